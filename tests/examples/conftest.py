"""The example shop as it runs: web service and worker connect as ordinary roles, which row-level security holds for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx
import pytest
import pytest_asyncio

from examples.shop import roles, tables
from examples.shop.application import app
from examples.shop.web import create_service
from recado.queue.connections import Pool
from tests.queue.support import ordinary_role
from tests.worker.support import Observed, working

SECRET = "whsec_test"


@pytest.fixture(autouse=True)
def shop_schema(schema: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shop was imported before the suite chose its schema."""
    monkeypatch.setattr(app, "schema", schema)


@asynccontextmanager
async def role(owner: asyncpg.Connection, dsn: str, schema: str, rights: roles.Rights) -> AsyncIterator[str]:
    """The URL for a role of this test's own that has what one of the shop's has."""
    async with ordinary_role(owner, dsn, schema, *rights.queue) as url:
        name = url.partition("://")[2].partition(":")[0]
        await roles.grant(owner, name, rights)
        yield url


@pytest_asyncio.fixture
async def shop_tables(conn: asyncpg.Connection) -> None:
    await tables.create(conn)


@pytest_asyncio.fixture
async def web_pool(conn: asyncpg.Connection, dsn: str, schema: str, shop_tables: None) -> AsyncIterator[Pool]:
    """The web service's connections."""
    async with (
        role(conn, dsn, schema, roles.RIGHTS[roles.WEB]) as url,
        asyncpg.create_pool(url, min_size=0) as pool,
    ):
        yield pool


@pytest.fixture
def backup_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "backups"
    monkeypatch.setenv("SHOP_BACKUP_DIR", str(folder))
    return folder


@pytest_asyncio.fixture
async def planning_worker(
    conn: asyncpg.Connection,
    dsn: str,
    schema: str,
    shop_tables: None,
    backup_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Observed]:
    """A worker that performs the shop's operations."""
    async with role(conn, dsn, schema, roles.RIGHTS[roles.WORKER]) as url:
        monkeypatch.setenv("RECADO_DSN", url)
        async with working(app, url, queues={"default": 5}) as (_, observed):
            yield observed


@asynccontextmanager
async def logged_in(pool: Pool, user: str) -> AsyncIterator[httpx.AsyncClient]:
    """The planner as one of its users has it."""
    transport = httpx.ASGITransport(create_service(pool, webhook_secret=SECRET, session_secret=SECRET))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/login", data={"user": user})).status_code == 303
        yield client


@pytest_asyncio.fixture
async def ada(web_pool: Pool) -> AsyncIterator[httpx.AsyncClient]:
    async with logged_in(web_pool, "ada") as client:
        yield client


@pytest_asyncio.fixture
async def grace(web_pool: Pool) -> AsyncIterator[httpx.AsyncClient]:
    """Of another organization than Ada."""
    async with logged_in(web_pool, "grace") as client:
        yield client
