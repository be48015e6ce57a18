"""The suite's own fixtures, on top of those that ship, and the guards that fail a test which leaves a mess."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping

import asyncpg
import pytest
import pytest_asyncio

import recado.testing
from recado.settings import DEFAULT_SCHEMA, settings
from tests import leaks

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop
except ImportError:  # Windows
    new_event_loop = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

KEPT_VARIABLES = frozenset({"RECADO_PG_BIN", "RECADO_TEST_DSN", "RECADO_TEST_SCHEMA"})
"""What the environment may say to the suite; all else would make it depend on whose shell it runs in."""


def pytest_configure(config: pytest.Config) -> None:
    # The entry point does this where recado is installed; a bare checkout runs its tests, too.
    if not config.pluginmanager.is_registered(recado.testing):
        config.pluginmanager.register(recado.testing)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop the worker runs on."""
    return {"loop": new_event_loop}


def pytest_collection_finish() -> None:
    # quiet_loop collects garbage after each test; what was imported up to here need not be looked at again.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def schema() -> Iterator[str]:
    """The schema under test: ``RECADO_TEST_SCHEMA``, so that the suite can run under another name, too."""
    name = os.environ.get("RECADO_TEST_SCHEMA", DEFAULT_SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        for variable in [v for v in os.environ if v.startswith("RECADO_") and v not in KEPT_VARIABLES]:
            patch.delenv(variable)
        patch.setenv("RECADO_SCHEMA", name)
        settings.cache_clear()
        yield name
    settings.cache_clear()


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """No thread and no child process outlives its test, nor the event loop of it."""
    threads, children = leaks.threads(), leaks.children()
    yield
    leaks.fail_on_new("threads", leaks.lasting(leaks.threads() - threads))
    leaks.fail_on_new("child processes", leaks.children() - children)


@pytest_asyncio.fixture(autouse=True)
async def quiet_loop(no_leaks: None) -> AsyncIterator[None]:
    """No task outlives its test's fixtures, and nothing reaches the event loop's exception handler."""
    with leaks.recorded_loop_errors() as errors:
        yield
        leaks.fail_on_new("tasks", leaks.tasks())
    leaks.fail_on_new("errors in the event loop", errors)


@pytest.fixture
def recado_dsn(recado_server: str, recado_dsn: str) -> Iterator[str]:
    """The shipped fixture, and no connection outlives the fixtures that stand on it."""
    yield recado_dsn
    leaks.fail_on_new("connections", leaks.connections(recado_server, recado_dsn))


@pytest.fixture
def dsn(recado_dsn: str) -> str:
    """The URL of a database with the migrated schema, for this test alone."""
    return recado_dsn


@pytest_asyncio.fixture
async def connect(dsn: str) -> AsyncIterator[Callable[[], Awaitable[asyncpg.Connection]]]:
    """``await connect()`` opens one more connection to the test's database, closed after the test."""
    opened: list[asyncpg.Connection] = []

    async def connect() -> asyncpg.Connection:
        connection = await asyncpg.connect(dsn)
        opened.append(connection)
        return connection

    yield connect
    for connection in opened:
        await connection.close()


@pytest_asyncio.fixture
async def conn(connect: Callable[[], Awaitable[asyncpg.Connection]]) -> asyncpg.Connection:
    """A connection to the test's database, outside any transaction."""
    return await connect()
