"""What is measured: each row of the table is a function that takes a run on a fresh database and returns figures."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlencode, urlsplit

import asyncpg

from bench.catalog import System
from bench.errors import PeerError
from bench.install import Installed
from bench.processes import PATIENCE, Child, child, do

BULK_CALL = 1_000
"""Jobs of one call where a queue is filled."""

FEED_CALL = 100
"""Jobs of one call beside a worker: a busy producer's."""

MOST_SINGLES = 2_000
"""Jobs that are enqueued one by one."""

PACE = 50
"""Jobs a second that an idle worker waits for,"""

MOST_PACED = 500
"""how many of these,"""

WARM_UP = 50
"""and how many before them: they find caches and connections cold, and do not count."""

EQUAL_CONCURRENCY = 100
"""Handlers at once where all are held to the same number."""

Figures: TypeAlias = Mapping[str, float]
"""By their unit."""


@dataclass(frozen=True, slots=True)
class Run:
    """One system on a database of its own, its schema installed."""

    installed: Installed
    dsn: str
    conn: asyncpg.Connection[asyncpg.Record] = field(repr=False)
    jobs: int

    @property
    def system(self) -> System:
        return self.installed.system

    async def do(self, role: str, **task: Any) -> Any:
        """Have a process do a task."""
        return await do(self.installed, role, dsn=self.dsn, **task)

    def child(self, role: str, **task: Any) -> AbstractAsyncContextManager[Child]:
        """A process that waits for ``go``."""
        return child(self.installed, role, dsn=self.dsn, **task)

    async def expect_waiting(self, jobs: int) -> None:
        """Make sure that so many jobs are in the queue.

        Raises:
            PeerError: there are more, or fewer.
        """
        found = await self.conn.fetchval(self.system.unfinished)
        if found != jobs:
            raise PeerError(f"{jobs:,} jobs were enqueued, and {found:,} are in the queue")

    async def finished(self) -> float:
        """Wait until the database shows every job as done, and return since when.

        Raises:
            PeerError: that does not happen.
        """
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    # The answer is true of the moment of the question, however long it takes.
                    asked = time.monotonic()
                    if await self.conn.fetchval(self.system.unfinished) == 0:
                        return asked
        except TimeoutError:
            raise PeerError(f"all jobs were handled, and {PATIENCE:g} s later some are not done") from None


@asynccontextmanager
async def fresh(server: str, installed: Installed, jobs: int) -> AsyncIterator[Run]:
    """A run on a new database of this server, which is dropped at the end of the block."""
    database = f"bench_{installed.system.module}"
    async with connection(server) as admin:
        await admin.execute(f"CREATE DATABASE {database}")
        try:
            dsn = _url(server, database)
            await do(installed, "setup", dsn=dsn)
            async with connection(dsn) as conn:
                yield Run(installed, dsn, conn, min(jobs, installed.system.most_jobs))
        finally:
            await admin.execute(f"DROP DATABASE {database} WITH (FORCE)")


@asynccontextmanager
async def connection(dsn: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A connection that is closed at the end of the block."""
    conn = await asyncpg.connect(dsn)
    try:
        yield conn
    finally:
        await conn.close()


def _url(server: str, database: str) -> str:
    """The URL in the one form that asyncpg, libpq, node-postgres and sqlx all take for a Unix socket."""
    parts = urlsplit(server)
    return f"postgresql:///{database}?{parts.query}&{urlencode({'user': parts.username or ''})}"


async def enqueue(run: Run) -> Figures:
    """One job after the other, on one connection."""
    jobs = min(run.jobs, MOST_SINGLES)
    began, ended = await run.do("one", jobs=jobs)
    await run.expect_waiting(jobs)
    return {"jobs/s": jobs / (ended - began)}


async def bulk(run: Run) -> Figures:
    """Calls of 1,000 jobs."""
    if not run.system.bulk:
        raise PeerError("it has no bulk enqueue")
    began, ended = await run.do("many", jobs=run.jobs, call=BULK_CALL)
    await run.expect_waiting(run.jobs)
    return {"jobs/s": run.jobs / (ended - began)}


async def drain(run: Run, concurrency: int | None = None) -> Figures:
    """A full queue: from the beginning of the first handler until the database shows every job as done."""
    await run.do("many", jobs=run.jobs, call=BULK_CALL)
    await run.expect_waiting(run.jobs)
    await run.conn.execute("VACUUM (ANALYZE)" if run.system.analyze else "VACUUM")
    await run.conn.execute("CHECKPOINT")
    async with run.child("work", concurrency=concurrency) as worker:
        worker.tell("go")
        await worker.handled(run.jobs)
        ended = await run.finished()
        begun = await _stop(worker, range(run.jobs))
    return {"jobs/s": run.jobs / (ended - min(begun.values()))}


async def latency(run: Run) -> Figures:
    """An idle worker: from before the call that enqueues a job to the first line of its handler."""
    jobs = min(run.jobs, MOST_PACED) + WARM_UP
    async with _idle_worker(run, idle=True) as worker:
        sent = await run.do("pace", jobs=jobs, pace=PACE)
        await worker.handled(1 + jobs)
        await run.finished()
        # Number 0 came twice: the first to find the worker awake, and the first of these, which is warm-up.
        begun = await _stop(worker, [0, *range(jobs)])
    waits = sorted(1000 * (begun[n] - sent[n]) for n in range(WARM_UP, jobs))
    return {f"p{percent} ms": waits[round(percent / 100 * (len(waits) - 1))] for percent in (50, 95, 99)}


async def sustained(run: Run) -> Figures:
    """Jobs that are enqueued in calls of 100 while a worker works, from the first call until every job is done."""
    async with _idle_worker(run, idle=False) as worker:
        began, _ = await run.do("many", jobs=run.jobs, call=FEED_CALL)
        await worker.handled(1 + run.jobs)
        ended = await run.finished()
        await _stop(worker, [0, *range(run.jobs)])
    return {"jobs/s": run.jobs / (ended - began)}


@asynccontextmanager
async def _idle_worker(run: Run, *, idle: bool) -> AsyncIterator[Child]:
    """A worker that has done one job, so that it is up, and has nothing left to do.

    Args:
        idle: whether that is how it will mostly be.
    """
    await run.do("one", jobs=1)
    async with run.child("work", concurrency=None, idle=idle) as worker:
        worker.tell("go")
        await worker.handled(1)
        await run.finished()
        yield worker


async def _stop(worker: Child, numbers: Sequence[int]) -> dict[int, float]:
    """When the handler of each job began, once it is sure that each began exactly once.

    Raises:
        PeerError: a job was lost, or ran twice.
    """
    worker.tell("stop")
    begun = await worker.receive("report")
    expected, found = Counter(numbers), Counter(n for n, _ in begun)
    if found != expected:
        lost, doubled = (expected - found).total(), (found - expected).total()
        raise PeerError(f"of {len(numbers):,} jobs {lost:,} were lost, and {doubled:,} ran twice")
    return dict(begun)


Row: TypeAlias = Callable[[Run], Awaitable[Figures]]

ROWS: Mapping[str, Row] = {
    "enqueue": enqueue,
    "bulk": bulk,
    "drain": drain,
    "drain-at-100": partial(drain, concurrency=EQUAL_CONCURRENCY),
    "latency": latency,
    "sustained": sustained,
}
"""In the order of the table."""
