"""Workers whose clocks are an hour off, in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tests.chaos.stage import Outcome, stage
from tests.chaos.support import WorkerProcess

CLOCK = Path(__file__).parents[1] / "clock"

HOUR = 3600.0

SERVES = "recado.worker: worker"
"""In the first line a worker logs."""

AHEAD = timedelta(seconds=2)
"""How far ahead jobs are scheduled."""

MAX_LATENESS = timedelta(seconds=4)
"""By which they run then: they are looked up in time, and wait behind the backlog."""

SCHEDULED = """
SELECT e.at - j.run_at FROM {schema}.jobs j JOIN public.effects e ON e.job = j.id WHERE j.id = ANY ($1)
"""


@dataclass(frozen=True)
class Size:
    jobs: int
    scheduled: int


SHORT = Size(jobs=600, scheduled=10)
FULL = Size(jobs=20_000, scheduled=200)


async def set_clocks_wrong(dsn: str, schema: str, folder: Path, size: Size) -> Outcome:
    """A worker that lives in the past, and one in the future; a third one like that is killed."""
    async with stage(dsn, schema, folder) as stand:
        for offset in (HOUR, -HOUR, HOUR):
            worker = await stand.start_worker(PYTHONPATH=f"{CLOCK}", CLOCK_OFFSET=f"{offset}")
            await worker.logged(SERVES)
            _check_wrong(worker, offset)
        scheduled = []
        async with asyncio.TaskGroup() as group:
            group.create_task(stand.produce(size.jobs))
            for n in range(size.scheduled):
                await stand.produced(n * size.jobs // size.scheduled)
                scheduled.append(await stand.enqueue("mix.pays", {"n": n}, after=AHEAD))
            await stand.kill(await stand.busy_worker())
            stand.calm.set()
        outcome = await stand.close()
        latenesses = [row[0] for row in await stand.fetch(SCHEDULED, scheduled)]
    return outcome.with_faults(_untimely(latenesses, size.scheduled))


def _untimely(latenesses: list[timedelta], scheduled: int) -> Iterator[str]:
    if len(latenesses) != scheduled:
        yield f"{len(latenesses)} of {scheduled} scheduled jobs have run"
    if min(latenesses) < timedelta():
        yield f"a job ran {-min(latenesses)} before its time"
    if max(latenesses) > MAX_LATENESS:
        yield f"a job ran {max(latenesses)} after its time"


def _check_wrong(worker: WorkerProcess, offset: float) -> None:
    """The worker's clock is wrong indeed, as its log shows; else nothing would be tested."""
    line = next(line for line in worker.log if SERVES in line)
    logged = datetime.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
    error = (logged - datetime.now()).total_seconds()
    assert abs(error - offset) < HOUR / 10, line
