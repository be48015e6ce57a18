"""The plans: for each scenario what one run consists of, for recado and for the bare statements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from recado.bench.figures import Ratio, of_fifths, of_rates, of_waits
from recado.bench.jobs import NOOP, QUEUES, SCHEDULED, TRANSACTIONAL, Row, mixed_rows, rows
from recado.bench.messages import Task
from recado.bench.options import Options
from recado.queue.models import DEFAULT_QUEUE, JobStatus


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    crew: list[Task]
    """The processes whose jobs count."""
    jobs: int
    """How many jobs they have to be through with; the last one ends the run."""
    expected: Mapping[JobStatus, int]
    """How many jobs of each status the table holds then."""
    due: Iterable[Row] = ()
    """What is in the table before."""
    scheduled: Iterable[Row] = ()
    """The same, for another day."""
    feeders: list[Task] = field(default_factory=list)
    """Processes that enqueue meanwhile."""
    paused: tuple[str, ...] = ()
    """Queues that are opened when the clock starts, for a crew that would begin at once."""
    pinned: bool = False
    """Whether another connection holds a snapshot open."""
    saturated: bool = False
    """Whether the registry shows a worker that is not hungry."""


Planner: TypeAlias = Callable[[Options, str, int | None], Plan]
"""Makes a plan from the options and the database's URL: recado's, or with the number of jobs that a bare claim is
to ask for the one of the bare statements."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is measured under one name."""

    name: str
    about: str
    jobs: int
    """How many, unless the user says otherwise: what takes a few seconds."""
    plan: Planner
    ratio: Ratio = of_rates


def _enqueue(options: Options, dsn: str, batch: int | None) -> Plan:
    return _producing("enqueue" if batch is None else "bare insert", options, dsn)


def _enqueue_many(options: Options, dsn: str, batch: int | None) -> Plan:
    return _producing("enqueue many" if batch is None else "bare copy", options, dsn)


def _producing(role: str, options: Options, dsn: str) -> Plan:
    return Plan(
        crew=[Task(role, dsn, options, jobs=options.jobs)],
        jobs=options.jobs,
        expected={JobStatus.PENDING: options.jobs},
        saturated=True,
    )


def _drain(options: Options, dsn: str, batch: int | None, *, pinned: bool = False) -> Plan:
    return Plan(
        crew=_crew("worker" if batch is None else "bare drain", options, dsn, batch),
        jobs=options.jobs,
        expected={JobStatus.COMPLETED: options.jobs},
        due=rows(range(options.jobs), NOOP, options.payload_bytes),
        paused=(DEFAULT_QUEUE,),
        pinned=pinned,
    )


def _sustained(options: Options, dsn: str, batch: int | None) -> Plan:
    return Plan(
        crew=_crew("worker" if batch is None else "bare drain", options, dsn, batch),
        feeders=[Task("feed" if batch is None else "bare feed", dsn, options, jobs=options.jobs)],
        jobs=options.jobs,
        expected={JobStatus.COMPLETED: options.jobs},
    )


def _latency(options: Options, dsn: str, batch: int | None) -> Plan:
    return Plan(
        crew=_crew("noting worker" if batch is None else "bare listen", options, dsn, batch),
        feeders=[Task("pace" if batch is None else "bare pace", dsn, options, jobs=options.jobs)],
        jobs=options.jobs,
        expected={JobStatus.COMPLETED: options.jobs},
    )


def _transactional(options: Options, dsn: str, batch: int | None) -> Plan:
    return Plan(
        crew=_crew("worker" if batch is None else "bare transactions", options, dsn, batch),
        jobs=options.jobs,
        expected={JobStatus.COMPLETED: options.jobs},
        due=rows(range(options.jobs), TRANSACTIONAL, options.payload_bytes),
        # The bare transactions have claimed everything before the clock starts.
        paused=(DEFAULT_QUEUE,) if batch is None else (),
    )


def _mixed(options: Options, dsn: str, batch: int | None) -> Plan:
    numbers = range(options.jobs)
    scheduled = [n for n in numbers if n % SCHEDULED == SCHEDULED // 2]
    due = [n for n in numbers if n % SCHEDULED != SCHEDULED // 2]
    expected = {JobStatus.COMPLETED: len(due), JobStatus.PENDING: len(scheduled)}
    return Plan(
        crew=_crew("worker" if batch is None else "bare drain", options, dsn, batch, QUEUES),
        jobs=len(due),
        expected={status: count for status, count in expected.items() if count},
        due=mixed_rows(due, options.payload_bytes),
        scheduled=mixed_rows(scheduled, options.payload_bytes),
        paused=QUEUES,
    )


def _crew(
    role: str, options: Options, dsn: str, batch: int | None, queues: tuple[str, ...] = (DEFAULT_QUEUE,)
) -> list[Task]:
    """As many processes as there are to be workers, each with its share of the jobs."""
    share, rest = divmod(options.jobs, options.workers)
    return [
        Task(role, dsn, options, jobs=share + (i < rest), queues=queues, batch=batch or 0)
        for i in range(options.workers)
    ]


SCENARIOS: Mapping[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Scenario("enqueue", "one job a transaction; bare: INSERT without NOTIFY", 10_000, _enqueue),
        Scenario("enqueue-many", "all jobs in one transaction; bare: COPY", 50_000, _enqueue_many),
        Scenario("drain", "a full queue; bare: claim and complete", 50_000, _drain),
        Scenario("sustained", "a queue that is filled meanwhile; bare: insert, claim, complete", 50_000, _sustained),
        Scenario("latency", "an idle worker, 50 jobs a second; bare: LISTEN and claim", 250, _latency, of_waits),
        Scenario("pinned", "drain under an open snapshot", 200_000, partial(_drain, pinned=True), of_fifths),
        Scenario("transactional", "handlers in transactions; bare: BEGIN, UPDATE, COMMIT", 10_000, _transactional),
        Scenario("mixed", "all priorities, two queues, failures, jobs for later", 20_000, _mixed),
    )
}
"""In the order in which ``all`` runs them."""
