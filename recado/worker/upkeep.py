"""What some worker has to do for all: take over orphans, delete what is old.

Each round is one transaction under an advisory lock that is only tried: of any number of workers one does it,
and there is no leader whose loss would stop it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta

import asyncpg

from recado.app import Recado
from recado.queue import leases, retention, workers
from recado.queue.connections import TRANSIENT, Link
from recado.queue.leases import LEASE_LOST
from recado.queue.locks import try_upkeep_lock
from recado.queue.models import JobStatus
from recado.worker.alerts import raise_alerts
from recado.worker.events import Event, EventKind, Observer

logger = logging.getLogger("recado.worker")

RECLAIM_INTERVAL = 15.0
"""Seconds between two sweeps for orphans: a quarter of the silence after which a worker is taken for dead."""

PRUNE_INTERVAL = 300.0
"""Seconds between two prunings: at 1,000 rows a statement a day's jobs are gone in a few of them."""

PRUNE_PAUSE = 0.1
"""Seconds between two statements of one pruning, so that it never takes a core for itself."""


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

    async def run(self) -> None:
        """Sweep until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat("take over orphans", self._reclaim, self._reclaim_interval))
            group.create_task(self._repeat("prune", self._prune, PRUNE_INTERVAL))

    async def _repeat(self, what: str, sweep: Callable[[], Awaitable[None]], interval: float) -> None:
        while True:
            try:
                await sweep()
            except (*TRANSIENT, asyncpg.PostgresError) as error:
                logger.warning("cannot %s: %s: %s; trying again in %g s", what, type(error).__name__, error, interval)
            await asyncio.sleep(interval)

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
            gone = await workers.remove_silent(conn, schema=schema)
        for worker_id in gone:
            logger.warning("worker %s gives no sign of life and is taken off the registry", worker_id)
        if orphans:
            logger.warning("took over %d jobs of workers that disappeared", len(orphans))
            self._observe(Event(EventKind.RECLAIMED, jobs=tuple(orphan.id for orphan in orphans)))
        return len(orphans)

    async def _prune(self) -> None:
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
