"""What the workers did, by the minute."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from recado.queue.connections import Connection
from recado.queue.statements import fill


@dataclass(slots=True)
class Tally:
    """What one worker did with one job type of one queue since it last said so. Times are sums of seconds."""

    completed: int = 0
    failed: int = 0
    dead: int = 0
    run_seconds: float = 0.0
    wait_seconds: float = 0.0


ADD = """
INSERT INTO {schema}.job_stats AS s
    (minute, queue, job_type, completed, failed, dead, run_seconds, wait_seconds)
SELECT date_trunc('minute', now()), queue, job_type, completed, failed, dead, run_seconds, wait_seconds
FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::float8[], $7::float8[])
    AS t (queue, job_type, completed, failed, dead, run_seconds, wait_seconds)
ON CONFLICT (minute, queue, job_type) DO UPDATE SET
    completed = least(s.completed, 4611686018427387904) + excluded.completed,
    failed = least(s.failed, 4611686018427387904) + excluded.failed,
    dead = least(s.dead, 4611686018427387904) + excluded.dead,
    run_seconds = least(s.run_seconds, 1e300) + excluded.run_seconds,
    wait_seconds = least(s.wait_seconds, 1e300) + excluded.wait_seconds
"""
"""Into the minute of the server's clock. Sorted by the caller, so that two workers lock in the same order. ``least``: a
bucket that somebody made by hand must not overflow, and with it break all that a worker writes down."""


async def add(conn: Connection, tallies: Mapping[tuple[str, str], Tally], *, schema: str | None = None) -> None:
    """Add tallies, by ``(queue, job type)``, to the current minute's buckets."""
    rows = sorted(tallies.items(), key=lambda item: item[0])
    await conn.execute(
        fill(ADD, schema),
        [queue for (queue, _), _ in rows],
        [job_type for (_, job_type), _ in rows],
        [t.completed for _, t in rows],
        [t.failed for _, t in rows],
        [t.dead for _, t in rows],
        [t.run_seconds for _, t in rows],
        [t.wait_seconds for _, t in rows],
    )
