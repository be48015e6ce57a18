from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from recado.queue.counts import COUNTS, DEPTHS, Counts, Depth, counts, queue_depths
from recado.queue.statements import fill

Connect = Callable[[], Awaitable[asyncpg.Connection]]

MANY = 20_000
"""Rows enough that the planner would read them all, where nothing leads it to an index."""


@pytest.fixture
def jobs(schema: str) -> str:
    return f"{schema}.jobs"


async def insert(
    conn: asyncpg.Connection,
    jobs: str,
    status: str = "pending",
    *,
    times: int = 1,
    queue: str = "default",
    job_type: str = "mail.send",
    run_in: str = "0",
    created_in: str = "0",
    finished_in: str | None = None,
) -> None:
    await conn.execute(
        f"""
        INSERT INTO {jobs} (id, job_type, queue, payload, status, run_at, created_at, finished_at)
        SELECT gen_random_uuid(), $1, $2, '{{}}', $3, now() + $4::text::interval, now() + $5::text::interval,
               now() + $6::text::interval
        FROM generate_series(1, $7)
        """,
        job_type,
        queue,
        status,
        run_in,
        created_in,
        finished_in,
        times,
    )


# --- counts ---


async def test_an_empty_queue_counts_nothing_and_has_no_age(conn: asyncpg.Connection) -> None:
    assert await counts(conn) == Counts(pending=0, dead=0, oldest_pending=None)


async def test_only_pending_and_dead_jobs_count(conn: asyncpg.Connection, jobs: str) -> None:
    for times, status in enumerate(["pending", "running", "completed", "dead", "cancelled"], start=1):
        await insert(conn, jobs, status, times=times, created_in="-1 hour" if status != "pending" else "0")

    found = await counts(conn)

    assert (found.pending, found.dead) == (1, 4)
    assert found.oldest_pending is not None
    assert found.oldest_pending < 60


async def test_every_queue_and_jobs_scheduled_for_later_count(conn: asyncpg.Connection, jobs: str) -> None:
    for queue in ["a", "default", "Ñandú", "zzz", "~"]:
        await insert(conn, jobs, queue=queue)
        await insert(conn, jobs, queue=queue, run_in="1 year")

    assert (await counts(conn)).pending == 10


async def test_dead_jobs_count_whenever_they_died_and_if_nobody_knows_when(conn: asyncpg.Connection, jobs: str) -> None:
    for finished_in in ["-1 year", "-1 second", "0", None]:
        await insert(conn, jobs, "dead", finished_in=finished_in)

    assert (await counts(conn)).dead == 4
    assert [depth.dead for depth in (await queue_depths(conn)).depths] == [4]


async def test_no_age_when_only_dead_jobs_are_left(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, "dead", created_in="-1 hour")

    assert await counts(conn) == Counts(pending=0, dead=1, oldest_pending=None)


async def test_the_age_is_by_creation_not_by_when_the_job_may_run(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, created_in="-1 hour", run_in="1 day")
    await insert(conn, jobs, created_in="-1 minute", run_in="-2 days")

    oldest = (await counts(conn)).oldest_pending

    assert oldest is not None
    assert 3600 <= oldest < 3660


async def test_the_age_goes_on_in_a_transaction_that_stays_open(
    conn: asyncpg.Connection, connect: Connect, jobs: str
) -> None:
    other = await connect()
    async with conn.transaction():
        await conn.execute("SELECT now()")
        await insert(other, jobs)
        first = (await counts(conn)).oldest_pending
        second = (await counts(conn)).oldest_pending

    assert first is not None
    assert second is not None
    assert 0 < first < second


async def test_a_job_created_in_the_future_is_not_of_a_negative_age(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, created_in="1 hour")

    assert (await counts(conn)).oldest_pending == 0.0


async def test_the_callers_transaction_is_seen_and_left_open(
    conn: asyncpg.Connection, connect: Connect, jobs: str
) -> None:
    other = await connect()
    async with conn.transaction():
        await insert(conn, jobs)
        assert (await counts(conn)).pending == 1
        assert (await counts(other)).pending == 0


# --- depths ---


async def test_depths_tell_queues_types_and_states_apart(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, times=2, queue="mail", run_in="-1 minute")
    await insert(conn, jobs, times=3, queue="mail", run_in="1 minute")
    await insert(conn, jobs, "running", times=4, queue="mail")
    await insert(conn, jobs, "dead", times=5, queue="mail")
    await insert(conn, jobs, "dead", queue="mail", job_type="mail.archive")
    await insert(conn, jobs, "running", queue="web")
    await insert(conn, jobs, "completed", queue="done")
    await insert(conn, jobs, "cancelled", queue="done")

    found = (await queue_depths(conn)).depths

    oldest = found[1].oldest_ready
    assert oldest is not None
    assert 60 <= oldest < 120
    assert found == [
        Depth("mail", "mail.archive", ready=0, scheduled=0, running=0, dead=1, oldest_ready=None),
        Depth("mail", "mail.send", ready=2, scheduled=3, running=4, dead=5, oldest_ready=oldest),
        Depth("web", "mail.send", ready=0, scheduled=0, running=1, dead=0, oldest_ready=None),
    ]


async def test_a_job_that_has_just_become_due_has_not_waited_since_its_creation(
    conn: asyncpg.Connection, jobs: str
) -> None:
    await insert(conn, jobs, created_in="-7 days", run_in="-1 second")

    [depth] = (await queue_depths(conn)).depths

    assert depth.oldest_ready is not None
    assert 1 <= depth.oldest_ready < 60


async def test_workers_count_while_their_heart_beats(conn: asyncpg.Connection, schema: str) -> None:
    for silent, silence in ((0, 60), (30, 60), (30, 10), (90, 60)):
        await conn.execute(
            f"""
            INSERT INTO {schema}.workers (id, host, pid, version, queues, slots, lease, silence, heartbeat_at)
            VALUES ($1, 'host', 1, '0', '{{}}', 1, '5 minutes', make_interval(secs => $3),
                    now() - make_interval(secs => $2))
            """,
            uuid4(),
            silent,
            silence,
        )

    assert (await queue_depths(conn)).workers == 2


async def test_the_servers_notify_queue_is_told(conn: asyncpg.Connection) -> None:
    assert (await queue_depths(conn)).notification_queue_usage == 0.0


# --- plans ---


async def nothing(conn: asyncpg.Connection, jobs: str) -> None:
    """An empty table: the plan a connection may keep until the statistics change."""


async def never_analyzed(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, "completed", times=MANY)
    await insert(conn, jobs, times=MANY)


async def half_pending(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, "completed", times=MANY)
    await insert(conn, jobs, times=MANY // 2)
    await insert(conn, jobs, times=MANY // 2, run_in="1 day")
    await conn.execute(f"ANALYZE {jobs}")


async def half_pending_in_many_queues(conn: asyncpg.Connection, jobs: str) -> None:
    await half_pending(conn, jobs)
    await conn.execute(f"UPDATE {jobs} SET queue = 'q' || (random() * 10)::int, priority = random() * 3")
    await conn.execute(f"VACUUM ANALYZE {jobs}")


async def half_dead(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, "completed", times=MANY, finished_in="-1 hour")
    await insert(conn, jobs, "dead", times=MANY, finished_in="0")
    await conn.execute(f"ANALYZE {jobs}")


async def half_dead_by_hand(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, "completed", times=MANY, finished_in="-1 hour")
    await insert(conn, jobs, "dead", times=MANY)
    await conn.execute(f"ANALYZE {jobs}")


async def once_all_dead(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, "dead", times=MANY, finished_in="0")
    await conn.execute(f"ANALYZE {jobs}")
    await conn.execute(f"UPDATE {jobs} SET status = 'completed'")


async def once_all_pending(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, times=MANY)
    await conn.execute(f"ANALYZE {jobs}")
    await conn.execute(f"UPDATE {jobs} SET status = 'completed'")


async def once_all_completed(conn: asyncpg.Connection, jobs: str) -> None:
    await insert(conn, jobs, "completed", times=MANY)
    await conn.execute(f"ANALYZE {jobs}")
    await insert(conn, jobs, times=MANY)


Prepare = Callable[[asyncpg.Connection, str], Awaitable[None]]


@pytest.mark.parametrize(
    "prepare",
    [
        nothing,
        never_analyzed,
        half_pending,
        half_pending_in_many_queues,
        half_dead,
        half_dead_by_hand,
        once_all_dead,
        once_all_pending,
        once_all_completed,
    ],
)
async def test_no_count_reads_the_whole_table(
    prepare: Prepare, conn: asyncpg.Connection, schema: str, jobs: str
) -> None:
    await conn.execute(f"ALTER TABLE {jobs} SET (autovacuum_enabled = false)")
    await prepare(conn, jobs)

    for statement in (COUNTS, DEPTHS):
        used = set(await scans(conn, fill(statement, schema)))
        assert {name for name in used if name.endswith("Seq Scan")} == set()
        assert {"jobs_claim_idx", "jobs_dead_idx"} <= used


@pytest.mark.parametrize(
    ("prepare", "status"),
    [(half_pending, "pending"), (once_all_pending, "pending"), (half_dead, "dead"), (once_all_dead, "dead")],
)
async def test_without_the_ranges_the_planner_would_read_the_whole_table(
    prepare: Prepare, status: str, conn: asyncpg.Connection, jobs: str
) -> None:
    await conn.execute(f"ALTER TABLE {jobs} SET (autovacuum_enabled = false)")
    await prepare(conn, jobs)

    plain = f"SELECT queue, count(*) FROM {jobs} WHERE status = '{status}' GROUP BY queue"

    assert {name for name in await scans(conn, plain) if name.endswith("Seq Scan")} != set()


async def scans(conn: asyncpg.Connection, statement: str) -> list[str]:
    """The indexes the plan of ``statement`` uses on the jobs, and its sequential scans of them."""
    [plan] = json.loads(await conn.fetchval(f"EXPLAIN (FORMAT JSON) {statement}"))

    def walk(node: dict[str, Any]) -> Iterator[str]:
        if "Index Name" in node:
            yield node["Index Name"]
        elif node.get("Relation Name") == "jobs" and node["Node Type"] != "Bitmap Heap Scan":
            yield node["Node Type"]
        for child in node.get("Plans", []):
            yield from walk(child)

    return list(walk(plan["Plan"]))
