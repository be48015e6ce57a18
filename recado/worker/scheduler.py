"""The clock: enqueues what is due by the schedules, and starts what recado itself does from time to time.

Every worker has one, and none of them leads. All wait for the same tick; the first to lock the schedule's row makes it,
in one transaction, and the others pass by. What time it is the server says; a worker's own clock plays no part, since
between two looks it only waits. :mod:`recado.queue.schedules` has the statements and the protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import asyncpg

from recado.app import Recado
from recado.errors import InvalidSchedule
from recado.queue import schedules
from recado.queue.connections import TRANSIENT, Connection, Link
from recado.queue.enqueue import insert_job
from recado.queue.models import NewJob
from recado.queue.schedules import SYSTEM, Schedule, ScheduleRow
from recado.worker.events import Event, EventKind, Observer
from recado.worker.retrying import Waits

logger = logging.getLogger("recado.worker")

SYNC_INTERVAL = 30.0
"""Seconds between two comparisons of the code with the table, and at most from one look at what is due to the next: how
long a resumed schedule, or the definition of the last release that is left, may wait. A guess at what nobody minds."""


@dataclass(frozen=True, slots=True)
class SystemTask:
    """What the worker that moves the tick of one of recado's own schedules does itself.

    No job, since nobody knows which queues are served. Should the worker die meanwhile, the next tick does it.
    """

    expression: str
    run: Callable[[], Awaitable[None]]


class Scheduler:
    """Makes the ticks of one worker's schedules.

    Args:
        worker_id: the worker's, which is registered already.
        system: recado's own schedules, by name.
        sync_interval: seconds, see :data:`SYNC_INTERVAL`.
    """

    def __init__(
        self,
        app: Recado,
        link: Link,
        worker_id: UUID,
        system: Mapping[str, SystemTask],
        *,
        sync_interval: float = SYNC_INTERVAL,
        observe: Observer,
    ) -> None:
        self._app = app
        self._link = link
        self._worker_id = worker_id
        self._system = system
        self._sync_interval = sync_interval
        self._observe = observe
        self._synced_at: float | None = None
        self._running: set[str] = set()
        """The system tasks that are under way here."""
        self._unreadable: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """Tick until cancelled."""
        waits = Waits()
        async with asyncio.TaskGroup() as tasks:
            while True:
                try:
                    wait = await self._round(tasks)
                    waits.reset()
                except (*TRANSIENT, asyncpg.PostgresError) as error:
                    logger.warning("cannot look at the schedules: %s: %s; trying again", type(error).__name__, error)
                    wait = waits.next()
                await asyncio.sleep(wait)

    async def _round(self, tasks: asyncio.TaskGroup) -> float:
        """Make all ticks that are due.

        Returns:
            Seconds until the next one is, or the next round at the latest.
        """
        if self._synced_at is None or time.monotonic() - self._synced_at >= self._sync_interval:
            await self._sync()
        rows = await self._rows()
        ticked = False
        for row in rows:
            if self._wants(row) and await self._try(row):
                ticked = True
                if row.application == SYSTEM:
                    # Beside the ticks, which must not wait for it.
                    self._running.add(row.name)
                    tasks.create_task(self._run_system_task(row.name), name=row.name)
        if ticked:
            return 0.0  # it may have taken its time: look anew
        # What is due and was not ticked, another worker has. Should that one fail, the next round finds it due still.
        nexts = [(tick - row.now).total_seconds() for row in rows if (tick := self._read(row, row.next)) is not None]
        return min([*nexts, self._sync_interval])

    async def _sync(self) -> None:
        system = [Schedule(name, None, task.expression) for name, task in self._system.items()]
        own = list(self._app.schedules.values())
        for application, entries in ((SYSTEM, system), (self._app.name, own)):
            async with self._link.connection() as conn, conn.transaction(isolation="read_committed"):
                await schedules.sync(conn, application, self._worker_id, entries, schema=self._app.schema)
        self._synced_at = time.monotonic()
        self._observe(Event(EventKind.SYNCED))

    async def _rows(self) -> list[ScheduleRow]:
        keys = [(self._app.name, name) for name in self._app.schedules] + [(SYSTEM, name) for name in self._system]
        async with self._link.connection() as conn:
            return await schedules.get_schedules(conn, keys, schema=self._app.schema)

    def _wants(self, row: ScheduleRow) -> bool:
        if row.application == SYSTEM and row.name in self._running:
            return False  # should this one last until its next tick, that is another worker's
        return self._read(row, row.due) is not None

    def _read(self, row: ScheduleRow, when: Callable[[], datetime | None]) -> datetime | None:
        """``None`` for a row that cannot be read here: it must not keep the others from their ticks."""
        try:
            return when()
        except InvalidSchedule as error:
            if (row.application, row.name) not in self._unreadable:
                self._unreadable.add((row.application, row.name))
                logger.warning("schedule %s of %r does not run on this worker: %s", row.name, row.application, error)
            return None

    async def _try(self, seen: ScheduleRow) -> bool:
        """As :meth:`_tick`; what the database has against one schedule's job must not keep the others from theirs."""
        try:
            return await self._tick(seen)
        except TRANSIENT:
            raise
        except asyncpg.PostgresError as error:
            logger.warning("schedule %s cannot enqueue: %s: %s; trying again", seen.name, type(error).__name__, error)
            return False

    async def _tick(self, seen: ScheduleRow) -> bool:
        """Make the tick that is due, unless another worker does or did so.

        Returns:
            Whether this worker made it.
        """
        async with self._link.connection() as conn, conn.transaction(isolation="read_committed"):
            row = await schedules.lock_schedule(conn, seen.application, seen.name, schema=self._app.schema)
            # By the row as it is now: another worker may have been faster, or changed it.
            tick = None if row is None else self._read(row, row.due)
            if row is None or tick is None or not self._knows(row):
                return False
            job_id = await self._enqueue(conn, row, tick)
            await schedules.set_tick(conn, row, tick, job_id, schema=self._app.schema)
        self._observe(Event(EventKind.TICKED, jobs=() if job_id is None else (job_id,)))
        return True

    def _knows(self, row: ScheduleRow) -> bool:
        """Whether the row's job type is in this worker's code; during a deploy it may be only in another's."""
        return row.job_type is None or row.job_type in self._app.job_types

    async def _enqueue(self, conn: Connection, row: ScheduleRow, tick: datetime) -> UUID | None:
        """The tick's job, or none."""
        if row.job_type is None:
            return None
        schema = self._app.schema
        last = row.last_job_id if row.overlap == "skip" else None
        if last is not None and await schedules.is_unfinished(conn, last, schema=schema):
            logger.info("schedule %s skips its tick: job %s has not ended", row.name, last)
            return None
        # How its jobs are treated is the job type's, as with any other enqueue: only when and with what is the row's.
        job_type = self._app.job_types[row.job_type]
        job = NewJob(
            job_type=job_type.name,
            payload=row.payload,
            queue=job_type.queue,
            priority=job_type.priority,
            max_attempts=job_type.max_attempts,
            idempotency_key=f"schedule:{row.application}:{row.name}:{tick.isoformat()}",
            metadata=json.dumps({"schedule": row.name, "tick": tick.isoformat()}),
            critical=job_type.critical,
        )
        return await insert_job(conn, job, schema=schema)

    async def _run_system_task(self, name: str) -> None:
        try:
            await self._system[name].run()
        except (*TRANSIENT, asyncpg.PostgresError) as error:
            logger.warning("cannot run %s: %s: %s; its next tick will", name, type(error).__name__, error)
        finally:
            self._running.discard(name)
