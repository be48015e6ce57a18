"""Operations: the moves of their state machine, who may make them, and that they end together with their jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from recado.errors import EnqueueError, IllegalTransition, OperationNotFound, TenantError
from recado.queue import JobStatus, NewJob, get_job, operations
from recado.queue.claims import claim
from recado.queue.finishes import Completion, complete
from recado.queue.ids import new_id
from recado.queue.operations import (
    CANCELLED,
    INTERRUPTED,
    LAST_NUMBER,
    MAX_ERROR,
    Cursor,
    OperationRow,
    OperationStatus,
    cancel_operation,
    expire,
    get_operation,
    is_newer,
    list_operations,
    mark_done,
    mark_error,
    mark_processing,
    prune,
    set_progress,
    start,
    system,
    tenant,
)
from recado.queue.statements import cancel_channel
from tests.queue.support import WORKER, Connect, Ear, blocked, insert

ORG = "7"
JOB = NewJob("operation.autoplan", "{}")
EXPIRY = timedelta(hours=2)
OLD = timedelta(hours=3)
NO_TEXT = "\0"
"""Nothing PostgreSQL could store."""


async def started(conn: asyncpg.Connection, job: NewJob = JOB, organization: str = ORG) -> UUID:
    return await start(conn, job, organization_id=organization)


async def begun(conn: asyncpg.Connection, *, fence: int = 1) -> UUID:
    """An operation whose job is running, by its attempt with this fence."""
    job_id = await started(conn)
    [job] = await claim(conn, WORKER, "default", 1, [None] * 4)
    assert (job.id, job.fence) == (job_id, 1)
    async with system(conn):
        for n in range(1, fence + 1):
            await mark_processing(conn, job_id, n)
    return job_id


async def look(conn: asyncpg.Connection, job_id: UUID) -> OperationRow:
    async with system(conn):
        return await get_operation(conn, job_id)


async def raw(conn: asyncpg.Connection, schema: str, job_id: UUID) -> dict[str, Any]:
    """The whole row, with the transaction that wrote it: equal only if nothing has touched it."""
    async with system(conn):
        record = await conn.fetchrow(
            f"SELECT o.*, xmin::text, ctid::text FROM {schema}.operations o WHERE job_id = $1", job_id
        )
    assert record is not None
    return dict(record.items())


async def aged(conn: asyncpg.Connection, schema: str, job_id: UUID, age: timedelta = OLD) -> None:
    """Nothing was heard of the operation for so long."""
    async with system(conn):
        await conn.execute(
            f"UPDATE {schema}.operations SET created_at = now() - $2::interval, updated_at = now() - $2::interval "
            "WHERE job_id = $1",
            job_id,
            age,
        )


# --- the state machine ---

Move = Callable[[asyncpg.Connection, UUID], Awaitable[bool]]
"""Makes a move with the fence 1, and tells whether it was made."""


async def to_processing(conn: asyncpg.Connection, job_id: UUID) -> bool:
    return await _made(mark_processing(conn, job_id, 1))


async def to_progress(conn: asyncpg.Connection, job_id: UUID) -> bool:
    return await _made(set_progress(conn, job_id, 1, 50))


async def to_done(conn: asyncpg.Connection, job_id: UUID) -> bool:
    return await mark_done(conn, [(job_id, 1, '{"a": 1}')]) == {job_id}


async def to_error(conn: asyncpg.Connection, job_id: UUID) -> bool:
    return await mark_error(conn, [job_id], "no") == {job_id}


async def to_cancelled(conn: asyncpg.Connection, job_id: UUID) -> bool:
    return await _made(cancel_operation(conn, job_id))


async def to_expired(conn: asyncpg.Connection, job_id: UUID) -> bool:
    return await expire(conn, after=timedelta(0)) == [job_id]


async def _made(move: Awaitable[Any]) -> bool:
    try:
        await move
    except IllegalTransition:
        return False
    return True


PENDING, PROCESSING, DONE, ERROR = OperationStatus
REFUSED = None

MOVES: dict[Move, dict[OperationStatus, OperationStatus | None]] = {
    to_processing: {PENDING: PROCESSING, PROCESSING: PROCESSING, DONE: REFUSED, ERROR: REFUSED},
    to_progress: {PENDING: REFUSED, PROCESSING: PROCESSING, DONE: REFUSED, ERROR: REFUSED},
    to_done: {PENDING: REFUSED, PROCESSING: DONE, DONE: REFUSED, ERROR: REFUSED},
    to_error: {PENDING: ERROR, PROCESSING: ERROR, DONE: REFUSED, ERROR: REFUSED},
    to_cancelled: {PENDING: ERROR, PROCESSING: ERROR, DONE: REFUSED, ERROR: REFUSED},
    to_expired: {PENDING: ERROR, PROCESSING: ERROR, DONE: REFUSED, ERROR: REFUSED},
}


@asynccontextmanager
async def in_state(conn: asyncpg.Connection, status: OperationStatus) -> AsyncIterator[UUID]:
    """An operation in this state, and a system's transaction to move it in."""
    job_id = await started(conn) if status is PENDING else await begun(conn)
    async with system(conn):
        if status is DONE:
            assert await mark_done(conn, [(job_id, 1, "{}")]) == {job_id}
        if status is ERROR:
            assert await mark_error(conn, [job_id], "it went wrong") == {job_id}
    async with system(conn):
        yield job_id


@pytest.mark.parametrize("status", OperationStatus)
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
async def test_every_move_is_made_from_its_own_states_and_changes_nothing_from_others(
    conn: asyncpg.Connection, schema: str, move: Move, status: OperationStatus
) -> None:
    async with in_state(conn, status) as job_id:
        before = await raw(conn, schema, job_id)
        made = await move(conn, job_id)
        after = await raw(conn, schema, job_id)

    wanted = MOVES[move][status]
    assert made == (wanted is not REFUSED)
    if wanted is REFUSED:
        assert after == before
    else:
        assert after["status"] == wanted
        assert after["version"] == before["version"] + 1


@pytest.mark.parametrize("move", [to_processing, to_progress, to_cancelled], ids=lambda move: move.__name__)
async def test_an_operation_that_is_not_there_cannot_be_moved(conn: asyncpg.Connection, move: Move) -> None:
    async with system(conn):
        with pytest.raises(OperationNotFound, match="there is none with this id"):
            await move(conn, new_id())
        assert not await to_done(conn, new_id())
        assert not await to_error(conn, new_id())


async def test_a_move_that_is_refused_says_why_and_what_to_do(conn: asyncpg.Connection) -> None:
    job_id = await begun(conn)
    async with system(conn):
        with pytest.raises(IllegalTransition, match="it is processing, and not by this attempt; start another one"):
            await set_progress(conn, job_id, 2, 1)
        await to_done(conn, job_id)
        with pytest.raises(IllegalTransition, match=f"cannot cancel operation {job_id}: it is done already"):
            await cancel_operation(conn, job_id)


async def test_done_has_its_result_and_all_of_its_progress_and_error_its_text(conn: asyncpg.Connection) -> None:
    done = await begun(conn)
    failed = await begun(conn)
    async with system(conn):
        await set_progress(conn, failed, 1, 30)
        assert await mark_done(conn, [(done, 1, '{"id": 42}')]) == {done}
        assert await mark_error(conn, [failed], "The file is no CSV.") == {failed}

    end = await look(conn, done)
    assert (end.status, end.progress, end.result, end.error) == (DONE, 100, {"id": 42}, None)
    end = await look(conn, failed)
    assert (end.status, end.progress, end.result, end.error) == (ERROR, 30, None, "The file is no CSV.")


async def test_a_batch_moves_what_can_be_moved(conn: asyncpg.Connection) -> None:
    first, second, third = await begun(conn), await begun(conn), await started(conn)
    async with system(conn):
        assert await mark_done(conn, []) == set()
        assert await mark_done(conn, [(third, 1, "1"), (second, 1, None), (first, 1, "1")]) == {first, second}
        assert await mark_error(conn, [], "no") == set()
        assert await mark_error(conn, [first, third], "no") == {third}


@pytest.mark.parametrize("length", [MAX_ERROR, MAX_ERROR + 1, 100_000])
async def test_an_errors_text_is_cut_at_2000_characters(conn: asyncpg.Connection, length: int) -> None:
    job_id = await begun(conn)
    async with system(conn):
        await mark_error(conn, [job_id], "é" * length)
    error = (await look(conn, job_id)).error
    assert error is not None
    assert len(error) == MAX_ERROR
    assert error.endswith("é" if length == MAX_ERROR else "é…")


# --- the fence ---


@pytest.mark.parametrize("move", [to_processing, to_progress, to_done], ids=lambda move: move.__name__)
async def test_an_earlier_attempt_changes_nothing_any_more(conn: asyncpg.Connection, schema: str, move: Move) -> None:
    job_id = await begun(conn, fence=2)
    before = await raw(conn, schema, job_id)
    async with system(conn):
        assert not await move(conn, job_id)
    assert await raw(conn, schema, job_id) == before


async def test_an_attempt_that_has_not_begun_tells_no_progress_and_no_end(conn: asyncpg.Connection) -> None:
    job_id = await begun(conn)
    async with system(conn):
        with pytest.raises(IllegalTransition):
            await set_progress(conn, job_id, 2, 1)
        assert await mark_done(conn, [(job_id, 2, None)]) == set()


async def test_progress_never_goes_back_within_an_attempt_and_starts_over_with_the_next(
    conn: asyncpg.Connection,
) -> None:
    job_id = await begun(conn)

    async def after(move: Awaitable[Any]) -> int:
        await move
        return (await get_operation(conn, job_id)).progress

    async with system(conn):
        assert await after(set_progress(conn, job_id, 1, 60)) == 60
        assert await after(set_progress(conn, job_id, 1, 40)) == 60
        assert await after(mark_processing(conn, job_id, 1, 10)) == 60
        assert await after(mark_processing(conn, job_id, 2, 5)) == 5
        assert await after(set_progress(conn, job_id, 2, 20)) == 20
        assert await after(mark_processing(conn, job_id, 3)) == 0


async def test_progress_beyond_its_range_is_refused_by_the_table(conn: asyncpg.Connection) -> None:
    job_id = await begun(conn)
    async with system(conn):
        with pytest.raises(asyncpg.CheckViolationError):
            await set_progress(conn, job_id, 1, 101)
    async with system(conn):
        with pytest.raises(asyncpg.CheckViolationError):
            await mark_processing(conn, job_id, 2, -1)


async def test_progress_that_does_not_move_is_news_all_the_same(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await begun(conn)
    await aged(conn, schema, job_id)
    before = await look(conn, job_id)
    async with system(conn):
        await set_progress(conn, job_id, 1, 0)
        assert await expire(conn, after=EXPIRY) == []
    after = await look(conn, job_id)
    assert (after.progress, after.version) == (0, before.version + 1)
    assert after.updated_at > before.updated_at


async def test_each_change_is_told_once_at_its_commit(conn: asyncpg.Connection, connect: Connect) -> None:
    ear = await Ear.on(await connect(), operations.channel(None))
    job_id = await started(conn)
    async with system(conn):
        await mark_processing(conn, job_id, 1)
    assert await ear.heard(conn) == [str(job_id)]
    async with system(conn):
        await set_progress(conn, job_id, 1, 10)
    async with system(conn):
        await mark_done(conn, [(job_id, 1, None)])
    assert await ear.heard(conn) == [str(job_id)] * 2
    async with system(conn):
        assert not await to_error(conn, job_id)
    assert await ear.heard(conn) == []


# --- numbers at their end ---


async def set_numbers(conn: asyncpg.Connection, schema: str, job_id: UUID, **numbers: int) -> None:
    async with system(conn):
        for column, number in numbers.items():
            await conn.execute(f"UPDATE {schema}.operations SET {column} = $2 WHERE job_id = $1", job_id, number)


@pytest.mark.parametrize("version", [LAST_NUMBER, -(2**31)])
@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
async def test_a_version_at_its_end_keeps_no_move_from_being_made(
    conn: asyncpg.Connection, schema: str, move: Move, version: int
) -> None:
    job_id = await begun(conn)
    await set_numbers(conn, schema, job_id, version=version)
    async with system(conn):
        assert await move(conn, job_id)
    after = (await look(conn, job_id)).version
    assert after == (1 if version == LAST_NUMBER else 0)
    assert is_newer(after, version)


async def test_an_operation_whose_version_is_at_its_end_keeps_none_from_expiring(
    conn: asyncpg.Connection, schema: str
) -> None:
    odd, other = await begun(conn), await begun(conn)
    for job_id in (odd, other):
        await aged(conn, schema, job_id)
    await set_numbers(conn, schema, odd, version=LAST_NUMBER)
    async with system(conn):
        assert set(await expire(conn, after=EXPIRY)) == {odd, other}


def test_of_two_versions_the_later_one_is_newer_also_across_the_end() -> None:
    later = [(2, 1), (LAST_NUMBER, LAST_NUMBER - 1), (1, LAST_NUMBER), (5, LAST_NUMBER - 5), (1, 0), (0, -(2**31))]
    for version, known in later:
        assert is_newer(version, known), (version, known)
        assert not is_newer(known, version), (version, known)
    assert not is_newer(7, 7)


@pytest.mark.parametrize(
    ("earlier", "later"), [(1, 2), (LAST_NUMBER - 1, LAST_NUMBER), (LAST_NUMBER, 1), (LAST_NUMBER - 3, 2), (-2, -1)]
)
async def test_the_later_attempt_has_the_operation_also_when_the_jobs_fence_has_started_over(
    conn: asyncpg.Connection, schema: str, earlier: int, later: int
) -> None:
    job_id = await begun(conn)
    await set_numbers(conn, schema, job_id, fence=earlier)
    async with system(conn):
        await set_progress(conn, job_id, earlier, 40)
        await mark_processing(conn, job_id, later)
        with pytest.raises(IllegalTransition):
            await mark_processing(conn, job_id, earlier)
        with pytest.raises(IllegalTransition):
            await set_progress(conn, job_id, earlier, 60)
    assert (await look(conn, job_id)).progress == 0


@pytest.mark.parametrize("fence", [1, 2**30, 2**30 + 1, LAST_NUMBER])
async def test_an_operation_that_has_not_begun_is_any_attempts(conn: asyncpg.Connection, fence: int) -> None:
    job_id = await started(conn)
    async with system(conn):
        await mark_processing(conn, job_id, fence)
        await set_progress(conn, job_id, fence, 5)
    assert (await look(conn, job_id)).status is PROCESSING


# --- two moves at once ---


async def job_and_operation_done(conn: asyncpg.Connection, job_id: UUID) -> bool:
    """Completes job and operation, as a worker does."""
    if not await complete(conn, WORKER, [Completion(job_id, 1)]):
        return False
    return await to_done(conn, job_id)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (to_done, to_error, DONE),
        (to_error, to_done, ERROR),
        (to_done, to_progress, DONE),
        (to_error, to_processing, ERROR),
        (to_done, to_cancelled, DONE),
        (to_cancelled, to_done, ERROR),
        (job_and_operation_done, to_cancelled, DONE),
        (to_cancelled, job_and_operation_done, ERROR),
        (to_cancelled, to_cancelled, ERROR),
        (to_error, to_cancelled, ERROR),
    ],
)
async def test_of_two_racing_moves_one_wins_and_the_other_learns_it(
    conn: asyncpg.Connection, connect: Connect, first: Move, second: Move, status: OperationStatus
) -> None:
    job_id = await begun(conn)
    other, observer = await connect(), await connect()

    async def loser() -> bool:
        async with system(other):
            return await second(other, job_id)

    async with asyncio.TaskGroup() as tasks, system(conn):
        assert await first(conn, job_id)
        racing = tasks.create_task(loser())
        await blocked(observer, other)
    assert not racing.result()
    end = await look(conn, job_id)
    assert end.status is status
    assert end.version == 3  # it began, and it ended


@pytest.mark.parametrize(("first", "second"), [(to_progress, to_done), (to_done, to_done)])
async def test_when_the_first_move_is_rolled_back_the_second_is_made(
    conn: asyncpg.Connection, connect: Connect, first: Move, second: Move
) -> None:
    job_id = await begun(conn)
    other, observer = await connect(), await connect()

    async def winner() -> bool:
        async with system(other):
            return await second(other, job_id)

    async with asyncio.TaskGroup() as tasks:
        transaction = conn.transaction()
        await transaction.start()
        async with system(conn):
            assert await first(conn, job_id)
        racing = tasks.create_task(winner())
        await blocked(observer, other)
        await transaction.rollback()
    assert racing.result()
    assert (await look(conn, job_id)).version == 3


async def test_of_two_attempts_at_once_the_later_one_has_the_operation(
    conn: asyncpg.Connection, connect: Connect
) -> None:
    job_id = await begun(conn)
    other, observer = await connect(), await connect()

    async def late() -> bool:
        async with system(other):
            return await to_progress(other, job_id)

    async with asyncio.TaskGroup() as tasks, system(conn):
        await mark_processing(conn, job_id, 2)
        racing = tasks.create_task(late())
        await blocked(observer, other)
    assert not racing.result()
    assert (await look(conn, job_id)).progress == 0


# --- starting ---


async def test_an_operation_and_its_job_have_one_id_and_start_together(conn: asyncpg.Connection) -> None:
    job_id = await start(conn, JOB, organization_id=7, created_by="ada")
    assert (await get_job(conn, job_id)).job_type == "operation.autoplan"
    row = await look(conn, job_id)
    assert (row.job_id, row.organization_id, row.kind, row.created_by) == (job_id, "7", "autoplan", "ada")
    assert (row.status, row.progress, row.result, row.error, row.version) == (PENDING, 0, None, None, 1)
    assert row.created_at == row.updated_at


async def count(conn: asyncpg.Connection, schema: str) -> tuple[int, int]:
    """How many jobs and operations there are."""
    async with system(conn):
        [row] = await conn.fetch(
            f"SELECT (SELECT count(*) FROM {schema}.jobs), (SELECT count(*) FROM {schema}.operations)"
        )
    return row[0], row[1]


async def test_a_rollback_takes_both(conn: asyncpg.Connection, schema: str) -> None:
    transaction = conn.transaction()
    await transaction.start()
    await started(conn)
    async with tenant(conn, ORG):
        await started(conn)
    assert await count(conn, schema) == (2, 2)
    await transaction.rollback()
    assert await count(conn, schema) == (0, 0)


async def test_where_the_row_is_refused_the_job_is_not_there_either(conn: asyncpg.Connection, schema: str) -> None:
    """Without a transaction of the caller's, and within one that goes on."""
    with pytest.raises(asyncpg.PostgresError):
        await start(conn, JOB, organization_id=ORG, created_by=NO_TEXT)
    async with conn.transaction():
        with pytest.raises(asyncpg.PostgresError):
            await start(conn, JOB, organization_id=ORG, created_by=NO_TEXT)
        assert await conn.fetchval(operations.CURRENT_TENANT) == ""
        await started(conn)
    assert await count(conn, schema) == (1, 1)


async def test_within_a_tenants_transaction_the_organization_is_known(conn: asyncpg.Connection) -> None:
    async with tenant(conn, ORG):
        ids = [await start(conn, JOB, organization_id=organization) for organization in (None, ORG, 7)]
    assert [(await look(conn, job_id)).organization_id for job_id in ids] == [ORG] * 3


async def test_the_system_starts_for_whom_it_names(conn: asyncpg.Connection) -> None:
    async with system(conn):
        job_id = await started(conn)
        assert await conn.fetchval(operations.CURRENT_TENANT) == "0"
    assert (await look(conn, job_id)).organization_id == ORG


async def test_without_a_tenant_an_organization_has_to_be_named(conn: asyncpg.Connection, schema: str) -> None:
    with pytest.raises(TenantError, match="nobody said for which organization; pass organization_id"):
        await start(conn, JOB, organization_id=None)
    with pytest.raises(TenantError, match="nobody said"):
        async with system(conn):
            await start(conn, JOB, organization_id=None)
    assert await count(conn, schema) == (0, 0)


async def test_a_tenant_starts_nothing_for_another_organization(conn: asyncpg.Connection, schema: str) -> None:
    async with tenant(conn, ORG):
        with pytest.raises(TenantError, match="for another organization than the transaction's"):
            await started(conn, organization="8")
    assert await count(conn, schema) == (0, 0)


async def test_a_start_in_a_transaction_without_a_tenant_leaves_it_without_one(conn: asyncpg.Connection) -> None:
    async with conn.transaction():
        await started(conn)
        assert await conn.fetchval(operations.CURRENT_TENANT) == ""


async def test_an_idempotency_key_belongs_to_an_organization(conn: asyncpg.Connection, schema: str) -> None:
    keyed = JOB._replace(idempotency_key="upload-1")
    first = await started(conn, keyed)
    assert await started(conn, keyed) == first
    other = await started(conn, keyed, "8")
    assert other != first
    assert await started(conn, keyed, "8") == other
    assert await started(conn, keyed._replace(job_type="operation.import")) not in (first, other)
    assert await count(conn, schema) == (3, 3)
    assert [(await look(conn, job_id)).organization_id for job_id in (first, other)] == ["7", "8"]


async def test_a_key_cannot_be_made_to_be_another_organizations(conn: asyncpg.Connection) -> None:
    first = await started(conn, JOB._replace(idempotency_key='b", "c'), "a")
    assert await started(conn, JOB._replace(idempotency_key="c"), 'a", "b') != first


async def test_a_taken_key_changes_nothing_of_the_operation_that_has_it(conn: asyncpg.Connection, schema: str) -> None:
    keyed = JOB._replace(idempotency_key="k")
    job_id = await started(conn, keyed)
    async with system(conn):
        await mark_processing(conn, job_id, 1)
        await mark_done(conn, [(job_id, 1, "1")])
    before = await raw(conn, schema, job_id)
    assert await start(conn, keyed, organization_id=ORG, created_by="somebody else") == job_id
    assert await raw(conn, schema, job_id) == before


async def test_two_starts_with_one_key_at_once_are_one_operation(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    keyed = JOB._replace(idempotency_key="k")
    other, observer = await connect(), await connect()
    async with asyncio.TaskGroup() as tasks, conn.transaction():
        first = await started(conn, keyed)
        racing = tasks.create_task(started(other, keyed))
        await blocked(observer, other)
    assert racing.result() == first
    assert await count(conn, schema) == (1, 1)


async def test_a_key_that_is_too_long_with_its_organization_is_refused(conn: asyncpg.Connection, schema: str) -> None:
    with pytest.raises(EnqueueError, match="the limit is 1,024"):
        await started(conn, JOB._replace(idempotency_key="k" * 1_024))
    assert await count(conn, schema) == (0, 0)


# --- looking ---


async def test_a_page_goes_on_where_the_one_before_ended(conn: asyncpg.Connection, schema: str) -> None:
    async with conn.transaction():  # all of one moment: the id decides
        ids = [await started(conn) for _ in range(5)]
        await started(conn, organization="8")
    await aged(conn, schema, ids[0])
    pages: list[list[UUID]] = []
    before = None
    async with tenant(conn, ORG):
        for _ in range(3):
            page = await list_operations(conn, ORG, before=before, limit=2)
            pages.append([row.job_id for row in page])
            before = Cursor(page[-1].created_at, page[-1].job_id)
        assert await list_operations(conn, ORG, before=before, limit=2) == []
    assert pages == [[ids[4], ids[3]], [ids[2], ids[1]], [ids[0]]]


async def test_a_list_can_be_narrowed(conn: asyncpg.Connection) -> None:
    plan = await started(conn)
    backup = await started(conn, JOB._replace(job_type="operation.backup"))
    async with system(conn):
        await mark_error(conn, [backup], "no")
        rows = [
            await list_operations(conn, ORG, kind="autoplan"),
            await list_operations(conn, ORG, status=ERROR),
            await list_operations(conn, ORG, kind="autoplan", status=ERROR),
            await list_operations(conn, 8),
        ]
    assert [[row.job_id for row in found] for found in rows] == [[plan], [backup], [], []]


@pytest.mark.parametrize("organization", ["", "0", 0, None, True])
async def test_a_list_is_one_organizations(conn: asyncpg.Connection, organization: Any) -> None:
    async with system(conn):
        with pytest.raises(TenantError):
            await list_operations(conn, organization)


# --- cancelling ---


async def test_a_pending_operation_is_cancelled_with_its_job(conn: asyncpg.Connection, connect: Connect) -> None:
    job_id = await started(conn)
    ear = await Ear.on(await connect(), cancel_channel(None))
    async with tenant(conn, ORG):
        operation = await cancel_operation(conn, job_id)
    assert (operation.status, operation.error) == (ERROR, CANCELLED)
    assert await look(conn, job_id) == operation
    assert (await get_job(conn, job_id)).status is JobStatus.CANCELLED
    assert await ear.heard(conn) == []  # nobody runs it


async def test_a_running_operations_worker_is_told_and_its_attempt_ends_nothing(
    conn: asyncpg.Connection, connect: Connect
) -> None:
    job_id = await begun(conn)
    ear = await Ear.on(await connect(), cancel_channel(None))
    async with tenant(conn, ORG):
        await cancel_operation(conn, job_id)
    assert await ear.heard(conn) == [str(job_id)]
    async with system(conn):
        assert not await job_and_operation_done(conn, job_id)
    assert (await look(conn, job_id)).error == CANCELLED


async def test_a_cancellation_that_is_rolled_back_cancels_neither(conn: asyncpg.Connection) -> None:
    job_id = await begun(conn)
    transaction = conn.transaction()
    await transaction.start()
    async with tenant(conn, ORG):
        await cancel_operation(conn, job_id)
    await transaction.rollback()
    assert (await look(conn, job_id)).status is PROCESSING
    assert (await get_job(conn, job_id)).status is JobStatus.RUNNING


async def test_what_had_ended_is_not_cancelled_and_neither_is_its_job(conn: asyncpg.Connection, schema: str) -> None:
    """Should the two ever disagree: the exception that says so undoes what was done to the job."""
    job_id = await begun(conn)
    async with system(conn):
        await to_done(conn, job_id)
    async with tenant(conn, ORG):
        with pytest.raises(IllegalTransition, match="it is done already"):
            await cancel_operation(conn, job_id)
    assert (await get_job(conn, job_id)).status is JobStatus.RUNNING


async def test_a_job_that_has_no_operation_is_not_cancelled_as_one(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema)
    async with system(conn):
        with pytest.raises(OperationNotFound):
            await cancel_operation(conn, job_id)
    assert (await get_job(conn, job_id)).status is JobStatus.PENDING


# --- expiry ---


async def test_what_is_open_without_news_expires_with_its_job(conn: asyncpg.Connection, schema: str) -> None:
    ids = {"pending": await started(conn)}
    [_] = await claim(conn, WORKER, "default", 1, [None] * 4)  # taken, but its attempt has not begun
    ids |= {"processing": await begun(conn), "young": await begun(conn), "done": await begun(conn)}
    async with system(conn):
        await to_done(conn, ids["done"])
    for name in ("pending", "processing", "done"):
        await aged(conn, schema, ids[name])

    async with system(conn):
        assert set(await expire(conn, after=EXPIRY)) == {ids["pending"], ids["processing"]}
        assert await expire(conn, after=EXPIRY) == []

    for name in ("pending", "processing"):
        end = await look(conn, ids[name])
        assert (end.status, end.error) == (ERROR, INTERRUPTED)
        assert (await get_job(conn, ids[name])).status is JobStatus.CANCELLED
    assert (await look(conn, ids["young"])).status is PROCESSING
    assert (await get_job(conn, ids["young"])).status is JobStatus.RUNNING
    assert (await look(conn, ids["done"])).status is DONE


async def test_how_long_news_may_be_missing_is_a_parameter(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await begun(conn)
    await aged(conn, schema, job_id, timedelta(minutes=10))
    async with system(conn):
        assert await expire(conn, after=timedelta(minutes=11)) == []
        assert await expire(conn, after=timedelta(minutes=9)) == [job_id]


async def test_one_step_expires_the_longest_silent_up_to_its_limit(conn: asyncpg.Connection, schema: str) -> None:
    ids = [await started(conn) for _ in range(3)]
    for n, job_id in enumerate(ids):
        await aged(conn, schema, job_id, OLD + timedelta(minutes=n))
    async with system(conn):
        assert set(await expire(conn, after=EXPIRY, limit=2)) == {ids[2], ids[1]}
        assert await expire(conn, after=EXPIRY, limit=2) == [ids[0]]


async def test_an_operation_whose_job_is_gone_expires(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await begun(conn)
    await conn.execute(f"DELETE FROM {schema}.jobs")
    await aged(conn, schema, job_id)
    async with system(conn):
        assert await expire(conn, after=EXPIRY) == [job_id]
    assert (await look(conn, job_id)).error == INTERRUPTED


async def test_a_worker_that_still_runs_what_expired_is_told(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    job_id = await begun(conn)
    await aged(conn, schema, job_id)
    ear = await Ear.on(await connect(), cancel_channel(None))
    async with system(conn):
        await expire(conn, after=EXPIRY)
    assert await ear.heard(conn) == [str(job_id)]
    async with system(conn):
        assert not await job_and_operation_done(conn, job_id)


async def test_a_job_that_is_being_ended_keeps_its_operation_from_expiring(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    job_id = await begun(conn)
    await aged(conn, schema, job_id)
    other = await connect()
    async with system(other):
        assert await job_and_operation_done(other, job_id)
        async with system(conn):
            assert await expire(conn, after=EXPIRY) == []  # and does not wait for it
    assert (await look(conn, job_id)).status is DONE
    assert (await get_job(conn, job_id)).status is JobStatus.COMPLETED


async def test_a_completion_that_comes_after_the_expiry_changes_nothing(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    job_id = await begun(conn)
    await aged(conn, schema, job_id)
    other, observer = await connect(), await connect()

    async def late() -> bool:
        async with system(other):
            return await job_and_operation_done(other, job_id)

    async with asyncio.TaskGroup() as tasks, system(conn):
        assert await expire(conn, after=EXPIRY) == [job_id]
        racing = tasks.create_task(late())
        await blocked(observer, other)
    assert not racing.result()
    assert (await look(conn, job_id)).error == INTERRUPTED
    assert (await get_job(conn, job_id)).status is JobStatus.CANCELLED


async def test_progress_that_comes_in_between_keeps_an_operation_and_its_job(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    """The expiry has seen the old row, and waits for the new one."""
    job_id = await begun(conn)
    await aged(conn, schema, job_id)
    other, observer = await connect(), await connect()

    async def expiry() -> list[UUID]:
        async with system(other):
            return await expire(other, after=EXPIRY)

    async with asyncio.TaskGroup() as tasks, system(conn):
        await set_progress(conn, job_id, 1, 10)
        racing = tasks.create_task(expiry())
        await blocked(observer, other)
    assert racing.result() == []
    assert (await look(conn, job_id)).status is PROCESSING
    assert (await get_job(conn, job_id)).status is JobStatus.RUNNING


async def test_progress_that_comes_after_the_expiry_is_refused(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    job_id = await begun(conn)
    await aged(conn, schema, job_id)
    other, observer = await connect(), await connect()

    async def late() -> bool:
        async with system(other):
            return await to_progress(other, job_id)

    async with asyncio.TaskGroup() as tasks, system(conn):
        assert await expire(conn, after=EXPIRY) == [job_id]
        racing = tasks.create_task(late())
        await blocked(observer, other)
    assert not racing.result()
    assert (await look(conn, job_id)).progress == 0


async def test_an_expiry_and_a_cancellation_never_deadlock(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    """Both take the job first. Here the cancellation has it, and not yet the operation."""
    job_id = await begun(conn)
    await aged(conn, schema, job_id)
    other = await connect()
    async with system(other):
        await other.execute(f"SELECT FROM {schema}.jobs WHERE id = $1 FOR UPDATE", job_id)
        async with system(conn):
            assert await expire(conn, after=EXPIRY) == []
        assert await to_cancelled(other, job_id)
    assert (await look(conn, job_id)).error == CANCELLED


# --- pruning ---


async def test_what_ended_long_ago_is_deleted_once_its_job_is_gone(conn: asyncpg.Connection, schema: str) -> None:
    ids = [await begun(conn) for _ in range(4)]
    gone, kept_by_its_job, young, still_open = ids
    async with system(conn):
        await mark_done(conn, [(gone, 1, None), (young, 1, None)])
        await mark_error(conn, [kept_by_its_job], "no")
    for job_id in (gone, kept_by_its_job, still_open):
        await aged(conn, schema, job_id)
    await conn.execute(f"DELETE FROM {schema}.jobs WHERE id <> $1", kept_by_its_job)

    async with system(conn):
        assert await prune(conn, retention=timedelta(hours=4)) == 0
        assert await prune(conn, retention=timedelta(hours=2)) == 1
        left = {row.job_id for row in await list_operations(conn, ORG)}
    assert left == {kept_by_its_job, young, still_open}


async def test_one_step_prunes_up_to_its_limit(conn: asyncpg.Connection, schema: str) -> None:
    ids = [await begun(conn) for _ in range(3)]
    async with system(conn):
        await mark_error(conn, ids, "no")
    await conn.execute(f"DELETE FROM {schema}.jobs")
    for job_id in ids:
        await aged(conn, schema, job_id)
    async with system(conn):
        assert [await prune(conn, retention=timedelta(hours=2), limit=2) for _ in range(3)] == [2, 1, 0]


# --- whatever connection the caller has ---


class Opaque:
    """What the caller's own codecs make of a value; recado must never see one."""


def no_other(value: object) -> str:
    assert isinstance(value, Opaque)
    return "unused"


@pytest.fixture
async def codecs(conn: asyncpg.Connection) -> asyncpg.Connection:
    """A connection that takes and gives JSON and UUIDs as types of its own only."""
    for name in ("json", "jsonb", "uuid"):
        await conn.set_type_codec(name, schema="pg_catalog", encoder=no_other, decoder=lambda _: Opaque())
    return conn


async def test_what_services_call_passes_by_the_codecs_of_their_connections(
    codecs: asyncpg.Connection, connect: Connect
) -> None:
    plain = await connect()
    async with tenant(codecs, ORG):
        job_id = await started(codecs, JOB._replace(idempotency_key="k"))
        assert await started(codecs, JOB._replace(idempotency_key="k")) == job_id
    async with system(plain):
        await mark_processing(plain, job_id, 1)
        await mark_done(plain, [(job_id, 1, '{"a": 1}')])
    async with tenant(codecs, ORG):
        row = await get_operation(codecs, job_id)
        assert (row.job_id, row.result) == (job_id, {"a": 1})
        assert await list_operations(codecs, ORG) == [row]
        assert await list_operations(codecs, ORG, before=Cursor(row.created_at, job_id)) == []
        other = await started(codecs)
        cancelled = await cancel_operation(codecs, other)
    assert (cancelled.job_id, cancelled.status) == (other, ERROR)
    assert (await get_job(plain, other)).status is JobStatus.CANCELLED


async def test_a_systems_savepoint_leaves_the_transaction_around_it_its_time(conn: asyncpg.Connection) -> None:
    """A caller's transaction may rest for as long as the caller likes, before and after."""
    timeout = "SELECT current_setting('idle_in_transaction_session_timeout')"
    async with conn.transaction():
        before = await conn.fetchval(timeout)
        async with system(conn):
            pass
        assert await conn.fetchval(timeout) == before
    async with system(conn):
        assert await conn.fetchval(timeout) == "5s"
