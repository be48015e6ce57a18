"""Taking jobs out of the queue: the claim, and the look that tells whether one is worth while."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from functools import partial
from operator import attrgetter
from uuid import UUID

import asyncpg

from recado.queue.connections import Connection
from recado.queue.models import ClaimedJob
from recado.queue.statements import WOKEN, fill

PRIORITIES = range(4)
"""0, most urgent, to 3: one lane of the claim for each."""

NO_FLOORS: Sequence[datetime | None] = (None,) * len(PRIORITIES)
"""Looks at all of every lane."""

_LANE = """
        SELECT ctid FROM (
            SELECT ctid FROM {schema}.jobs
            WHERE status = 'pending' AND queue = $2 AND priority = PRIORITY
              AND run_at <= now() AND run_at >= coalesce(FLOOR, '-infinity'::timestamptz)
            ORDER BY run_at, id LIMIT $3 FOR UPDATE SKIP LOCKED
        ) AS lane_PRIORITY"""

CLAIM = (
    """
UPDATE {schema}.jobs j
SET status = 'running', fence = fence % 2147483647 + 1, locked_at = now(), locked_by = $1, updated_at = now()
FROM unnest(ARRAY(
    SELECT ctid FROM ("""
    + "\n        UNION ALL".join(
        _LANE.replace("PRIORITY", str(priority)).replace("FLOOR", f"${4 + priority}") for priority in PRIORITIES
    )
    + """
    ) AS ready
    WHERE NOT EXISTS (SELECT FROM {schema}.queues WHERE name = $2 AND paused_at IS NOT NULL)
    LIMIT $3
)) AS claimed (tid)
WHERE j.ctid = claimed.tid AND (claimed.tid > '(0,0)' OR claimed.tid <= '(0,0)')
  AND (SELECT set_config('synchronous_commit', 'off', true)) IS NOT NULL
RETURNING id, job_type, queue, priority, payload, attempts, max_attempts, reclaims, fence, run_at,
    created_at, metadata,
    extract(epoch FROM clock_timestamp() - greatest(run_at, least(created_at, now())))::float8
"""
)
"""Claim up to $3 jobs of queue $2, most urgent first, each lane in the order of run_at and id.

- By ``ctid``, which the lanes' locks keep valid: 34,600 jobs/s against 18,000 by ``id`` at 100 a batch,
  49,600 against 26,800 at 500.
- One lane per priority, so that the partial index gives each in order. ``UNION ALL`` under ``LIMIT`` is lazy:
  the second lane is only read when the first had too few, and jobs of a later time are never walked over.
- ``ARRAY(…)`` runs once. ``id IN (SELECT … SKIP LOCKED)`` may run again, and lock more than $3 rows. It is joined:
  in ``ctid = ANY (ARRAY(…))`` a plan made while the table was new compares each of its rows with all of the array,
  until autovacuum has analyzed it: with 40,000 pending jobs 160 ms a claim of 1,000, joined 19; else the same 10.
- The condition on ``tid`` is always true. The planner takes it for true of six rows in ten that it expects of the
  array, and so looks rows up by their place from a table of some 24 pages on, where it would else read and hash the
  table up to 40, which is about what it has when a connection settles on its plan: on a new table that grew while
  jobs streamed through, 26 µs a job, so 10, and 28,900 jobs/s instead of 22,700. With a range, taken for true of one
  or three, a plan made for a table of one page compares each row with each ``tid``: tests/queue/test_plans.py.
- The floors ($4 to $7) let a claim start where the last one ended. While an old snapshot anywhere keeps
  VACUUM from removing what was claimed before, a claim from the start walks over all of it: 100,000 jobs
  took 1.0 s for their first fifth and 3.9 s for the last; with floors all fifths took the same.
- Its commit does not wait for the disk: a claim that a crash undoes leaves its jobs pending. The setting is
  local to the statement's own transaction, so that nothing of it stays behind in a pooler's connection.
- RETURNING has no order: the caller sorts.
- No row may keep its queue from being claimed, whatever somebody inserted by hand: at its end the fence starts over
  instead of overflowing.
"""

LOOK = (
    "SELECT extract(epoch FROM min(run_at) - clock_timestamp())::float8 FROM ("
    + "UNION ALL".join(
        f"""
    (SELECT run_at FROM {{schema}}.jobs
     WHERE status = 'pending' AND queue = $1 AND priority = {priority}
       AND run_at >= coalesce(${2 + priority}, '-infinity'::timestamptz)
     ORDER BY run_at, id LIMIT 1)
    """
        for priority in PRIORITIES
    )
    + """) AS first
WHERE NOT EXISTS (SELECT FROM {schema}.queues WHERE name = $1 AND paused_at IS NOT NULL)"""
)
"""Seconds until the first pending job is due, from four reads of the claim's own index. What an idle worker
asks instead of claiming: it writes nothing, locks nothing, and says for how long to sleep."""

FIRST_PENDING = "SELECT " + ", ".join(
    f"""
    (SELECT run_at FROM {{schema}}.jobs
     WHERE status = 'pending' AND queue = $1 AND priority = {priority} AND run_at <= now()
     ORDER BY run_at, id LIMIT 1)"""
    for priority in PRIORITIES
)
"""Where each lane really begins. With an old snapshot open it walks over all that was claimed before: of 250,000 jobs
in 170 ms, which a claim would have to wait for; so it is asked on a connection beside the claims'."""

RELEASE_STRAYS = (
    """
WITH changed AS (
    UPDATE {schema}.jobs
    SET status = 'pending', locked_at = NULL, locked_by = NULL, updated_at = now()
    WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM {schema}.jobs
        WHERE status = 'running' AND locked_by = $1 AND id <> ALL ($2::uuid[])
          AND locked_at BETWEEN (SELECT '-infinity'::timestamptz) AND (SELECT 'infinity'::timestamptz)
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING id, queue, status, run_at
), """
    + WOKEN
    + """
SELECT id, (SELECT count(*) FROM woken) FROM changed
"""
)
"""Give back what this worker claimed and never heard of, because the connection broke before the answer.

The range excludes nothing; its bounds are unknown to the planner, which takes it for a narrow one and so walks the
partial index, even on statistics from when all jobs were running."""


async def claim(
    conn: Connection,
    worker_id: UUID,
    queue: str,
    limit: int,
    floors: Sequence[datetime | None],
    *,
    schema: str | None = None,
) -> list[ClaimedJob]:
    """Claim up to ``limit`` jobs of ``queue`` that are due.

    Args:
        floors: for each priority the ``run_at`` to start from; ``None`` looks at all of it.

    Returns:
        The jobs, most urgent first; within a priority in the order of ``run_at`` and ``id``.
    """
    rows = await conn.fetch(fill(CLAIM, schema), worker_id, queue, limit, *floors)
    jobs = list(map(_claimed_job, rows))
    jobs.sort(key=_claim_order)
    return jobs


_claimed_job: Callable[[asyncpg.Record], ClaimedJob] = partial(tuple.__new__, ClaimedJob)
"""As ``ClaimedJob._make``, which looks at the length first and takes twice as long."""

_claim_order = attrgetter("priority", "run_at", "id")


async def look(
    conn: Connection, queue: str, floors: Sequence[datetime | None] = NO_FLOORS, *, schema: str | None = None
) -> float | None:
    """Seconds until the first pending job of ``queue`` from ``floors`` on is due; negative when it is, ``None`` when
    there is none or the queue is paused."""
    seconds: float | None = await conn.fetchval(fill(LOOK, schema), queue, *floors)
    return seconds


async def first_pending(conn: Connection, queue: str, *, schema: str | None = None) -> Sequence[datetime | None]:
    """For each priority the earliest ``run_at`` of the jobs of ``queue`` that are due."""
    row = await conn.fetchrow(fill(FIRST_PENDING, schema), queue)
    return tuple(row) if row is not None else (None,) * len(PRIORITIES)


async def release_strays(
    conn: Connection, worker_id: UUID, held: Collection[UUID], *, schema: str | None = None
) -> list[UUID]:
    """Give back the jobs that the table says are with this worker, but for those it knows it holds.

    Returns:
        The ids of the jobs that are pending again.
    """
    return [row[0] for row in await conn.fetch(fill(RELEASE_STRAYS, schema), worker_id, list(held))]
