"""The primary is killed under load, and its synchronous standby takes over."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from recado.queue import migrate
from tests.chaos.stage import LOOK_INTERVAL, PATIENCE, Outcome, stage
from tests.chaos.standby import pair


@dataclass(frozen=True)
class Size:
    jobs: int


SHORT = Size(jobs=300)
FULL = Size(jobs=20_000)


async def fail_over(folder: Path, schema: str, size: Size) -> Outcome:
    """Let jobs come in and be run, kill the primary in the midst of it, and promote the standby.

    One worker and the enqueuers know both servers and look for the primary; the other worker knows one address, which
    is moved. What is told as recovered is the time from the kill until a job that came in afterwards was completed,
    the promotion included.
    """
    with pair(folder) as servers:
        async with asyncio.timeout(PATIENCE):
            while not await servers.is_synchronous():  # noqa: ASYNC110 - only this view tells
                await asyncio.sleep(LOOK_INTERVAL)
        conn = await asyncpg.connect(servers.hosts_dsn)
        try:
            await migrate.up(conn, schema=schema)
        finally:
            await conn.close()
        async with stage(servers.hosts_dsn, schema, folder) as stand:
            await stand.start_workers(1)
            await stand.start_workers(1, RECADO_DSN=servers.address_dsn)
            async with asyncio.TaskGroup() as group:
                group.create_task(stand.produce(size.jobs))
                await stand.produced(size.jobs // 2)
                servers.kill_primary()
                healed = group.create_task(stand.healed())
                await servers.promote()
                await healed
                stand.calm.set()
            return await stand.close(connections_broke=True)
