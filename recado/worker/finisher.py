"""Writes down how attempts ended, in batches.

There is no timer: while one batch is under way the next one gathers. With little to do each attempt is written
at once; under load batches grow to hundreds.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from uuid import UUID

import asyncpg

from recado.app import Recado
from recado.queue import finishes, stats
from recado.queue.connections import TRANSIENT, Link
from recado.queue.finishes import Completion, Failed, Failure, Release
from recado.queue.limits import MAX_NAME_LENGTH
from recado.queue.models import ClaimedJob, JobStatus
from recado.queue.operations import FAILED, system
from recado.queue.stats import Tally
from recado.worker.alerts import raise_alerts
from recado.worker.events import Event, EventKind, Observer
from recado.worker.operations import end_dead, end_done, is_operation
from recado.worker.retrying import Waits

logger = logging.getLogger("recado.worker")

STATS_INTERVAL = 10.0
"""Seconds between two writes of the minute buckets: six writes a bucket, and little is lost in a crash."""

ROWS_PER_STATEMENT = 1_000
"""Of one batch: its arrays stay well below a megabyte even with results."""


E = TypeVar("E", Completion, Failure, Release)
_Write: TypeAlias = Callable[[Sequence[tuple[ClaimedJob, E]]], Awaitable[None]]


@dataclass(slots=True)
class _Batch:
    """Attempts that have ended and are not written down yet."""

    completions: list[tuple[ClaimedJob, Completion]] = field(default_factory=list)
    failures: list[tuple[ClaimedJob, Failure]] = field(default_factory=list)
    releases: list[tuple[ClaimedJob, Release]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.completions or self.failures or self.releases)

    def jobs(self) -> Iterable[ClaimedJob]:
        for entries in (self.completions, self.failures, self.releases):
            for job, _ in list(entries):
                yield job


class Finisher:
    """Owns the connection that ends attempts."""

    def __init__(self, app: Recado, link: Link, worker_id: UUID, observe: Observer) -> None:
        self._app = app
        self._link = link
        self._worker_id = worker_id
        self._observe = observe
        self._gathering = _Batch()
        self._writing = _Batch()
        self._wakeup = asyncio.Event()
        self._closing = False
        self._tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        self._stats_due = 0.0

    def complete(self, job: ClaimedJob, result: str | None, run_time: float) -> None:
        """The attempt ended well; ``result`` is a JSON text, ``run_time`` in seconds."""
        self._gathering.completions.append((job, Completion(job.id, job.fence, result)))
        self.count_completed(job, run_time)
        self._wakeup.set()

    def count_completed(self, job: ClaimedJob, run_time: float) -> None:
        """Count an attempt that was completed in its handler's own transaction."""
        tally = self._tally(job)
        tally.completed += 1
        tally.run_seconds += run_time
        tally.wait_seconds += max(0.0, job.waited)

    def fail(self, job: ClaimedJob, failure: Failure) -> None:
        """The attempt ended badly."""
        self._gathering.failures.append((job, failure))
        self.count_failed(job, failure.run_time)
        self._wakeup.set()

    def count_failed(self, job: ClaimedJob, run_time: float, *, dead: int = 0) -> None:
        """Count an attempt that ended badly, and in how many deaths."""
        tally = self._tally(job)
        tally.failed += 1
        tally.dead += dead
        tally.run_seconds += run_time
        tally.wait_seconds += max(0.0, job.waited)

    def _tally(self, job: ClaimedJob | Failed) -> Tally:
        # A type inserted by hand may be of any length; the table's index is not.
        return self._tallies[job.queue, job.job_type[:MAX_NAME_LENGTH]]

    def release(self, job: ClaimedJob, wait: float | None = None) -> None:
        """The attempt does not count: the job goes back, to be run again at once or after ``wait`` seconds."""
        self._gathering.releases.append((job, Release(job.id, job.fence, wait)))
        self._wakeup.set()

    def unwritten(self) -> set[UUID]:
        """The jobs whose end is not in the table yet."""
        return {job.id for batch in (self._writing, self._gathering) for job in batch.jobs()}

    def leases(self) -> list[tuple[UUID, int]]:
        """These jobs, each with its fence. Called from the lease thread: each list is copied in one step, and what
        gathers is asked first, since it moves on to what is being written."""
        jobs = [job for batch in (self._gathering, self._writing) for job in batch.jobs()]
        return [(job.id, job.fence) for job in jobs]

    def close(self) -> None:
        """Let :meth:`run` return once all is written."""
        self._closing = True
        self._wakeup.set()

    async def run(self) -> None:
        """Write batches until :meth:`close` was called and nothing is left."""
        waits = Waits()
        while True:
            await self._wait()
            if self._gathering and not self._writing:
                self._writing, self._gathering = self._gathering, _Batch()
            try:
                await self._write()
                await self._write_stats()
                waits.reset()
            except TRANSIENT as error:
                # Nothing is lost: what was not confirmed is written again. Where the server had committed it
                # and only its answer was lost, the fence makes the repeat change nothing.
                logger.warning("cannot write down ended attempts: %s; trying again", type(error).__name__)
                await asyncio.sleep(waits.next())
                self._wakeup.set()
            if self._closing and not self._writing and not self._gathering and not self._tallies:
                return

    async def _wait(self) -> None:
        """Sleep until something ended, or the statistics are due."""
        # What gathered while a batch had to be written again has woken us for that one already.
        if not self._wakeup.is_set() and not self._gathering:
            due = self._stats_due if self._tallies else None
            try:
                async with asyncio.timeout_at(due):
                    await self._wakeup.wait()
            except TimeoutError:
                return
        self._wakeup.clear()

    async def _write(self) -> None:
        """Write what is in ``_writing``; each part leaves it as soon as the server has confirmed it."""
        batch = self._writing
        while batch.completions:
            await self._write_part(batch.completions, self._complete)
        while batch.failures:
            await self._write_part(batch.failures, self._fail)
        while batch.releases:
            await self._write_part(batch.releases, self._release)

    async def _write_part(self, entries: list[tuple[ClaimedJob, E]], write: _Write[E]) -> None:
        part = entries[:ROWS_PER_STATEMENT]
        try:
            await write(part)
        except TRANSIENT:
            raise
        except asyncpg.PostgresError:
            # One row that the server refuses must not take the others with it: each by itself.
            for entry in part:
                await self._write_alone(entry, write)
        del entries[: len(part)]

    async def _write_alone(self, entry: tuple[ClaimedJob, E], write: _Write[E]) -> None:
        job, ending = entry
        try:
            await write([entry])
        except TRANSIENT:
            raise
        except asyncpg.PostgresError as error:
            # By its code only: the server's own words quote the row, and with it the payload.
            logger.error("cannot write down how job %s ended: %s (%s)", job.id, type(error).__name__, error.sqlstate)  # noqa: TRY400
            if not isinstance(ending, Failure):
                text = f"cannot be stored: {type(error).__name__}"
                self.fail(job, Failure(job.id, job.fence, 0.0, False, 0.0, type(error).__name__, text, None))
            # A failure that cannot be written either leaves the job to its lease, which is renewed no more.

    async def _complete(self, entries: Sequence[tuple[ClaimedJob, Completion]]) -> None:
        schema = self._app.schema
        async with self._link.connection() as conn:
            if any(map(is_operation, {job.job_type for job, _ in entries})):
                # The result stands with the operation, where its client may read it.
                ends = [e._replace(result=None) if is_operation(job.job_type) else e for job, e in entries]
                async with system(conn):
                    done = await finishes.complete(conn, self._worker_id, ends, schema=schema)
                    await end_done(conn, entries, done, schema=schema)
            else:
                done = await finishes.complete(conn, self._worker_id, [end for _, end in entries], schema=schema)
        self._report(EventKind.COMPLETED, entries, done)

    async def _release(self, entries: Sequence[tuple[ClaimedJob, Release]]) -> None:
        async with self._link.connection() as conn:
            done = await finishes.release(
                conn, self._worker_id, [release for _, release in entries], schema=self._app.schema
            )
        self._report(EventKind.RELEASED, entries, done)

    async def _fail(self, entries: Sequence[tuple[ClaimedJob, Failure]]) -> None:
        failures = [failure for _, failure in entries]
        async with self._link.connection() as conn, conn.transaction(isolation="read_committed"):
            ended = await finishes.fail(conn, self._worker_id, failures, schema=self._app.schema)
            dead = [failed for failed in ended if failed.status is JobStatus.DEAD]
            classes = {failure.id: failure.error_class for failure in failures}
            await raise_alerts(conn, self._app, [(failed, classes[failed.id]) for failed in dead])
            await end_dead(conn, self._app, dead, FAILED)
        for failed in dead:
            self._tally(failed).dead += 1
        self._report(EventKind.FAILED, entries, {f.id for f in ended if f.status is not JobStatus.DEAD}, lost=False)
        self._report(EventKind.DIED, entries, {f.id for f in dead}, lost=False)
        self._report_lost(entries, {f.id for f in ended})

    def _report(
        self, kind: EventKind, entries: Sequence[tuple[ClaimedJob, Any]], done: set[UUID], *, lost: bool = True
    ) -> None:
        if done:
            self._observe(Event(kind, jobs=tuple([job.id for job, _ in entries if job.id in done])))
        if lost:
            self._report_lost(entries, done)

    def _report_lost(self, entries: Sequence[tuple[ClaimedJob, Any]], done: set[UUID]) -> None:
        if len(done) == len(entries):
            return
        missing = tuple(job.id for job, _ in entries if job.id not in done)
        for job_id in missing:
            logger.warning("job %s had been taken over or cancelled: how this attempt ended changes nothing", job_id)
        if missing:
            self._observe(Event(EventKind.LOST, jobs=missing))

    async def _write_stats(self) -> None:
        if not self._tallies or (not self._closing and asyncio.get_running_loop().time() < self._stats_due):
            return
        tallies, self._tallies = self._tallies, defaultdict(Tally)
        self._stats_due = asyncio.get_running_loop().time() + STATS_INTERVAL
        try:
            async with self._link.connection() as conn:
                await stats.add(conn, tallies, schema=self._app.schema)
        except TRANSIENT:
            # Lost rather than counted twice: whether the server had committed them is not known.
            logger.warning("cannot write the statistics of the last %d s; they are lost", STATS_INTERVAL)
