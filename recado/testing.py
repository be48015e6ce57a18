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

A test then asks for what it expects::

    async def test_an_order_sends_a_receipt(recado_db):
        await place_order(recado_db, ...)
        await assert_enqueued(recado_db, "email.send_receipt", {"order_id": ANY})
        assert (await drain(app, recado_db)).completed == 1

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
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit
from uuid import UUID

import asyncpg
import pytest
from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from uuid6 import uuid7

from recado.app import OperationHandler, Recado
from recado.queue import list_jobs, migrate
from recado.queue.claims import NO_FLOORS, claim
from recado.queue.connections import Connection
from recado.queue.finishes import Completion, Release, complete_one, fail, release
from recado.queue.models import ClaimedJob, Job, JobStatus
from recado.queue.operations import FAILED, OperationStatus
from recado.queue.transactions import atomic
from recado.worker.alerts import raise_alerts
from recado.worker.calls import call, failure_of, handler_of, result_of, snooze_of
from recado.worker.operations import begin, end_dead
from recado.worker.operations import result_of as operation_result

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


# --- what tests ask ---

CLAIMED_AT_ONCE = 100
"""Jobs that :func:`drain` claims in one statement."""


@dataclass(slots=True)
class Drained:
    """How the attempts of one :func:`drain` ended."""

    completed: int = 0
    failed: int = 0
    """Those that wait for another attempt."""
    dead: int = 0
    snoozed: int = 0


async def drain(app: Recado, conn: Connection, *, state: Mapping[str, Any] | None = None) -> Drained:
    """Run all jobs that are due, and those they enqueue, until none is; one after the other, on ``conn``.

    It works inside a transaction of the test's too: each handler that asks for ``conn`` then gets it in a savepoint.

    Args:
        app: whose handlers run.
        state: what handlers get as ``state``; ``None`` runs the application's lifespan for it.

    Returns:
        How many attempts ended in which way. What failed is not due again before its wait is over.
    """
    drained = Drained()
    async with app.run_lifespan() if state is None else contextlib.nullcontext(state) as handed:
        worker_id = uuid7()
        while queues := await _queues_with_work(app, conn):
            claimed = False
            for queue in queues:
                for job in await claim(conn, worker_id, queue, CLAIMED_AT_ONCE, NO_FLOORS, schema=app.schema):
                    claimed = True
                    await _run_one(app, conn, worker_id, job, handed, drained)
            if not claimed:
                break
    return drained


async def assert_enqueued(
    conn: Connection, job_type: str, payload: Any = None, *, queue: str | None = None, schema: str | None = None
) -> Job:
    """Assert that a job of this type waits, and return the newest that does.

    Args:
        payload: what it has to hold: of a dict, at least these keys; ``unittest.mock.ANY`` stands for any value.
        queue: where it has to wait.

    Raises:
        AssertionError: there is none; it says which jobs of the type there are.
    """
    jobs = await list_jobs(conn, job_type=job_type, status=JobStatus.PENDING, limit=LOOKED_AT, schema=schema)
    for job in jobs:
        if (payload is None or _matches(payload, job.payload)) and queue in (None, job.queue):
            return job
    where = "" if queue is None else f" in queue {queue!r}"
    wanted = "" if payload is None else f" with {payload!r}"
    there = ", ".join(f"{job.payload!r} in {job.queue!r}" for job in jobs) or "none at all"
    raise AssertionError(f"expected a pending job {job_type!r}{wanted}{where}, got {there}")


LOOKED_AT = 1_000
"""Jobs that are looked through at most: more than a test enqueues."""


async def _queues_with_work(app: Recado, conn: Connection) -> list[str]:
    jobs = await list_jobs(conn, status=JobStatus.PENDING, limit=LOOKED_AT, schema=app.schema)
    return sorted({job.queue for job in jobs})


async def _run_one(
    app: Recado, conn: Connection, worker_id: UUID, job: ClaimedJob, state: Mapping[str, Any], drained: Drained
) -> None:
    began = time.monotonic()
    try:
        handler = handler_of(app, job)
        if isinstance(handler, OperationHandler):
            status = await _run_operation(app, conn, worker_id, job, handler, state)
            drained.completed += status is OperationStatus.DONE
            drained.dead += status is OperationStatus.ERROR
            return
        async with atomic(conn):
            value = await call(handler, job, conn=conn, state=state, timeout=None, in_thread=asyncio.to_thread)
            await complete_one(conn, worker_id, Completion(job.id, job.fence, result_of(job, value)), schema=app.schema)
        drained.completed += 1
    except Exception as error:
        # What the handler raises is the user's; it is written down as a worker would.
        if (wait := snooze_of(error)) is not None:
            await release(conn, worker_id, [Release(job.id, job.fence, wait)], schema=app.schema)
            drained.snoozed += 1
            return
        failure = failure_of(app, job, error, time.monotonic() - began)
        async with atomic(conn):
            ended = await fail(conn, worker_id, [failure], schema=app.schema)
            dead = [(f, failure.error_class) for f in ended if f.status is JobStatus.DEAD]
            await raise_alerts(conn, app, dead)
            await end_dead(conn, app, ended, FAILED)
        drained.dead += len(dead)
        drained.failed += len(ended) - len(dead)


async def _run_operation(
    app: Recado,
    conn: Connection,
    worker_id: UUID,
    job: ClaimedJob,
    handler: OperationHandler[Any, Any, Any],
    state: Mapping[str, Any],
) -> OperationStatus:
    """Run an attempt at an operation; how it ended."""

    def connect() -> contextlib.nullcontext[Connection]:
        return contextlib.nullcontext(conn)

    async with await begin(job, worker_id, connect, schema=app.schema) as operation:
        value = await call(
            handler, job, conn=None, operation=operation, state=state, timeout=None, in_thread=asyncio.to_thread
        )
        if not operation.ended:
            operation_result(value)  # refused as a worker refuses it
            await operation.mark_done(value)
    return operation.status


def _matches(wanted: Any, found: Any) -> bool:
    if isinstance(wanted, BaseModel):
        wanted = wanted.model_dump(mode="json")
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        return all(key in found and _matches(value, found[key]) for key, value in wanted.items())
    if isinstance(wanted, list | tuple) and isinstance(found, list):
        return len(wanted) == len(found) and all(map(_matches, wanted, found))
    # A UUID or a date in the test stands for what it is in JSON.
    return bool(wanted == found) or to_jsonable_python(wanted, serialize_unknown=True) == found


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
