"""Claims jobs of one queue, as many as it has room for, and sleeps when there are none."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from uuid import UUID

import asyncpg

from recado.queue import claims, workers
from recado.queue.connections import TRANSIENT, Connection, Link
from recado.queue.models import ClaimedJob
from recado.worker.events import Event, EventKind, Observer
from recado.worker.finisher import Finisher
from recado.worker.hunger import SATED_AFTER, Hunger, Watch
from recado.worker.retrying import Waits
from recado.worker.runner import Runner

logger = logging.getLogger("recado.worker")

POLL_INTERVAL = 2.0
"""Seconds between two looks at an empty queue when nobody notifies: how late a job may start when a notification
got lost."""

FIRST_LOOK = 0.05
"""Seconds after the last claim until a sleeping worker looks when the next job is due; under light load the next
notification mostly comes before, and saves the statement."""

SWEEP_INTERVAL = 2.0
"""Seconds between two claims without floors while there is a backlog: how late a job may start that was committed,
retried or released below the floor."""

SWEEP_SHARE = 20
"""A sweep waits for twenty times as long as the last one took: no more than 5 % of the time goes into them, however
many dead rows an old snapshot keeps in their way."""

DEAR_SWEEP = 0.01
"""Seconds: a sweep that takes longer is not a claim's any more, but is made beside the claims."""

TRAIL = timedelta(seconds=0.25)
"""By how much the floors of a claim without a backlog lie below what was claimed last, at most: what was stamped
earlier but committed later, as of two enqueues at the same time one does, is found by the claim that its notification
wakes. Where the walk over what was claimed meanwhile takes as long as a dear sweep, it is rationed like one."""

TRAIL_JOBS = 200
"""Jobs that the trail spans at most, which is as many as are claimed within it at 800 a second: some 0.1 ms of dead
rows under an old snapshot. At 20,000 a second a quarter of one would be 5,000."""

LONGEST_SHY = 0.1
"""Seconds; the most by which a worker that was beaten to a job holds back at the next notification."""

FIRST_SHY = 0.002
"""Seconds; about a claim's round trip."""


class Claimer:
    """Owns the claims of one queue. One is in flight at a time: while it is under way slots come free, and the
    next one takes them all."""

    def __init__(
        self,
        queue: str,
        link: Link,
        aside: Link,
        runner: Runner,
        finisher: Finisher,
        hunger: Hunger,
        worker_id: UUID,
        *,
        poll_interval: float,
        schema: str,
        observe: Observer,
    ) -> None:
        self._queue = queue
        self._link = link
        self._aside = aside
        self._sweep_wanted = asyncio.Event()
        self._runner = runner
        self._finisher = finisher
        self._hunger = hunger
        self._worker_id = worker_id
        self._poll_interval = poll_interval
        self._schema = schema
        self._observe = observe
        self._wakeup = asyncio.Event()
        self._stopping = False
        self._floors: list[datetime | None] = [None] * len(claims.PRIORITIES)
        self._firsts: Sequence[datetime | None] = ()
        self._swept_at = self._sweep_took = 0.0
        self._trail_from = 0.0
        self._recent: list[deque[datetime]] = [deque(maxlen=TRAIL_JOBS) for _ in claims.PRIORITIES]
        self._backlog = False
        self._full_since: float | None = None
        self._watch: Watch | None = Watch()  # registered hungry, but enqueuers may have looked before
        self._look_took = 0.0
        self._shy = 0.0
        self._took = False
        """The last claim took something."""
        self._beaten = False
        """The coming claim was notified: should it find nothing, another worker was faster."""
        self._connects = 0
        self._owes_sweep = False
        """A claim or a look left out what lies below the floors, and no sweep has begun since."""

    def wake(self) -> None:
        """There may be work: a notification, or a listener that may have missed one."""
        self._wakeup.set()

    def stop(self) -> None:
        """Claim nothing more."""
        self._stopping = True
        self._wakeup.set()

    async def run(self) -> None:
        """Claim until :meth:`stop` was called."""
        async with asyncio.TaskGroup() as group:
            sweeping = group.create_task(self._sweep_aside())
            await self._claim_on()
            sweeping.cancel()

    async def _claim_on(self) -> None:
        waits = Waits()
        while not self._stopping:
            room = await self._runner.room(self._queue)
            if room == 0:
                return
            try:
                if await self._step(room):
                    await self._sleep()
                waits.reset()
            except (*TRANSIENT, asyncpg.PostgresError) as error:
                logger.warning("cannot claim from %s: %s: %s; trying again", self._queue, type(error).__name__, error)
                await self._pause(waits.next())

    async def _step(self, room: int) -> bool:
        """Claim once.

        Returns:
            Whether there is nothing more, and enqueuers know that we wait.
        """
        self._wakeup.clear()  # before the claim: what is notified from here on may be missing in its snapshot
        jobs = await self._claim(room)
        self._backlog = len(jobs) == room
        if self._backlog:
            await self._count_full()
            return False
        self._full_since = None
        if self._queue in self._hunger:
            return True
        await self._hunger.join(self._queue)
        # Committed; now claim once more for those that were enqueued before, and watch for those whose
        # transactions read the old state and are still open.
        self._watch = Watch()
        return False

    async def _count_full(self) -> None:
        now = time.monotonic()
        if self._full_since is None:
            self._full_since = now
        elif now - self._full_since >= SATED_AFTER and self._queue in self._hunger:
            await self._hunger.leave(self._queue)

    async def _claim(self, limit: int) -> list[ClaimedJob]:
        async with self._connection() as conn:
            began = time.monotonic()
            self._set_back_floors()
            sweep = self._may_sweep(began)
            self._owes_sweep = not sweep
            trail = not self._backlog and began >= self._trail_from
            floors = claims.NO_FLOORS if sweep else self._trailing() if trail else self._floors
            jobs = await claims.claim(conn, self._worker_id, self._queue, limit, floors, schema=self._schema)
            if sweep:
                self._count_sweep(began)
            elif trail and (took := time.monotonic() - began) > DEAR_SWEEP:
                self._trail_from = began + took * SWEEP_SHARE
            # Still holding the connection: whoever asks next for strays has to find these among what is held.
            self._runner.submit(self._queue, jobs)
        for job in jobs:  # in the order of run_at: the last of a priority is its new floor, also where it goes back
            self._floors[job.priority] = job.run_at
            self._recent[job.priority].append(job.run_at)
        self._took = bool(jobs)
        if jobs:
            self._shy = 0.0
            self._observe(Event(EventKind.CLAIMED, self._queue, tuple(job.id for job in jobs)))
        elif self._beaten:
            self._shy = FIRST_SHY
        self._beaten = False
        return jobs

    def _may_sweep(self, now: float) -> bool:
        """Whether this claim goes without floors: always on an empty queue, where that costs nothing, now and
        then under a backlog, and never more often than its share of the time allows. Once that is dear, none does:
        the sweep is made aside, and the claims go on meanwhile."""
        since = now - self._swept_at
        if since < self._sweep_took * SWEEP_SHARE or (self._backlog and since < SWEEP_INTERVAL):
            return False
        if self._sweep_took > DEAR_SWEEP:
            self._sweep_wanted.set()
            return False
        return True

    def _trailing(self) -> list[datetime | None]:
        return [floor and self._behind(floor, recent) for floor, recent in zip(self._floors, self._recent, strict=True)]

    def _behind(self, floor: datetime, recent: deque[datetime]) -> datetime:
        begin = floor - TRAIL
        if len(recent) == TRAIL_JOBS:
            begin = max(begin, recent[0])
        return min(begin, floor)  # a sweep may have set the floor back since

    def _count_sweep(self, began: float) -> None:
        self._swept_at = time.monotonic()
        self._sweep_took = self._swept_at - began

    async def _sweep_aside(self) -> None:
        """Look where the lanes begin, whenever a claim would have wanted to know."""
        while True:
            await self._sweep_wanted.wait()
            self._owes_sweep = False
            began = time.monotonic()
            try:
                async with self._aside.connection() as conn:
                    firsts = await claims.first_pending(conn, self._queue, schema=self._schema)
            except (*TRANSIENT, asyncpg.PostgresError) as error:
                logger.warning("cannot sweep %s: %s; trying again", self._queue, type(error).__name__)
                firsts = ()
            self._count_sweep(began)
            self._sweep_wanted.clear()
            self._firsts = firsts
            if any(firsts):
                self._wakeup.set()  # for a claim that takes it in

    def _set_back_floors(self) -> None:
        """Take in what a sweep has found aside. Between two claims: one that was under way meanwhile sets the floors
        to what it took, and would undo it."""
        for priority, first in enumerate(self._firsts):
            floor = self._floors[priority]
            if first is not None and floor is not None and first < floor:
                self._floors[priority] = first
        self._firsts = ()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection]:
        """The connection of the claims. When it is a new one, the last claim on the old one may have been
        committed and its answer lost: those jobs are given back first."""
        async with self._link.connection() as conn:
            if self._link.connects != self._connects:
                held = self._runner.held() | self._finisher.unwritten()
                strays = await claims.release_strays(conn, self._worker_id, held, schema=self._schema)
                if self._connects:
                    await self._hunger.say_again(conn)
                    self._watch = Watch()
                self._connects = self._link.connects
                if strays:
                    logger.warning("gave back %d jobs that were claimed on a connection that broke", len(strays))
                    self._observe(Event(EventKind.RELEASED, self._queue, tuple(strays)))
            yield conn

    async def _sleep(self) -> None:
        """Sleep until a claim is worth while."""
        # A notification that came while the last claim was under way is often for what that claim took.
        echo = self._took and self._wakeup.is_set()
        wait = max(FIRST_LOOK, self._look_took * SWEEP_SHARE)
        while not self._stopping:
            woken = await self._pause(wait)
            if woken and self._shy == 0.0:
                self._beaten = not echo
                return
            if woken:
                # Others were faster the last time. Whoever was the fastest is not shy, and comes first again; all
                # the others only look whether it left anything: twenty idle workers make one claim a job.
                await asyncio.sleep(random.uniform(0, self._shy))  # noqa: S311
                self._wakeup.clear()
            due = await self._look(woken)
            if due is not None and due <= 0:
                return
            if woken:
                self._shy = min(2 * self._shy, LONGEST_SHY)
            wait = self._poll_interval * random.uniform(0.8, 1.0)  # noqa: S311 - spreads a fleet
            if due is not None:
                wait = min(wait, due)
            if self._watch is not None:
                wait = min(wait, self._watch.interval())
            if self._owes_sweep:
                wait = min(wait, self._swept_at + self._sweep_took * SWEEP_SHARE - time.monotonic())
            # Where an old snapshot keeps dead rows in the way, a look costs as much as a sweep.
            wait = max(wait, self._look_took * SWEEP_SHARE)

    async def _look(self, woken: bool) -> float | None:
        """Seconds until the first job is due.

        Args:
            woken: there may be a job below the floors, which a look with floors does not see.
        """
        async with self._connection() as conn:
            began = time.monotonic()
            self._set_back_floors()
            if woken or self._watch is not None:
                self._owes_sweep = self._sweep_took > DEAR_SWEEP
            if self._watch is not None and self._watch.over(*await workers.horizon(conn)):
                self._watch = None
            self._may_sweep(began)  # with an idle queue, nobody else asks
            floors = self._trailing() if self._sweep_took > DEAR_SWEEP else claims.NO_FLOORS
            due = await claims.look(conn, self._queue, floors, schema=self._schema)
            self._look_took = time.monotonic() - began
        if due is None or due > 0:
            self._observe(Event(EventKind.LOOKED, self._queue))
        return due

    async def _pause(self, seconds: float) -> bool:
        """Whether something woke the claimer before ``seconds`` were over."""
        try:
            async with asyncio.timeout(seconds):
                await self._wakeup.wait()
        except TimeoutError:
            return False
        return True
