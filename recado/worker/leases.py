"""Keeps the leases of running jobs, and the worker's place in the registry, whatever the event loop does.

It lives in a thread of its own with a loop and a connection of its own: a handler that blocks the worker's loop
for longer than the lease must not lose its job for that. The same thread notices the blocking and names the job.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias
from uuid import UUID

import asyncpg

from recado.errors import RecadoError
from recado.queue import leases, workers
from recado.queue.connections import TRANSIENT, Connection, Connector, Link
from recado.queue.models import ClaimedJob
from recado.queue.workers import WorkerInfo
from recado.worker.events import Event, EventKind, Observer
from recado.worker.retrying import Waits
from recado.worker.runner import Attempt, Runner

logger = logging.getLogger("recado.worker")

LAG_CHECK = 0.5
"""Seconds between two looks at the worker's loop."""

MAX_LAG = 1.0
"""Seconds that the loop may be silent before its handler is named: what a person notices as a hang."""

Lease: TypeAlias = tuple[UUID, int]


class Leases:
    """Owns the lease thread."""

    def __init__(
        self,
        connector: Connector,
        runner: Runner,
        worker: WorkerInfo,
        *,
        heartbeat: float,
        schema: str,
        observe: Observer,
    ) -> None:
        self._link_to = connector
        self._runner = runner
        self._worker = worker
        self._heartbeat = heartbeat
        self._renew_after = worker.lease / leases.RENEWALS_PER_LEASE
        self._schema = schema
        self._observe = observe
        self._main_loop = asyncio.get_running_loop()
        self._main_thread = threading.get_ident()
        self._thread = threading.Thread(target=self._thread_main, name="recado-leases", daemon=True)
        self._ended = asyncio.Event()
        self._renewed: dict[Lease, float] = {}
        # Below: of the lease thread's loop.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()
        self._ready = threading.Event()
        self._nudge: asyncio.Event
        self._stopping = False
        self._answered = True
        self._warned = False
        self._suspect: UUID | None = None
        """The job that blocked the loop at the last look."""
        self._blocked_since = 0.0

    def start(self) -> None:
        """Start the thread. The worker has to be registered already."""
        self._thread.start()

    def check_soon(self) -> None:
        """Look at the leases now: a job was cancelled, or the listener was away and may have missed that."""
        self._ready.wait()
        with self._loop_lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._nudge.set)

    async def watch(self) -> None:
        """Wait for the thread to end.

        Raises:
            RecadoError: it ended without having been stopped. Without it every job would be taken over while it
                runs, so the worker must not go on.
        """
        await self._ended.wait()
        if not self._stopping:
            raise RecadoError("cannot keep leases: their thread died; the log says why")

    async def stop(self) -> None:
        """End the thread and take the worker off the registry."""
        self._stopping = True
        self.check_soon()
        await self._ended.wait()
        self._thread.join()

    # -- in the thread

    def _thread_main(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception:
            logger.critical("the lease thread died", exc_info=True)
        finally:
            self._ready.set()
            self._main_loop.call_soon_threadsafe(self._ended.set)

    async def _main(self) -> None:
        self._nudge = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        link = Link(self._link_to, "leases")
        waits = Waits()
        due = time.monotonic() + self._heartbeat
        try:
            while not self._stopping:
                self._watch_main_loop()
                if await self._nudged(min(LAG_CHECK, max(0.0, due - time.monotonic()))) or time.monotonic() >= due:
                    due = time.monotonic() + await self._beat(link, waits)
            await self._sign_off(link)
        finally:
            with self._loop_lock:  # from here on nobody may call this loop: it is about to be closed
                self._loop = None
            await link.close()

    async def _nudged(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._nudge.wait()
        except TimeoutError:
            return False
        self._nudge.clear()
        return not self._stopping

    async def _beat(self, link: Link, waits: Waits) -> float:
        """One sign of life, with the leases looked after.

        Returns:
            Seconds until the next.
        """
        try:
            async with link.connection() as conn:
                await workers.beat(conn, self._worker, self._runner.running(), schema=self._schema)
                lost = await self._look_after_leases(conn)
        except (*TRANSIENT, asyncpg.PostgresError) as error:
            # Whatever the server has against it, trying again is all there is to do: without renewals the jobs
            # are taken over, and the fence then keeps them apart.
            logger.warning("cannot renew leases: %s: %s; trying again", type(error).__name__, error)
            return min(waits.next(), self._heartbeat)
        waits.reset()
        self._main_loop.call_soon_threadsafe(self._report, lost)
        return self._heartbeat

    async def _look_after_leases(self, conn: Connection) -> list[Lease]:
        """Renew what is due; of the rest, see what still stands.

        Returns:
            The leases that are lost.
        """
        now = time.monotonic()
        current = set(self._runner.leases())
        # A lease counts from its claim; this thread knows it only since its first look, which is up to a beat
        # later. Renewed a beat early, it never gets older than the third it may.
        self._renewed = {lease: self._renewed.get(lease, now - self._heartbeat) for lease in current}
        due = [lease for lease, at in self._renewed.items() if now - at >= self._renew_after - self._heartbeat]
        rest = list(current.difference(due))
        standing: set[Lease] = set()
        if due:
            standing |= await leases.renew(conn, self._worker.id, due, schema=self._schema)
            self._renewed |= dict.fromkeys(due, now)
        if rest:
            standing |= await leases.held(conn, self._worker.id, rest, schema=self._schema)
        return [lease for lease in current if lease not in standing]

    def _report(self, lost: list[Lease]) -> None:
        """On the worker's loop: end the attempts whose lease is lost. One that has ended since is not there."""
        for job_id, fence in lost:
            self._runner.lose(job_id, fence)
        self._observe(Event(EventKind.BEAT))

    async def _sign_off(self, link: Link) -> None:
        try:
            async with link.connection() as conn:
                await workers.remove(conn, self._worker.id, schema=self._schema)
        except (*TRANSIENT, asyncpg.PostgresError) as error:
            logger.warning("cannot leave the registry: %s; another worker will clean up", type(error).__name__)

    # -- the watch over the worker's loop

    def _watch_main_loop(self) -> None:
        now = time.monotonic()
        if not self._answered:
            self._watch_blocker(now)
        elif self._runner.running():
            self._answered, self._warned = False, False
            self._suspect, self._blocked_since = None, now
            self._main_loop.call_soon_threadsafe(self._answer)

    def _watch_blocker(self, now: float) -> None:
        frame = sys._current_frames().get(self._main_thread)
        job = _job_of(frame)
        suspect = None if job is None else job.id
        if suspect != self._suspect:
            if self._suspect is not None or self._warned:
                # Handlers that begin together may block the loop one after the other, without an answer between
                # them: each is named, and for its own time.
                self._blocked_since = now
            self._suspect, self._warned = suspect, False
        if not self._warned and now - self._blocked_since > MAX_LAG:
            self._warned = True
            self._name_blocker(job, frame, now - self._blocked_since)

    def _answer(self) -> None:
        self._answered = True

    def _name_blocker(self, job: ClaimedJob | None, frame: FrameType | None, lag: float) -> None:
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown place"
        if job is None:
            logger.warning("the event loop has been blocked for %.1f s, not by a job, at %s", lag, where)
        else:
            logger.warning(
                "job %s (%s) has blocked the event loop for %.1f s at %s; await what waits, or make its handler "
                "a plain def, which runs in a thread",
                job.id,
                job.job_type,
                lag,
                where,
            )
        jobs = () if job is None else (job.id,)
        self._main_loop.call_soon_threadsafe(self._observe, Event(EventKind.BLOCKED, jobs=jobs))


def _job_of(frame: FrameType | None) -> ClaimedJob | None:
    """The job whose attempt is on the stack: the frame of the runner that drives it has it as ``attempt``."""
    run: Callable[..., object] = Runner._run
    while frame is not None:
        if frame.f_code is run.__code__:
            attempt = frame.f_locals.get("attempt")
            return attempt.job if isinstance(attempt, Attempt) else None
        frame = frame.f_back
    return None
