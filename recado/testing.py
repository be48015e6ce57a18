"""pytest fixtures for applications that use recado; pytest loads them wherever recado is installed.

=================== ======== ====================================================================
fixture             scope    what it is
=================== ======== ====================================================================
``recado_server``   session  the URL of a PostgreSQL server for tests: an embedded one, or the one
                             named by ``RECADO_TEST_DSN``, whose role must be allowed to create
                             databases
``recado_template`` session  the name of a database there that holds the migrated schema
``recado_dsn``      function the URL of a fresh copy of it, dropped after the test
``recado_db``       function an asyncpg connection to that copy
=================== ======== ====================================================================

An application with tables of its own overrides ``recado_template`` and creates them there::

    @pytest.fixture(scope="session")
    def recado_template(recado_server, recado_template):
        subprocess.run(["alembic", "upgrade", "head"], env={...: database_url(recado_server, recado_template)})
        return recado_template
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import asyncpg
import pytest

from recado.queue import migrate

if sys.platform != "win32":  # there pytest must load this module all the same
    from recado import embedded

T = TypeVar("T")

try:
    from pytest_asyncio import fixture as async_fixture
except ImportError:
    # The coroutine tests are another plugin's, such as anyio's: that takes pytest's own decorator, which
    # pytest-asyncio in its strict mode does not.
    async_fixture = pytest.fixture  # type: ignore[assignment]

MEMORY_FILES = Path("/dev/shm")  # noqa: S108 - what is made in it has a random name
"""A file system in memory: a copy of the template takes 9 ms there, against 60 to 130 on a disk."""

MIN_MEMORY_FILES = 2**30
"""Bytes that must be free there; a guess that leaves out the 64 MB of a container, which do not suffice."""

CLUSTER_PREFIX = "recado-pytest-"
"""Begins the name of a test cluster's folder; the id of the pytest process follows."""


def database_url(server: str, database: str) -> str:
    """The URL of another database on the server that the URL ``server`` leads to."""
    return urlsplit(server)._replace(path=f"/{quote(database, safe='')}").geturl()


# --- fixtures ---


@pytest.fixture(scope="session")
def recado_server() -> Iterator[str]:
    """The URL of the server's maintenance database."""
    existing = os.environ.get("RECADO_TEST_DSN")
    if existing:
        yield existing
        return
    with _cluster_folder() as folder, embedded.start(folder, durable=False) as server:
        yield server.dsn()


@pytest.fixture(scope="session")
def recado_template(recado_server: str) -> Iterator[str]:
    """The name of the database that each test's own is copied from; nobody may be connected to it then."""
    with _database(recado_server) as name:
        _run(_migrate(database_url(recado_server, name)))
        yield name


@pytest.fixture
def recado_dsn(recado_server: str, recado_template: str) -> Iterator[str]:
    """The URL of a database of this test's own."""
    # Copying files beats copying through the WAL as long as checkpoints are cheap, as they are here.
    with _database(recado_server, f"TEMPLATE {recado_template} STRATEGY file_copy") as name:
        yield database_url(recado_server, name)


@async_fixture
async def recado_db(recado_dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection to the database of this test, outside any transaction."""
    connection = await asyncpg.connect(recado_dsn)
    yield connection
    await connection.close()


# --- behind them ---


@contextlib.contextmanager
def _cluster_folder() -> Iterator[Path]:
    in_memory = os.access(MEMORY_FILES, os.W_OK) and shutil.disk_usage(MEMORY_FILES).free >= MIN_MEMORY_FILES
    parent = MEMORY_FILES if in_memory else Path(tempfile.gettempdir())
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=f"{CLUSTER_PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield folder
    finally:
        embedded.remove(folder)


def _remove_abandoned(parent: Path) -> None:
    """Remove what test sessions left that were killed: no fixture ended there, and memory is scarce."""
    for folder in parent.glob(f"{CLUSTER_PREFIX}*"):
        if not _is_running(folder.name.removeprefix(CLUSTER_PREFIX).partition("-")[0]):
            with contextlib.suppress(OSError):  # another user's, or another session is removing it just now
                embedded.remove(folder)


def _is_running(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@contextlib.contextmanager
def _database(server: str, options: str = "") -> Iterator[str]:
    name = f"recado_{uuid.uuid4().hex}"
    _run(_execute(server, f"CREATE DATABASE {name} {options}"))
    try:
        yield name
    finally:
        _run(_execute(server, f"DROP DATABASE {name} WITH (FORCE)"))


def _run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in a loop of its own.

    These fixtures are not coroutines, for then they would be tied to one plugin and its scopes of loops. With
    a loop factory the runner leaves the current event loop alone, which asyncio.run() would set to None.
    """
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(main)


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def _migrate(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await migrate.up(connection)
    finally:
        await connection.close()
