"""Pruning: what ended long ago goes, everything else stays, and the walk always comes to its end."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from recado.queue import JobStatus, requeue
from recado.queue.retention import FIRST_ID, RETENTION, STATS_RETENTION, Pruned, prune, prune_stats
from recado.queue.stats import Tally, add
from tests.queue.support import PATIENCE, Connect, count, insert

WEEK = timedelta(days=7)
DAY = timedelta(days=1)


def id_from(age: timedelta) -> UUID:
    """A UUIDv7 as it was made ``age`` ago."""
    milliseconds = int((time.time() - age.total_seconds()) * 1000)
    return UUID(int=milliseconds << 80 | 7 << 76 | uuid4().int & (2**76 - 1))


async def ended(
    conn: asyncpg.Connection, schema: str, status: str, age: timedelta, *, id: UUID | None = None, **columns: Any
) -> UUID:
    """A job that was enqueued, and ended, ``age`` ago."""
    finished_at = datetime.now(UTC) - age
    return await insert(conn, schema, status, id=id or id_from(age), finished_at=finished_at, **columns)


async def left(conn: asyncpg.Connection, schema: str) -> set[UUID]:
    return {r["id"] for r in await conn.fetch(f"SELECT id FROM {schema}.jobs")}


async def walk(conn: asyncpg.Connection, **options: Any) -> list[Pruned]:
    """All steps of one walk, each in its own transaction, as upkeep does it."""
    steps = [await prune(conn, **options)]
    while steps[-1].cursor != FIRST_ID:
        assert len(steps) < 100, "the walk does not come to its end"
        steps.append(await prune(conn, steps[-1].cursor, **options))
    return steps


async def test_completed_and_cancelled_jobs_go_after_a_week_and_all_others_stay(
    conn: asyncpg.Connection, schema: str
) -> None:
    for status in ("completed", "cancelled"):
        await ended(conn, schema, status, WEEK + timedelta(minutes=1))
    kept = {
        *[await ended(conn, schema, status, WEEK - timedelta(minutes=1)) for status in ("completed", "cancelled")],
        await ended(conn, schema, "dead", 100 * WEEK),
        *[await insert(conn, schema, status, id=id_from(100 * WEEK)) for status in ("pending", "running")],
    }

    steps = await walk(conn)

    assert sum(step.deleted for step in steps) == 2
    assert await left(conn, schema) == kept


async def test_the_end_of_a_job_decides_and_not_its_beginning(conn: asyncpg.Connection, schema: str) -> None:
    now = datetime.now(UTC)
    long_on_its_way = await insert(conn, schema, "completed", id=id_from(10 * WEEK), finished_at=now)

    await walk(conn)

    assert await left(conn, schema) == {long_on_its_way}


async def test_each_status_is_kept_for_its_own_time(conn: asyncpg.Connection, schema: str) -> None:
    ages = {"completed": 2 * DAY, "cancelled": 2 * DAY, "dead": 2 * DAY}
    ids = {status: await ended(conn, schema, status, age) for status, age in ages.items()}
    keep = {JobStatus.COMPLETED: 3 * DAY, JobStatus.CANCELLED: DAY, JobStatus.DEAD: DAY}

    await walk(conn, keep=keep)

    assert await left(conn, schema) == {ids["completed"]}


async def test_a_status_that_is_not_named_is_kept_for_ever(conn: asyncpg.Connection, schema: str) -> None:
    ids = {await ended(conn, schema, status, 1_000 * WEEK) for status in ("completed", "cancelled", "dead")}

    assert sum(step.deleted for step in await walk(conn, keep={})) == 0
    assert await left(conn, schema) == ids


@pytest.mark.parametrize("age", [timedelta(), timedelta(days=365 * 200)], ids=["at once", "longer than clocks go"])
async def test_the_walk_ends_whatever_the_age(age: timedelta, conn: asyncpg.Connection, schema: str) -> None:
    for of in (timedelta(seconds=1), WEEK, 100 * WEEK):
        await ended(conn, schema, "completed", of)

    await walk(conn, keep={JobStatus.COMPLETED: age}, limit=1)

    assert await count(conn, schema) == (0 if age == timedelta() else 3)


async def test_the_walk_ends_though_the_clock_goes_on_meanwhile(conn: asyncpg.Connection) -> None:
    """Its last part begins where ids are from a day ahead: a day ahead of the step before, that is."""
    cursor = (await prune(conn)).cursor
    a_minute_ago = UUID(int=cursor.int - (60_000 << 80))

    assert (await prune(conn, a_minute_ago)).cursor == FIRST_ID


async def test_the_walk_of_an_empty_table_ends(conn: asyncpg.Connection) -> None:
    assert sum(step.deleted for step in await walk(conn)) == 0


async def test_the_cursor_moves_past_pages_full_of_jobs_to_keep(conn: asyncpg.Connection, schema: str) -> None:
    dead = {await ended(conn, schema, "dead", 3 * WEEK) for _ in range(7)}
    await ended(conn, schema, "completed", 2 * WEEK)

    steps = await walk(conn, limit=3)

    assert [step.deleted for step in steps[:3]] == [0, 0, 1]
    assert await left(conn, schema) == dead


async def test_no_statement_deletes_more_than_its_limit(conn: asyncpg.Connection, schema: str) -> None:
    for _ in range(10):
        await ended(conn, schema, "completed", 2 * WEEK)

    deleted = [step.deleted for step in await walk(conn, limit=4)]

    assert max(deleted) == 4
    assert sum(deleted) == 10


async def test_ids_that_are_no_uuids_of_version_7_are_found_too(conn: asyncpg.Connection, schema: str) -> None:
    for _ in range(20):
        await ended(conn, schema, "completed", 2 * WEEK, id=uuid4())
    # The largest of all ids is the bound of the walk, and reserved.
    for number in (1, 2**80, 2**128 - 2):
        await ended(conn, schema, "completed", 2 * WEEK, id=UUID(int=number))
    kept = {
        await ended(conn, schema, "dead", 2 * WEEK, id=uuid4()),
        await ended(conn, schema, "completed", DAY, id=uuid4()),
        await ended(conn, schema, "completed", DAY),
    }

    steps = await walk(conn, limit=4)

    assert await left(conn, schema) == kept
    assert max(step.deleted for step in steps) == 4


async def test_young_jobs_are_not_even_read(conn: asyncpg.Connection, schema: str) -> None:
    for _ in range(5):
        await ended(conn, schema, "completed", DAY)

    # A page of one would stop at each of the five.
    assert len(await walk(conn, limit=1)) == 2


async def test_what_went_wrong_goes_with_its_job_and_stays_with_others(conn: asyncpg.Connection, schema: str) -> None:
    gone, kept = await ended(conn, schema, "completed", 2 * WEEK), await ended(conn, schema, "dead", 2 * WEEK)
    for job_id in (gone, kept):
        await conn.execute(
            f"INSERT INTO {schema}.job_errors (job_id, fence, attempt, error_class, message) "
            "VALUES ($1, 1, 1, 'E', '')",
            job_id,
        )

    await walk(conn)

    assert [r["job_id"] for r in await conn.fetch(f"SELECT job_id FROM {schema}.job_errors")] == [kept]


@pytest.mark.parametrize("then", ["commit", "rollback"])
async def test_a_job_that_somebody_is_requeueing_is_left_alone_and_not_waited_for(
    then: str, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    other = await connect()
    requeued, _ = [await ended(conn, schema, "completed", 2 * WEEK) for _ in range(2)]
    transaction = other.transaction()
    await transaction.start()
    await requeue(other, requeued)

    async with asyncio.timeout(PATIENCE):
        assert (await prune(conn)).deleted == 1
    await getattr(transaction, then)()

    assert await left(conn, schema) == {requeued}
    assert (await prune(conn)).deleted == (1 if then == "rollback" else 0)


async def test_a_rollback_brings_everything_back(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await ended(conn, schema, "completed", 2 * WEEK)

    transaction = conn.transaction()
    await transaction.start()
    assert (await prune(conn)).deleted == 1
    await transaction.rollback()

    assert await left(conn, schema) == {job_id}


def test_by_default_what_died_is_kept_until_a_person_has_looked() -> None:
    assert dict(RETENTION) == {JobStatus.COMPLETED: WEEK, JobStatus.CANCELLED: WEEK}


async def test_minute_buckets_go_after_a_month(conn: asyncpg.Connection, schema: str) -> None:
    for job_type, age in (("a.new", timedelta()), ("a.kept", 29 * DAY), ("a.old", 31 * DAY)):
        await add(conn, {("default", job_type): Tally(completed=1)})
        await conn.execute(
            f"UPDATE {schema}.job_stats SET minute = minute - $2::interval WHERE job_type = $1", job_type, age
        )

    await prune_stats(conn)
    assert {r[0] for r in await conn.fetch(f"SELECT job_type FROM {schema}.job_stats")} == {"a.new", "a.kept"}
    assert timedelta(days=30) == STATS_RETENTION

    await prune_stats(conn, retention=DAY)
    assert {r[0] for r in await conn.fetch(f"SELECT job_type FROM {schema}.job_stats")} == {"a.new"}
