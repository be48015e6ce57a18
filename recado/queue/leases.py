"""Holding on to running jobs, and taking over those whose worker is gone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from recado.queue.connections import Connection
from recado.queue.models import JobStatus
from recado.queue.statements import WOKEN, fill

DEFAULT_LEASE = 300.0
"""Seconds a claim holds without being renewed. Long enough that a server's restart passes by within it; a dead
process is noticed sooner, by its missing heartbeat."""

RENEWALS_PER_LEASE = 3
"""A renewal may fail twice in a row before the lease is gone."""

HEARTBEAT_INTERVAL = 10.0
"""Seconds between two signs of life of a worker process."""

MAX_SILENCE = 60.0
"""Seconds without a heartbeat after which a worker is taken for dead: six beats missed."""

MAX_RECLAIMS = 5
"""A job that has taken five workers down with it is a poison pill."""

ROWS_PER_STATEMENT = 1_000
"""Of any sweep: it holds few locks, and none for long."""

LEASE_LOST = "recado.errors.LeaseLost"
"""The error class that stands in ``job_errors`` for an attempt whose worker disappeared."""


@dataclass(frozen=True, slots=True)
class Reclaimed:
    """A job that was taken from a worker that disappeared: pending again, or dead."""

    id: UUID
    fence: int
    job_type: str
    queue: str
    status: JobStatus
    attempts: int
    max_attempts: int
    critical: bool
    reclaims: int


RENEW = """
UPDATE {schema}.jobs j SET locked_at = now()
FROM (SELECT $1::uuid AS worker_id, unnest((SELECT $2::uuid[])) AS id, unnest((SELECT $3::integer[])) AS fence) AS d
WHERE j.id = d.id AND j.fence = d.fence AND j.locked_by = d.worker_id
RETURNING j.id, j.fence
"""
"""By primary key and fenced, like finishing; :mod:`recado.queue.finishes` says why the batch has this shape."""

HELD = """
SELECT j.id, j.fence
FROM {schema}.jobs j,
     (SELECT $1::uuid AS worker_id, unnest((SELECT $2::uuid[])) AS id, unnest((SELECT $3::integer[])) AS fence) AS d
WHERE j.id = d.id AND j.fence = d.fence AND j.locked_by = d.worker_id
"""
"""Which leases still stand: reads only, so that asking every few seconds costs no dead rows."""

RECLAIM = (
    """
WITH changed AS (
    UPDATE {schema}.jobs
    SET status = CASE WHEN reclaims + 1 >= $1 THEN 'dead' ELSE 'pending' END,
        finished_at = CASE WHEN reclaims + 1 >= $1 THEN now() END,
        reclaims = least(reclaims + 1, 32767),
        last_error = 'the worker that ran the job disappeared (' || (reclaims + 1) || ' of ' || $1 || ')',
        locked_at = NULL, locked_by = NULL, updated_at = now()
    WHERE ctid = ANY (ARRAY(
        SELECT j.ctid FROM {schema}.jobs j
        WHERE j.status = 'running' AND NOT EXISTS (
            SELECT FROM {schema}.workers w
            WHERE w.id = j.locked_by
              AND w.heartbeat_at >= now() - w.silence
              AND j.locked_at >= now() - w.lease
        )
        ORDER BY j.locked_at LIMIT $2 FOR UPDATE OF j SKIP LOCKED
    ))
    RETURNING id, fence, job_type, queue, status, run_at, attempts, max_attempts, reclaims, critical,
        last_error
), logged AS (
    INSERT INTO {schema}.job_errors (job_id, fence, attempt, error_class, message)
    SELECT id, fence, least(attempts + 1, max_attempts), '"""
    + LEASE_LOST
    + """', last_error FROM changed
    ON CONFLICT DO NOTHING
), """
    + WOKEN
    + """
SELECT id, fence, job_type, queue, status, attempts, max_attempts, critical, reclaims, (SELECT count(*) FROM woken)
FROM changed
"""
)
"""Orphans: jobs that run without a worker whose heartbeat is fresh and whose lease, counted from its last renewal,
has not run out; both by what that worker itself has registered, since settings differ. No attempt is counted: the
handler did not fail, its worker did. A statement of its own, apart from the claim: ``pending OR stale`` in one would
keep the claim from its index. SKIP LOCKED: a row that is being finished right now is no orphan. ``least``: a row
inserted by hand with all the reclaims that a smallint holds must not keep the others from being taken over."""


async def renew(
    conn: Connection, worker_id: UUID, leases: Sequence[tuple[UUID, int]], *, schema: str | None = None
) -> set[tuple[UUID, int]]:
    """Renew leases, given as ``(job id, fence)``.

    Returns:
        Those that stand; what is missing was taken over, cancelled or finished.
    """
    leases = sorted(leases)
    rows = await conn.fetch(
        fill(RENEW, schema), worker_id, [job_id for job_id, _ in leases], [fence for _, fence in leases]
    )
    return {(row[0], row[1]) for row in rows}


async def held(
    conn: Connection, worker_id: UUID, leases: Sequence[tuple[UUID, int]], *, schema: str | None = None
) -> set[tuple[UUID, int]]:
    """Those of ``leases`` that still stand, without renewing them."""
    rows = await conn.fetch(
        fill(HELD, schema), worker_id, [job_id for job_id, _ in leases], [fence for _, fence in leases]
    )
    return {(row[0], row[1]) for row in rows}


async def reclaim(
    conn: Connection,
    *,
    max_reclaims: int = MAX_RECLAIMS,
    limit: int = ROWS_PER_STATEMENT,
    schema: str | None = None,
) -> list[Reclaimed]:
    """Take over jobs whose worker is gone, the longest silent first.

    Args:
        max_reclaims: how many lost workers make a job a poison pill, which is dead.
        limit: how many jobs at most.
    """
    rows = await conn.fetch(fill(RECLAIM, schema), max_reclaims, limit)
    return [
        Reclaimed(row[0], row[1], row[2], row[3], JobStatus(row[4]), row[5], row[6], row[7], row[8]) for row in rows
    ]
