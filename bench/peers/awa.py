"""Awa, a runtime in Rust with handlers in Python: queue storage and batches of 512, its defaults, 20 connections, and
bulk enqueue by COPY. With a second claimer it was slower in a trial (1,970 jobs/s against 2,390).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import asyncpg
import awa

from bench.peers import Handle, Producer

CONCURRENCY = 100
MAX_CONNECTIONS = 20


@dataclass
class Bench:
    n: int


async def setup(dsn: str) -> None:
    client = awa.AsyncClient(dsn)
    await client.migrate()
    await client.close()
    # What its documentation asks for on a new database, before any worker starts.
    conn = await asyncpg.connect(dsn)
    await conn.execute("SELECT awa.storage_auto_finalize_if_fresh('awa')")
    await conn.close()


@asynccontextmanager
async def producer(dsn: str) -> AsyncIterator[Producer]:
    client = awa.AsyncClient(dsn)

    async def one(n: int) -> None:
        await client.insert(Bench(n), queue="bench")

    async def many(numbers: Sequence[int]) -> None:
        await client.enqueue_many_copy([Bench(n) for n in numbers], queue="bench")

    yield Producer(one, many)
    await client.close()


async def work(dsn: str, handle: Handle, concurrency: int | None) -> None:
    client = awa.AsyncClient(dsn, max_connections=MAX_CONNECTIONS)

    @client.task(Bench, queue="bench")
    async def bench(job: awa.Job) -> None:
        handle(job.args.n)

    await client.start([{"name": "bench", "max_workers": concurrency or CONCURRENCY}])
    await asyncio.Event().wait()
