"""The registry of worker processes: who lives, and who is hungry for which queue."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from uuid import UUID

from recado.queue.connections import Connection
from recado.queue.leases import MAX_SILENCE
from recado.queue.statements import fill


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the registry knows of one worker process."""

    id: UUID
    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    slots: int
    lease: float
    """Seconds after which its jobs may be taken over unless it renewed them."""
    hungry: set[str] = field(default_factory=set)
    """The queues it wants to be notified of; changes while it works."""
    silence: float = MAX_SILENCE
    """Seconds without a heartbeat after which it is taken for dead."""


BEAT = """
INSERT INTO {schema}.workers AS w (id, host, pid, version, queues, slots, lease, silence, running, hungry_queues)
VALUES ($1, $2, $3, $4, $5, $6, make_interval(secs => $7), make_interval(secs => $8), $9, $10)
ON CONFLICT (id) DO UPDATE SET heartbeat_at = now(), running = excluded.running
"""
"""Registration and heartbeat in one: a worker that was silent for so long that its row was removed is back
with its next beat. The beat leaves ``hungry_queues`` to :data:`SET_HUNGRY`, which another connection writes."""

SET_HUNGRY = """
UPDATE {schema}.workers SET hungry_queues = $2, heartbeat_at = now() WHERE id = $1
"""
"""A sign of life, too: after an outage longer than its silence a worker may claim again some seconds before its next
beat, and what it claims would at once be taken for a dead worker's."""

REMOVE = "DELETE FROM {schema}.workers WHERE id = $1"

REMOVE_SILENT = """
DELETE FROM {schema}.workers w
WHERE heartbeat_at < now() - silence
  AND NOT EXISTS (SELECT FROM {schema}.jobs j WHERE j.status = 'running' AND j.locked_by = w.id)
RETURNING id
"""
"""Only when nothing is left that it had claimed: the reclaim needs the row to know its lease."""

PROBE = "SELECT pg_is_in_recovery()"
"""Whether the server still answers on a connection that otherwise only listens; and whether it has become a standby
in a fail-over, where nobody notifies any more."""

HORIZON = """
SELECT pg_snapshot_xmin(s)::text::bigint, pg_snapshot_xmax(s)::text::bigint
FROM pg_current_snapshot() AS s
"""
"""Every transaction below the first number has ended; none that has an id yet reaches the second."""


async def beat(conn: Connection, worker: WorkerInfo, running: int, *, schema: str | None = None) -> None:
    """Register ``worker``, or say that it still lives and how many jobs it runs."""
    await conn.execute(
        fill(BEAT, schema),
        worker.id,
        worker.host,
        worker.pid,
        worker.version,
        list(worker.queues),
        worker.slots,
        worker.lease,
        worker.silence,
        running,
        sorted(worker.hungry),
    )


async def set_hungry(conn: Connection, worker_id: UUID, queues: Collection[str], *, schema: str | None = None) -> bool:
    """Say for which queues the worker wants to be notified.

    Returns:
        Whether the worker is registered; if not, its next beat has to come first.
    """
    return await conn.execute(fill(SET_HUNGRY, schema), worker_id, sorted(queues)) == "UPDATE 1"


async def remove(conn: Connection, worker_id: UUID, *, schema: str | None = None) -> None:
    """Take a worker that stopped off the registry."""
    await conn.execute(fill(REMOVE, schema), worker_id)


async def remove_silent(conn: Connection, *, schema: str | None = None) -> list[UUID]:
    """Take workers that are taken for dead and hold no job off the registry."""
    return [row[0] for row in await conn.fetch(fill(REMOVE_SILENT, schema))]


async def horizon(conn: Connection) -> tuple[int, int]:
    """The snapshot's ``(xmin, xmax)``: see :data:`HORIZON`."""
    row = await conn.fetchrow(HORIZON)
    if row is None:  # pragma: no cover - a SELECT without FROM a table has exactly one row
        raise RuntimeError("cannot read the snapshot: PostgreSQL returned no row")
    return row[0], row[1]
