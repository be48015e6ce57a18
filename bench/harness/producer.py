"""Enqueues jobs at a pace."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel

from bench.harness.environment import Environment
from bench.harness.metrics import Meter
from recado import Recado
from recado.queue.connections import TRANSIENT, Link, connector
from recado.queue.counts import counts

logger = logging.getLogger("bench.harness")

JOB_TYPE = "bench.work"

MAX_CREDIT = 1.0
"""Seconds of the rate that may be made up for. What could not be enqueued while the server was away is not asked for
afterwards, as its clients would have been refused; it then shows as missing in the rate."""

CONTROL_INTERVAL = 0.1
"""Seconds between two looks at the control file."""

DEPTH_INTERVAL = 1.0
"""Seconds between two looks at how many jobs wait; in between this process knows what it has added and taken."""

RETRY_INTERVAL = 0.1
"""Seconds before a batch that the server refused is tried again."""


class Payload(BaseModel):
    """What each job carries."""

    at: float
    """When it was enqueued, by the wall clock: of all processes of a machine."""
    filler: str


Due: TypeAlias = Callable[[], int]
"""How many jobs are to be enqueued now."""


class Pace:
    """Jobs at a rate: credits the time that has really passed, not one period a call."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._credit = 0.0
        self._credited_at = time.monotonic()

    def due(self) -> int:
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._credited_at) * self.rate, MAX_CREDIT * self.rate)
        self._credited_at = now
        return int(self._credit)

    def spend(self, jobs: int) -> None:
        self._credit -= jobs

    async def follow(self, control_file: Path) -> None:
        """Take the rate from a file, for good."""
        while True:
            # Not there yet, or half written: the next look is soon.
            with suppress(OSError, ValueError):
                rate = float(await asyncio.to_thread(control_file.read_text))
                if 0 <= rate < math.inf:
                    self.rate = rate
            await asyncio.sleep(CONTROL_INTERVAL)


class Demand:
    """Jobs that somebody asks for."""

    def __init__(self) -> None:
        self._asked = 0

    def ask(self, jobs: int) -> None:
        self._asked += jobs

    def due(self) -> int:
        return self._asked

    def spend(self, jobs: int) -> None:
        self._asked -= jobs


class Depth:
    """Jobs to keep so many in the queue."""

    def __init__(self, target: int, meter: Meter) -> None:
        self._target = target
        self._meter = meter
        self._counted = 0
        self._balance = 0
        """What this process had enqueued more than completed when they were counted."""

    def due(self) -> int:
        return max(0, self._target - self._counted - (self._meter.enqueued - self._meter.completed - self._balance))

    def spend(self, jobs: int) -> None:
        """The meter knows."""

    async def count(self, depth: Callable[[], Awaitable[int | None]]) -> None:
        """Count what waits, for good: other processes enqueue and complete, too."""
        while True:
            balance = self._meter.enqueued - self._meter.completed
            if (counted := await depth()) is not None:
                self._counted, self._balance = counted, balance
            await asyncio.sleep(DEPTH_INTERVAL)


async def produce(app: Recado, environment: Environment, source: Pace | Demand | Depth, meter: Meter) -> None:
    """Enqueue what is due until cancelled, whatever happens to the server."""
    size = environment.payload_bytes - len(Payload(at=time.time(), filler="").model_dump_json())
    filler = "x" * size
    link = Link(connector(environment.dsn), "producer")
    try:
        while True:
            jobs = min(source.due(), environment.batch)
            if jobs:
                try:
                    async with link.connection() as conn:
                        now = time.time()
                        await app.enqueue_many(
                            conn, [app.new(JOB_TYPE, Payload(at=now, filler=filler)) for _ in range(jobs)]
                        )
                except TRANSIENT as error:
                    logger.warning("cannot enqueue: %s; trying again", type(error).__name__)
                    await asyncio.sleep(RETRY_INTERVAL)
                    continue
                source.spend(jobs)
                meter.enqueued += jobs
            if jobs < environment.batch:
                await asyncio.sleep(environment.batch_interval)
    finally:
        await link.close()


class Gauge:
    """Counts what is in the queue, on a connection of its own."""

    def __init__(self, app: Recado, dsn: str) -> None:
        self._app = app
        self._link = Link(connector(dsn), "gauge")

    async def depth(self) -> int | None:
        """Jobs that are pending; ``None`` when the server does not say."""
        try:
            async with self._link.connection() as conn:
                return (await counts(conn, schema=self._app.schema)).pending
        except TRANSIENT:
            return None

    async def close(self) -> None:
        await self._link.close()
