"""Ending attempts: completed, failed, or given back.

Every statement here is fenced: it changes a job only while ``fence`` and ``locked_by`` are those of the
attempt that is being ended. A worker whose lease was taken over changes nothing and is told so, and a batch
that is repeated because its connection broke changes nothing twice. None of them asks for
``status = 'running'``: on fresh statistics, which say that no row is running, the planner then walks the whole
partial index for each id; 4,400 of 40,000 jobs finished in 60 s, without it 25,000 to 40,000 a second.

Batches come as arrays, and are joined in a way that keeps the planner at the primary key whatever it believes
about the table:

- ``unnest((SELECT $2::uuid[]))`` hides an array's length. Where it is known, 1,000 ids look dear enough for a
  sequential scan of a table of some 40,000 rows; and on statistics from before any job ran, for one whose every
  running row is compared with all 1,000: 1,300 ms a batch, hidden 7.
- ``worker_id`` is a column of the batch, so that ``locked_by`` is compared in the join. As a condition on the
  table alone it is taken for one that a single row fulfils, and a plan that was made while the table was new
  does the same as above until autovacuum has analyzed it: with 20,000 running jobs 2,050 ms a batch, so 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from recado.queue.connections import Connection
from recado.queue.models import JobStatus
from recado.queue.statements import BOUNDED, WOKEN, fill


class Completion(NamedTuple):
    """An attempt that ended well. ``result`` is a JSON text."""

    id: UUID
    fence: int
    result: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """An attempt that ended badly. ``wait`` is in seconds, ``run_time`` too; the texts are clean."""

    id: UUID
    fence: int
    wait: float
    discard: bool
    run_time: float
    error_class: str
    message: str = field(repr=False)
    traceback: str | None = field(repr=False)


@dataclass(frozen=True, slots=True)
class Release:
    """An attempt that does not count: given back at a stop (``wait`` is ``None``), or snoozed (seconds)."""

    id: UUID
    fence: int
    wait: float | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """What became of a job whose attempt failed."""

    id: UUID
    fence: int
    job_type: str
    queue: str
    status: JobStatus
    attempts: int
    max_attempts: int
    critical: bool


COMPLETE = """
UPDATE {schema}.jobs j
SET status = 'completed', result = d.result::jsonb, finished_at = now(), updated_at = now(),
    locked_at = NULL, locked_by = NULL
FROM (SELECT $1::uuid AS worker_id, unnest((SELECT $2::uuid[])) AS id, unnest((SELECT $3::integer[])) AS fence,
             unnest((SELECT $4::text[])) AS result) AS d
WHERE j.id = d.id AND j.fence = d.fence AND j.locked_by = d.worker_id
RETURNING j.id
"""
"""A batch, looked up by primary key. ``locked_by`` is cleared: that is what makes a repeat change nothing."""

COMPLETE_ONE = """
UPDATE {schema}.jobs
SET status = 'completed', result = $4::text::jsonb, finished_at = now(), updated_at = now(),
    locked_at = NULL, locked_by = NULL
WHERE id = $2 AND fence = $3 AND locked_by = $1
RETURNING id, set_config('idle_in_transaction_session_timeout', '5s', true)
"""
"""Inside a transactional handler's own transaction, with its writes. Only the commit is to follow: a worker that is
stopped right before it loses the row's lock, which would keep the job from being taken over. (The other bound of
:data:`~recado.queue.statements.BOUNDED` is not for the user's deferred constraints.)"""

FAIL = (
    """
WITH changed AS (
    UPDATE {schema}.jobs j
    SET status = CASE WHEN d.discard OR j.attempts + 1 >= j.max_attempts THEN 'dead' ELSE 'pending' END,
        finished_at = CASE WHEN d.discard OR j.attempts + 1 >= j.max_attempts THEN now() END,
        run_at = CASE WHEN d.discard OR j.attempts + 1 >= j.max_attempts THEN j.run_at
                      ELSE now() + make_interval(secs => d.wait) END,
        attempts = least(j.attempts + 1, j.max_attempts),
        last_error = d.error_class || ': ' || d.message,
        locked_at = NULL, locked_by = NULL, updated_at = now()
    FROM (SELECT $1::uuid AS worker_id, unnest((SELECT $2::uuid[])) AS id, unnest((SELECT $3::integer[])) AS fence,
                 unnest((SELECT $4::float8[])) AS wait, unnest((SELECT $5::boolean[])) AS discard,
                 unnest((SELECT $6::float8[])) AS run_time, unnest((SELECT $7::text[])) AS error_class,
                 unnest((SELECT $8::text[])) AS message, unnest((SELECT $9::text[])) AS traceback) AS d
    WHERE j.id = d.id AND j.fence = d.fence AND j.locked_by = d.worker_id
    RETURNING j.id, j.fence, j.job_type, j.queue, j.status, j.run_at, j.attempts, j.max_attempts,
              j.critical, d.run_time, d.error_class, d.message, d.traceback
), logged AS (
    INSERT INTO {schema}.job_errors
        (job_id, fence, attempt, worker_id, started_at, error_class, message, traceback)
    SELECT id, fence, attempts, $1, now() - make_interval(secs => run_time), error_class, message, traceback
    FROM changed
), """
    + WOKEN
    + """
SELECT id, fence, job_type, queue, status, attempts, max_attempts, critical, (SELECT count(*) FROM woken),
       """
    + BOUNDED
    + """
FROM changed
"""
)
"""Followed by the alerts, in one transaction; should its client fall silent in between, the server ends it and
with it the locks. The attempt is counted here, where it ended badly, and the row itself says whether it was the
last one. ``least``: a row inserted by hand with its attempts used up must not break the batch on the table's CHECK."""

RELEASE = (
    """
WITH changed AS (
    UPDATE {schema}.jobs j
    SET status = 'pending', locked_at = NULL, locked_by = NULL, updated_at = now(),
        run_at = CASE WHEN d.wait IS NULL THEN j.run_at ELSE now() + make_interval(secs => d.wait) END
    FROM (SELECT $1::uuid AS worker_id, unnest((SELECT $2::uuid[])) AS id, unnest((SELECT $3::integer[])) AS fence,
                 unnest((SELECT $4::float8[])) AS wait) AS d
    WHERE j.id = d.id AND j.fence = d.fence AND j.locked_by = d.worker_id
    RETURNING j.id, j.queue, j.status, j.run_at
), """
    + WOKEN
    + """
SELECT id, (SELECT count(*) FROM woken) FROM changed
"""
)
"""Without a wait ``run_at`` stays: what is given back keeps its place in the line."""


async def complete(
    conn: Connection, worker_id: UUID, done: Sequence[Completion], *, schema: str | None = None
) -> set[UUID]:
    """Complete a batch of attempts.

    Returns:
        The ids that were completed; what is missing had lost its lease.
    """
    done = sorted(done, key=_lock_order)
    rows = await conn.fetch(
        fill(COMPLETE, schema),
        worker_id,
        [d.id for d in done],
        [d.fence for d in done],
        [d.result for d in done],
    )
    return {row[0] for row in rows}


async def complete_one(conn: Connection, worker_id: UUID, done: Completion, *, schema: str | None = None) -> bool:
    """Complete an attempt within the transaction of the handler that ran it.

    Returns:
        Whether it was completed; if not, the lease was lost and the transaction has to be rolled back.
    """
    row = await conn.fetchrow(fill(COMPLETE_ONE, schema), worker_id, done.id, done.fence, done.result)
    return row is not None


async def fail(
    conn: Connection, worker_id: UUID, failures: Sequence[Failure], *, schema: str | None = None
) -> list[Failed]:
    """Count a batch of failed attempts: each job waits for its next attempt, or is dead.

    Returns:
        What became of the jobs; what is missing had lost its lease.
    """
    failures = sorted(failures, key=_lock_order)
    rows = await conn.fetch(
        fill(FAIL, schema),
        worker_id,
        [f.id for f in failures],
        [f.fence for f in failures],
        [f.wait for f in failures],
        [f.discard for f in failures],
        [f.run_time for f in failures],
        [f.error_class for f in failures],
        [f.message for f in failures],
        [f.traceback for f in failures],
    )
    return [Failed(row[0], row[1], row[2], row[3], JobStatus(row[4]), row[5], row[6], row[7]) for row in rows]


async def release(
    conn: Connection, worker_id: UUID, releases: Sequence[Release], *, schema: str | None = None
) -> set[UUID]:
    """Give a batch of attempts back without counting them.

    Returns:
        The ids that are pending again; what is missing had lost its lease.
    """
    releases = sorted(releases, key=_lock_order)
    rows = await conn.fetch(
        fill(RELEASE, schema),
        worker_id,
        [r.id for r in releases],
        [r.fence for r in releases],
        [r.wait for r in releases],
    )
    return {row[0] for row in rows}


def _lock_order(ending: Completion | Failure | Release) -> UUID:
    """Batches lock their rows in the order of the ids, so that two never wait for each other in a circle."""
    return ending.id
