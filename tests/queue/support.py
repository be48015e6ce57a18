"""What the queue's tests share: rows to work on, signals to wait for, statements to count."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncpg

from recado.queue.grants import Role, grants
from recado.queue.ids import new_id
from recado.queue.workers import WorkerInfo, beat

Connect: TypeAlias = Callable[[], Awaitable[asyncpg.Connection]]

PATIENCE = 20.0
"""Seconds until a signal that should have come is taken for missing; nothing waits for it where all is well."""

SENTINEL = "sentinel"

WORKER = UUID("00000000-0000-4000-8000-000000000001")
"""Holds the jobs that :func:`insert` puts in as running."""


async def insert(conn: asyncpg.Connection, schema: str, status: str = "pending", **columns: Any) -> UUID:
    """Insert a job by plain SQL, as an operator would; what is not named has the value that goes with its status."""
    job_id: UUID = columns.pop("id", None) or new_id()
    values = {"job_type": "mail.send", "payload": "{}", "status": status, **_columns_of(status), **columns}
    names = ", ".join(values)
    places = ", ".join(f"${n}" for n in range(2, len(values) + 2))
    await conn.execute(f"INSERT INTO {schema}.jobs (id, {names}) VALUES ($1, {places})", job_id, *values.values())
    if status in ("completed", "dead", "cancelled"):
        await conn.execute(f"UPDATE {schema}.jobs SET finished_at = coalesce(finished_at, now()) WHERE id = $1", job_id)
    return job_id


def _columns_of(status: str) -> dict[str, Any]:
    match status:
        case "running":
            return {"fence": 1, "locked_by": WORKER}
        case "completed":
            return {"fence": 1}
        case "dead":
            return {"fence": 5, "attempts": 5, "last_error": "ValueError: it went wrong"}
        case _:
            return {}


async def row(conn: asyncpg.Connection, schema: str, job_id: UUID) -> dict[str, Any]:
    """The whole row, with the transaction that wrote it: equal only if nothing has touched it."""
    record = await conn.fetchrow(f"SELECT j.*, xmin::text, ctid::text FROM {schema}.jobs j WHERE id = $1", job_id)
    assert record is not None
    return dict(record.items())


async def count(conn: asyncpg.Connection, schema: str, where: str = "true") -> int:
    """How many jobs there are."""
    number: int = await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs WHERE {where}")
    return number


async def hungry(conn: asyncpg.Connection, *queues: str) -> None:
    """Register a worker that waits for jobs in ``queues``."""
    await beat(conn, WorkerInfo(uuid4(), "host", 1, "0", queues, 1, 300.0, set(queues)), 0)


async def blocked(observer: asyncpg.Connection, waiting: asyncpg.Connection) -> None:
    """Wait until ``waiting`` waits for a lock of another transaction; only this view knows."""
    async with asyncio.timeout(PATIENCE):
        while not await observer.fetchval("SELECT cardinality(pg_blocking_pids($1)) > 0", waiting.get_server_pid()):
            pass


@asynccontextmanager
async def ordinary_role(owner: asyncpg.Connection, dsn: str, schema: str, *purposes: Role) -> AsyncIterator[str]:
    """The URL of ``dsn`` for a role that owns nothing and is no superuser, but has what ``recado grants`` gives it for
    ``purposes``; for all of them unless some are named."""
    name = f"recado_test_{uuid4().hex}"  # roles belong to the whole server
    password = uuid4().hex
    await owner.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{password}' NOSUPERUSER NOBYPASSRLS")
    try:
        await owner.execute(grants(name, purposes or Role, schema=schema))
        host = urlsplit(dsn).netloc.rpartition("@")[2]
        yield urlsplit(dsn)._replace(netloc=f"{name}:{password}@{host}").geturl()
    finally:
        await owner.execute(f"DROP OWNED BY {name}; DROP ROLE {name}")


NOT_OURS = re.compile(r"BEGIN|COMMIT|ROLLBACK|SAVEPOINT|RELEASE|.*('jit'|typeinfo_tree)", re.DOTALL)
"""Transactions, and how asyncpg asks for types that it meets for the first time."""


@asynccontextmanager
async def statements(conn: asyncpg.Connection) -> AsyncIterator[list[str]]:
    """The statements that were sent on ``conn`` within the block; complete when it has ended."""
    sent: list[str] = []

    def note(query: Any) -> None:
        if not NOT_OURS.match(query.query):
            sent.append(query.query)

    with conn.query_logger(note):
        yield sent
        await asyncio.sleep(0)  # loggers are called soon, not at once


class Ear:
    """Listens on a channel."""

    def __init__(self, listener: asyncpg.Connection, channel: str) -> None:
        self._listener = listener
        self._channel = channel
        self._heard: asyncio.Queue[str] = asyncio.Queue()

    @classmethod
    async def on(cls, listener: asyncpg.Connection, channel: str) -> Ear:
        ear = cls(listener, channel)
        await listener.add_listener(channel, ear._hear)
        return ear

    def _hear(self, *event: Any) -> None:
        self._heard.put_nowait(event[-1])

    async def heard(self, speaker: asyncpg.Connection) -> list[str]:
        """What came since the last call. Notifications keep the order of their commits, so what has not come before
        the sentinel of this call does not come any more."""
        await speaker.execute("SELECT pg_notify($1, $2)", self._channel, SENTINEL)
        heard: list[str] = []
        async with asyncio.timeout(PATIENCE):
            while (payload := await self._heard.get()) != SENTINEL:
                heard.append(payload)
        return heard
