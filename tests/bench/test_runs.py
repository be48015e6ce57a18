"""Runs that do not go as planned fail loudly, and are cleaned up after."""

from __future__ import annotations

import asyncio
from collections import Counter

import asyncpg
import pytest

from recado.bench.database import open_database
from recado.bench.jobs import FAILS_ONCE, NOOP, QUEUES, mixed_rows, rows
from recado.bench.messages import Task
from recado.bench.options import SCHEMA, Options
from recado.bench.processes import children
from recado.bench.runs import measure
from recado.bench.scenarios import SCENARIOS
from recado.errors import ConfigurationError, RecadoError
from recado.queue.models import JobStatus

NEVER_DONE = Options(jobs=100_000)


async def exists(conn: asyncpg.Connection) -> bool:
    found: bool = await conn.fetchval("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", SCHEMA)
    return found


async def test_what_is_interrupted_leaves_neither_a_schema_nor_a_process(dsn: str, conn: asyncpg.Connection) -> None:
    working = asyncio.Event()

    def tell(what: str, done: int, jobs: int) -> None:
        if done:
            working.set()

    async def run() -> None:
        async with open_database(dsn, ours=False) as database:
            await measure(database, SCENARIOS["latency"], NEVER_DONE, tell)

    running = asyncio.create_task(run())
    await working.wait()
    assert await exists(conn)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not await exists(conn)


async def test_a_process_that_ends_early_ends_the_run_and_says_why(dsn: str) -> None:
    tasks = [Task("enqueue", dsn, NEVER_DONE), Task("worker", "postgresql://127.0.0.1:1/x", NEVER_DONE)]
    with pytest.raises(RecadoError, match="its process 'worker' ended with exit code 1: ConnectionRefusedError"):
        async with children(tasks, lambda: None):
            pass


async def test_a_job_that_is_not_where_it_should_be_spoils_the_run(dsn: str) -> None:
    async with open_database(dsn, ours=False) as database:
        await database.prepare(rows(range(3), NOOP, 100))
        await database.check({JobStatus.PENDING: 3})
        with pytest.raises(RecadoError, match="should hold 2 completed jobs, and it holds 3 pending jobs"):
            await database.check({JobStatus.COMPLETED: 2})


async def test_each_run_begins_with_an_empty_queue(dsn: str) -> None:
    async with open_database(dsn, ours=False) as database:
        for _ in range(2):
            await database.prepare(rows(range(3), NOOP, 100))
            await database.pause(QUEUES)
            await database.register_saturated()
            await database.check({JobStatus.PENDING: 3})


async def test_two_benchmarks_in_one_database_do_not_meet(dsn: str, conn: asyncpg.Connection) -> None:
    async with open_database(dsn, ours=False) as database:
        await database.prepare(rows(range(3), NOOP, 100))
        with pytest.raises(ConfigurationError, match=f"there is a schema {SCHEMA} in this database already"):
            async with open_database(dsn, ours=False):
                pass
        await database.check({JobStatus.PENDING: 3})
    assert not await exists(conn)


async def test_a_role_that_may_not_make_a_schema_is_told_in_one_sentence(dsn: str, conn: asyncpg.Connection) -> None:
    await conn.execute("CREATE ROLE bench_guest LOGIN")
    try:
        with pytest.raises(RecadoError, match=r"^cannot finish the benchmark: permission denied for database"):
            async with open_database(dsn.replace("postgres@", "bench_guest@"), ours=False):
                pass
    finally:
        await conn.execute("DROP ROLE bench_guest")


@pytest.mark.parametrize("size", [30, 100, 1_000])
def test_payloads_have_the_size_that_was_asked_for(size: int) -> None:
    assert {len(row[-1]) for row in rows([0, 9, 10, 99_999], NOOP, size)} == {size}


def test_one_mixed_job_in_twenty_fails_and_all_priorities_are_in_both_queues() -> None:
    found = list(mixed_rows(range(1_600), 100))
    assert Counter(row[1] for row in found) == {NOOP: 1_520, FAILS_ONCE: 80}
    assert Counter((row[2], row[3]) for row in found) == {(q, p): 200 for q in QUEUES for p in range(4)}
