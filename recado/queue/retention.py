"""Deleting what has ended long ago."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import MappingProxyType
from uuid import UUID

from recado.queue.connections import Connection
from recado.queue.models import JobStatus
from recado.queue.statements import fill

RETENTION: Mapping[JobStatus, timedelta] = MappingProxyType(
    {JobStatus.COMPLETED: timedelta(days=7), JobStatus.CANCELLED: timedelta(days=7)}
)
"""How long jobs are kept after their end: a week, so that Monday can ask about last Tuesday. Dead jobs are kept
until a person has looked at them."""

STATS_RETENTION = timedelta(days=30)
"""How long the minute buckets are kept: what a chart of a month needs."""

ROWS_PER_STATEMENT = 1_000
"""How many jobs one statement looks at, and so deletes at most."""

FIRST_ID = UUID(int=0)

PRUNE = """
WITH milliseconds AS (
    SELECT greatest(extract(epoch FROM now() - $4::interval) * 1000, 0)::bigint AS old,
           (extract(epoch FROM now() + interval '1 day') * 1000)::bigint AS strange
), bounds AS (
    SELECT rpad(lpad(to_hex(old), 12, '0'), 32, '0')::uuid AS old,
           rpad(lpad(to_hex(strange), 12, '0'), 32, '0')::uuid AS strange
    FROM milliseconds
), page AS (
    SELECT id, status, finished_at FROM {schema}.jobs
    WHERE id > $1
      AND id < (SELECT CASE WHEN $1 < old THEN old ELSE 'ffffffff-ffff-ffff-ffff-ffffffffffff' END FROM bounds)
    ORDER BY id LIMIT $5
), prunable AS (
    SELECT j.ctid FROM {schema}.jobs j
    JOIN page ON j.id = page.id
    JOIN unnest($2::text[], $3::interval[]) AS r (status, age)
      ON page.status = r.status AND page.finished_at < now() - r.age
    WHERE j.status = r.status AND j.finished_at < now() - r.age
    FOR UPDATE OF j SKIP LOCKED
), gone AS (
    DELETE FROM {schema}.jobs WHERE ctid = ANY (ARRAY(SELECT ctid FROM prunable)) RETURNING id
)
SELECT CASE
           WHEN (SELECT count(*) FROM page) = $5 THEN (SELECT id FROM page ORDER BY id DESC LIMIT 1)
           WHEN $1 < old THEN strange
           ELSE '00000000-0000-0000-0000-000000000000'
       END,
       (SELECT count(*) FROM gone)
FROM bounds
"""
"""One page of a walk along the primary key. The cursor moves past rows that are kept, so that a page full of
them does not stop the sweep. UUIDv7 begin with their milliseconds, so the walk ends where jobs are too young, and
goes on with ids from the future: those are no UUIDv7, but somebody inserted them by hand. Which part the cursor is
in, ``old`` tells and not ``strange``: both move with the clock, and away from a cursor that stands on ``strange``,
but never past it. The conditions on ``j`` look at the row as it is when it is locked: one that was requeued
meanwhile stays, and one that somebody has locked waits for the next walk."""

PRUNE_STATS = "DELETE FROM {schema}.job_stats WHERE minute < now() - $1::interval"


@dataclass(frozen=True, slots=True)
class Pruned:
    """One step of the walk."""

    cursor: UUID
    """Where the next step begins; :data:`FIRST_ID` when the end was reached."""
    deleted: int


async def prune(
    conn: Connection,
    cursor: UUID = FIRST_ID,
    *,
    keep: Mapping[JobStatus, timedelta] = RETENTION,
    limit: int = ROWS_PER_STATEMENT,
    schema: str | None = None,
) -> Pruned:
    """Look at up to ``limit`` jobs after ``cursor`` and delete those that ended longer ago than they are kept.

    Args:
        keep: for how long, by status; a status that is not named is kept.
    """
    ages = list(keep.values())
    row = await conn.fetchrow(
        fill(PRUNE, schema), cursor, [str(status) for status in keep], ages, min(ages, default=timedelta()), limit
    )
    return Pruned(FIRST_ID, 0) if row is None else Pruned(*row)


async def prune_stats(conn: Connection, *, retention: timedelta = STATS_RETENTION, schema: str | None = None) -> None:
    """Delete minute buckets that are older than ``retention``."""
    await conn.execute(fill(PRUNE_STATS, schema), retention)
