"""Looking at jobs, and steering them by hand."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import asyncpg

from recado.errors import IllegalTransition, JobNotFound
from recado.queue.connections import Connection
from recado.queue.limits import check_before, check_id, check_limit, check_name, check_queue, check_status
from recado.queue.models import Job, JobError, JobStatus, read_json
from recado.queue.operations import CANCELLED, JOB_TYPE_PREFIX, mark_error, system
from recado.queue.statements import WOKEN, fill
from recado.queue.transactions import atomic

PAGE_SIZE = 100
"""Rows of a list unless the caller asks for more or fewer: a screenful or two."""

ROWS_PER_STATEMENT = 1_000
"""Of a bulk change: it holds few locks, and none for long."""

_COLUMNS = """
    id::text, job_type, queue, priority, payload::text, status, attempts, max_attempts, reclaims, critical, fence,
    run_at, locked_at, locked_by::text, last_error, idempotency_key, result::text, metadata::text, created_at,
    updated_at, finished_at
"""
"""What the caller's connection may have codecs of its own for is asked for as text, in all of this module."""

SELECT_JOB = f"SELECT {_COLUMNS} FROM {{schema}}.jobs WHERE id = $1"

SELECT_JOBS = f"""
SELECT {_COLUMNS} FROM {{schema}}.jobs j
WHERE ($1::text IS NULL OR status = $1)
  AND ($2::text IS NULL OR queue = $2)
  AND ($3::text IS NULL OR job_type = $3)
  AND id < coalesce($4::uuid, 'ffffffff-ffff-ffff-ffff-ffffffffffff')
ORDER BY j.id DESC LIMIT $5
"""
"""Newest first, since ids are in the order of time; a page goes on below the last id of the one before, so
that no page costs more than the first. ``coalesce`` and not ``OR``, which no index can look up: a cached plan
would walk to the page from the newest job on. ``j.id``, since ``id`` alone is the text that is selected."""

SELECT_ERRORS = """
SELECT fence, attempt, worker_id::text, started_at, ended_at, error_class, message, traceback
FROM {schema}.job_errors WHERE job_id = $1 ORDER BY fence
"""

DEAD_BY_ERROR = """
SELECT job_type, split_part(coalesce(last_error, ''), E'\\n', 1), count(*), max(finished_at), min(finished_at)
FROM {schema}.jobs WHERE status = 'dead'
GROUP BY 1, 2 ORDER BY 3 DESC, 1, 2 LIMIT $1
"""
"""By the first line of the last error; the partial index on dead jobs keeps it from the rest of the table."""

CANCEL = """
UPDATE {schema}.jobs
SET status = 'cancelled', fence = fence % 2147483647 + 1, finished_at = now(), updated_at = now(),
    locked_at = NULL, locked_by = NULL
WHERE id = $1 AND status IN ('pending', 'running')
RETURNING job_type, CASE WHEN fence > 1 THEN pg_notify('{schema}_cancel', id::text) END
"""
"""The fence moves, so that an attempt that is under way can no longer end the job; its worker is told by a
NOTIFY, and by its next look at its leases where that gets lost. A job that was never claimed (its fence is
1 only now) has nobody to be told. At its end the fence starts over, as in a claim."""

REQUEUE = (
    """
WITH changed AS (
    UPDATE {schema}.jobs
    SET status = 'pending', attempts = 0, reclaims = 0, run_at = now(), finished_at = NULL, result = NULL,
        updated_at = now()
    WHERE id = $1 AND status IN ('dead', 'cancelled', 'completed') AND job_type NOT LIKE 'operation.%'
    RETURNING id, queue, status, run_at
), """
    + WOKEN
    + """
SELECT id::text, (SELECT count(*) FROM woken) FROM changed
"""
)
"""All attempts anew, at once; what went wrong before stays in job_errors. The key is kept, so an enqueue with
it still finds this job. Not an operation's: its client was told of the end, and that is final."""

REQUEUE_DEAD = (
    """
WITH changed AS (
    UPDATE {schema}.jobs
    SET status = 'pending', attempts = 0, reclaims = 0, run_at = now(), finished_at = NULL, updated_at = now()
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {schema}.jobs j
        WHERE status = 'dead' AND finished_at < coalesce($3, 'infinity'::timestamptz)
          AND job_type NOT LIKE 'operation.%'
          AND ($1::text IS NULL OR job_type = $1) AND ($2::text IS NULL OR queue = $2)
        ORDER BY finished_at, j.id LIMIT $4 FOR UPDATE SKIP LOCKED
    ))
    RETURNING id, queue, status, run_at
), """
    + WOKEN
    + """
SELECT id::text, (SELECT count(*) FROM woken) FROM changed
"""
)
"""Locks and changes in one statement, so that it is right outside a transaction too. In the order of the index on
dead jobs: by ``id`` alone the planner may walk the primary key instead, past all that is not dead."""

NOW = "SELECT now()"

PAUSE = """
INSERT INTO {schema}.queues (name, paused_at) VALUES ($1, now())
ON CONFLICT (name) DO UPDATE SET paused_at = coalesce({schema}.queues.paused_at, excluded.paused_at)
"""

RESUME = """
UPDATE {schema}.queues SET paused_at = NULL WHERE name = $1
RETURNING pg_notify('{schema}', name)
"""
"""Always notified: it is rare, and workers that found the queue paused are asleep."""


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead jobs of one type that share the first line of their last error."""

    job_type: str
    error: str
    count: int
    newest: datetime | None
    oldest: datetime | None


async def get_job(conn: Connection, job_id: UUID, *, schema: str | None = None) -> Job:
    """The job with this id.

    Raises:
        InvalidArgument: ``job_id`` is no UUID.
        JobNotFound: there is none.
    """
    row = await conn.fetchrow(fill(SELECT_JOB, schema), check_id(job_id))
    if row is None:
        raise JobNotFound(f"cannot find job {job_id}: there is none with this id; it may have been pruned")
    return _job(row)


async def list_jobs(
    conn: Connection,
    *,
    status: JobStatus | None = None,
    queue: str | None = None,
    job_type: str | None = None,
    before: UUID | None = None,
    limit: int = PAGE_SIZE,
    schema: str | None = None,
) -> list[Job]:
    """Jobs, newest first.

    Args:
        before: the last id of the page before this one.

    Raises:
        InvalidArgument: a filter or the limit is none that could be; raised before any SQL.
    """
    rows = await conn.fetch(
        fill(SELECT_JOBS, schema),
        None if status is None else check_status(status, JobStatus),
        None if queue is None else check_name(queue, "queue"),
        None if job_type is None else check_name(job_type, "job type"),
        None if before is None else check_id(before),
        check_limit(limit),
    )
    return [_job(row) for row in rows]


async def list_errors(conn: Connection, job_id: UUID, *, schema: str | None = None) -> list[JobError]:
    """What went wrong with a job, oldest first; empty for one that never failed.

    Raises:
        InvalidArgument: ``job_id`` is no UUID.
    """
    rows = await conn.fetch(fill(SELECT_ERRORS, schema), check_id(job_id))
    return [JobError(job_id, row[0], row[1], _uuid(row[2]), *row[3:]) for row in rows]


async def dead_by_error(conn: Connection, *, limit: int = PAGE_SIZE, schema: str | None = None) -> list[DeadGroup]:
    """What died, grouped by job type and error, the most frequent first.

    Args:
        limit: of the groups.

    Raises:
        InvalidArgument: the limit is none that could be.
    """
    return [DeadGroup(*row) for row in await conn.fetch(fill(DEAD_BY_ERROR, schema), check_limit(limit))]


async def cancel(conn: Connection, job_id: UUID, *, schema: str | None = None) -> None:
    """Cancel a job that is pending or running.

    It is ``cancelled`` as soon as the caller's transaction commits. A handler that is running then gets a
    ``CancelledError``; a plain function in its thread cannot be interrupted, but what it returns is dropped.

    Raises:
        InvalidArgument: ``job_id`` is no UUID.
        JobNotFound: there is no such job.
        IllegalTransition: it had ended already.
    """
    check_id(job_id)
    async with atomic(conn):  # an operation ends with its job, whoever cancels it
        row = await conn.fetchrow(fill(CANCEL, schema), job_id)
        if row is None:
            job = await get_job(conn, job_id, schema=schema)
            raise IllegalTransition(
                f"cannot cancel job {job_id}: it is {job.status} already; requeue it if it should run again"
            )
        if row[0].startswith(JOB_TYPE_PREFIX):
            async with system(conn):
                await mark_error(conn, [job_id], CANCELLED, schema=schema)


async def requeue(conn: Connection, job_id: UUID, *, schema: str | None = None) -> None:
    """Run a job that is dead, cancelled or completed once more, with all its attempts.

    Raises:
        InvalidArgument: ``job_id`` is no UUID.
        JobNotFound: there is no such job.
        IllegalTransition: it is pending or running, or an operation's.
    """
    if not await conn.fetch(fill(REQUEUE, schema), check_id(job_id)):
        job = await get_job(conn, job_id, schema=schema)
        if job.job_type.startswith(JOB_TYPE_PREFIX):
            raise IllegalTransition(
                f"cannot requeue job {job_id}: it is an operation's, and its client was told how it ended; start "
                "another operation"
            )
        raise IllegalTransition(
            f"cannot requeue job {job_id}: it is {job.status} and will end by itself; cancel it first"
        )


async def requeue_dead(
    conn: Connection,
    *,
    job_type: str | None = None,
    queue: str | None = None,
    before: datetime | None = None,
    limit: int = ROWS_PER_STATEMENT,
    schema: str | None = None,
) -> list[UUID]:
    """Run dead jobs once more, those that died first before the others, at most ``limit`` of them.

    Args:
        before: only jobs that had died by then. Whoever calls it until nothing is left must pass one, as
            :func:`server_time` gives it: jobs that die again at once would keep it busy for ever.

    Returns:
        Their ids; as long as there are some, another call finds more. Jobs that another transaction is
        changing at the moment are passed over.

    Raises:
        InvalidArgument: a filter or the limit is none that could be; raised before any SQL.
    """
    changed = await conn.fetch(
        fill(REQUEUE_DEAD, schema),
        None if job_type is None else check_name(job_type, "job type"),
        None if queue is None else check_name(queue, "queue"),
        None if before is None else check_before(before),
        check_limit(limit),
    )
    return [UUID(row[0]) for row in changed]


async def server_time(conn: Connection) -> datetime:
    """Now, by the server's clock, which is the one that counts."""
    now: datetime = await conn.fetchval(NOW)
    return now


async def pause(conn: Connection, queue: str, *, schema: str | None = None) -> None:
    """Let no worker claim from ``queue`` any more; what is running runs on.

    Raises:
        EnqueueError: ``queue`` is no queue's name.
    """
    await conn.execute(fill(PAUSE, schema), check_queue(queue))


async def resume(conn: Connection, queue: str, *, schema: str | None = None) -> None:
    """Open a paused queue again, and wake the workers that sleep.

    Raises:
        EnqueueError: ``queue`` is no queue's name.
    """
    await conn.execute(fill(RESUME, schema), check_queue(queue))


def _job(row: asyncpg.Record) -> Job:
    columns = {name: row[name] for name in row.keys()}  # noqa: SIM118 - a Record iterates over its values
    for name in ("payload", "result", "metadata"):
        columns[name] = None if columns[name] is None else read_json(columns[name])
    for name in ("id", "locked_by"):
        columns[name] = _uuid(columns[name])
    return Job(**columns | {"status": JobStatus(columns["status"])})


def _uuid(text: str | None) -> UUID | None:
    return None if text is None else UUID(text)
