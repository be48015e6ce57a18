"""For which queues this worker wants to be notified.

Enqueue notifies only while some worker is hungry for the queue, since a transaction that notifies commits
one at a time. A worker is hungry from its start and turns sated only under a backlog; see
:mod:`recado.queue.workers` for the statements and ``docs/design.md`` for the protocol.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from recado.queue import workers
from recado.queue.connections import Connection, Link
from recado.queue.workers import WorkerInfo
from recado.worker.events import Event, EventKind, Observer

logger = logging.getLogger("recado.worker")

SATED_AFTER = 0.1
"""Seconds for which claims have to come back full before enqueuers are told not to notify any more."""

SATED_EVERY = 1.0
"""Seconds between two times of turning sated: each change is a committed update of a row that every enqueue reads."""

FIRST_WATCH = 0.05
"""Seconds until the first look after turning hungry: past it, no statement still runs on a snapshot from before
that has not shown its transaction id yet."""

WATCH_FRACTION = 0.01
"""Of the time a transaction has been open since: how late a job in it may start. 50 ms at least."""


class Hunger:
    """What the registry says this worker is hungry for; shared by the claimers of its queues."""

    def __init__(self, link: Link, worker: WorkerInfo, *, schema: str, observe: Observer) -> None:
        self._link = link
        self._worker = worker
        self._schema = schema
        self._observe = observe
        self._changing = asyncio.Lock()
        self._sated_at = 0.0
        # The same object as in the registry's entry: should a beat have to insert it anew, it says the truth.
        self._hungry = worker.hungry

    def __contains__(self, queue: str) -> bool:
        return queue in self._hungry

    async def join(self, queue: str) -> None:
        """Turn hungry for ``queue``; committed when this returns."""
        async with self._changing:
            if queue not in self._hungry:
                await self._write([*self._hungry, queue])
                self._hungry.add(queue)
                self._observe(Event(EventKind.HUNGRY, queue))

    async def leave(self, queue: str) -> None:
        """Turn sated for ``queue``, unless a queue did so within the last second."""
        async with self._changing:
            if queue in self._hungry and time.monotonic() - self._sated_at >= SATED_EVERY:
                self._sated_at = time.monotonic()
                # First here, then there: should the answer get lost, this worker believes the worse and turns
                # hungry anew. The other way round it would wait for notifications that nobody sends.
                self._hungry.discard(queue)
                await self._write(self._hungry)
                self._observe(Event(EventKind.SATED, queue))

    async def say_again(self, conn: Connection) -> None:
        """On a new connection: the server may be another one now, or have lost what it was told."""
        # Without the lock: its holder may be waiting for this very connection, and writes the same set after us.
        await self._tell(conn, self._hungry)

    async def _write(self, queues: Collection[str]) -> None:
        async with self._link.connection() as conn:
            await self._tell(conn, queues)

    async def _tell(self, conn: Connection, queues: Collection[str]) -> None:
        if not await workers.set_hungry(conn, self._worker.id, queues, schema=self._schema):
            # Silent for so long that the entry was removed: register anew, then say it again.
            await workers.beat(conn, self._worker, 0, schema=self._schema)
            await workers.set_hungry(conn, self._worker.id, queues, schema=self._schema)


class Watch:
    """After turning hungry: until when an enqueuer may have read the old state, and so not have notified.

    Such a transaction has its id by the first look, :data:`FIRST_WATCH` later. So the first look notes the next id to
    be given out, and once every transaction below has ended, whoever commits without notifying has begun later and
    saw us hungry. (But for two that may take their id long after their snapshot: under REPEATABLE READ, and an
    INSERT that waits for another one with the same key. Their jobs are found by the poll.)
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._until: int | None = None

    def interval(self) -> float:
        """Seconds until the next look."""
        return max(FIRST_WATCH, (time.monotonic() - self._began) * WATCH_FRACTION)

    def over(self, xmin: int, xmax: int) -> bool:
        """Whether the look that follows this snapshot sees all there is to see."""
        if time.monotonic() - self._began < FIRST_WATCH:
            return False
        if self._until is None:
            self._until = xmax
        return xmin >= self._until
