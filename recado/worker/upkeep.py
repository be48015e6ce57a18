"""What some worker has to do for all: take over orphans, delete what is old, end what nobody works on any more.

Each step is one transaction under an advisory lock that is only tried: of any number of workers one does it,
and there is no leader whose loss would stop it. Every worker looks for orphans; when to prune and to expire, the
schedules say, which all workers share (:mod:`recado.worker.scheduler`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from datetime import timedelta

import asyncpg

from recado.app import Recado
from recado.queue import leases, operations, retention, workers
from recado.queue.connections import TRANSIENT, Link
from recado.queue.leases import LEASE_LOST
from recado.queue.locks import try_upkeep_lock
from recado.queue.models import JobStatus
from recado.queue.operations import INTERRUPTED
from recado.settings import settings
from recado.worker.alerts import raise_alerts
from recado.worker.events import Event, EventKind, Observer
from recado.worker.operations import end_dead
from recado.worker.scheduler import SystemTask

logger = logging.getLogger("recado.worker")

RECLAIM_INTERVAL = 15.0
"""Seconds between two sweeps for orphans: a quarter of the silence after which a worker is taken for dead."""

PRUNE = "recado.prune"
"""The schedule of the pruning: one for all workers, so that it is made as often with a hundred of them as with one."""

PRUNE_SCHEDULE = "*/5 * * * *"
"""At 1,000 rows a statement what ended within five minutes is gone in a few of them."""

EXPIRE = "recado.expire"
"""The schedule of the expiry of operations; when, ``RECADO_EXPIRY_SCHEDULE`` says."""

PRUNE_PAUSE = 0.1
"""Seconds between two statements of one pruning or expiry, so that it never takes a core for itself."""


class Upkeep:
    """Owns the connection of the sweeps."""

    def __init__(
        self,
        app: Recado,
        link: Link,
        *,
        reclaim_interval: float,
        keep: Mapping[JobStatus, timedelta],
        observe: Observer,
    ) -> None:
        self._app = app
        self._link = link
        self._reclaim_interval = reclaim_interval
        self._keep = keep
        self._observe = observe

    def system_tasks(self) -> dict[str, SystemTask]:
        """What the scheduler starts, by the name of its schedule."""
        return {
            PRUNE: SystemTask(PRUNE_SCHEDULE, self.prune),
            EXPIRE: SystemTask(settings().expiry_schedule, self.expire),
        }

    async def run(self) -> None:
        """Take over orphans until cancelled."""
        while True:
            try:
                await self._reclaim()
            except (*TRANSIENT, asyncpg.PostgresError) as error:
                logger.warning(
                    "cannot take over orphans: %s: %s; trying again in %g s",
                    type(error).__name__,
                    error,
                    self._reclaim_interval,
                )
            await asyncio.sleep(self._reclaim_interval)

    async def _reclaim(self) -> None:
        while await self._reclaim_once() == leases.ROWS_PER_STATEMENT:
            pass
        self._observe(Event(EventKind.SWEPT))

    async def _reclaim_once(self) -> int:
        """Take over up to 1,000 orphans; how many there were."""
        schema = self._app.schema
        async with self._link.connection() as conn, conn.transaction(isolation="read_committed"):
            if not await try_upkeep_lock(conn, "reclaim", schema=schema):
                return 0
            orphans = await leases.reclaim(conn, schema=schema)
            dead = [orphan for orphan in orphans if orphan.status is JobStatus.DEAD]
            await raise_alerts(conn, self._app, [(orphan, LEASE_LOST) for orphan in dead])
            await end_dead(conn, self._app, dead, INTERRUPTED)
            gone = await workers.remove_silent(conn, schema=schema)
        for worker_id in gone:
            logger.warning("worker %s gives no sign of life and is taken off the registry", worker_id)
        if orphans:
            logger.warning("took over %d jobs of workers that disappeared", len(orphans))
            self._observe(Event(EventKind.RECLAIMED, jobs=tuple(orphan.id for orphan in orphans)))
        return len(orphans)

    async def prune(self) -> None:
        """Delete what ended long ago, unless another worker is at it."""
        await self._prune_jobs()
        await self._prune_operations()
        self._observe(Event(EventKind.PRUNED))

    async def _prune_jobs(self) -> None:
        """Walk once along all jobs that may be old enough."""
        cursor = retention.FIRST_ID
        while True:
            async with self._link.connection() as conn, conn.transaction(isolation="read_committed"):
                if not await try_upkeep_lock(conn, "prune", schema=self._app.schema):
                    return
                pruned = await retention.prune(conn, cursor, keep=self._keep, schema=self._app.schema)
                if pruned.cursor == retention.FIRST_ID:
                    await retention.prune_stats(conn, schema=self._app.schema)
            cursor = pruned.cursor
            if cursor == retention.FIRST_ID:
                return
            await asyncio.sleep(PRUNE_PAUSE)

    async def _prune_operations(self) -> None:
        while True:
            async with self._link.connection() as conn, operations.system(conn):
                if not await try_upkeep_lock(conn, "prune", schema=self._app.schema):
                    return
                pruned = await operations.prune(conn, schema=self._app.schema)
            if pruned < operations.ROWS_PER_STATEMENT:
                return
            await asyncio.sleep(PRUNE_PAUSE)

    async def expire(self) -> None:
        """End the operations that nobody works on any more."""
        after = settings().expiry_after
        while True:
            async with self._link.connection() as conn, operations.system(conn):
                if not await try_upkeep_lock(conn, "expire", schema=self._app.schema):
                    return
                expired = await operations.expire(conn, after=after, schema=self._app.schema)
            if expired:
                logger.warning("%d operations were without news for %s and ended as interrupted", len(expired), after)
            self._observe(Event(EventKind.EXPIRED, jobs=tuple(expired)))
            if len(expired) < operations.ROWS_PER_STATEMENT:
                return
            await asyncio.sleep(PRUNE_PAUSE)
