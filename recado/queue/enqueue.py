"""Putting jobs into the queue, in the caller's transaction.

Nothing here commits: a rollback takes the job with it, and the NOTIFY, which PostgreSQL sends at the
commit, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING
from uuid import UUID

from recado.queue.ids import new_id, new_ids
from recado.queue.models import NewJob
from recado.queue.statements import WOKEN, fill, resolve_schema

if TYPE_CHECKING:
    from recado.queue.connections import Connection

ROWS_PER_STATEMENT = 1_000
"""Of a bulk enqueue: large enough that the round trip vanishes, small enough to hold few locks at a time."""

INSERT = """
INSERT INTO {schema}.jobs AS j
    (id, job_type, queue, priority, payload, max_attempts, run_at, idempotency_key, metadata, critical)
VALUES ($1::text::uuid, $2, $3, $4, $5::text::jsonb, $6, coalesce($7, now()), $8, $9::text::jsonb, $10)
ON CONFLICT (job_type, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
RETURNING CASE
    WHEN j.run_at <= clock_timestamp() + interval '3 seconds'
         AND EXISTS (SELECT FROM {schema}.workers w WHERE j.queue = ANY (w.hungry_queues))
    THEN pg_notify('{schema}', j.queue)
END
"""
"""One row, and a NOTIFY only while a worker waits for one.

A transaction that notified commits under one database-wide lock, fsync included: 32 connections that
always notify commit 2,020 a second, that never do 5,250, gated 4,830. The gate looks 3 s ahead, beyond a
worker's poll, so that a job due sooner than that is known to a sleeping worker. ``::text::jsonb`` and
``::text::uuid`` pass by whatever codecs the caller has set on the connection.
"""

INSERT_MANY = (
    """
WITH changed AS (
    INSERT INTO {schema}.jobs
        (id, job_type, queue, priority, payload, max_attempts, run_at, idempotency_key, metadata, critical)
    SELECT id::uuid, job_type, queue, priority, payload::jsonb, max_attempts, coalesce(run_at, now()),
           idempotency_key, metadata::jsonb, critical
    FROM unnest($1::text[], $2::text[], $3::text[], $4::smallint[], $5::text[], $6::smallint[],
                $7::timestamptz[], $8::text[], $9::text[], $10::boolean[])
        AS n (id, job_type, queue, priority, payload, max_attempts, run_at, idempotency_key, metadata, critical)
    ON CONFLICT (job_type, idempotency_key) WHERE idempotency_key IS NOT NULL DO NOTHING
    RETURNING id, queue, status, run_at, idempotency_key
), """
    + WOKEN
    + """
SELECT ARRAY(SELECT id::text FROM changed WHERE idempotency_key IS NOT NULL), (SELECT count(*) FROM woken)
"""
)
"""Many rows in one statement, and one NOTIFY for each of their queues. Only the ids of rows with a key come
back: of the others the caller knows that they are in."""

COPY_FROM = 50
"""Jobs without a key from which on they go in by COPY. Fewer are faster in one INSERT, which needs no second statement
to notify: at 20 by an eighth; at 50 the two are level, at 100 COPY is faster by a quarter, at 1,000 by half."""

COPY_COLUMNS = ("id", "job_type", "queue", "priority", "payload", "max_attempts", "metadata", "critical")
"""What COPY writes, as text, so that the caller's codecs play no part. It takes 190,000 rows a second, where
INSERT_MANY takes 75,000 and a COPY of ready-made binary rows 220,000. It can neither look for keys nor mix given
times with the default, so keyed and scheduled jobs go by INSERT_MANY."""

WAKE = """
SELECT pg_notify('{schema}', queue) FROM unnest($1::text[]) AS q (queue)
WHERE EXISTS (SELECT FROM {schema}.workers w WHERE q.queue = ANY (w.hungry_queues))
"""
"""The gate for jobs that went in by COPY, which has no RETURNING. In the same transaction; where the caller has none,
a crash right between the two costs the wake-up, not the jobs."""

SELECT_BY_KEY = """
SELECT id::text FROM {schema}.jobs WHERE job_type = $1 AND idempotency_key = $2
"""
"""A statement of its own: within the INSERT's the snapshot could not see the row it ran into, when that row's
transaction committed only while the INSERT waited for it."""

SELECT_BY_KEYS = """
SELECT job_type, idempotency_key, id::text
FROM {schema}.jobs
JOIN unnest((SELECT $1::text[]), (SELECT $2::text[])) AS k (job_type, idempotency_key)
    USING (job_type, idempotency_key)
"""
"""The arrays' length is hidden from the planner, which would read a table of 40,000 rows as a whole for 1,000 keys:
8.3 ms, by the index 3.4."""


async def insert_job(conn: Connection, job: NewJob, *, schema: str | None = None) -> UUID:
    """Insert ``job``, or find the one that has its ``(job_type, idempotency_key)`` already.

    Returns:
        The id of the new job, or of the existing one, which stays as it is.

    Raises:
        asyncpg.SerializationError: under REPEATABLE READ or SERIALIZABLE, when the existing job was
            committed after the caller's snapshot; the transaction has to be repeated, as always there.
    """
    insert = fill(INSERT, schema)
    while True:
        job_id = new_id()
        inserted = await conn.fetchrow(
            insert,
            f"{job_id.int:032x}",  # quicker to write than with hyphens
            job.job_type,
            job.queue,
            job.priority,
            job.payload,
            job.max_attempts,
            job.run_at,
            job.idempotency_key,
            job.metadata,
            job.critical,
        )
        if inserted is not None:
            return job_id
        existing = await conn.fetchval(fill(SELECT_BY_KEY, schema), job.job_type, job.idempotency_key)
        if existing is not None:
            return UUID(existing)
        # The job that was in the way has been deleted between the two statements; now there is room.


async def insert_jobs(conn: Connection, jobs: Sequence[NewJob], *, schema: str | None = None) -> list[UUID]:
    """Insert many jobs: plain ones by COPY, those with a key or a time by INSERT, 1,000 rows a statement.

    Returns:
        Their ids, in the order of ``jobs``; for a duplicate, within ``jobs`` or in the table, the id of
        the job that has the key.

    Raises:
        asyncpg.SerializationError: as for :func:`insert_job`.
    """
    plain = [i for i, job in enumerate(jobs) if job.idempotency_key is None and job.run_at is None]
    if len(plain) < COPY_FROM:
        plain = []
    elif len(plain) == len(jobs):
        ids: list[UUID] = []
        await _copy(conn, jobs, ids, schema)
        return ids
    ids = new_ids(len(jobs))
    if plain:
        await _copy(conn, [jobs[i] for i in plain], [ids[i] for i in plain], schema)
    # In the order of their keys, so that two bulks with the same keys wait for each other instead of
    # deadlocking. The sort is stable and ids are made above: jobs without a key stay first in, first out.
    order = sorted(
        set(range(len(jobs))).difference(plain), key=lambda i: (jobs[i].job_type, jobs[i].idempotency_key or "", i)
    )
    for start in range(0, len(order), ROWS_PER_STATEMENT):
        await _insert_chunk(conn, jobs, ids, order[start : start + ROWS_PER_STATEMENT], schema)
    return ids


async def _copy(conn: Connection, jobs: Sequence[NewJob], ids: list[UUID], schema: str | None) -> None:
    """Copy jobs without a key or a time in, and wake who waits for them; ``ids`` is filled as far as it lacks some."""

    async def rows() -> AsyncIterator[bytes]:
        # While the server takes one chunk in, the next one is made.
        for start in range(0, len(jobs), ROWS_PER_STATEMENT):
            chunk = jobs[start : start + ROWS_PER_STATEMENT]
            ids.extend(new_ids(max(0, start + len(chunk) - len(ids))))
            yield "".join(map(_copy_row, ids[start : start + len(chunk)], chunk)).encode()

    await conn.copy_to_table(
        "jobs", schema_name=resolve_schema(schema), columns=COPY_COLUMNS, source=rows(), format="text"
    )
    await conn.execute(fill(WAKE, schema), sorted({job.queue for job in jobs}))


def _copy_row(job_id: UUID, job: NewJob) -> str:
    return (
        f"{job_id.int:032x}\t{_escaped(job.job_type)}\t{_escaped(job.queue)}\t{job.priority}\t{_escaped(job.payload)}\t"
        f"{job.max_attempts}\t{_escaped(job.metadata)}\t{job.critical}\n"
    )


def _escaped(text: str) -> str:
    """``text`` as a column of COPY's text format: what separates columns and rows, and the escape itself, escaped."""
    return text.replace("\\", "\\\\").replace("\t", "\\t").replace("\n", "\\n").replace("\r", "\\r")


async def _insert_chunk(
    conn: Connection, jobs: Sequence[NewJob], ids: list[UUID], chunk: list[int], schema: str | None
) -> None:
    """Insert the jobs at the indices ``chunk``; where a key was taken, put the existing id into ``ids``."""
    while chunk:
        rows = [jobs[i] for i in chunk]
        inserted = await conn.fetchval(
            fill(INSERT_MANY, schema),
            [str(ids[i]) for i in chunk],
            [job.job_type for job in rows],
            [job.queue for job in rows],
            [job.priority for job in rows],
            [job.payload for job in rows],
            [job.max_attempts for job in rows],
            [job.run_at for job in rows],
            [job.idempotency_key for job in rows],
            [job.metadata for job in rows],
            [job.critical for job in rows],
        )
        new = {UUID(text) for text in inserted}
        taken = [i for i in chunk if jobs[i].idempotency_key is not None and ids[i] not in new]
        if not taken:
            return
        found = await conn.fetch(
            fill(SELECT_BY_KEYS, schema),
            [jobs[i].job_type for i in taken],
            [jobs[i].idempotency_key for i in taken],
        )
        by_key = {(row[0], row[1]): UUID(row[2]) for row in found}
        chunk = []
        for i in taken:
            existing = by_key.get((jobs[i].job_type, str(jobs[i].idempotency_key)))
            if existing is None:
                chunk.append(i)  # deleted between the two statements: there is room now
            else:
                ids[i] = existing
