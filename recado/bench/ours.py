"""The processes that use recado as an application does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from recado.bench.jobs import NOOP, Payload, make_app, payload
from recado.bench.messages import Task
from recado.bench.meter import Meter
from recado.bench.options import SCHEMA
from recado.bench.roles import FEED_CALL, PACE, Work, connections, side_by_side
from recado.queue.connections import Connection
from recado.worker import Event, EventKind, Worker


@asynccontextmanager
async def worker(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """A worker with default settings."""
    async with _worker(task, meter, None):
        yield _nothing_more


@asynccontextmanager
async def noting_worker(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """The same, and its handlers note when they begin."""
    async with _worker(task, meter, meter.report.begun):
        yield _nothing_more


async def _nothing_more() -> None:
    """The worker works by itself."""


@asynccontextmanager
async def _worker(task: Task, meter: Meter, begun: dict[int, float] | None) -> AsyncIterator[None]:
    """A worker that is connected, listens, and has found nothing in any of its queues."""
    missing = {EventKind.LISTENING, *task.queues}
    idle = asyncio.Event()

    def observe(event: Event) -> None:
        match event.kind:
            case EventKind.COMPLETED:
                meter.count(len(event.jobs))
            case EventKind.CLAIMED:
                meter.count_claim(len(event.jobs))
            case EventKind.LISTENING:
                missing.discard(event.kind)
            case EventKind.LOOKED:
                missing.discard(event.queue or "")
        if not missing:
            idle.set()

    app = make_app(SCHEMA, task.options.work_ms, begun)
    queues = dict.fromkeys(task.queues, task.options.concurrency)
    async with Worker(app, task.dsn, queues=queues, observe=observe):
        await idle.wait()
        yield


@asynccontextmanager
async def enqueue(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Enqueues jobs one by one on many connections, each in a transaction of its own."""
    app = make_app(SCHEMA)
    async with connections(task, task.options.connections) as opened:
        payloads = iter(_payloads(task))

        async def on_one(conn: Connection) -> None:
            for payload in payloads:
                await app.enqueue(conn, NOOP, payload)
                meter.count(1)

        yield lambda: side_by_side(map(on_one, opened))


@asynccontextmanager
async def enqueue_many(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Enqueues all jobs in one transaction. They are made before, as the rows are that the bare COPY takes: making one,
    with its payload validated, written and read back, is Python alone and no business of the database's."""
    app = make_app(SCHEMA)
    jobs = [app.new(NOOP, payload) for payload in _payloads(task)]
    async with connections(task) as [conn]:

        async def work() -> None:
            async with conn.transaction():
                await app.enqueue_many(conn, jobs)
            meter.count(task.jobs)

        yield work


@asynccontextmanager
async def feed(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Enqueues jobs in one call after the other, while others work."""
    app = make_app(SCHEMA)
    payloads = _payloads(task)
    async with connections(task) as [conn]:

        async def work() -> None:
            for start in range(0, task.jobs, FEED_CALL):
                chunk = payloads[start : start + FEED_CALL]
                await app.enqueue_many(conn, [app.new(NOOP, payload) for payload in chunk])
                meter.count(len(chunk))

        yield work


@asynccontextmanager
async def pace(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Enqueues jobs one by one at a steady pace, and notes when each call began."""
    app = make_app(SCHEMA)
    payloads = _payloads(task)
    sent = meter.report.sent
    async with connections(task) as [conn]:

        async def work() -> None:
            began = time.monotonic()
            for n, payload in enumerate(payloads):
                await asyncio.sleep(began + n / PACE - time.monotonic())
                sent[n] = time.monotonic()
                await app.enqueue(conn, NOOP, payload)
                meter.count(1)

        yield work


def _payloads(task: Task) -> list[Payload]:
    """What the application wants done; recado's work begins with it."""
    return [payload(n, task.options.payload_bytes) for n in range(task.jobs)]
