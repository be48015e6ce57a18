"""Hostile handlers and odd rows: each is a counted failure or harmless, and the worker runs the next job.

What handlers raise and return otherwise is in ``test_runner``.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pydantic import BaseModel, model_serializer

from recado import ClaimedJob, Discard, JobStatus, Recado, Retry, Snooze
from recado.errors import LeaseLost
from recado.queue import get_job, list_errors
from recado.queue.admin import cancel
from recado.queue.models import Job
from recado.queue.statements import fill, wake_channel
from recado.worker import EventKind
from recado.worker.failures import MAX_MESSAGE, MAX_TRACEBACK
from tests.queue.support import insert
from tests.worker.support import Observed, working

WILD = "a.wild"
ENDINGS = (EventKind.FAILED, EventKind.DIED, EventKind.COMPLETED, EventKind.RELEASED, EventKind.LOST)


@pytest.fixture
def app() -> Recado:
    app = Recado()
    app.job("a.tame")(tame)
    return app


async def tame(payload: None) -> None:
    pass


@asynccontextmanager
async def surviving(app: Recado, dsn: str, conn: asyncpg.Connection) -> AsyncIterator[Observed]:
    """A worker with one slot, which must run the next job after whatever the block has done to it."""
    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        yield seen
        await seen.seen(EventKind.COMPLETED, await app.enqueue(conn, "a.tame", None))


async def run_all(
    app: Recado, dsn: str, conn: asyncpg.Connection, handlers: Mapping[str, Callable[[], Any]], **options: Any
) -> dict[str, Job]:
    """What becomes of a job of each handler after its first attempt; by the handlers' names."""
    jobs = {}
    async with surviving(app, dsn, conn) as seen:
        for n, (name, handler) in enumerate(handlers.items()):
            job_id = await app.job(f"wild.{n}", **options)(handler).enqueue(conn, None)
            await seen.until(lambda job_id=job_id: any(job_id in seen.jobs(kind) for kind in ENDINGS))  # type: ignore[misc]
            jobs[name] = await get_job(conn, job_id)
    return jobs


# --- what handlers raise ---


class Speechless(Exception):
    def __str__(self) -> str:
        sys.exit("no")


class CarelessRetry(Retry):
    def __init__(self) -> None:
        pass


class CarelessSnooze(Snooze):
    def __init__(self) -> None:
        pass


class CarelessDiscard(Discard):
    def __init__(self) -> None:
        pass


class Odd(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__qualname__", "__module__"):
            raise RuntimeError(name)
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=Odd):
    pass


def with_causes(count: int) -> Exception:
    error = ValueError("the last")
    for n in range(count):
        cause, error = error, ValueError(str(n))
        error.__cause__ = cause
    return error


def with_a_note() -> Exception:
    error = ValueError("noted")
    error.add_note("\0\ud800")
    vars(error)["__notes__"] += [Speechless(), 5]
    return error


RAISED: dict[str, Callable[[], BaseException]] = {
    "generator exit": GeneratorExit,
    "stop iteration": StopIteration,
    "stop async iteration": StopAsyncIteration,
    "exit": lambda: SystemExit(3),
    "interrupt": KeyboardInterrupt,
    "cancel": asyncio.CancelledError,
    "speechless": Speechless,
    "nameless": Nameless,
    "10,000 causes": lambda: with_causes(10_000),
    "odd notes": with_a_note,
    "a group": lambda: BaseExceptionGroup("many", [SystemExit(n) for n in range(1_000)]),
    "a retry without its wait": CarelessRetry,
    "a snooze without its time": CarelessSnooze,
    "a discard without its reason": CarelessDiscard,
    "a lost lease": lambda: LeaseLost("not ours to say"),
    "an odd retry": lambda: Retry(after=[1]),  # type: ignore[arg-type]
    "out of memory": MemoryError,
}


def raising(make: Callable[[], BaseException], plain: bool) -> Callable[[], Any]:
    def wild() -> None:
        raise make()

    async def wild_coroutine() -> None:
        raise make()

    return wild if plain else wild_coroutine


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "thread"])
async def test_whatever_is_raised_is_a_counted_failure(
    plain: bool, app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    jobs = await run_all(app, dsn, conn, {kind: raising(make, plain) for kind, make in RAISED.items()})

    expected = dict.fromkeys(RAISED, (JobStatus.PENDING, 1))
    expected["a discard without its reason"] = (JobStatus.DEAD, 1)
    assert {kind: (job.status, job.attempts) for kind, job in jobs.items()} == expected
    for job in jobs.values():
        [error] = await list_errors(conn, job.id)
        assert error.error_class
        assert len(error.message) <= MAX_MESSAGE
        assert len(error.traceback or "") <= MAX_TRACEBACK


# --- waits ---


BACKOFFS: dict[str, Callable[[int], Any]] = {
    "exits": lambda n: sys.exit(),
    "interrupts": lambda n: (_ for _ in ()).throw(KeyboardInterrupt()),
    "cancels": lambda n: (_ for _ in ()).throw(asyncio.CancelledError()),
    "overflows": lambda n: 10.0**400,
    "huge": lambda n: 10**400,
    "a list": lambda n: [1],
}


async def test_a_backoff_may_do_what_it_likes(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    jobs = []
    async with surviving(app, dsn, conn) as seen:
        for n, backoff in enumerate(BACKOFFS.values()):
            fails = app.job(f"fails.{n}", backoff=backoff)(raising(ValueError, plain=False))
            jobs.append(await fails.enqueue(conn, None))
            await seen.seen(EventKind.FAILED, jobs[-1])

    for job_id in jobs:
        job = await get_job(conn, job_id)
        assert (job.status, job.attempts, job.last_error) == (JobStatus.PENDING, 1, "ValueError: ")


# --- what handlers return ---


class Stubborn(BaseModel):
    @model_serializer
    def write(self) -> Any:
        raise KeyError("no")


def failing() -> Iterator[int]:
    yield 1
    raise RuntimeError("not to be written")


def circle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def deep() -> Any:
    value: Any = None
    for _ in range(10_000):
        value = [value]
    return value


def returning(make: Callable[[], Any]) -> Callable[[], Any]:
    async def wild() -> Any:
        return make()

    return wild


async def test_a_result_that_cannot_be_written_ends_the_attempt_all_the_same(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    values: list[Callable[[], Any]] = [Stubborn, failing, circle, deep, lambda: open]

    jobs = await run_all(app, dsn, conn, {str(value): returning(value) for value in values})

    for name, job in jobs.items():
        assert (job.status, job.attempts, job.result) in [
            (JobStatus.COMPLETED, 0, None),
            (JobStatus.PENDING, 1, None),
        ], name


# --- what transactional handlers do to their connection ---

Deed = Callable[[asyncpg.Connection, ClaimedJob], Awaitable[object]]


async def closes(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await conn.close()


async def resets(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await conn.execute("ROLLBACK; DISCARD ALL")


async def swallows_an_error(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    with contextlib.suppress(asyncpg.DivisionByZeroError):
        await conn.execute("SELECT 1 / 0")


async def kills_its_backend(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await conn.execute("SELECT pg_terminate_backend(pg_backend_pid())")


async def cancels_its_job(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await cancel(conn, job.id)


async def deletes_its_job(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await conn.execute(fill("DELETE FROM {schema}.jobs WHERE id = $1", None), job.id)


async def leaves_a_statement_behind(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    async def sleep() -> None:
        with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError):
            await conn.execute("SELECT pg_sleep(60)")

    left_behind.append(asyncio.create_task(sleep()))
    await asyncio.sleep(0)


left_behind: list[asyncio.Task[None]] = []

END_SLEEPERS = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND query LIKE '%pg_sleep(60)%' AND pid <> pg_backend_pid()
"""


@pytest.mark.parametrize(
    "deed",
    [
        *(closes, resets, swallows_an_error, kills_its_backend, leaves_a_statement_behind),
        *(cancels_its_job, deletes_its_job),
    ],
)
async def test_what_spoils_the_transaction_is_a_counted_failure(
    deed: Deed, app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    @app.job(WILD)
    async def wild(payload: None, conn: asyncpg.Connection, job: ClaimedJob) -> None:
        await deed(conn, job)

    @app.job("a.transactional")
    async def transactional(payload: None, conn: asyncpg.Connection) -> None:
        await conn.execute("SELECT 1")

    try:
        async with surviving(app, dsn, conn) as seen:
            job_id = await app.enqueue(conn, WILD, None)
            await seen.until(lambda: any(job_id in seen.jobs(kind) for kind in ENDINGS))
            await seen.seen(EventKind.COMPLETED, await transactional.enqueue(conn, None))
    finally:
        await conn.execute(END_SLEEPERS)
        await asyncio.gather(*left_behind)
        left_behind.clear()
    job = await get_job(conn, job_id)
    assert (job.status, job.attempts) == (JobStatus.PENDING, 1)


async def leaves_a_savepoint(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await conn.transaction().start()


async def leaves_a_cursor(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await conn.cursor("SELECT generate_series(1, 1000)")


async def leaves_settings(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await conn.execute("SET LOCAL search_path = pg_catalog")


async def leaks_a_listener(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    await conn.add_listener("somewhere", print)


@pytest.mark.filterwarnings("ignore::asyncpg.InterfaceWarning")
@pytest.mark.parametrize("deed", [leaves_a_savepoint, leaves_a_cursor, leaves_settings, leaks_a_listener])
async def test_what_is_left_on_the_connection_does_no_harm(
    deed: Deed, app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    @app.job(WILD)
    async def wild(payload: None, conn: asyncpg.Connection, job: ClaimedJob) -> None:
        await deed(conn, job)

    @app.job("a.transactional")
    async def transactional(payload: None, conn: asyncpg.Connection) -> None:
        await conn.execute("SELECT 1")

    async with surviving(app, dsn, conn) as seen:
        await seen.seen(EventKind.COMPLETED, await app.enqueue(conn, WILD, None))
        await seen.seen(EventKind.COMPLETED, await transactional.enqueue(conn, None))


async def test_a_task_that_a_handler_leaves_behind_is_its_own_business(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    left: list[asyncio.Task[bool]] = []

    async def leaves_a_task() -> None:
        left.append(asyncio.create_task(asyncio.Event().wait()))

    jobs = await run_all(app, dsn, conn, {"leaves a task": leaves_a_task})

    assert jobs["leaves a task"].status is JobStatus.COMPLETED
    [task] = left
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


# --- rows that somebody has inserted by hand ---

INCOMPRESSIBLE = "".join(chr(0x4E00 + (n * 7919) % 20_000) for n in range(10_000))

ROWS: dict[str, dict[str, Any]] = {
    "no id of version 7": {"id": UUID("6f1b7e0a-3d5c-4c3e-9a59-3d8f3e3b8a10")},
    "the first id": {"id": UUID(int=0)},
    "the last id": {"id": UUID(int=2**128 - 1)},
    "a type of 10,000 characters": {"job_type": INCOMPRESSIBLE},
    "a type of 10,000 characters that dies": {"job_type": INCOMPRESSIBLE, "critical": True, "max_attempts": 1},
    "no type": {"job_type": ""},
    "a deep payload": {"payload": "[" * 3_000 + "]" * 3_000},
    "a long number": {"payload": "9" * 10_000},
    "odd metadata": {"metadata": "[]"},
    "the last fence": {"fence": 2**31 - 1},
    "attempts used up": {"attempts": 5},
    "an operation that is none": {"job_type": "operation.none"},
}


async def test_an_odd_row_is_tried_and_counted(app: Recado, dsn: str, conn: asyncpg.Connection, schema: str) -> None:
    @app.job(WILD)
    async def wild(payload: int, job: ClaimedJob) -> None:
        raise ValueError(job.metadata)

    jobs = {}
    async with surviving(app, dsn, conn) as seen:
        for kind, columns in ROWS.items():
            jobs[kind] = await insert(conn, schema, **{"job_type": WILD, "payload": "1"} | columns)
            await conn.execute("SELECT pg_notify($1, 'default')", wake_channel(schema))
            await seen.until(lambda job_id=jobs[kind]: any(job_id in seen.jobs(ending) for ending in ENDINGS))  # type: ignore[misc]

    for kind, job_id in jobs.items():
        job = await get_job(conn, job_id)
        assert job.status in (JobStatus.PENDING, JobStatus.DEAD), kind
        assert job.attempts >= 1, kind
        assert len(await list_errors(conn, job_id)) == 1, kind
    # What it did is counted, whatever the type's name.
    counted = await conn.fetchval(f"SELECT sum(failed)::int FROM {schema}.job_stats")
    assert counted == len(ROWS)
