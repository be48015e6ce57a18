"""Operations: what their handlers tell, and that they end as their jobs do, in one transaction."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic import BaseModel

from recado import Discard, Operation, Recado, Retry, Snooze
from recado.errors import IllegalTransition, InvalidPayload, LeaseLost, RegistrationError, TenantError, UnknownJobType
from recado.queue import cancel, claims, get_job, list_errors, operations, requeue
from recado.queue.operations import OperationRow, OperationStatus, tenant
from recado.testing import drain
from recado.worker import EventKind
from recado.worker.operations import begin
from tests.worker.support import Connect, working

ORGANIZATION = "acme"


class Import(BaseModel):
    rows: int = 0


class Kit:
    """An application whose one operation does what a test says."""

    def __init__(self, **options: Any) -> None:
        self.app = Recado()
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.attempts: list[Operation] = []
        self.errors: list[BaseException] = []

        async def perform(operation: Operation) -> Any:
            return None

        self.perform = perform

        @self.app.operation("import", **options)
        async def handler(payload: Import, operation: Operation) -> Any:
            self.attempts.append(operation)
            self.begun.set()
            try:
                return await self.perform(operation)
            except BaseException as error:
                self.errors.append(error)
                raise

        self.handler = handler

    async def start(self, conn: asyncpg.Connection) -> UUID:
        return await self.handler.start(conn, Import(), organization_id=ORGANIZATION, created_by="ann")


@pytest.fixture
def kit() -> Kit:
    return Kit()


async def row_of(conn: asyncpg.Connection, job_id: UUID) -> OperationRow:
    async with tenant(conn, ORGANIZATION):
        return await operations.get_operation(conn, job_id)


async def statuses(conn: asyncpg.Connection, job_id: UUID) -> tuple[str, str]:
    return (await get_job(conn, job_id)).status, (await row_of(conn, job_id)).status


# --- the ways to an end ---


async def test_what_is_returned_is_the_result_and_both_end(kit: Kit, dsn: str, conn: asyncpg.Connection) -> None:
    async def perform(operation: Operation) -> Any:
        assert (operation.organization_id, operation.created_by, operation.kind) == (ORGANIZATION, "ann", "import")
        kit.begun.set()
        await kit.go_on.wait()
        return {"blueprint_id": 42}

    kit.perform = perform
    job_id = await kit.start(conn)
    assert await statuses(conn, job_id) == ("pending", "pending")
    async with working(kit.app, dsn) as (_, seen):
        await kit.begun.wait()
        assert await statuses(conn, job_id) == ("running", "processing")
        kit.go_on.set()
        await seen.seen(EventKind.COMPLETED, job_id)
    row = await row_of(conn, job_id)
    assert (row.status, row.progress, row.result, row.error) == (OperationStatus.DONE, 100, {"blueprint_id": 42}, None)
    assert (await get_job(conn, job_id)).result is None  # it is the organization's, and stands with the operation


async def test_between_attempts_it_is_processing_and_a_new_one_starts_over(dsn: str, conn: asyncpg.Connection) -> None:
    kit = Kit(backoff=[0], max_attempts=2)
    seen_progress = []

    async def perform(operation: Operation) -> Any:
        seen_progress.append((await row_of(conn, operation.job_id)).progress)
        await operation.progress(70)
        if len(kit.attempts) == 1:
            raise RuntimeError("secret")
        return None

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.COMPLETED, job_id)
    assert seen_progress == [0, 0]
    assert (await row_of(conn, job_id)).status == "done"


async def test_an_unexpected_exception_is_told_in_a_neutral_sentence_and_written_down_whole(
    dsn: str, conn: asyncpg.Connection
) -> None:
    kit = Kit(max_attempts=1)

    async def perform(operation: Operation) -> Any:
        await operation.progress(30)
        raise RuntimeError("password=hunter2")

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.DIED, job_id)
    row = await row_of(conn, job_id)
    assert (row.status, row.progress, row.error) == ("error", 30, operations.FAILED)
    assert (await get_job(conn, job_id)).status == "dead"
    [error] = await list_errors(conn, job_id)
    assert "hunter2" in error.message
    assert error.traceback is not None
    assert "in perform" in error.traceback


@pytest.mark.parametrize("signal", [Discard("internal"), Retry(after=0, reason="internal")])
async def test_a_signal_without_attempts_left_ends_it_neutrally(
    dsn: str, conn: asyncpg.Connection, signal: Exception
) -> None:
    kit = Kit(max_attempts=1)

    async def perform(operation: Operation) -> Any:
        raise signal

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.DIED, job_id)
    assert (await row_of(conn, job_id)).error == operations.FAILED


async def test_a_snooze_leaves_it_processing(kit: Kit, dsn: str, conn: asyncpg.Connection) -> None:
    async def perform(operation: Operation) -> Any:
        raise Snooze(3600)

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.RELEASED, job_id)
    assert await statuses(conn, job_id) == ("pending", "processing")


async def test_a_result_that_is_no_json_is_an_error_at_once(kit: Kit, dsn: str, conn: asyncpg.Connection) -> None:
    async def perform(operation: Operation) -> Any:
        return object()

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.DIED, job_id)
    assert len(kit.attempts) == 1
    assert (await row_of(conn, job_id)).error == operations.FAILED


# --- a handler that ends it itself ---


async def test_mark_done_ends_both_at_once_and_what_follows_changes_nothing(
    kit: Kit, dsn: str, conn: asyncpg.Connection
) -> None:
    async def perform(operation: Operation) -> Any:
        await operation.mark_done({"n": 1})
        assert await statuses(conn, operation.job_id) == ("completed", "done")
        for move in (operation.mark_done(), operation.mark_error("no"), operation.progress(5)):
            with pytest.raises(IllegalTransition, match="has ended it already"):
                await move
        raise RuntimeError("after the end")

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.COMPLETED, job_id)
        assert seen.count(EventKind.LOST) == 0
    assert isinstance(kit.errors[0], RuntimeError)
    row = await row_of(conn, job_id)
    assert (row.status, row.progress, row.result, row.error) == ("done", 100, {"n": 1}, None)
    assert await list_errors(conn, job_id) == []


async def test_mark_error_ends_both_at_once_with_the_handlers_own_sentence(
    kit: Kit, dsn: str, conn: asyncpg.Connection
) -> None:
    async def perform(operation: Operation) -> Any:
        await operation.mark_error("Line 3 has no rack.\0" + "x" * 3000)
        assert await statuses(conn, operation.job_id) == ("dead", "error")

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.DIED, job_id)
        assert seen.count(EventKind.LOST) == 0
    assert kit.errors == []
    error = (await row_of(conn, job_id)).error
    assert error is not None
    assert error.startswith("Line 3 has no rack.\N{REPLACEMENT CHARACTER}x")
    assert len(error) == operations.MAX_ERROR


async def test_a_result_that_mark_done_cannot_store_changes_nothing(
    kit: Kit, dsn: str, conn: asyncpg.Connection
) -> None:
    async def perform(operation: Operation) -> Any:
        with pytest.raises(InvalidPayload):
            await operation.mark_done("x" * 300_000)
        assert await statuses(conn, operation.job_id) == ("running", "processing")

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.COMPLETED, job_id)
    assert kit.errors == []


# --- progress ---


async def count_versions(conn: asyncpg.Connection, job_id: UUID) -> int:
    return (await row_of(conn, job_id)).version


async def test_progress_is_written_ten_times_a_second_at_most_and_the_last_one_always(
    kit: Kit, dsn: str, conn: asyncpg.Connection, connect: Connect
) -> None:
    listener = await connect()
    changed = asyncio.Event()
    await listener.add_listener(operations.channel(kit.app.schema), lambda *_: changed.set())

    async def perform(operation: Operation) -> Any:
        began = asyncio.get_running_loop().time()
        for percent in range(100):
            await operation.progress(percent)
        # What is waited for now comes without another call.
        while (row := await row_of(conn, operation.job_id)).progress < 99:
            changed.clear()
            await changed.wait()
        assert row.version - 2 <= 1 + (asyncio.get_running_loop().time() - began) / 0.1 + 1

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.COMPLETED, job_id)
    assert kit.errors == []
    await listener.reset()


async def test_progress_never_goes_back_and_is_checked(kit: Kit, dsn: str, conn: asyncpg.Connection) -> None:
    async def perform(operation: Operation) -> Any:
        await operation.progress(50)
        await operation.progress(20)
        for bad in (-1, 101, 1.5, True, None):
            with pytest.raises(ValueError, match="an integer from 0 to 100"):
                await operation.progress(bad)  # type: ignore[arg-type]
        raise Discard

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.DIED, job_id)
    assert (await row_of(conn, job_id)).progress == 50


async def test_the_last_progress_of_an_attempt_that_fails_is_written(dsn: str, conn: asyncpg.Connection) -> None:
    kit = Kit(max_attempts=1)

    async def perform(operation: Operation) -> Any:
        await operation.progress(10)
        await operation.progress(60)  # within the same tenth of a second
        raise RuntimeError

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.DIED, job_id)
    assert (await row_of(conn, job_id)).progress == 60


# --- cancelled, expired, lost ---


@pytest.mark.parametrize("how", ["job", "operation"])
async def test_cancelling_either_ends_both_and_interrupts_the_handler(
    kit: Kit, dsn: str, conn: asyncpg.Connection, how: str
) -> None:
    async def perform(operation: Operation) -> Any:
        await asyncio.Event().wait()

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await kit.begun.wait()
        if how == "job":
            await cancel(conn, job_id)
        else:
            async with tenant(conn, ORGANIZATION):
                await operations.cancel_operation(conn, job_id)
        await seen.seen(EventKind.LOST, job_id)
    assert isinstance(kit.errors[0], asyncio.CancelledError)
    assert await statuses(conn, job_id) == ("cancelled", "error")
    assert (await row_of(conn, job_id)).error == operations.CANCELLED


async def test_cancelling_one_that_waits_ends_both(kit: Kit, conn: asyncpg.Connection) -> None:
    job_id = await kit.start(conn)
    await cancel(conn, job_id)
    assert await statuses(conn, job_id) == ("cancelled", "error")


async def test_an_attempt_that_lost_its_job_can_move_nothing(kit: Kit, conn: asyncpg.Connection, schema: str) -> None:
    job_id = await kit.start(conn)
    worker_id = uuid4()
    [job] = await claims.claim(conn, worker_id, "default", 1, claims.NO_FLOORS)
    operation = await begin(job, worker_id, lambda: nullcontext(conn), schema=schema)
    async with operations.system(conn):  # what losing the job and the next attempt do
        await conn.execute(f"UPDATE {schema}.jobs SET fence = fence + 1")
        await operations.mark_processing(conn, job_id, 2, 33)
    with pytest.raises(IllegalTransition, match="not by this attempt"):
        await operation.progress(90)
    for move in (operation.mark_done(), operation.mark_error("no")):
        with pytest.raises(LeaseLost):
            await move
    with pytest.raises(LeaseLost):
        await begin(job, worker_id, lambda: nullcontext(conn), schema=schema)
    row = await row_of(conn, job_id)
    assert (row.status, row.progress) == ("processing", 33)


async def test_a_job_that_dies_with_its_workers_takes_its_operation_along(
    kit: Kit, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await kit.start(conn)
    await conn.execute(
        f"UPDATE {schema}.jobs SET status = 'running', fence = 5, reclaims = 4, locked_at = now(), locked_by = $1",
        uuid4(),
    )
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.RECLAIMED, job_id)
    assert await statuses(conn, job_id) == ("dead", "error")
    assert (await row_of(conn, job_id)).error == operations.INTERRUPTED


async def test_a_worker_that_is_stopped_leaves_it_processing_for_the_next(
    kit: Kit, dsn: str, conn: asyncpg.Connection
) -> None:
    async def perform(operation: Operation) -> Any:
        if len(kit.attempts) == 1:
            await asyncio.Event().wait()
        return "second"

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn, grace=0):
        await kit.begun.wait()
    assert await statuses(conn, job_id) == ("pending", "processing")
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.COMPLETED, job_id)
    assert (await row_of(conn, job_id)).result == "second"


async def test_one_that_expires_under_a_handler_interrupts_it(kit: Kit, dsn: str, conn: asyncpg.Connection) -> None:
    async def perform(operation: Operation) -> Any:
        await asyncio.Event().wait()

    kit.perform = perform
    job_id = await kit.start(conn)
    async with working(kit.app, dsn) as (_, seen):
        await kit.begun.wait()
        async with operations.system(conn):
            assert await operations.expire(conn, after=timedelta()) == [job_id]
        await seen.seen(EventKind.LOST, job_id)
    assert await statuses(conn, job_id) == ("cancelled", "error")


async def test_what_has_ended_is_not_requeued(kit: Kit, conn: asyncpg.Connection) -> None:
    job_id = await kit.start(conn)
    await cancel(conn, job_id)
    with pytest.raises(IllegalTransition, match="start another operation"):
        await requeue(conn, job_id)
    assert await statuses(conn, job_id) == ("cancelled", "error")


# --- registering and starting ---


async def test_the_job_of_an_operation_is_enqueued_by_no_other_way(kit: Kit, conn: asyncpg.Connection) -> None:
    for attempt in (
        kit.app.enqueue(conn, "operation.import", Import()),
        kit.handler.enqueue(conn, Import()),
    ):
        with pytest.raises(Exception, match=r"call its start\(\)"):
            await attempt
    with pytest.raises(RegistrationError, match="belong to operations"):
        kit.app.job("operation.other")(lambda: None)
    with pytest.raises(RegistrationError, match="belong to operations"):
        kit.app.declare("operation.other")


async def test_an_unknown_kind_and_a_missing_organization_are_errors_at_the_call(
    kit: Kit, conn: asyncpg.Connection, schema: str
) -> None:
    with pytest.raises(UnknownJobType, match=r"@app\.operation"):
        await kit.app.start_operation(conn, "nothing", {}, organization_id=ORGANIZATION)
    with pytest.raises(TenantError, match="for which organization"):
        await kit.app.start_operation(conn, "import", {})
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs") == 0


def test_a_handler_of_an_operation_gets_no_transaction_and_is_no_thread(kit: Kit) -> None:
    async def with_conn(payload: None, conn: asyncpg.Connection) -> None: ...

    def in_thread(payload: None, operation: Operation) -> None: ...

    with pytest.raises(RegistrationError, match="nobody can fill its parameter 'conn'"):
        kit.app.operation("a")(with_conn)
    with pytest.raises(RegistrationError, match="cannot await its progress"):
        kit.app.operation("a")(in_thread)
    with pytest.raises(RegistrationError, match="a kind has no dot"):
        kit.app.operation("a.b")


async def test_a_job_without_its_row_dies_with_the_reason(
    kit: Kit, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = uuid4()
    await conn.execute(
        f"INSERT INTO {schema}.jobs (id, job_type, payload) VALUES ($1, 'operation.import', '{{}}')", job_id
    )
    async with working(kit.app, dsn) as (_, seen):
        await seen.seen(EventKind.DIED, job_id)
    assert "it has no operation" in str((await get_job(conn, job_id)).last_error)
    assert kit.attempts == []


async def test_drain_performs_operations_as_a_worker_does(kit: Kit, conn: asyncpg.Connection) -> None:
    async def perform(operation: Operation) -> Any:
        await operation.progress(10)
        match len(kit.attempts):
            case 1:
                return {"ok": True}
            case 2:
                await operation.mark_error("Nothing to import.")
            case _:
                raise Discard
        return None

    kit.perform = perform
    ids = [await kit.start(conn) for _ in range(3)]
    drained = await drain(kit.app, conn)
    assert (drained.completed, drained.dead) == (1, 2)
    rows = [await row_of(conn, job_id) for job_id in ids]
    assert [(row.status, row.result, row.error) for row in rows] == [
        ("done", {"ok": True}, None),
        ("error", None, "Nothing to import."),
        ("error", None, operations.FAILED),
    ]
    assert [(await get_job(conn, job_id)).status for job_id in ids] == ["completed", "dead", "dead"]
