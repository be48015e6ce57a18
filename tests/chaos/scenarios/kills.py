"""Workers that are killed in the middle of everything."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.stage import Outcome, stage


@dataclass(frozen=True)
class Size:
    jobs: int
    kills: int
    processes: int


SHORT = Size(jobs=1_000, kills=5, processes=3)
FULL = Size(jobs=50_000, kills=200, processes=4)


async def kill_workers(dsn: str, schema: str, folder: Path, size: Size) -> Outcome:
    """SIGKILL workers that hold jobs, spread evenly over the jobs that come in; each is replaced."""
    async with stage(dsn, schema, folder) as stand:
        await stand.start_workers(size.processes)
        async with asyncio.TaskGroup() as group:
            group.create_task(stand.produce(size.jobs))
            for n in range(size.kills):
                await stand.produced(n * size.jobs // size.kills)
                await stand.kill(await stand.busy_worker())
                await stand.start_worker()
            stand.calm.set()
        return await stand.close()
