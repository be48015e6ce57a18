"""Workers that live, but do not answer: their loop is blocked, or the whole process is stopped."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.stage import HASTY, Outcome, Stage, stage

HASTIER = ("--lease", "1.2", "--silence", "1.2")

TURNS_TO_WRITE = 3
"""Of the loop, until the finisher has heard of an end and begins to open its connection."""


@dataclass(frozen=True)
class Size:
    jobs: int
    rounds: int
    blocked: float
    """Seconds for which a handler blocks the loop; the lease is 1.2."""


SHORT = Size(jobs=300, rounds=1, blocked=2.2)
FULL = Size(jobs=20_000, rounds=40, blocked=30.0)


async def block_loops(dsn: str, schema: str, folder: Path, size: Size) -> Outcome:
    """Handlers that block the loop for longer than the lease and the silence, one after the other.

    The second one begins a few turns of the loop after the first has ended: as its end is about to be written down,
    and cannot be. Another worker, of another queue, is there to take jobs over.
    """
    async with stage(dsn, schema, folder, options=HASTIER) as stand:
        await stand.start_worker("--queue", "default")
        await stand.start_worker("--queue", "another")
        await stand.until(f"count(*) = 2 FROM {schema}.workers")
        turns = {"mix.blocks": 0, "mix.blocks_paying": TURNS_TO_WRITE}
        ids = await stand.enqueue_all(
            [stand.service.new(name, {"turns": n, "seconds": size.blocked}) for name, n in turns.items()]
        )
        for name, job_id in zip(turns, ids, strict=True):
            await stand.logged(f"job {job_id} ({name}) has blocked the event loop for")
        outcome = await stand.close()
    found = outcome.audit
    if (found.runs, found.reclaims) == (len(ids), 0):
        return outcome
    return outcome.with_faults([f"{found.runs} runs and {found.reclaims} reclaims of {len(ids)} jobs"])


async def freeze_workers(dsn: str, schema: str, folder: Path, size: Size) -> Outcome:
    """SIGSTOP workers that hold jobs until these were taken over; what they do when they wake up changes nothing."""
    async with stage(dsn, schema, folder, options=HASTY) as stand:
        await stand.start_workers(3)
        async with asyncio.TaskGroup() as group:
            group.create_task(stand.produce(size.jobs))
            for n in range(size.rounds):
                await stand.produced(n * size.jobs // size.rounds)
                await _freeze_one(stand)
                await stand.healed()
            stand.calm.set()
        return await stand.close()


async def _freeze_one(stand: Stage) -> None:
    """Freeze a worker in the middle of a transactional job until another one has done that job. Its own time is over
    by then: when it wakes up, it completes the job before it can know better."""
    while True:
        job_id = await stand.enqueue("mix.pays_slowly", {})
        pid = await stand.noted(job_id)
        worker = next(worker for worker in stand.workers if worker.pid == pid)
        lines = len(worker.log)
        worker.send(signal.SIGSTOP)
        [status] = await stand.fetch("SELECT status FROM {schema}.jobs WHERE id = $1", job_id)
        if status[0] == "running":
            break
        worker.send(signal.SIGCONT)  # seen too late: it had done the job
    await stand.until(f"status = 'completed' FROM {stand.schema}.jobs WHERE id = $1", job_id)
    worker.send(signal.SIGCONT)
    await worker.logged(
        f"job {job_id} ", since=lines
    )  # it was taken over, or the attempt ended otherwise: to no effect
