"""Chancy, with the executor for coroutines instead of the pool of processes, polling again as soon as a job has ended,
and with finished jobs written back every 50 ms instead of every second.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from chancy import Chancy, Job, Queue, Worker

from bench.peers import Handle, Producer

CONCURRENCY = 100
"""Of the queue, in the database."""

WRITE_INTERVAL = 0.05
"""Seconds between two times of writing back what has finished."""

handlers: list[Handle] = []
"""The one of this process, for Chancy finds a job's function by its name."""


async def bench(*, n: int) -> None:
    handlers[0](n)


def make_app(dsn: str) -> Chancy:
    # Its own logger tells of each job.
    return Chancy(dsn, log=logging.getLogger("chancy"))


async def setup(dsn: str) -> None:
    executor = Chancy.Executor.Async
    async with make_app(dsn) as chancy:
        await chancy.migrate()
        await chancy.declare(
            Queue("bench", concurrency=CONCURRENCY, executor=executor, polling_interval=1, eager_polling=True)
        )


@asynccontextmanager
async def producer(dsn: str) -> AsyncIterator[Producer]:
    async with make_app(dsn) as chancy:

        async def one(n: int) -> None:
            await chancy.push(new(n))

        async def many(numbers: Sequence[int]) -> None:
            # It inserts while one goes through what it gives back.
            async for _ in chancy.push_many([new(n) for n in numbers]):
                pass

        yield Producer(one, many)


def new(n: int) -> Job:
    return Job.from_func(bench).with_queue("bench").with_kwargs(n=n)


async def work(dsn: str, handle: Handle, concurrency: int | None) -> None:
    handlers.append(handle)
    async with make_app(dsn) as chancy:
        worker = Worker(chancy, register_signal_handlers=False)
        worker.send_outgoing_interval = WRITE_INTERVAL
        async with worker:
            await asyncio.Event().wait()
