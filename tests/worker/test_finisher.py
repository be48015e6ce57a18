"""Writing down how attempts ended, when the database is in the way."""

from __future__ import annotations

import asyncio
from uuid import uuid4

from recado import Recado
from recado.queue import claims
from recado.queue.connections import Connector, Link
from recado.worker import EventKind
from recado.worker.finisher import Finisher
from tests.worker.support import Connect, Observed, waiting_for_a_lock

TERMINATE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'recado finisher'
"""


async def test_what_ends_while_a_batch_has_to_be_written_again_is_written_after_it(
    dsn: str, schema: str, connect: Connect
) -> None:
    """And not only when something else ends, which on a worker that has nothing to do may be never."""
    conn, other = await connect(), await connect()
    app, worker_id, observed = Recado(), uuid4(), Observed()
    app.declare("mail.send")
    for _ in range(2):
        await app.enqueue(conn, "mail.send", {})
    first, second = await claims.claim(conn, worker_id, "default", 2, claims.NO_FLOORS, schema=schema)
    link = Link(Connector((dsn,), {}), "finisher")
    finisher = Finisher(app, link, worker_id, observed)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(finisher.run())
        async with conn.transaction():
            await conn.execute(f"SELECT FROM {schema}.jobs WHERE id = $1 FOR UPDATE", first.id)
            finisher.complete(first, None, 0.0)
            await waiting_for_a_lock(other, "recado finisher")
            finisher.complete(second, None, 0.0)
            await other.execute(TERMINATE)
        await observed.seen(EventKind.COMPLETED, first.id)
        await observed.seen(EventKind.COMPLETED, second.id)
        finisher.close()
        await running
    await link.close()
