"""PgQueuer, after its performance guide: asyncpg, durable tables with its own autovacuum settings.

Without a limit, batches of 1,000 were the fastest in trials (8,400 jobs/s; 6,500 with 500, 7,600 with 2,000), and
several queue managers in one process gained nothing. A limit has to be two batches, which leaves 50 for a hundred at
once.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.models import Job
from pgqueuer.queries import Queries

from bench.peers import Handle, Producer

BEST_BATCH = 1_000


async def setup(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    queries = Queries(AsyncpgDriver(conn))
    await queries.install()
    await queries.optimize_autovacuum()
    await conn.close()


@asynccontextmanager
async def producer(dsn: str) -> AsyncIterator[Producer]:
    conn = await asyncpg.connect(dsn)
    queries = Queries(AsyncpgDriver(conn))

    async def one(n: int) -> None:
        await queries.enqueue("bench", payload(n))

    async def many(numbers: Sequence[int]) -> None:
        count = len(numbers)
        await queries.enqueue(["bench"] * count, [payload(n) for n in numbers], [0] * count)

    yield Producer(one, many)
    await conn.close()


def payload(n: int) -> bytes:
    return json.dumps({"n": n}).encode()


async def work(dsn: str, handle: Handle, concurrency: int | None) -> None:
    pgqueuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(dsn)))

    @pgqueuer.entrypoint("bench")
    async def bench(job: Job) -> None:
        handle(json.loads(job.payload or b"")["n"])

    batch = BEST_BATCH if concurrency is None else concurrency // 2
    await pgqueuer.run(batch_size=batch, max_concurrent_tasks=concurrency)
