"""How much there is to do, how much went wrong, and how long it has been waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recado.queue.connections import Connection
from recado.queue.statements import fill


@dataclass(frozen=True, slots=True)
class Counts:
    """The whole queue in three numbers, all of one moment."""

    pending: int
    """Jobs that wait for a worker, those scheduled for later included."""
    dead: int
    oldest_pending: float | None
    """Seconds since the oldest pending job was created; ``None`` when nothing is pending."""


@dataclass(frozen=True, slots=True)
class Depth:
    """The jobs of one type in one queue that are not over."""

    queue: str
    job_type: str
    ready: int
    """Pending, and due: a free worker would claim them."""
    scheduled: int
    """Pending, and due later."""
    running: int
    dead: int
    oldest_ready: float | None
    """Seconds since the oldest ready job could have run; ``None`` when none is ready."""


@dataclass(frozen=True, slots=True)
class Depths:
    """What stands in the queues, and who is there to work on it."""

    depths: Sequence[Depth]
    """Ordered by queue and job type; where nothing is left, there is no entry."""
    workers: int
    """Worker processes with a fresh heartbeat."""
    notification_queue_usage: float
    """How full the server's NOTIFY queue is, from 0 to 1. At 1 every commit that notifies fails, in all of
    the server's databases."""


_PENDING = """
    status = 'pending'
    AND queue BETWEEN (SELECT min(queue) FROM {schema}.jobs WHERE status = 'pending')
                  AND (SELECT max(queue) FROM {schema}.jobs WHERE status = 'pending')
"""
"""All pending jobs, by way of the claim's index.

The range excludes nothing. It is there because the planner cannot know its bounds, takes them for a narrow
range, and so walks the partial index whatever the statistics say. With ``status = 'pending'`` alone it reads
the whole table when half of it is pending, or was when it was last analyzed. Measured on PostgreSQL 15 and
18: with 1,300,000 completed jobs and statistics from when all were pending 100 to 220 ms against 1; with
1,000,000 pending and as many completed the two are even (200 to 400 ms), here without parallel workers.
"""

_DEAD = """
    status = 'dead'
    AND (finished_at BETWEEN (SELECT min(finished_at) FROM {schema}.jobs WHERE status = 'dead')
                         AND (SELECT max(finished_at) FROM {schema}.jobs WHERE status = 'dead')
         OR finished_at IS NULL
            AND id BETWEEN (SELECT '00000000-0000-0000-0000-000000000000'::uuid)
                       AND (SELECT 'ffffffff-ffff-ffff-ffff-ffffffffffff'::uuid))
"""
"""All dead jobs, by way of the dead letter list's index, in the same manner. A row that was marked dead by hand
may lack ``finished_at``, and counts all the same."""

COUNTS = f"""
SELECT pending.count, dead.count, extract(epoch FROM statement_timestamp() - pending.oldest)::float8
FROM (SELECT count(*), min(created_at) AS oldest FROM {{schema}}.jobs WHERE {_PENDING}) AS pending,
     (SELECT count(*) FROM {{schema}}.jobs WHERE {_DEAD}) AS dead
"""
"""One statement, hence one snapshot: a job is never counted as both, or as neither, while it changes over.
``statement_timestamp()`` because ``now()`` stands still in a caller's long transaction."""

DEPTHS = f"""
SELECT queue, job_type,
       count(*) FILTER (WHERE status = 'pending' AND run_at <= statement_timestamp()),
       count(*) FILTER (WHERE status = 'pending' AND run_at > statement_timestamp()),
       count(*) FILTER (WHERE status = 'running'),
       count(*) FILTER (WHERE status = 'dead'),
       extract(epoch FROM statement_timestamp() - min(run_at) FILTER (
           WHERE status = 'pending' AND run_at <= statement_timestamp()))::float8
FROM (
    SELECT queue, job_type, status, run_at FROM {{schema}}.jobs WHERE {_PENDING}
    UNION ALL
    SELECT queue, job_type, status, run_at FROM {{schema}}.jobs WHERE status = 'running'
    UNION ALL
    SELECT queue, job_type, status, run_at FROM {{schema}}.jobs WHERE {_DEAD}
) AS unfinished
GROUP BY queue, job_type
ORDER BY queue, job_type
"""
"""One arm for each partial index, so that no completed row is read; 400 to 500 ms for 1,000,000 pending
jobs."""

WORKERS = """
SELECT count(*), pg_notification_queue_usage() FROM {schema}.workers
WHERE heartbeat_at >= statement_timestamp() - silence
"""
"""The registry keeps a silent worker's row for as long as it holds jobs, so the heartbeat decides."""


async def counts(conn: Connection, *, schema: str | None = None) -> Counts:
    """Count the pending and the dead jobs, and tell how old the oldest pending one is.

    By the server's clock alone. A job created in the future, by a clock that was set back since, is 0 s old.
    """
    [(pending, dead, oldest)] = await conn.fetch(fill(COUNTS, schema))
    return Counts(pending, dead, None if oldest is None else max(0.0, oldest))


async def queue_depths(conn: Connection, *, schema: str | None = None) -> Depths:
    """Count the unfinished jobs of each queue and job type, and the workers that live."""
    rows = await conn.fetch(fill(DEPTHS, schema))
    [(workers, usage)] = await conn.fetch(fill(WORKERS, schema))
    return Depths([Depth(*row) for row in rows], workers, usage)
