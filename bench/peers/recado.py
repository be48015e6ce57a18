"""recado, with its default settings."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import asyncpg
from pydantic import BaseModel

from bench.peers import Handle, Producer
from recado import Recado, Worker
from recado.queue import migrate
from recado.worker.worker import DEFAULT_SLOTS


class Payload(BaseModel):
    n: int


def make_app(handle: Handle) -> Recado:
    app = Recado("bench")

    @app.job("bench.job")
    async def job(payload: Payload) -> None:
        handle(payload.n)

    return app


async def setup(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    await migrate.up(conn)
    await conn.close()


@asynccontextmanager
async def producer(dsn: str) -> AsyncIterator[Producer]:
    app = make_app(lambda n: None)
    conn = await asyncpg.connect(dsn)

    async def one(n: int) -> None:
        await app.enqueue(conn, "bench.job", Payload(n=n))

    async def many(numbers: Sequence[int]) -> None:
        await app.enqueue_many(conn, [app.new("bench.job", Payload(n=n)) for n in numbers])

    yield Producer(one, many)
    await conn.close()


async def work(dsn: str, handle: Handle, concurrency: int | None) -> None:
    await Worker(make_app(handle), dsn, queues={"default": concurrency or DEFAULT_SLOTS}).run()
