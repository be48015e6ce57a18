"""The count at the end of every chaos program: nothing lost, nothing twice, nothing left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

import asyncpg

from recado import JobStatus
from recado.app import JOB_DIED
from recado.queue.leases import LEASE_LOST, MAX_RECLAIMS
from tests.chaos.mixture import BESIDE, KINDS, Kind
from tests.chaos.support import lines

JOBS = """
SELECT j.id, j.job_type, j.status, j.attempts, j.reclaims, j.fence, j.idempotency_key, j.locked_by, j.finished_at,
       j.run_at, coalesce(e.failures, 0) AS failures, coalesce(e.losses, 0) AS losses
FROM {schema}.jobs j LEFT JOIN (
    SELECT job_id, count(*) FILTER (WHERE error_class <> $1) AS failures,
           count(*) FILTER (WHERE error_class = $1) AS losses
    FROM {schema}.job_errors GROUP BY job_id
) e ON e.job_id = j.id
"""

STATS = """
SELECT coalesce(sum(completed), 0)::bigint AS completed, coalesce(sum(failed), 0)::bigint AS failed,
       coalesce(sum(dead), 0)::bigint AS dead, coalesce(bool_and(minute <= now()), true) AS past
FROM {schema}.job_stats
"""


@dataclass
class Ledger:
    """What the enqueuers were told, which the table has to agree with."""

    acknowledged: dict[UUID, str] = field(default_factory=dict)
    """The job types of jobs whose commit was answered."""
    in_doubt: set[UUID] = field(default_factory=set)
    """Jobs whose commit was sent, but its answer never came: there or not, both are right."""
    cancelled: set[UUID] = field(default_factory=set)
    """Jobs whose cancellation was answered."""
    perhaps_cancelled: set[UUID] = field(default_factory=set)


@dataclass(frozen=True)
class Audit:
    """What was found."""

    acknowledged: int
    runs: int
    reclaims: int
    poisoned: int
    """Jobs that are dead because they were taken from as many lost workers as a job may lose."""
    faults: tuple[str, ...]


@dataclass(frozen=True)
class Books:
    """All that is compared."""

    ledger: Ledger
    jobs: dict[UUID, asyncpg.Record]
    effects: Counter[UUID]
    runs: Counter[UUID]
    stats: asyncpg.Record
    workers: int


async def audit(
    conn: asyncpg.Connection, schema: str, ledger: Ledger, handled: Path, *, connections_broke: bool = False
) -> Audit:
    """Compare the table, the handlers' notes and effects, and what the enqueuers were told.

    Args:
        connections_broke: transactional handlers may have failed for it, more often than they are made to.
    """
    rows = await conn.fetch(JOBS.format(schema=schema), LEASE_LOST)
    stats = await conn.fetchrow(STATS.format(schema=schema))
    assert stats is not None
    books = Books(
        ledger,
        jobs={row["id"]: row for row in rows},
        effects=Counter([row["job"] for row in await conn.fetch("SELECT job FROM public.effects")]),
        runs=Counter(UUID(line[0]) for line in lines(handled)),
        stats=stats,
        workers=await conn.fetchval(f"SELECT count(*) FROM {schema}.workers"),
    )
    faults = [
        *_lost_or_invented(books),
        *_badly_ended(books, connections_broke),
        *_effects(books),
        *_unalerted(books),
        *_implausible(books),
    ]
    return Audit(
        acknowledged=len(ledger.acknowledged),
        runs=books.runs.total(),
        reclaims=sum(row["reclaims"] for row in rows),
        poisoned=sum(map(_is_poisoned, rows)),
        faults=tuple(faults),
    )


def _lost_or_invented(books: Books) -> Iterator[str]:
    ledger = books.ledger
    yield from _report("acknowledged, but not in the table", ledger.acknowledged.keys() - books.jobs.keys())
    own = {job_id for job_id, row in books.jobs.items() if row["job_type"] != JOB_DIED}
    yield from _report("in the table, but never enqueued", own - ledger.acknowledged.keys() - ledger.in_doubt)
    yield from _report("run, but not in the table", books.runs.keys() - books.jobs.keys())
    wrong = {job_id for job_id, kind in ledger.acknowledged.items() if _type(books, job_id) not in (kind, None)}
    yield from _report("in the table with another type", wrong)


def _badly_ended(books: Books, connections_broke: bool) -> Iterator[str]:
    for job_id, row in books.jobs.items():
        if row["status"] in (JobStatus.PENDING, JobStatus.RUNNING) or row["locked_by"] is not None:
            yield f"{_name(row)} is left {row['status']}, locked by {row['locked_by']}"
            continue
        if row["status"] == JobStatus.COMPLETED and row["finished_at"] < row["run_at"]:
            yield f"{_name(row)} ended before it was due"
        if row["status"] != JobStatus.CANCELLED and not books.runs[job_id] and not _is_poisoned(row):
            yield f"{_name(row)} is {row['status']}, but no handler has run it"
        if row["failures"] != row["attempts"] or row["losses"] != row["reclaims"]:
            yield f"{_name(row)} counts {row['attempts']} and {row['reclaims']}, logged {row['failures']} and " + str(
                row["losses"]
            )
        if row["status"] != _expected_status(books, row):
            yield f"{_name(row)} is {row['status']}"
        elif not _are_plausible_failures(row, connections_broke):
            yield f"{_name(row)} failed {row['attempts']} times"


def _expected_status(books: Books, row: asyncpg.Record) -> str:
    ledger, status = books.ledger, str(row["status"])
    if row["id"] in ledger.cancelled:
        return JobStatus.CANCELLED
    if _is_poisoned(row) or (row["id"] in ledger.perhaps_cancelled and status == JobStatus.CANCELLED):
        return status
    return _kind(row).ending


def _are_plausible_failures(row: asyncpg.Record, connections_broke: bool) -> bool:
    if row["status"] == JobStatus.CANCELLED or _is_poisoned(row):
        return True
    kind = _kind(row)
    if connections_broke and kind.transactional:
        return bool(row["attempts"] >= kind.failures)
    return bool(row["attempts"] == kind.failures)


def _effects(books: Books) -> Iterator[str]:
    """A completed transactional job has one effect, any other none."""
    for job_id, row in books.jobs.items():
        expected = int(_kind(row).transactional and row["status"] == JobStatus.COMPLETED)
        if books.effects[job_id] != expected:
            yield f"{_name(row)} is {row['status']} and has {books.effects[job_id]} effects"
    yield from _report("with an effect, but not in the table", books.effects.keys() - books.jobs.keys())


def _unalerted(books: Books) -> Iterator[str]:
    """Each death of a critical job has one alert, which was told by the row that died."""
    alerts = Counter(row["idempotency_key"] for row in books.jobs.values() if row["job_type"] == JOB_DIED)
    dead = Counter(
        f"{row['id']}:{row['fence']}"
        for row in books.jobs.values()
        if row["status"] == JobStatus.DEAD and _kind(row).critical
    )
    if alerts != dead:
        yield f"{alerts.total()} alerts for {dead.total()} deaths, not one for each"


def _implausible(books: Books) -> Iterator[str]:
    """Statistics may be lost with a worker, but never count what did not happen."""
    if books.workers:
        yield f"{books.workers} workers are left in the registry"
    if books.stats["completed"] > books.runs.total():
        yield f"{books.stats['completed']} completions in the statistics, of {books.runs.total()} runs"
    dead = sum(row["status"] == JobStatus.DEAD for row in books.jobs.values())
    if books.stats["dead"] > dead:
        yield f"{books.stats['dead']} deaths in the statistics, {dead} in the table"
    if not books.stats["past"]:
        yield "the statistics have buckets in the future"


def _kind(row: asyncpg.Record) -> Kind:
    return (KINDS | BESIDE).get(row["job_type"], Kind())


def _is_poisoned(row: asyncpg.Record) -> bool:
    return bool(row["status"] == JobStatus.DEAD and row["reclaims"] >= MAX_RECLAIMS)


def _type(books: Books, job_id: UUID) -> str | None:
    row = books.jobs.get(job_id)
    return None if row is None else row["job_type"]


def _name(row: asyncpg.Record) -> str:
    return f"job {row['id']} ({row['job_type']}, fence {row['fence']}, {row['reclaims']} reclaims)"


def _report(what: str, ids: set[UUID]) -> Iterator[str]:
    if ids:
        yield f"{len(ids)} jobs {what}, such as {min(ids)}"
