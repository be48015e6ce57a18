"""Runs that do not go as planned: they fail loudly, and are cleaned up after."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from recado.bench.database import open_database
from recado.bench.options import SCHEMA, Options
from recado.bench.runs import measure
from recado.bench.scenarios import SCENARIOS


async def exists(conn: asyncpg.Connection) -> bool:
    found: bool = await conn.fetchval("SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", SCHEMA)
    return found


async def test_a_run_that_is_interrupted_leaves_neither_schema_nor_processes(
    dsn: str, conn: asyncpg.Connection
) -> None:
    running = asyncio.Event()
    stopped: list[str] = []

    def tell(what: str, done: int, jobs: int) -> None:
        stopped[:] = [what]
        running.set()

    async def run() -> None:
        async with open_database(dsn, ours=False) as database:
            await measure(database, SCENARIOS["latency"], Options(jobs=10_000), tell)

    task = asyncio.create_task(run())
    await running.wait()
    assert await exists(conn)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stopped == ["latency 1/3"]
    assert not await exists(conn)
