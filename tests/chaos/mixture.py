"""The application of the chaos programs: one job type for each way a job can go.

Every handler notes its run in a file before it ends. What a handler has written there survives its process.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any

import asyncpg

from recado import ClaimedJob, JobStatus, Recado, Snooze
from recado.app import JOB_DIED, JobDied
from recado.queue import connections
from recado.worker import runner
from tests.chaos.apps import note

app = Recado()

if "STATEMENT_TIMEOUT" in os.environ:
    # In the short form of a program nobody waits for 30 s.
    for module in (connections, runner):
        vars(module)["STATEMENT_TIMEOUT"] = float(os.environ["STATEMENT_TIMEOUT"])
    connections.CONNECT_TIMEOUT = connections.ANSWER_TIMEOUT = connections.STATEMENT_TIMEOUT

STEP = 0.01
"""Seconds of work; a job takes none to three of them, so that some are prefetched and some are not."""

SOON = (0.05,)
"""Seconds between two attempts: a chaos program counts attempts, it does not wait for them."""

LINGER = 0.5
"""Seconds that a job runs which somebody may cancel: long enough to be caught in the act."""

STUBBORN = 100
"""Attempts of jobs that fail when their connection breaks: more than any program breaks connections."""


@dataclass(frozen=True)
class Kind:
    """How jobs of one type have to end."""

    ending: JobStatus = JobStatus.COMPLETED
    failures: int = 0
    transactional: bool = False
    critical: bool = False
    max_attempts: int = 5


KINDS = {
    "mix.plain": Kind(),
    "mix.thread": Kind(),
    "mix.snoozes": Kind(),
    "mix.lingers": Kind(),
    "mix.fails": Kind(failures=1),
    "mix.dies": Kind(JobStatus.DEAD, failures=2, critical=True, max_attempts=2),
    "mix.pays": Kind(transactional=True, max_attempts=STUBBORN),
    "mix.repays": Kind(failures=1, transactional=True, max_attempts=STUBBORN),
}

SHARES = ("mix.plain", "mix.pays", "mix.fails", "mix.thread", "mix.repays") * 9 + (
    "mix.snoozes",
    "mix.dies",
    "mix.lingers",
    "mix.lingers",
    "mix.pays",
)
"""The types of fifty jobs in a row."""

CREATE_EFFECTS = """
CREATE TABLE public.effects (job uuid NOT NULL, at timestamptz NOT NULL DEFAULT clock_timestamp())
"""
"""What transactional handlers write. Not unique: the database must not be the one to prevent a second effect."""

WRITE_EFFECT = "INSERT INTO public.effects (job) VALUES ($1)"


class Broken(Exception):
    """What a handler raises that is meant to fail."""


async def work(payload: Any) -> None:
    await asyncio.sleep(payload["n"] % 4 * STEP)


async def block(payload: Any) -> None:
    """Block the loop, as many of its turns later as the payload says."""
    for _ in range(payload["turns"]):
        await asyncio.sleep(0)
    time.sleep(payload["seconds"])  # noqa: ASYNC251 - the fault in question


@app.job("mix.plain")
async def plain(payload: Any, job: ClaimedJob) -> None:
    await work(payload)
    note(job, "plain")


@app.job("mix.thread")
def thread(payload: Any, job: ClaimedJob) -> None:
    time.sleep(payload["n"] % 4 * STEP)
    note(job, "thread")


@app.job("mix.snoozes")
async def snoozes(payload: Any, job: ClaimedJob) -> None:
    note(job, "snoozes")
    if job.fence == 1:
        raise Snooze(SOON[0])


@app.job("mix.lingers")
async def lingers(payload: Any, job: ClaimedJob) -> None:
    note(job, "lingers")
    await asyncio.sleep(LINGER)


@app.job("mix.fails", backoff=SOON)
async def fails(payload: Any, job: ClaimedJob) -> None:
    await work(payload)
    note(job, "fails")
    if job.attempt == 1:
        raise Broken


@app.job("mix.dies", backoff=SOON, critical=True)
async def dies(payload: Any, job: ClaimedJob) -> None:
    note(job, "dies")
    raise Broken


@app.job("mix.pays", backoff=SOON)
async def pays(payload: Any, job: ClaimedJob, conn: asyncpg.Connection) -> None:
    await conn.execute(WRITE_EFFECT, job.id)
    await work(payload)
    note(job, "pays")


@app.job("mix.repays", backoff=SOON)
async def repays(payload: Any, job: ClaimedJob, conn: asyncpg.Connection) -> None:
    """Its first attempt fails behind its write."""
    await conn.execute(WRITE_EFFECT, job.id)
    await work(payload)
    note(job, "repays")
    if job.attempt == 1:
        raise Broken


@app.job(JOB_DIED)
async def alert(payload: JobDied, job: ClaimedJob) -> None:
    note(job, "alert")


# --- what is enqueued beside the mixture ---

BESIDE = {
    "mix.blocks": Kind(),
    "mix.blocks_paying": Kind(transactional=True),
    "mix.pays_slowly": Kind(transactional=True),
}


@app.job("mix.blocks")
async def blocks(payload: Any, job: ClaimedJob) -> None:
    note(job, "blocks")
    await block(payload)


@app.job("mix.blocks_paying")
async def blocks_paying(payload: Any, job: ClaimedJob, conn: asyncpg.Connection) -> None:
    await conn.execute(WRITE_EFFECT, job.id)
    note(job, "blocks_paying")
    await block(payload)


@app.job("mix.pays_slowly")
async def pays_slowly(payload: Any, job: ClaimedJob, conn: asyncpg.Connection) -> None:
    """Notes its run in the middle of it."""
    await conn.execute(WRITE_EFFECT, job.id)
    note(job, "pays_slowly")
    await asyncio.sleep(LINGER)
