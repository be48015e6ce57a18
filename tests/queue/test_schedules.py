"""The rows of schedules: whose code they follow, what a deploy does to them, and how they are paused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from recado.errors import ScheduleNotFound
from recado.queue import JobStatus, list_schedules, pause_schedule, resume_schedule, server_time, workers
from recado.queue.schedules import SYSTEM, Schedule, get_schedules, lock_schedule, set_tick, sync
from recado.queue.workers import WorkerInfo, beat
from tests.queue.support import Connect, blocked, insert

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)

DAILY = Schedule("report.daily", "report.render", "0 6 * * *", "Europe/Madrid", '{"kind": "long"}')
LATER = replace(DAILY, expression="0 7 * * *")
SHORTER = replace(DAILY, payload='{"kind": "short"}')
HOURLY = Schedule("mail.digest", "mail.send", "0 * * * *")


async def register(conn: asyncpg.Connection) -> UUID:
    """A live worker."""
    worker_id = uuid4()
    await beat(conn, WorkerInfo(worker_id, "host", 1, "0", ("default",), 1, 300.0), 0)
    return worker_id


async def synced(conn: asyncpg.Connection, worker_id: UUID, *schedules: Schedule, application: str = "shop") -> bool:
    async with conn.transaction():
        return await sync(conn, application, worker_id, schedules)


async def rows(conn: asyncpg.Connection, schema: str) -> dict[tuple[str, str], dict[str, Any]]:
    """All rows, with the transactions that wrote them: equal only if nothing has touched them."""
    found = await conn.fetch(f"SELECT *, xmin::text FROM {schema}.schedules")
    return {(row["application"], row["name"]): dict(row.items()) for row in found}


async def set_long_ago(conn: asyncpg.Connection, schema: str) -> None:
    await conn.execute(f"UPDATE {schema}.schedules SET last_tick = $1", LONG_AGO)


# --- code and rows ---


async def test_a_new_schedule_counts_from_now(conn: asyncpg.Connection, schema: str) -> None:
    before = await server_time(conn)
    assert await synced(conn, await register(conn), DAILY)
    row = (await rows(conn, schema))["shop", "report.daily"]
    assert (row["job_type"], row["expression"], row["timezone"], row["overlap"], row["definition"]) == (
        "report.render", "0 6 * * *", "Europe/Madrid", "skip", DAILY.definition,
    )  # fmt: skip
    assert row["payload"] == '{"kind": "long"}'
    assert before <= row["last_tick"] <= await server_time(conn)
    assert row["last_job_id"] is None


async def test_a_sync_that_finds_all_in_line_writes_nothing(conn: asyncpg.Connection, schema: str) -> None:
    worker_id = await register(conn)
    await synced(conn, worker_id, DAILY, HOURLY)
    before = await rows(conn, schema)
    holders = await conn.fetch(f"SELECT *, xmin::text FROM {schema}.schedule_holders")
    await synced(conn, worker_id, DAILY, HOURLY)
    assert await rows(conn, schema) == before
    assert await conn.fetch(f"SELECT *, xmin::text FROM {schema}.schedule_holders") == holders


async def test_a_schedule_survives_a_restart_with_its_tick_and_its_pause(conn: asyncpg.Connection, schema: str) -> None:
    first = await register(conn)
    await synced(conn, first, DAILY)
    await set_long_ago(conn, schema)
    await pause_schedule(conn, "shop", "report.daily")
    before = await rows(conn, schema)
    await workers.remove(conn, first)
    await synced(conn, await register(conn), DAILY)
    assert await rows(conn, schema) == before


async def test_two_releases_side_by_side_leave_the_row_alone_until_the_old_one_is_gone(
    conn: asyncpg.Connection, schema: str
) -> None:
    old, also_old, new = await register(conn), await register(conn), await register(conn)
    await synced(conn, old, DAILY)
    await synced(conn, also_old, DAILY)
    await set_long_ago(conn, schema)
    before = await rows(conn, schema)
    for worker_id, schedule in [(new, LATER), (old, DAILY), (also_old, DAILY), (new, LATER)]:
        await synced(conn, worker_id, schedule)
        assert await rows(conn, schema) == before
    await workers.remove(conn, old)
    await synced(conn, new, LATER)
    assert await rows(conn, schema) == before
    await workers.remove(conn, also_old)
    moved_at = await server_time(conn)
    await synced(conn, new, LATER)
    row = (await rows(conn, schema))["shop", "report.daily"]
    assert (row["expression"], row["definition"]) == ("0 7 * * *", LATER.definition)
    assert row["last_tick"] >= moved_at  # at other times from now on: nothing of the past is due


async def test_what_changed_but_its_times_keeps_the_tick_that_came_during_the_deploy(
    conn: asyncpg.Connection, schema: str
) -> None:
    old, new = await register(conn), await register(conn)
    await synced(conn, old, DAILY)
    await set_long_ago(conn, schema)
    await workers.remove(conn, old)
    await synced(conn, new, SHORTER)
    row = (await rows(conn, schema))["shop", "report.daily"]
    assert (row["payload"], row["last_tick"]) == ('{"kind": "short"}', LONG_AGO)


async def test_a_schedule_that_left_the_code_is_removed_when_no_live_worker_has_it(
    conn: asyncpg.Connection, schema: str
) -> None:
    old, new = await register(conn), await register(conn)
    await synced(conn, old, DAILY, HOURLY)
    await synced(conn, new, HOURLY)
    assert set(await rows(conn, schema)) == {("shop", "report.daily"), ("shop", "mail.digest")}
    await workers.remove(conn, old)
    await synced(conn, new, HOURLY)
    assert set(await rows(conn, schema)) == {("shop", "mail.digest")}
    await synced(conn, await register(conn))
    assert set(await rows(conn, schema)) == {("shop", "mail.digest")}


async def test_two_applications_do_not_touch_each_others(conn: asyncpg.Connection, schema: str) -> None:
    shop, blog = await register(conn), await register(conn)
    await synced(conn, shop, DAILY)
    before = (await rows(conn, schema))["shop", "report.daily"]
    await workers.remove(conn, shop)
    await synced(conn, blog, LATER, application="blog")
    after = await rows(conn, schema)
    assert after["shop", "report.daily"] == before
    assert after["blog", "report.daily"]["expression"] == "0 7 * * *"
    await synced(conn, blog, application="news")
    assert await rows(conn, schema) == after


async def test_recados_own_are_due_at_once_and_never_removed(conn: asyncpg.Connection, schema: str) -> None:
    prune = Schedule("recado.prune", None, "*/5 * * * *")
    worker_id = await register(conn)
    await synced(conn, worker_id, prune, application=SYSTEM)
    (row,) = await get_schedules(conn, [(SYSTEM, "recado.prune")])
    assert row.due() is not None
    await workers.remove(conn, worker_id)
    await synced(conn, await register(conn), application=SYSTEM)
    assert set(await rows(conn, schema)) == {(SYSTEM, "recado.prune")}


async def test_a_worker_that_was_taken_off_the_registry_changes_nothing(conn: asyncpg.Connection, schema: str) -> None:
    """It holds nothing any more, and would else remove its own schedules."""
    worker_id = await register(conn)
    await synced(conn, worker_id, DAILY)
    before = await rows(conn, schema)
    await workers.remove(conn, worker_id)
    assert not await synced(conn, worker_id, DAILY)
    assert await rows(conn, schema) == before


async def test_of_two_that_start_at_once_the_second_sees_what_the_first_holds(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    first, second, observer = conn, await connect(), await connect()
    one, two = await register(observer), await register(observer)
    await synced(observer, one, SHORTER)
    await workers.remove(observer, one)
    one = await register(observer)
    async with first.transaction():
        await sync(first, "shop", one, [DAILY])
        waiting = asyncio.create_task(synced(second, two, LATER))
        await blocked(observer, second)
        await beat(observer, WorkerInfo(one, "host", 1, "0", ("default",), 1, 300.0), 1)  # goes on meanwhile
    assert await waiting
    assert (await rows(conn, schema))["shop", "report.daily"]["definition"] == DAILY.definition


async def test_a_restarted_worker_keeps_its_schedule_from_one_that_lacks_it_and_starts_at_once(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    """What the first holds is not committed yet, and nobody else holds it: the second has to wait for that."""
    second, observer = await connect(), await connect()
    gone, one, two = await register(observer), await register(observer), await register(observer)
    await synced(observer, gone, DAILY)
    await pause_schedule(observer, "shop", "report.daily")
    await workers.remove(observer, gone)
    before = await rows(observer, schema)
    async with conn.transaction():
        await sync(conn, "shop", one, [DAILY])
        waiting = asyncio.create_task(synced(second, two))
        done, _ = await asyncio.wait(
            {waiting, asyncio.create_task(blocked(observer, second))}, return_when=asyncio.FIRST_COMPLETED
        )
        assert waiting not in done
    assert await waiting
    assert await rows(conn, schema) == before


# --- ticks ---


async def test_a_row_that_another_transaction_has_locked_is_passed_by(
    conn: asyncpg.Connection, connect: Connect
) -> None:
    other = await connect()
    await synced(conn, await register(conn), DAILY)
    async with conn.transaction():
        row = await lock_schedule(conn, "shop", "report.daily")
        assert row is not None
        async with other.transaction():
            assert await lock_schedule(other, "shop", "report.daily") is None
        await set_tick(conn, row, row.now, None)
    async with other.transaction():
        again = await lock_schedule(other, "shop", "report.daily")
        assert again is not None
        assert again.last_tick == row.now
    assert await lock_schedule(other, "shop", "no.such") is None


async def test_a_transaction_that_falls_silent_with_the_row_does_not_keep_it(conn: asyncpg.Connection) -> None:
    await synced(conn, await register(conn), DAILY)
    async with conn.transaction():
        await lock_schedule(conn, "shop", "report.daily")
        assert await conn.fetchval("SHOW idle_in_transaction_session_timeout") == "5s"
    assert await conn.fetchval("SHOW idle_in_transaction_session_timeout") == "0"


async def test_after_an_outage_the_last_tick_is_due_and_no_other(conn: asyncpg.Connection, schema: str) -> None:
    await synced(conn, await register(conn), replace(HOURLY, expression="* * * * *"))
    await set_long_ago(conn, schema)
    (row,) = await get_schedules(conn, [("shop", "mail.digest")])
    assert row.due() == row.now.replace(second=0, microsecond=0)
    assert row.next() == row.now.replace(second=0, microsecond=0) + timedelta(minutes=1)
    assert replace(row, last_tick=row.now.replace(second=0, microsecond=0)).due() is None


# --- pause, resume, list ---


async def test_a_paused_schedule_is_not_ticked_and_a_resumed_one_catches_nothing_up(
    conn: asyncpg.Connection, schema: str
) -> None:
    await synced(conn, await register(conn), DAILY)
    await set_long_ago(conn, schema)
    await pause_schedule(conn, "shop", "report.daily")
    assert await get_schedules(conn, [("shop", "report.daily")]) == []
    assert await lock_schedule(conn, "shop", "report.daily") is None
    paused_at = (await rows(conn, schema))["shop", "report.daily"]["paused_at"]
    await pause_schedule(conn, "shop", "report.daily")
    assert (await rows(conn, schema))["shop", "report.daily"]["paused_at"] == paused_at
    await resume_schedule(conn, "shop", "report.daily")
    (row,) = await get_schedules(conn, [("shop", "report.daily")])
    assert row.last_tick >= paused_at
    assert row.due() is None


async def test_resuming_what_was_not_paused_does_not_cost_it_a_tick(conn: asyncpg.Connection, schema: str) -> None:
    await synced(conn, await register(conn), DAILY)
    await set_long_ago(conn, schema)
    await resume_schedule(conn, "shop", "report.daily")
    assert (await rows(conn, schema))["shop", "report.daily"]["last_tick"] == LONG_AGO


@pytest.mark.parametrize("key", [("blog", "report.daily"), ("shop", "report.weekly"), ("", "report.daily")])
async def test_an_unknown_schedule_is_an_error(conn: asyncpg.Connection, key: tuple[str, str]) -> None:
    await synced(conn, await register(conn), DAILY)
    for change, verb in ((pause_schedule, "pause"), (resume_schedule, "resume")):
        with pytest.raises(
            ScheduleNotFound, match=rf"cannot {verb} schedule '{key[1]}': application '{key[0]}' has none"
        ):
            await change(conn, *key)


async def test_a_list_says_what_was_and_what_comes_next(conn: asyncpg.Connection, schema: str) -> None:
    worker_id = await register(conn)
    await synced(conn, worker_id, DAILY, HOURLY)
    await synced(conn, worker_id, DAILY, application="blog")
    job_id = await insert(conn, schema, "running")
    (row,) = await get_schedules(conn, [("shop", "mail.digest")])
    await set_tick(conn, row, LONG_AGO, job_id)
    await pause_schedule(conn, "shop", "report.daily")
    now = await server_time(conn)
    digest, daily = await list_schedules(conn, application="shop")
    assert (digest.name, digest.application, digest.job_type) == ("mail.digest", "shop", "mail.send")
    assert (digest.expression, digest.timezone, digest.overlap) == ("0 * * * *", "UTC", "skip")
    assert (digest.last_tick, digest.last_job_id, digest.last_job_status) == (LONG_AGO, job_id, JobStatus.RUNNING)
    assert digest.next_tick is not None
    assert now < digest.next_tick <= now + timedelta(hours=1, minutes=1)
    assert digest.paused_at is None
    assert (daily.last_job_id, daily.last_job_status, daily.next_tick) == (None, None, None)
    assert daily.paused_at is not None
    assert [s.application for s in await list_schedules(conn)] == ["blog", "shop", "shop"]


async def test_a_pruned_job_and_an_unreadable_expression_do_not_hide_a_schedule(
    conn: asyncpg.Connection, schema: str
) -> None:
    await synced(conn, await register(conn), HOURLY)
    await conn.execute(f"UPDATE {schema}.schedules SET last_job_id = $1, expression = 'nonsense'", uuid4())
    (status,) = await list_schedules(conn)
    assert (status.last_job_status, status.next_tick) == (None, None)
