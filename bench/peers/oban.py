"""Oban for Python, with a pool of 20. It claims as many jobs as there are free slots; there is no batch apart from
that. Whether more than a hundred slots would gain anything, trials did not settle.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from oban import Job, Oban, worker
from oban.schema import install

from bench.peers import Handle, Producer

CONCURRENCY = 100
POOL_SIZE = 20

handlers: list[Handle] = []
"""The one of this process, for Oban finds a job's class by its name."""


@worker(queue="default")
class Bench:
    async def process(self, job: Job) -> None:
        handlers[0](job.args["n"])


async def setup(dsn: str) -> None:
    pool = await Oban.create_pool(dsn)
    await install(pool)
    await pool.close()


@asynccontextmanager
async def producer(dsn: str) -> AsyncIterator[Producer]:
    pool = await Oban.create_pool(dsn, min_size=1, max_size=POOL_SIZE)
    oban = Oban(pool=pool)

    async def one(n: int) -> None:
        await oban.enqueue(Bench.new({"n": n}))

    async def many(numbers: Sequence[int]) -> None:
        await oban.enqueue_many([Bench.new({"n": n}) for n in numbers])

    yield Producer(one, many)
    await pool.close()


async def work(dsn: str, handle: Handle, concurrency: int | None) -> None:
    handlers.append(handle)
    pool = await Oban.create_pool(dsn, min_size=2, max_size=POOL_SIZE)
    async with Oban(pool=pool, queues={"default": {"limit": concurrency or CONCURRENCY}}):
        await asyncio.Event().wait()
