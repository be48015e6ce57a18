"""What the worker's tests share: an observer to wait on, and a worker that is stopped at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg

from recado import Recado, Worker
from recado.queue import get_job
from recado.queue.connections import Pool
from recado.queue.models import Job
from recado.worker import Event, EventKind

Connect: TypeAlias = Callable[[], Awaitable[asyncpg.Connection]]

PATIENCE = 20.0
"""Seconds until a signal that should have come is taken for missing; nothing waits for it where all is well."""

NEVER = 3600.0
"""Seconds; an interval that must play no part in a test."""


class Observed:
    """Records a worker's events, and lets a test wait for them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = asyncio.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self._changed.set()

    def count(self, kind: EventKind) -> int:
        return sum(event.kind is kind for event in self.events)

    def jobs(self, kind: EventKind) -> list[UUID]:
        return [job for event in self.events if event.kind is kind for job in event.jobs]

    def clear(self) -> None:
        self.events.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def seen(self, kind: EventKind, job: UUID | None = None, *, times: int = 1) -> None:
        """Wait until ``kind`` was seen ``times`` times (of ``job``)."""
        if job is None:
            await self.until(lambda: self.count(kind) >= times)
        else:
            await self.until(lambda: self.jobs(kind).count(job) >= times)

    async def idle(self) -> None:
        """Wait until the worker has looked in vain since its last claim."""

        def looked() -> bool:
            kinds = (event.kind for event in reversed(self.events))
            last = next((kind for kind in kinds if kind in (EventKind.CLAIMED, EventKind.LOOKED)), None)
            return last is EventKind.LOOKED

        await self.until(looked)

    async def asleep(self, queue: str = "default") -> None:
        """Wait until the worker has looked at ``queue`` once more and found nothing."""
        before = len([e for e in self.events if e.kind is EventKind.LOOKED and e.queue == queue])
        await self.until(
            lambda: len([e for e in self.events if e.kind is EventKind.LOOKED and e.queue == queue]) > before
        )


@asynccontextmanager
async def working(app: Recado, database: Pool | str, **options: Any) -> AsyncIterator[tuple[Worker, Observed]]:
    """A worker whose polls and sweeps come never, unless a test says otherwise: what happens was woken."""
    observed = Observed()
    worker = Worker(app, database, observe=observed, **{"reclaim_interval": NEVER, "grace": 5.0} | options)
    if "poll_interval" not in options:
        worker._poll_interval = NEVER  # longer than it may be: no poll can be mistaken for what is tested
    async with worker:
        await observed.seen(EventKind.LISTENING)
        await observed.seen(EventKind.SWEPT)  # the one at the start; what the test does comes after it
        yield worker, observed


async def job_of(conn: asyncpg.Connection[asyncpg.Record], job_id: UUID) -> Job:
    return await get_job(conn, job_id)


@asynccontextmanager
async def logged(text: str) -> AsyncIterator[None]:
    """Enters a block that ends once the worker has logged ``text``."""
    seen = asyncio.Event()
    loop = asyncio.get_running_loop()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if text in record.getMessage():
                loop.call_soon_threadsafe(seen.set)

    handler = Handler()
    logging.getLogger("recado").addHandler(handler)
    try:
        yield
        async with asyncio.timeout(PATIENCE):
            await seen.wait()
    finally:
        logging.getLogger("recado").removeHandler(handler)


async def waiting_for_a_lock(conn: asyncpg.Connection, application: str) -> None:
    """Wait until a backend of ``application`` waits for a lock. The server has no signal for that but this view."""
    async with asyncio.timeout(PATIENCE):
        while not await conn.fetchval(  # noqa: ASYNC110
            "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock' "
            "AND datname = current_database())",
            application,
        ):
            await asyncio.sleep(0.01)
