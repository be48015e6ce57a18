"""All or nothing on the caller's connection, in whatever transaction of the caller's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from recado.errors import IllegalTransition, JobNotFound
from recado.queue import JobStatus, NewJob, cancel, cancel_operation, get_job, get_operation, system, tenant
from recado.queue.ids import new_id
from recado.queue.operations import CURRENT_TENANT, OperationStatus, start
from recado.queue.transactions import atomic
from tests.queue.support import Connect, count, insert

JOB = NewJob("operation.report", "{}")


async def begin(conn: asyncpg.Connection) -> None:
    """As those do who come from psycopg, or write SQL themselves."""
    await conn.execute("BEGIN")


@asynccontextmanager
async def no_transaction(conn: asyncpg.Connection) -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def by_hand(conn: asyncpg.Connection) -> AsyncIterator[None]:
    await begin(conn)
    yield
    await conn.execute("COMMIT")


@asynccontextmanager
async def with_savepoint(conn: asyncpg.Connection) -> AsyncIterator[None]:
    async with by_hand(conn):
        await conn.execute("SAVEPOINT mine")
        yield
        await conn.execute("RELEASE SAVEPOINT mine")


@asynccontextmanager
async def by_the_driver(conn: asyncpg.Connection) -> AsyncIterator[None]:
    async with conn.transaction():
        yield


AROUND: list[Callable[[asyncpg.Connection], Any]] = [no_transaction, by_hand, with_savepoint, by_the_driver]

around = pytest.mark.parametrize("transaction", AROUND, ids=lambda each: each.__name__)


class Stop(Exception):
    """Ends a block."""


async def put(conn: asyncpg.Connection, schema: str, name: str) -> None:
    await conn.execute(f"INSERT INTO {schema}.queues (name) VALUES ($1)", name)


async def put_and_stop(conn: asyncpg.Connection, schema: str, *names: str) -> None:
    """A block that fails in the end."""
    async with atomic(conn):
        for name in names:
            await put(conn, schema, name)
        raise Stop


async def there(conn: asyncpg.Connection, schema: str) -> list[str]:
    return [row[0] for row in await conn.fetch(f"SELECT name FROM {schema}.queues ORDER BY name")]


@around
async def test_a_block_counts_as_a_whole_and_leaves_the_transaction_to_its_owner(
    transaction: Any, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    observer = await connect()
    async with transaction(conn):
        open_before = conn.is_in_transaction()
        async with atomic(conn):
            await put(conn, schema, "kept")
            assert await there(observer, schema) == []
        assert conn.is_in_transaction() == open_before
        with pytest.raises(Stop):
            await put_and_stop(conn, schema, "undone")
        await put(conn, schema, "later")
    assert await there(observer, schema) == ["kept", "later"]


@around
async def test_blocks_within_blocks_undo_no_more_than_their_own(
    transaction: Any, conn: asyncpg.Connection, schema: str
) -> None:
    async def outer_stops() -> None:
        async with atomic(conn):
            async with atomic(conn):
                await put(conn, schema, "e")
            raise Stop

    async with transaction(conn):
        async with atomic(conn):
            await put(conn, schema, "a")
            for name in ("b", "c"):
                with pytest.raises(Stop):
                    await put_and_stop(conn, schema, name)
            async with atomic(conn):
                await put(conn, schema, "d")
        with pytest.raises(Stop):
            await outer_stops()
    assert await there(conn, schema) == ["a", "d"]


@around
async def test_a_statement_that_fails_spoils_its_block_alone(
    transaction: Any, conn: asyncpg.Connection, schema: str
) -> None:
    async with transaction(conn):
        with pytest.raises(asyncpg.UniqueViolationError):
            await put_and_stop(conn, schema, "a", "a")
        await put(conn, schema, "b")
    assert await there(conn, schema) == ["b"]


async def test_a_savepoint_that_a_cancelled_block_has_left_hides_none_around_it(
    conn: asyncpg.Connection, schema: str
) -> None:
    """Cancelled between the server's savepoint and its answer: whoever is around has to undo it all."""
    left = atomic(conn)

    async def cancelled() -> None:
        async with atomic(conn):
            await put(conn, schema, "a")
            await left.__aenter__()
            raise asyncio.CancelledError

    await begin(conn)
    with pytest.raises(asyncio.CancelledError):
        await cancelled()
    await conn.execute("COMMIT")
    assert await there(conn, schema) == []
    with pytest.raises(asyncpg.NoActiveSQLTransactionError):
        await left.__aexit__(None, None, None)  # nothing of it was left


async def test_in_a_transaction_that_has_failed_the_server_says_so(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema)

    async def enter() -> None:
        async with tenant(conn, "7"):
            pass

    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: cancel(conn, job_id),
        lambda: cancel_operation(conn, job_id),
        lambda: start(conn, JOB, organization_id="7"),
        enter,
    ]
    for call in calls:
        await begin(conn)
        with pytest.raises(asyncpg.UndefinedTableError):
            await conn.execute("SELECT FROM nothing_is_called_so")
        with pytest.raises(asyncpg.InFailedSQLTransactionError):
            await call()
        await conn.execute("ROLLBACK")
    assert (await get_job(conn, job_id)).status is JobStatus.PENDING


# --- what is built on it ---


@around
async def test_a_job_is_cancelled_in_any_transaction(transaction: Any, conn: asyncpg.Connection, schema: str) -> None:
    job_id, ended = await insert(conn, schema), await insert(conn, schema, "completed")
    async with transaction(conn):
        with pytest.raises(JobNotFound):
            await cancel(conn, new_id())
        with pytest.raises(IllegalTransition):
            await cancel(conn, ended)
        await cancel(conn, job_id)
    assert (await get_job(conn, job_id)).status is JobStatus.CANCELLED


@around
async def test_an_operation_is_started_looked_at_and_cancelled_in_any_transaction(
    transaction: Any, conn: asyncpg.Connection
) -> None:
    async with transaction(conn):
        first = await start(conn, JOB, organization_id="7")
        second = await start(conn, JOB, organization_id="7")
        async with tenant(conn, "7"):
            assert (await cancel_operation(conn, first)).status is OperationStatus.ERROR
        await cancel(conn, second)  # by way of the job
        if conn.is_in_transaction():
            assert await conn.fetchval(CURRENT_TENANT) == ""
    async with system(conn):
        for job_id in (first, second):
            assert (await get_operation(conn, job_id)).status is OperationStatus.ERROR
            assert (await get_job(conn, job_id)).status is JobStatus.CANCELLED


async def test_what_was_done_in_a_transaction_begun_by_hand_is_its_owners_to_undo(
    conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await insert(conn, schema)
    await begin(conn)
    await cancel(conn, job_id)
    await start(conn, JOB, organization_id="7")
    await conn.execute("ROLLBACK")
    assert await count(conn, schema) == 1
    assert (await get_job(conn, job_id)).status is JobStatus.PENDING
