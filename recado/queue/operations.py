"""Operations: rows that a client polls while a long job runs, each organization its own.

An operation and its job have the same id and end together: every function here that moves one is called in the
transaction that moves the other. Jobs are always locked before operations, so that no two of them wait in a circle.

Who may see a row is for the database to say: row-level security is enabled and forced. :func:`tenant` says for whom a
transaction asks; the worker and operators work in :func:`system`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID

import asyncpg

from recado.errors import IllegalTransition, InvalidArgument, OperationNotFound, TenantError
from recado.queue.connections import Connection, Pool
from recado.queue.enqueue import insert_job
from recado.queue.limits import (
    check_before,
    check_id,
    check_idempotency_key,
    check_limit,
    check_name,
    check_status,
    id_text,
    shortened,
)
from recado.queue.models import NewJob, read_json
from recado.queue.statements import BOUNDED, fill, resolve_schema
from recado.queue.transactions import atomic

SYSTEM = "0"
"""The organization of recado itself, which sees all; nobody else's may have this id."""

JOB_TYPE_PREFIX = "operation."
"""Begins the job type of every operation; its kind follows. No other job type may begin so."""

MAX_ERROR = 2_000
"""Characters of an error's text: what a person reads at the end of a progress bar."""

MAX_ORGANIZATION = 256
"""Characters of an organization's id; a UUID has 36, and the index holds far more."""

PAGE_SIZE = 50
"""Operations of a page unless the caller asks for more or fewer: what a list on a screen shows."""

ROWS_PER_STATEMENT = 1_000
"""Of one expiry: it holds few locks, and none for long."""

RETENTION = timedelta(days=30)
"""How long operations are kept after their end: what a user may want to look up again."""

FAILED = "The operation failed. Please try again."
"""What a client is told of an exception: nothing. Its traceback is in ``job_errors``."""

CANCELLED = "The operation was cancelled."

INTERRUPTED = "The operation was interrupted before finishing. Please try again."

LAST_NUMBER = 2_147_483_647
"""What an integer column holds: a version, or a job's fence, that has come so far starts over at 1. No operation
changes so often; but a row may be written by hand, and one that cannot move would keep all others from expiring."""

OrganizationId: TypeAlias = str | int | UUID
"""Compared and stored as text."""


class OperationStatus(StrEnum):
    """``pending`` → ``processing`` → ``done`` or ``error``; what is cancelled or expires while it is pending becomes
    ``error`` at once. There is no other way, and none back."""

    PENDING = "pending"
    PROCESSING = "processing"
    DONE = "done"
    ERROR = "error"

    @property
    def ended(self) -> bool:
        return self in (OperationStatus.DONE, OperationStatus.ERROR)


@dataclass(frozen=True, slots=True)
class OperationRow:
    """An operation as its organization sees it."""

    job_id: UUID
    organization_id: str
    kind: str
    status: OperationStatus
    progress: int
    """0 to 100."""
    result: Any = field(repr=False)
    error: str | None = field(repr=False)
    created_by: str | None
    version: int
    """Moves with each change, and starts over at 1 behind the last that the column holds: see :func:`is_newer`."""
    created_at: datetime
    updated_at: datetime


class Cursor(NamedTuple):
    """Where a page of the list ends, and the next one goes on."""

    created_at: datetime
    job_id: UUID


class Started(NamedTuple):
    """Whose operation an attempt works on."""

    organization_id: str
    created_by: str | None


SET_TENANT = "SELECT set_config('app.current_org_id', $1, true)"
"""Ends with the transaction, so nothing of it stays behind in a pooler's connection; what stays is ``''``, which the
policy lets see nothing."""

SET_SYSTEM = f"SELECT set_config('app.current_org_id', '0', true), {BOUNDED}"
"""For recado's own short transactions: should their client fall silent, the server ends them and with them the locks
that a user's cancel would wait for."""

CURRENT_TENANT = "SELECT coalesce(current_setting('app.current_org_id', true), '')"

INSERT = """
INSERT INTO {schema}.operations (job_id, organization_id, kind, created_by) VALUES ($1::text::uuid, $2, $3, $4)
ON CONFLICT (job_id) DO NOTHING
"""
"""Nothing, when the idempotency key led to a job that is there already, and with it its operation."""

_CHANGED = """
RETURNING job_id, pg_notify('{schema}_operations', job_id::text)
"""
"""Whoever streams the operation is told at the commit. Not gated: an operation changes ten times a second at most."""

MARK_PROCESSING = """
UPDATE {schema}.operations
SET status = 'processing', fence = $2, version = version % 2147483647 + 1, updated_at = now(),
    progress = CASE WHEN fence = $2 THEN greatest(progress, $3) ELSE $3 END
WHERE job_id = $1 AND status NOT IN ('done', 'error')
  AND (fence = 0 OR ($2::bigint - fence + 2147483647) % 2147483647 < 1073741824)
RETURNING organization_id, created_by, pg_notify('{schema}_operations', job_id::text)
"""
"""The fence is the claim's, and moves with each attempt: from here on an earlier attempt changes nothing, and its
progress, which only a new attempt may take back, starts over. 0 is no attempt's; of two others the later is the one
that is less than half of a round ahead, since a job's fence starts over at its end: see :func:`is_newer`."""

PROGRESS = (
    """
UPDATE {schema}.operations
SET progress = greatest(progress, $3), version = version % 2147483647 + 1, updated_at = now()
WHERE job_id = $1 AND fence = $2 AND status NOT IN ('pending', 'done', 'error')
"""
    + _CHANGED
)
"""``updated_at`` moves also where the progress does not: any call is news, and keeps the operation from expiring.

Here and in the moves below the states are told by what they are not, which no index can look up: with ``status =
'processing'`` statistics that know of none lead through the index on it, past all that are processing, to find one."""

MARK_DONE = (
    """
UPDATE {schema}.operations o
SET status = 'done', progress = 100, result = d.result::jsonb, version = version % 2147483647 + 1, updated_at = now()
FROM unnest((SELECT $1::uuid[]), (SELECT $2::integer[]), (SELECT $3::text[])) AS d (id, fence, result)
WHERE o.job_id = d.id AND o.fence = d.fence AND o.status NOT IN ('pending', 'done', 'error')
"""
    + _CHANGED
)
"""In the transaction that completes the jobs. The arrays' length is hidden for the same reason as there."""

MARK_ERROR = (
    """
UPDATE {schema}.operations o
SET status = 'error', error = $2, version = version % 2147483647 + 1, updated_at = now()
WHERE job_id = ANY (ARRAY(SELECT unnest((SELECT $1::text[]::uuid[])))) AND status NOT IN ('done', 'error')
"""
    + _CHANGED
)
"""In the transaction in which the jobs die or are cancelled: their fences have decided who may. The ids as text, since
a service that cancels may have a codec of its own for uuid."""

_COLUMNS = """
    job_id::text, organization_id, kind, status, progress, result::text, error, created_by, version, created_at,
    updated_at
"""
"""As text what the caller's connection may have codecs of its own for."""

SELECT_OPERATION = f"SELECT {_COLUMNS} FROM {{schema}}.operations WHERE job_id = $1::text::uuid"

SELECT_OPERATIONS = f"""
SELECT {_COLUMNS} FROM {{schema}}.operations o
WHERE organization_id = $1
  AND ($2::text IS NULL OR kind = $2)
  AND ($3::text IS NULL OR status = $3)
  AND (o.created_at, o.job_id) < (coalesce($4, 'infinity'::timestamptz),
                                  coalesce($5::text::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
ORDER BY o.created_at DESC, o.job_id DESC LIMIT $6
"""
"""By the index of the organization, so that no page costs more than the first. The policy alone would not lead there:
it also lets the system in, which an index on organizations cannot look up."""

STALE = """
SELECT job_id FROM {schema}.operations
WHERE status = ANY ($3::text[]) AND created_at < now() - $1::interval AND updated_at < now() - $1::interval
ORDER BY updated_at LIMIT $2
"""
"""Without locks: those of the jobs come first. The condition on ``created_at`` is implied by the other, and leads into
the index; so does the array, where a list of constants is taken for most of a small table."""

LOCK_JOBS = """
SELECT id FROM {schema}.jobs WHERE id = ANY (ARRAY(SELECT unnest((SELECT $1::uuid[]))))
ORDER BY id FOR UPDATE SKIP LOCKED
"""
"""Whoever has one locked is about to end it, or somebody cancels it: that is news. The array's length is hidden, since
1,000 ids look dear enough for reading all of a table that was never analyzed."""

JOBS_THERE = "SELECT id FROM {schema}.jobs WHERE id = ANY (ARRAY(SELECT unnest((SELECT $1::uuid[]))))"

EXPIRE = (
    """
UPDATE {schema}.operations
SET status = 'error', error = $2, version = version % 2147483647 + 1, updated_at = now()
WHERE job_id = ANY ($1::uuid[]) AND status NOT IN ('done', 'error') AND updated_at < now() - $3::interval
"""
    + _CHANGED
)
"""Looks again, now that nobody can end the jobs: progress may have come in between."""

CANCEL_JOBS = """
UPDATE {schema}.jobs
SET status = 'cancelled', fence = fence % 2147483647 + 1, finished_at = now(), updated_at = now(),
    locked_at = NULL, locked_by = NULL
WHERE id = ANY (ARRAY(SELECT unnest((SELECT $1::text[]::uuid[])))) AND status IN ('pending', 'running')
RETURNING CASE WHEN fence > 1 THEN pg_notify('{schema}_cancel', id::text) END
"""
"""As ``admin.CANCEL``, for many."""

PRUNE = """
DELETE FROM {schema}.operations WHERE job_id = ANY (ARRAY(
    SELECT job_id FROM {schema}.operations o
    WHERE status = ANY ($3::text[]) AND created_at < now() - $1::interval AND updated_at < now() - $1::interval
      AND NOT EXISTS (SELECT FROM {schema}.jobs j WHERE j.id = o.job_id)
    ORDER BY created_at LIMIT $2
))
"""
"""Not before the job is gone: as long as it is there, its idempotency key leads here."""

OPEN = [OperationStatus.PENDING, OperationStatus.PROCESSING]
ENDED = [OperationStatus.DONE, OperationStatus.ERROR]


def channel(schema: str | None) -> str:
    """The NOTIFY channel on which an operation's id says that it has changed."""
    return f"{resolve_schema(schema)}_operations"


def is_newer(version: int, known: int) -> bool:
    """Whether ``version`` came after ``known``, though the numbers may have started over in between: the later of two
    is the one that is less than half of a round ahead (RFC 1982, section 3.2)."""
    return 0 < (version - known) % LAST_NUMBER <= LAST_NUMBER // 2


def check_organization(organization_id: OrganizationId) -> str:
    """The organization's id as text.

    Raises:
        TenantError: it is empty or ``'0'``, which see nothing and everything; or no text PostgreSQL could store.
    """
    text = id_text(organization_id)
    if not text:
        raise TenantError(
            f"cannot ask for organization {shortened(organization_id)}: it must be an id that is not empty; "
            "pass the one of the user who asks"
        )
    if text == SYSTEM:
        raise TenantError(
            "cannot ask for organization '0': that is the system, which sees all; give the organization another id, "
            "or use system() where everything is meant to be seen"
        )
    if len(text) > MAX_ORGANIZATION or "\0" in text or not text.isprintable():
        raise TenantError(
            f"cannot ask for organization {shortened(text)}: an id has at most {MAX_ORGANIZATION} printable "
            "characters; pass the one of the user who asks"
        )
    return text


@asynccontextmanager
async def tenant(where: Connection | Pool, organization_id: OrganizationId) -> AsyncIterator[Connection]:
    """A transaction that sees the operations of one organization, and no others.

    Within a transaction that is open already it is a savepoint, and what was set before is set again afterwards.

    Args:
        where: a connection, or a pool to take one from.

    Raises:
        TenantError: ``organization_id`` is none that a tenant can have.
    """
    text = check_organization(organization_id)
    async with _connection(where) as conn, _transaction(conn, SET_TENANT, text):
        yield conn


@asynccontextmanager
async def system(where: Connection | Pool) -> AsyncIterator[Connection]:
    """A transaction that sees the operations of all organizations: for upkeep and operators, never for a request.

    It must be short: a client that falls silent in it for five seconds is disconnected. Within a transaction that is
    open already it is a savepoint, which leaves that one its own time.
    """
    async with _connection(where) as conn:
        # SET LOCAL outlasts a savepoint: the limit would be that of the caller's own transaction ever after.
        setting = (SET_TENANT, SYSTEM) if conn.is_in_transaction() else (SET_SYSTEM,)
        async with _transaction(conn, *setting):
            yield conn


@asynccontextmanager
async def _connection(where: Connection | Pool) -> AsyncIterator[Connection]:
    if isinstance(where, asyncpg.Pool):
        async with where.acquire() as conn:
            yield conn
    else:
        yield where


@asynccontextmanager
async def _transaction(conn: Connection, setting: str, *args: str) -> AsyncIterator[None]:
    before = await conn.fetchval(CURRENT_TENANT) if conn.is_in_transaction() else None
    async with atomic(conn):
        await conn.execute(setting, *args)
        yield
        if before is not None:
            # SET LOCAL outlasts the savepoint. (Where it is rolled back, so is the setting.)
            await conn.execute(SET_TENANT, before)


async def start(
    conn: Connection,
    job: NewJob,
    *,
    organization_id: OrganizationId | None,
    created_by: str | None = None,
    schema: str | None = None,
) -> UUID:
    """Insert an operation and its job, in the caller's transaction.

    Args:
        job: its type is the operation's kind, behind :data:`JOB_TYPE_PREFIX`. Two organizations may use the same
            idempotency key.
        organization_id: whose it is; ``None`` is the tenant of the caller's transaction.
        created_by: who asked for it.

    Returns:
        The id of both; for an idempotency key that is taken, the id of the operation that has it.

    Raises:
        TenantError: no organization is named, or another than the transaction's.
    """
    async with atomic(conn):  # never one without the other
        current = await conn.fetchval(CURRENT_TENANT)
        if organization_id is None and current in ("", SYSTEM):
            raise TenantError(
                f"cannot start {job.job_type!r}: nobody said for which organization; pass organization_id, or start it "
                "within tenant()"
            )
        organization = check_organization(current if organization_id is None else organization_id)
        if current not in ("", SYSTEM, organization):
            raise TenantError(
                f"cannot start {job.job_type!r} for another organization than the transaction's; leave organization_id "
                "out, or start it outside of this tenant()"
            )
        if job.idempotency_key is not None:
            key = json.dumps([organization, job.idempotency_key], ensure_ascii=False)
            job = job._replace(idempotency_key=check_idempotency_key(key))
        if current == "":
            await conn.execute(SET_TENANT, organization)
        job_id = await insert_job(conn, job, schema=schema)
        kind = job.job_type.removeprefix(JOB_TYPE_PREFIX)
        await conn.execute(fill(INSERT, schema), str(job_id), organization, kind, created_by)
        if current == "":
            await conn.execute(SET_TENANT, "")
    return job_id


# --- moves; the caller has made the transaction the system's, and moves the job in it ---


async def mark_processing(
    conn: Connection, job_id: UUID, fence: int, progress: int = 0, *, schema: str | None = None
) -> Started:
    """An attempt begins: its job was claimed with this fence.

    Raises:
        IllegalTransition: the operation has ended, or a later attempt has begun.
        OperationNotFound: there is none.
    """
    row = await conn.fetchrow(fill(MARK_PROCESSING, schema), job_id, fence, progress)
    if row is None:
        raise await _refused(conn, job_id, "begin", schema)
    return Started(row[0], row[1])


async def set_progress(conn: Connection, job_id: UUID, fence: int, progress: int, *, schema: str | None = None) -> None:
    """Tell how far the attempt with this fence is; less than was told before changes nothing.

    Raises:
        IllegalTransition: the operation is not processing, or another attempt has begun.
        OperationNotFound: there is none.
    """
    if await conn.fetchrow(fill(PROGRESS, schema), job_id, fence, progress) is None:
        raise await _refused(conn, job_id, "go on with", schema)


async def mark_done(
    conn: Connection, done: Sequence[tuple[UUID, int, str | None]], *, schema: str | None = None
) -> set[UUID]:
    """Operations ended well, each given as its id, the attempt's fence, and the result as a JSON text.

    Returns:
        The ids of those that moved; what is missing was not processing, or not by that attempt.
    """
    ids, fences, results = zip(*sorted(done), strict=True) if done else ((), (), ())
    rows = await conn.fetch(fill(MARK_DONE, schema), list(ids), list(fences), list(results))
    return {row[0] for row in rows}


async def mark_error(conn: Connection, job_ids: Collection[UUID], text: str, *, schema: str | None = None) -> set[UUID]:
    """Operations ended badly.

    Args:
        text: what their clients are told.

    Returns:
        The ids of those that moved; what is missing had ended.
    """
    rows = await conn.fetch(fill(MARK_ERROR, schema), [str(job_id) for job_id in sorted(job_ids)], _cut(text))
    return {row[0] for row in rows}


async def expire(
    conn: Connection, *, after: timedelta, limit: int = ROWS_PER_STATEMENT, schema: str | None = None
) -> list[UUID]:
    """End what has been open without news for ``after``, and cancel its jobs.

    Returns:
        Their ids.
    """
    stale = [row[0] for row in await conn.fetch(fill(STALE, schema), after, limit, OPEN)]
    if not stale:
        return []
    locked = {row[0] for row in await conn.fetch(fill(LOCK_JOBS, schema), stale)}
    # An operation whose job is gone, by whosever hand, must end as well.
    there = {row[0] for row in await conn.fetch(fill(JOBS_THERE, schema), stale)}
    ids = [job_id for job_id in stale if job_id in locked or job_id not in there]
    expired = [row[0] for row in await conn.fetch(fill(EXPIRE, schema), ids, INTERRUPTED, after)]
    await conn.execute(fill(CANCEL_JOBS, schema), [str(job_id) for job_id in expired])
    return expired


async def prune(
    conn: Connection, *, retention: timedelta = RETENTION, limit: int = ROWS_PER_STATEMENT, schema: str | None = None
) -> int:
    """Delete operations that ended longer ago than ``retention`` and whose jobs are gone.

    Returns:
        How many there were; less than ``limit`` says that none is left.
    """
    tag = await conn.execute(fill(PRUNE, schema), retention, limit, ENDED)
    return int(tag.split()[-1])


# --- what a tenant sees and does ---


async def get_operation(conn: Connection, job_id: UUID, *, schema: str | None = None) -> OperationRow:
    """The operation with this id.

    Raises:
        InvalidArgument: ``job_id`` is no UUID.
        OperationNotFound: there is none, or it is another organization's: nobody is told which.
    """
    row = await conn.fetchrow(fill(SELECT_OPERATION, schema), str(check_id(job_id)))
    if row is None:
        raise _not_found(job_id)
    return _operation(row)


async def list_operations(
    conn: Connection,
    organization_id: OrganizationId,
    *,
    kind: str | None = None,
    status: OperationStatus | None = None,
    before: Cursor | None = None,
    limit: int = PAGE_SIZE,
    schema: str | None = None,
) -> list[OperationRow]:
    """An organization's operations, newest first.

    Args:
        before: the end of the page before this one.

    Raises:
        TenantError: ``organization_id`` is none that a tenant can have.
        InvalidArgument: a filter, ``before`` or the limit is none that could be; raised before any SQL.
    """
    created_at, job_id = (None, None) if before is None else _check_cursor(before)
    rows = await conn.fetch(
        fill(SELECT_OPERATIONS, schema),
        check_organization(organization_id),
        None if kind is None else check_name(kind, "kind"),
        None if status is None else check_status(status, OperationStatus),
        created_at,
        None if job_id is None else str(job_id),
        check_limit(limit),
    )
    return [_operation(row) for row in rows]


def _check_cursor(before: Cursor) -> Cursor:
    if not isinstance(before, tuple) or len(before) != len(Cursor._fields):
        raise InvalidArgument(
            f"cannot use {shortened(before)} as before: it is no Cursor; pass one, of the last operation's created_at "
            "and job_id"
        )
    return Cursor(check_before(before[0]), check_id(before[1]))


async def cancel_operation(conn: Connection, job_id: UUID, *, schema: str | None = None) -> OperationRow:
    """Cancel an operation and its job, in the tenant's or the system's transaction.

    Returns:
        The operation as it is then.

    Raises:
        InvalidArgument: ``job_id`` is no UUID.
        OperationNotFound: there is none that this tenant may see.
        IllegalTransition: it had ended already.
    """
    check_id(job_id)
    async with atomic(conn):
        await get_operation(conn, job_id, schema=schema)  # the jobs know no tenants
        # The job first, as everywhere; whoever is ending it at the moment is waited for, and has won.
        await conn.execute(fill(CANCEL_JOBS, schema), [str(job_id)])
        if not await mark_error(conn, [job_id], CANCELLED, schema=schema):
            raise await _refused(conn, job_id, "cancel", schema)
        return await get_operation(conn, job_id, schema=schema)


async def _refused(conn: Connection, job_id: UUID, what: str, schema: str | None) -> IllegalTransition:
    """Why a move was not made."""
    operation = await get_operation(conn, job_id, schema=schema)
    if operation.status.ended:
        reason = f"it is {operation.status} already"
    else:
        reason = f"it is {operation.status}, and not by this attempt"
    return IllegalTransition(f"cannot {what} operation {job_id}: {reason}; start another one if it is still wanted")


def _not_found(job_id: UUID) -> OperationNotFound:
    return OperationNotFound(f"cannot find operation {job_id}: there is none with this id; it may have been pruned")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_ERROR else f"{text[: MAX_ERROR - 1]}…"


def _operation(row: asyncpg.Record) -> OperationRow:
    return OperationRow(
        job_id=UUID(row[0]),
        organization_id=row[1],
        kind=row[2],
        status=OperationStatus(row[3]),
        progress=row[4],
        result=None if row[5] is None else read_json(row[5]),
        error=row[6],
        created_by=row[7],
        version=row[8],
        created_at=row[9],
        updated_at=row[10],
    )
