"""PgBouncer in transaction mode between a database and all its clients, with few servers, and killed now and then."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from pathlib import Path

import asyncpg

from recado.queue.connections import TRANSIENT, Pool
from tests.chaos.mixture import SHARES
from tests.chaos.pooler import PGBOUNCER, pgbouncer
from tests.chaos.stage import HASTY, LOOK_INTERVAL, Impossible, Outcome, Stage, stage

CLIENTS = 10
"""Enqueuers at the same time, far more than there are servers."""

SERVERS = 4
"""Of the pooler's: less than one worker has connections."""

OPTIONS = (*HASTY, "--timeout", "10")
"""A handler whose connection went with the pooler has nothing else to end it."""


@dataclass(frozen=True)
class Size:
    jobs: int
    kills: int


SHORT = Size(jobs=300, kills=1)
FULL = Size(jobs=20_000, kills=20)


async def share_servers(dsn: str, schema: str, folder: Path, size: Size) -> Outcome:
    """Let jobs come in and be run through the pooler; one of the workers listens at the server itself, one polls.

    Raises:
        Impossible: there is no PgBouncer.
    """
    if PGBOUNCER is None:
        raise Impossible("cannot pool connections: there is no PgBouncer; install it")
    async with pgbouncer(dsn, size=SERVERS) as pooler:
        url = pooler.url(dsn)
        async with stage(dsn, schema, folder, options=OPTIONS, worker_dsn=url) as stand:
            await stand.start_workers(1)
            await stand.start_workers(1, RECADO_LISTEN_DSN=dsn)
            async with (
                asyncpg.create_pool(url, min_size=0, max_size=CLIENTS, statement_cache_size=0) as pool,
                asyncio.TaskGroup() as group,
            ):
                numbers = itertools.count()
                for _ in range(CLIENTS):
                    group.create_task(_enqueue(stand, pool, numbers, size.jobs))
                for n in range(1, size.kills + 1):
                    await stand.until(f"count(*) >= $1 FROM {schema}.jobs", n * size.jobs // (size.kills + 1))
                    await pooler.kill()
                    await pooler.start()
                    await stand.healed()
                stand.calm.set()
            return await stand.close(connections_broke=True)


async def _enqueue(stand: Stage, pool: Pool, numbers: itertools.count[int], count: int) -> None:
    """Enqueue one job after the other, until there are ``count`` of all clients' and no fault will come any more."""
    for n in numbers:
        if n >= count and stand.calm.is_set():
            return
        await stand.until(f"count(*) < 300 FROM {stand.schema}.jobs WHERE status = 'pending' AND run_at <= now()")
        job = stand.service.new(SHARES[n % len(SHARES)], {"n": n}, idempotency_key=f"{n}")
        while True:
            ids = []
            try:
                async with pool.acquire() as conn, conn.transaction():
                    ids = await stand.service.enqueue_many(conn, [job])
            except TRANSIENT:
                stand.ledger.in_doubt.update(ids)
                await asyncio.sleep(LOOK_INTERVAL)
            else:
                stand.ledger.acknowledged[ids[0]] = job.job_type
                break
