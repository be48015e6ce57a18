"""Pools for the API to use, operations to look at, clients to ask for them, and servers that do not answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import parse_qsl, urlsplit
from uuid import UUID

import asyncpg
import httpx
import pytest
import pytest_asyncio
from starlette.types import ASGIApp

from recado.app import Recado
from recado.queue import operations
from recado.queue.connections import Connection, Pool
from recado.queue.models import NewJob
from recado.settings import Token
from tests.queue.support import ordinary_role

POOL_SIZE = 2

Ask = Callable[..., httpx.AsyncClient]


@pytest_asyncio.fixture
async def pool(dsn: str) -> AsyncIterator[Pool]:
    """A pool that connects when it is first used."""
    async with asyncpg.create_pool(dsn, min_size=0, max_size=POOL_SIZE) as pool:
        yield pool


@pytest_asyncio.fixture
async def tenant_pool(conn: asyncpg.Connection, dsn: str, schema: str) -> AsyncIterator[Pool]:
    """The pool of a role that row-level security binds; its connections pass from tenant to tenant."""
    async with (
        ordinary_role(conn, dsn, schema) as url,
        asyncpg.create_pool(url, min_size=0, max_size=POOL_SIZE) as pool,
    ):
        yield pool


@pytest.fixture
def recado_app() -> Recado:
    return Recado("shop")


def client(api: ASGIApp, *, address: str = "127.0.0.1", base_url: str = "http://localhost") -> httpx.AsyncClient:
    """A client of ``api`` whose requests come from ``address``, and whose Host is that of ``base_url``."""
    transport = httpx.ASGITransport(api, raise_app_exceptions=False, client=(address, 50000))
    return httpx.AsyncClient(transport=transport, base_url=base_url)


def bearer(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def token(secret: str, *scopes: str, name: str = "ops", organization: str | None = None) -> Token:
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return Token(name=name, sha256=digest, scopes=frozenset(scopes), organization=organization)


async def insert(conn: Connection, schema: str, status: str = "pending", job_type: str = "mail.send") -> None:
    await conn.execute(
        f"INSERT INTO {schema}.jobs (id, job_type, payload, status) VALUES (gen_random_uuid(), $1, '{{}}', $2)",
        job_type,
        status,
    )


async def start(conn: Connection, organization_id: str, kind: str = "import") -> UUID:
    """An operation that is pending."""
    return await operations.start(conn, NewJob(f"operation.{kind}", "{}"), organization_id=organization_id)


async def begin(conn: Connection, job_id: UUID) -> None:
    """A worker begins it."""
    async with operations.system(conn):
        await operations.mark_processing(conn, job_id, 1)


async def progress(conn: Connection, job_id: UUID, percent: int) -> None:
    async with operations.system(conn):
        await operations.set_progress(conn, job_id, 1, percent)


async def finish(conn: Connection, job_id: UUID, result: str = "null") -> None:
    async with operations.system(conn):
        assert await operations.mark_done(conn, [(job_id, 1, result)]) == {job_id}


async def assert_whole(pool: Pool) -> None:
    """Every connection of the pool can be had, and works."""
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        holders = asyncio.Barrier(pool.get_max_size())

        async def hold() -> None:
            async with pool.acquire() as conn:
                await holders.wait()
                assert await conn.fetchval("SELECT 1") == 1

        for _ in range(pool.get_max_size()):
            group.create_task(hold())


class Relay:
    """A TCP port that leads to the database until ``flowing`` is cleared: then it takes all and gives nothing."""

    def __init__(self, dsn: str, group: asyncio.TaskGroup) -> None:
        self._dsn = dsn
        self._group = group
        self.flowing = asyncio.Event()
        self.flowing.set()
        self.accepted = asyncio.Event()
        self.port = 0

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted.set()
        self._group.create_task(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await _open(self._dsn)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pump(reader, to_server))
            group.create_task(self._pump(from_server, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self.flowing.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # one side has hung up, which ends the other, too
        finally:
            writer.close()


async def _open(dsn: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(dsn)
    query = dict(parse_qsl(url.query))
    host, port = query.get("host") or url.hostname, int(query.get("port") or url.port or 5432)
    if host is not None and host.startswith("/"):
        return await asyncio.open_unix_connection(f"{host}/.s.PGSQL.{port}")
    return await asyncio.open_connection(host, port)


@asynccontextmanager
async def relay(dsn: str) -> AsyncIterator[Relay]:
    """A relay to ``dsn``; when the block ends it lets everything through, and waits for its clients to leave."""
    async with asyncio.TaskGroup() as group:
        relay = Relay(dsn, group)
        server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
        relay.port = server.sockets[0].getsockname()[1]
        try:
            yield relay
        finally:
            server.close()
            relay.flowing.set()
