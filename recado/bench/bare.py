"""The same statements without recado around them: what the server and the driver allow at best.

Nothing here validates, runs handlers, renews leases or waits for anything but the server. Arguments are made
before the clock starts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

import asyncpg

from recado.bench.jobs import COLUMNS, FAILS_ONCE, NOOP, payload_json, rows
from recado.bench.messages import Task
from recado.bench.meter import Meter
from recado.bench.options import SCHEMA
from recado.bench.roles import FEED_CALL, PACE, Work, connections, side_by_side
from recado.queue.benchmark import BARE_INSERT
from recado.queue.claims import CLAIM, PRIORITIES, look
from recado.queue.connections import Connection
from recado.queue.enqueue import INSERT
from recado.queue.finishes import COMPLETE, COMPLETE_ONE, Failure, fail
from recado.queue.ids import new_id
from recado.queue.leases import DEFAULT_LEASE
from recado.queue.models import DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE
from recado.queue.statements import fill, wake_channel
from recado.queue.workers import WorkerInfo, beat
from recado.version import VERSION
from recado.worker.worker import MAX_HANDLER_CONNECTIONS

EMPTY_WAIT = 0.002
"""Seconds between two looks at empty queues: a round trip or two."""

Claimed: TypeAlias = list[asyncpg.Record]

ID, JOB_TYPE, PRIORITY, PAYLOAD, ATTEMPTS, FENCE, RUN_AT = 0, 1, 3, 4, 5, 8, 9
"""Where the claim's answer has what."""


# --- claim and complete ---


@asynccontextmanager
async def drain(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Claims on one connection and completes on another, both at once, in batches of the worker's size."""
    worker_id = new_id()
    async with connections(task, 2) as [claiming, finishing]:
        # One claim ahead: while a batch is being completed the next one is claimed, as the worker does.
        claimed: asyncio.Queue[Claimed] = asyncio.Queue(maxsize=1)
        yield lambda: side_by_side(
            [_claim(claiming, worker_id, task, claimed, meter), _complete(finishing, worker_id, claimed, meter)]
        )


async def _claim(conn: Connection, worker_id: UUID, task: Task, claimed: asyncio.Queue[Claimed], meter: Meter) -> None:
    """Claim batch after batch, each from where the last one ended."""
    statement = fill(CLAIM, SCHEMA)
    floors = _no_floors(task)
    while True:
        found = 0
        for queue in task.queues:
            jobs = await conn.fetch(statement, worker_id, queue, task.batch, *floors[queue])
            if jobs:
                found += len(jobs)
                meter.count_claim(len(jobs))
                _raise_floors(floors[queue], jobs)
                await claimed.put(jobs)
        if not found:
            floors = _no_floors(task)  # whatever is left lies below them
            await _until_due(conn, task.queues)


async def _until_due(conn: Connection, queues: tuple[str, ...]) -> None:
    """Look as an idle worker does, if more often; the bare statements hear no NOTIFY."""
    for queue in itertools.cycle(queues):
        due = await look(conn, queue, schema=SCHEMA)
        if due is not None and due <= 0:
            return
        await asyncio.sleep(EMPTY_WAIT)


def _no_floors(task: Task) -> dict[str, list[datetime | None]]:
    return {queue: [None] * len(PRIORITIES) for queue in task.queues}


def _raise_floors(floors: list[datetime | None], jobs: Claimed) -> None:
    for job in jobs:
        floor = floors[job[PRIORITY]]
        if floor is None or floor < job[RUN_AT]:
            floors[job[PRIORITY]] = job[RUN_AT]


async def _complete(conn: Connection, worker_id: UUID, claimed: asyncio.Queue[Claimed], meter: Meter) -> None:
    """Complete all that is claimed, as soon as the batch before is through."""
    statement = fill(COMPLETE, SCHEMA)
    while True:
        jobs = await claimed.get()
        while not claimed.empty():
            jobs += claimed.get_nowait()
        if failing := [job for job in jobs if _is_failing(job)]:
            await _fail(conn, worker_id, failing)
            jobs = [job for job in jobs if not _is_failing(job)]
        await conn.fetch(
            statement, worker_id, [job[ID] for job in jobs], [job[FENCE] for job in jobs], [None] * len(jobs)
        )
        meter.count(len(jobs))


def _is_failing(job: asyncpg.Record) -> bool:
    return bool(job[JOB_TYPE] == FAILS_ONCE and job[ATTEMPTS] == 0)


async def _fail(conn: Connection, worker_id: UUID, jobs: Claimed) -> None:
    failures = [
        Failure(
            id=job[ID],
            fence=job[FENCE],
            wait=0.0,
            discard=False,
            run_time=0.0,
            error_class="RuntimeError",
            message="the first attempt fails",
            traceback=None,
        )
        for job in jobs
    ]
    await fail(conn, worker_id, failures, schema=SCHEMA)


@asynccontextmanager
async def transactions(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Completes claimed jobs one by one, each in a transaction, on as many connections as a worker has for that."""
    worker_id = new_id()
    count = min(task.options.concurrency, MAX_HANDLER_CONNECTIONS)
    statement = fill(COMPLETE_ONE, SCHEMA)
    async with connections(task, count) as opened:
        claim = fill(CLAIM, SCHEMA)
        floors = [None] * len(PRIORITIES)
        jobs = iter(await opened[0].fetch(claim, worker_id, DEFAULT_QUEUE, task.jobs, *floors))

        async def on_one(conn: Connection) -> None:
            for job in jobs:
                async with conn.transaction(isolation="read_committed"):
                    await conn.fetchrow(statement, worker_id, job[ID], job[FENCE], None)
                meter.count(1)

        yield lambda: side_by_side(map(on_one, opened))


@asynccontextmanager
async def listen(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Listens on one connection; on another claims at each notification, and completes."""
    worker_id = new_id()
    begun = meter.report.begun
    woken = asyncio.Event()
    async with connections(task, 2) as [listening, claiming]:
        await listening.add_listener(wake_channel(SCHEMA), lambda *_: woken.set())
        await beat(claiming, _hungry(worker_id, task.queues), 0, schema=SCHEMA)
        claim, complete = fill(CLAIM, SCHEMA), fill(COMPLETE, SCHEMA)
        floors = [None] * len(PRIORITIES)

        async def work() -> None:
            while True:
                await woken.wait()
                woken.clear()
                # As many as a worker has slots: two notifications may well be heard as one.
                jobs = await claiming.fetch(claim, worker_id, DEFAULT_QUEUE, task.options.concurrency, *floors)
                now = time.monotonic()
                begun.update((json.loads(job[PAYLOAD])["n"], now) for job in jobs)
                if jobs:
                    ids, fences = [job[ID] for job in jobs], [job[FENCE] for job in jobs]
                    await claiming.fetch(complete, worker_id, ids, fences, [None] * len(jobs))
                    meter.count(len(jobs))

        yield work


def _hungry(worker_id: UUID, queues: tuple[str, ...]) -> WorkerInfo:
    return WorkerInfo(worker_id, "bench", os.getpid(), VERSION, queues, 1, DEFAULT_LEASE, set(queues))


# --- insert ---


@asynccontextmanager
async def insert(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Inserts rows one by one on many connections, without the gate of the NOTIFY."""
    statement = fill(BARE_INSERT, SCHEMA)
    async with connections(task, task.options.connections) as opened:
        jobs = iter(_insert_arguments(task))

        async def on_one(conn: Connection) -> None:
            for job in jobs:
                await conn.fetchrow(statement, *job)
                meter.count(1)

        yield lambda: side_by_side(map(on_one, opened))


@asynccontextmanager
async def copy(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Copies all rows in at once."""
    records = list(rows(range(task.jobs), NOOP, task.options.payload_bytes))
    async with connections(task) as [conn]:

        async def work() -> None:
            await conn.copy_records_to_table("jobs", schema_name=SCHEMA, records=records, columns=COLUMNS)
            meter.count(task.jobs)

        yield work


@asynccontextmanager
async def feed(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Copies rows in, one batch after the other."""
    records = list(rows(range(task.jobs), NOOP, task.options.payload_bytes))
    async with connections(task) as [conn]:

        async def work() -> None:
            for start in range(0, task.jobs, FEED_CALL):
                batch = records[start : start + FEED_CALL]
                await conn.copy_records_to_table("jobs", schema_name=SCHEMA, records=batch, columns=COLUMNS)
                meter.count(len(batch))

        yield work


@asynccontextmanager
async def pace(task: Task, meter: Meter) -> AsyncIterator[Work]:
    """Inserts rows one by one at a steady pace, with the NOTIFY, and notes when each statement began."""
    statement = fill(INSERT, SCHEMA)
    sent = meter.report.sent
    arguments = _insert_arguments(task)
    async with connections(task) as [conn]:

        async def work() -> None:
            began = time.monotonic()
            for n, job in enumerate(arguments):
                await asyncio.sleep(began + n / PACE - time.monotonic())
                sent[n] = time.monotonic()
                await conn.fetchrow(statement, *job)
                meter.count(1)

        yield work


def _insert_arguments(task: Task) -> list[tuple[Any, ...]]:
    """Of the INSERT, for each job."""
    size = task.options.payload_bytes
    return [
        (
            *(str(new_id()), NOOP, DEFAULT_QUEUE, DEFAULT_PRIORITY, payload_json(n, size)),
            *(DEFAULT_MAX_ATTEMPTS, None, None, "{}", False),
        )
        for n in range(task.jobs)
    ]
