"""Schedules: when which job is enqueued, and what has been settled already.

The row is the truth, and no worker leads. A tick is one transaction: the row is locked, the job goes in, ``last_tick``
moves. So each tick is enqueued by exactly one worker, whatever becomes of the job later, and whoever dies in between.

What stands in a row comes from the code of workers. Each says in ``schedule_holders`` which definitions it has; what it
says there goes with it. A definition gives way to another only when no live worker holds it any more, and a schedule
that left the code is removed only then: two releases side by side neither remove nor double each other's, nor take
turns.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias
from uuid import UUID

import asyncpg

from recado import cron
from recado.errors import InvalidSchedule, ScheduleNotFound
from recado.queue.connections import Connection
from recado.queue.limits import check_name, shortened
from recado.queue.locks import wait_for_lock
from recado.queue.models import JobStatus
from recado.queue.statements import BOUNDED, fill

SYSTEM = ""
"""The application of recado's own schedules, which every worker of the schema has; no other may have this name."""

Overlap: TypeAlias = Literal["skip", "queue"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """What the code says of one schedule."""

    name: str
    job_type: str | None
    """``None`` for one of recado's own, whose work is no job."""
    expression: str
    timezone: str = "UTC"
    payload: str = field(default="null", repr=False)
    """A JSON text."""
    overlap: Overlap = "skip"
    """What becomes of a tick while the last one's job is pending or running: no job, or one more."""

    @property
    def definition(self) -> str:
        """A digest of all but the name: equal where two workers' code says the same."""
        parts = [self.job_type, self.expression, self.timezone, self.payload, self.overlap]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule as it stands in the table, which is what a tick goes by."""

    application: str
    name: str
    job_type: str | None
    expression: str
    timezone: str
    payload: str = field(repr=False)
    overlap: Overlap
    last_tick: datetime
    last_job_id: UUID | None
    now: datetime
    """By the server's clock: the beginning of the transaction that read the row."""

    def due(self) -> datetime | None:
        """The latest tick that is due. Those between it and ``last_tick`` are settled with it, so that an outage ends
        with one run.

        Raises:
            InvalidSchedule: the expression or the time zone cannot be read here.
        """
        tick = cron.latest(self.expression, self.timezone, self.now)
        return tick if tick is not None and tick > self.last_tick else None

    def next(self) -> datetime | None:
        """The first tick after ``now``.

        Raises:
            InvalidSchedule: as for :meth:`due`.
        """
        return cron.following(self.expression, self.timezone, self.now)


@dataclass(frozen=True, slots=True)
class ScheduleStatus:
    """What an operator sees of a schedule."""

    application: str
    name: str
    job_type: str | None
    expression: str
    timezone: str
    overlap: Overlap
    last_tick: datetime
    """All ticks up to here are settled; of a schedule that has not run, the time from which it counts."""
    next_tick: datetime | None
    """``None`` while it is paused."""
    last_job_id: UUID | None
    last_job_status: JobStatus | None
    """``None`` if there was no job yet, or it was pruned."""
    paused_at: datetime | None


STAY = "SELECT id FROM {schema}.workers WHERE id = $1 FOR KEY SHARE"
"""Until the transaction ends nobody takes the worker off the registry, and its holdings with it. Its beats go on."""

HOLD = """
INSERT INTO {schema}.schedule_holders (application, name, worker_id, definition)
SELECT $1, name, $2, definition FROM unnest($3::text[], $4::text[]) AS d (name, definition)
ON CONFLICT DO NOTHING
"""
"""What a process has in its code never changes while it runs, so a row is written once and goes with the worker."""

ADD = """
INSERT INTO {schema}.schedules
    (application, name, job_type, expression, timezone, payload, overlap, definition, last_tick)
SELECT $1, name, job_type, expression, timezone, payload::jsonb, overlap, definition,
       CASE $1 WHEN '' THEN 'epoch' ELSE clock_timestamp() END
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[])
    AS d (name, job_type, expression, timezone, payload, overlap, definition)
ON CONFLICT (application, name) DO NOTHING
"""
"""A new schedule counts from now; recado's own are due at once. ``clock_timestamp()``, since the transaction may have
waited for the lock after its ``now()``."""

MOVE = """
UPDATE {schema}.schedules s
SET job_type = d.job_type, expression = d.expression, timezone = d.timezone, payload = d.payload::jsonb,
    overlap = d.overlap, definition = d.definition, updated_at = clock_timestamp(),
    last_tick = CASE WHEN s.expression = d.expression AND s.timezone = d.timezone THEN s.last_tick
                     ELSE clock_timestamp() END
FROM unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[])
    AS d (name, job_type, expression, timezone, payload, overlap, definition)
WHERE s.application = $1 AND s.name = d.name AND s.definition <> d.definition
  AND NOT EXISTS (
      SELECT FROM {schema}.schedule_holders h
      WHERE h.application = s.application AND h.name = s.name AND h.definition = s.definition
  )
"""
"""Other times count from now; with the same times, a tick that came during the deploy is still due."""

REMOVE = """
DELETE FROM {schema}.schedules s
WHERE application = $1
  AND NOT EXISTS (
      SELECT FROM {schema}.schedule_holders h WHERE h.application = s.application AND h.name = s.name
  )
"""

SELECT_DUE = """
SELECT application, name, job_type, expression, timezone, payload::text, overlap, last_tick, last_job_id, now()
FROM {schema}.schedules
JOIN unnest($1::text[], $2::text[]) AS mine (application, name) USING (application, name)
WHERE paused_at IS NULL
"""
"""When each is due, cron has to say: there is no column for it that could disagree."""

LOCK = f"""
SELECT application, name, job_type, expression, timezone, payload::text, overlap, last_tick, last_job_id, now(),
       {BOUNDED}
FROM {{schema}}.schedules
WHERE application = $1 AND name = $2 AND paused_at IS NULL
FOR UPDATE SKIP LOCKED
"""
"""Whoever has the row already makes this tick. As for the sweeps' lock, a client that falls silent loses it."""

SELECT_STATUS = "SELECT status FROM {schema}.jobs WHERE id = $1"
"""Apart from :data:`LOCK`: joined there, it would be the job of the row as it was before another worker changed it."""

SET_TICK = """
UPDATE {schema}.schedules
SET last_tick = $3, last_job_id = coalesce($4, last_job_id), updated_at = now()
WHERE application = $1 AND name = $2
"""

SELECT_SCHEDULES = """
SELECT s.application, s.name, s.job_type, s.expression, s.timezone, s.overlap, s.last_tick, s.last_job_id::text,
       j.status, s.paused_at, now()
FROM {schema}.schedules s LEFT JOIN {schema}.jobs j ON j.id = s.last_job_id
WHERE $1::text IS NULL OR s.application = $1
ORDER BY s.application, s.name
"""

PAUSE = """
UPDATE {schema}.schedules SET paused_at = coalesce(paused_at, now()), updated_at = now()
WHERE application = $1 AND name = $2
"""

RESUME = """
UPDATE {schema}.schedules
SET last_tick = CASE WHEN paused_at IS NULL THEN last_tick ELSE clock_timestamp() END, paused_at = NULL,
    updated_at = now()
WHERE application = $1 AND name = $2
"""
"""What was due during the pause is not caught up. One that was not paused stays as it is."""


async def sync(
    conn: Connection,
    application: str,
    worker_id: UUID,
    schedules: Sequence[Schedule],
    *,
    schema: str | None = None,
) -> bool:
    """Bring the application's rows in line with what its live workers have in their code.

    It takes a lock until the transaction ends: of two workers that start at once, one sees what the other holds.

    Args:
        schedules: all that this worker has.

    Returns:
        Whether the worker is registered; if not, nothing was changed, and its next beat has to come first. (It was
        silent for so long that its row was removed; it would take its own schedules for nobody's.)
    """
    await wait_for_lock(conn, f"schedules:{application}", schema=schema)
    if await conn.fetchval(fill(STAY, schema), worker_id) is None:
        return False
    names = [schedule.name for schedule in schedules]
    definitions = [schedule.definition for schedule in schedules]
    columns = (
        names,
        [schedule.job_type for schedule in schedules],
        [schedule.expression for schedule in schedules],
        [schedule.timezone for schedule in schedules],
        [schedule.payload for schedule in schedules],
        [schedule.overlap for schedule in schedules],
        definitions,
    )
    await conn.execute(fill(HOLD, schema), application, worker_id, names, definitions)
    await conn.execute(fill(ADD, schema), application, *columns)
    await conn.execute(fill(MOVE, schema), application, *columns)
    if application != SYSTEM:
        await conn.execute(fill(REMOVE, schema), application)
    return True


async def get_schedules(
    conn: Connection, keys: Collection[tuple[str, str]], *, schema: str | None = None
) -> list[ScheduleRow]:
    """The schedules with these ``(application, name)`` that are there and not paused."""
    rows = await conn.fetch(fill(SELECT_DUE, schema), [key[0] for key in keys], [key[1] for key in keys])
    return [ScheduleRow(*row) for row in rows]


async def lock_schedule(
    conn: Connection, application: str, name: str, *, schema: str | None = None
) -> ScheduleRow | None:
    """The schedule, locked until the transaction ends; ``None`` if another has it, or it is paused or gone."""
    row = await conn.fetchrow(fill(LOCK, schema), application, name)
    return None if row is None else ScheduleRow(*row[:10])


async def is_unfinished(conn: Connection, job_id: UUID, *, schema: str | None = None) -> bool:
    """Whether the job is there, and pending or running."""
    status = await conn.fetchval(fill(SELECT_STATUS, schema), job_id)
    return status in (JobStatus.PENDING, JobStatus.RUNNING)


async def set_tick(
    conn: Connection, row: ScheduleRow, tick: datetime, job_id: UUID | None, *, schema: str | None = None
) -> None:
    """Settle all ticks up to ``tick``; in the transaction that has locked the row and enqueued the job, if any."""
    await conn.execute(fill(SET_TICK, schema), row.application, row.name, tick, job_id)


async def list_schedules(
    conn: Connection, *, application: str | None = None, schema: str | None = None
) -> list[ScheduleStatus]:
    """All schedules, or those of one application; recado's own belong to ``''``.

    Raises:
        InvalidArgument: ``application`` is no name that one could have.
    """
    wanted = None if application is None else check_name(application, "application")
    return [_status(row) for row in await conn.fetch(fill(SELECT_SCHEDULES, schema), wanted)]


def _status(row: asyncpg.Record) -> ScheduleStatus:
    application, name, job_type, expression, timezone, overlap, last_tick, job_id, job_status, paused_at, now = row
    next_tick = None
    if paused_at is None:
        # What cannot be read was written by somebody's hand, or in a time zone that only the workers' systems know.
        with suppress(InvalidSchedule):
            next_tick = cron.following(expression, timezone, now)
    return ScheduleStatus(
        application=application,
        name=name,
        job_type=job_type,
        expression=expression,
        timezone=timezone,
        overlap=overlap,
        last_tick=last_tick,
        next_tick=next_tick,
        last_job_id=None if job_id is None else UUID(job_id),
        last_job_status=None if job_status is None else JobStatus(job_status),
        paused_at=paused_at,
    )


async def pause_schedule(conn: Connection, application: str, name: str, *, schema: str | None = None) -> None:
    """Let a schedule enqueue nothing until it is resumed; it survives deploys and restarts.

    Raises:
        InvalidArgument: ``application`` or ``name`` is no name that one could have.
        ScheduleNotFound: there is none of this name.
    """
    await _change(conn, PAUSE, "pause", application, name, schema)


async def resume_schedule(conn: Connection, application: str, name: str, *, schema: str | None = None) -> None:
    """Let a paused schedule go on with its next tick; what was due meanwhile is not caught up. Its workers notice
    within half a minute.

    Raises:
        InvalidArgument: ``application`` or ``name`` is no name that one could have.
        ScheduleNotFound: there is none of this name.
    """
    await _change(conn, RESUME, "resume", application, name, schema)


async def _change(conn: Connection, statement: str, verb: str, application: str, name: str, schema: str | None) -> None:
    names = check_name(application, "application"), check_name(name, "schedule")
    if await conn.execute(fill(statement, schema), *names) == "UPDATE 0":
        raise ScheduleNotFound(
            f"cannot {verb} schedule {shortened(name)}: application {shortened(application)} has none of this name; "
            "see what there is with list_schedules, or `recado schedules list`"
        )
