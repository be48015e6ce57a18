"""The application that is measured, and the rows its table is filled with."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import TypeAlias
from uuid import UUID

import asyncpg
from pydantic import BaseModel

from recado.app import Recado
from recado.queue.claims import PRIORITIES
from recado.queue.ids import new_id
from recado.queue.models import DEFAULT_PRIORITY, DEFAULT_QUEUE, ClaimedJob

NOOP = "bench.noop"
TRANSACTIONAL = "bench.transactional"
FAILS_ONCE = "bench.fails_once"

QUEUES = (DEFAULT_QUEUE, "second")
"""Those of the scenario that has more than one."""

FAILING = 20
"""One job of so many fails at its first attempt."""

SCHEDULED = 10
"""One job of so many is for another day."""

Row: TypeAlias = tuple[UUID, str, str, int, str]

COLUMNS = ("id", "job_type", "queue", "priority", "payload")
"""Of a :data:`Row`; the others have their defaults, ``run_at`` the server's now."""


class Payload(BaseModel):
    """What every job carries; the filler brings it to the size that was asked for."""

    n: int
    filler: str = ""


def payload(n: int, size: int) -> Payload:
    """The payload of job ``n``, of ``size`` bytes as JSON, or a few more where these do not hold the number."""
    return Payload(n=n, filler="x" * (size - len(f'{{"n":{n},"filler":""}}')))


def payload_json(n: int, size: int) -> str:
    """The same as the table has it."""
    return payload(n, size).model_dump_json()


def rows(numbers: Iterable[int], job_type: str, size: int) -> Iterator[Row]:
    """Jobs of one type in one queue."""
    for n in numbers:
        yield new_id(), job_type, DEFAULT_QUEUE, DEFAULT_PRIORITY, payload_json(n, size)


def mixed_rows(numbers: Iterable[int], size: int) -> Iterator[Row]:
    """Jobs of all priorities in two queues; some fail once."""
    for n in numbers:
        job_type = FAILS_ONCE if n % FAILING == 0 else NOOP
        queue = QUEUES[n // FAILING % len(QUEUES)]
        priority = PRIORITIES[n // FAILING // len(QUEUES) % len(PRIORITIES)]
        yield new_id(), job_type, queue, priority, payload_json(n, size)


def make_app(schema: str, work_ms: float = 0.0, begun: dict[int, float] | None = None) -> Recado:
    """The application.

    Args:
        work_ms: milliseconds for which each handler sleeps.
        begun: where handlers note when they begin, by the number of the job; ``None`` if nobody asks.
    """
    app = Recado("bench", schema=schema)

    @app.job(NOOP)
    async def noop(payload: Payload) -> None:
        if begun is not None:
            begun[payload.n] = time.monotonic()
        if work_ms:
            await asyncio.sleep(work_ms / 1000)

    @app.job(TRANSACTIONAL)
    async def transactional(payload: Payload, conn: asyncpg.Connection) -> None:
        if work_ms:
            await asyncio.sleep(work_ms / 1000)

    @app.job(FAILS_ONCE, backoff=(0.0,))
    async def fails_once(payload: Payload, job: ClaimedJob) -> None:
        if job.attempts == 0:
            raise RuntimeError("the first attempt fails")
        if work_ms:
            await asyncio.sleep(work_ms / 1000)

    return app
