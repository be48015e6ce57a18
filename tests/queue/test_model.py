"""Random sequences of all that happens to jobs, against a model in Python that knows what must come of each step.

Every step is one transaction, and the model reads the server's ``now()`` in it: so model and table agree to the
microsecond, and no step waits for anything. Time passes by moving all that is written in the tables back.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, seed, settings, strategies
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from recado.errors import IllegalTransition, JobNotFound
from recado.queue import admin, claims, enqueue, finishes, leases, retention, workers
from recado.queue.claims import NO_FLOORS
from recado.queue.finishes import Completion, Failure, Release
from recado.queue.models import ClaimedJob, JobStatus, NewJob
from recado.queue.workers import WorkerInfo

T = TypeVar("T")
Floors: TypeAlias = Sequence[datetime | None]

HOUR = timedelta(hours=1)

MAX_RECLAIMS = 2
"""So that jobs get to be poison pills within a few steps."""

KEEP = {JobStatus.PENDING: -HOUR, JobStatus.COMPLETED: 2 * HOUR, JobStatus.CANCELLED: HOUR}
"""Pending jobs have not ended, so none of them is old enough. Their negative age takes the end of the walk past all
ids, which are made by the real clock, that no step moves on."""

QUEUES = ("default", "mail")

WORKERS = {
    info.id: info
    for info in (
        WorkerInfo(UUID(int=1), "host", 1, "0", QUEUES, 1, lease=2 * 3600.0, silence=4 * 3600.0),
        WorkerInfo(UUID(int=2), "host", 2, "0", QUEUES, 1, lease=5 * 3600.0, silence=2 * 3600.0),
    )
}
"""One whose lease is over before it falls silent, and one that falls silent before."""

SELECT_JOBS = """
SELECT id, job_type, queue, priority, idempotency_key, max_attempts, run_at, status, attempts, reclaims, fence,
       locked_at, locked_by, finished_at
FROM {schema}.jobs
"""

SELECT_THE_REST = """
SELECT ARRAY(SELECT (job_id, fence, attempt, worker_id, error_class) FROM {schema}.job_errors),
       ARRAY(SELECT (id, heartbeat_at) FROM {schema}.workers),
       ARRAY(SELECT name FROM {schema}.queues WHERE paused_at IS NOT NULL)
"""

LET_TIME_PASS = """
WITH aged AS (
    UPDATE {schema}.jobs SET run_at = run_at - $1::interval, created_at = created_at - $1::interval,
        locked_at = locked_at - $1::interval, finished_at = finished_at - $1::interval
)
UPDATE {schema}.workers SET heartbeat_at = heartbeat_at - $1::interval
"""


class Attempt(NamedTuple):
    """What a worker believes that it holds."""

    worker: UUID
    id: UUID
    fence: int


@dataclass
class Job:
    """A row of the table as it has to be."""

    id: UUID
    job_type: str
    queue: str
    priority: int
    key: str | None
    max_attempts: int
    run_at: datetime
    status: str = "pending"
    attempts: int = 0
    reclaims: int = 0
    fence: int = 0
    locked_at: datetime | None = None
    locked_by: UUID | None = None
    finished_at: datetime | None = None

    def end(self, status: str, now: datetime) -> None:
        self.status, self.finished_at = status, now
        self.locked_at = self.locked_by = None

    def put_back(self) -> None:
        self.status = "pending"
        self.locked_at = self.locked_by = None

    def start_over(self, now: datetime) -> None:
        self.status, self.attempts, self.reclaims, self.run_at, self.finished_at = "pending", 0, 0, now, None


@dataclass
class World:
    """All that the tables hold, and the floors, which the workers remember."""

    jobs: dict[UUID, Job] = field(default_factory=dict)
    errors: set[tuple[UUID, int, int, UUID | None, str]] = field(default_factory=set)
    heartbeats: dict[UUID, datetime] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    floors: dict[tuple[UUID, str], Floors] = field(default_factory=dict)

    def held(self, attempt: Attempt) -> Job | None:
        job = self.jobs.get(attempt.id)
        return job if job is not None and (job.locked_by, job.fence) == (attempt.worker, attempt.fence) else None

    def is_running(self, job_id: UUID) -> bool:
        return job_id in self.jobs and self.jobs[job_id].status == "running"

    def with_key(self, job_type: str, key: str | None) -> Job | None:
        found = (job for job in self.jobs.values() if key is not None and (job.job_type, job.key) == (job_type, key))
        return next(found, None)

    def lane(self, queue: str, priority: int, floor: datetime | None = None) -> list[Job]:
        lane = [
            job
            for job in self.jobs.values()
            if (job.status, job.queue, job.priority) == ("pending", queue, priority)
            and (floor is None or job.run_at >= floor)
        ]
        return sorted(lane, key=lambda job: (job.run_at, job.id))

    def orphaned(self, job: Job, now: datetime) -> bool:
        if job.status != "running":
            return False
        assert job.locked_at is not None
        assert job.locked_by is not None
        info, heartbeat = WORKERS[job.locked_by], self.heartbeats.get(job.locked_by)
        return (
            heartbeat is None
            or heartbeat < now - timedelta(seconds=info.silence)
            or job.locked_at < now - timedelta(seconds=info.lease)
        )

    def go_back(self, age: timedelta) -> None:
        for job in self.jobs.values():
            job.run_at -= age
            job.locked_at = job.locked_at and job.locked_at - age
            job.finished_at = job.finished_at and job.finished_at - age
        self.heartbeats = {worker: heartbeat - age for worker, heartbeat in self.heartbeats.items()}
        self.floors = {key: [floor and floor - age for floor in floors] for key, floors in self.floors.items()}


committing = strategies.sampled_from([True] * 5 + [False])
queues = strategies.sampled_from(["default", "default", "default", "mail"])
worker_ids = strategies.sampled_from(list(WORKERS))
limits = strategies.sampled_from([100, 1, 2])
hours = strategies.sampled_from([1, 3, 6]).map(lambda n: n * HOUR)
delays = strategies.sampled_from([None, None, -HOUR, HOUR])
new_jobs = strategies.builds(
    lambda job_type, key, queue, priority, max_attempts, delay: (
        NewJob(job_type, "{}", queue, priority, max_attempts, idempotency_key=key),
        delay,
    ),
    strategies.sampled_from(["a.a", "a.b"]),
    strategies.sampled_from([None, None, None, None, "k", "l"]),
    queues,
    strategies.sampled_from([1, 1, 0, 3]),
    strategies.integers(1, 3),
    delays,
)
Spec = tuple[NewJob, timedelta | None]


class Life(RuleBasedStateMachine):
    """The steps. What a step says to have happened is counted in ``seen``."""

    ids: Bundle[UUID] = Bundle("ids")

    def __init__(
        self,
        run: Callable[[Awaitable[Any]], Any],
        conn: asyncpg.Connection,
        service: asyncpg.Connection,
        schema: str,
        seen: Counter[str],
    ) -> None:
        super().__init__()
        self.run = run
        self.conn = conn
        self.service = service
        self.schema = schema
        self.seen = seen
        self.world = World()
        self.attempts: list[Attempt] = []
        self.uncommitted: dict[UUID, Job] | None = None
        self.service_now: datetime | None = None
        self.ended: Counter[tuple[UUID, int]] = Counter()
        self.execute("TRUNCATE {schema}.jobs, {schema}.workers, {schema}.queues CASCADE")

    def teardown(self) -> None:
        if self.uncommitted is not None:
            self.run(self.service.execute("ROLLBACK"))

    def execute(self, statement: str, *args: Any) -> None:
        self.run(self.conn.execute(statement.replace("{schema}", self.schema), *args))

    def fetch(self, statement: str) -> list[asyncpg.Record]:
        rows: list[asyncpg.Record] = self.run(self.conn.fetch(statement.replace("{schema}", self.schema)))
        return rows

    @contextmanager
    def transaction(self, commit: bool = True) -> Iterator[datetime]:
        """One step; yields the time that its statements see. What is rolled back has not happened in the model
        either, though whoever made the step may believe so: as after a crash of the server."""
        before = None if commit else (copy.deepcopy(self.world), self.ended.copy())
        transaction = self.conn.transaction()
        self.run(transaction.start())
        try:
            yield self.run(self.conn.fetchval("SELECT now()"))
        except BaseException:
            self.run(transaction.rollback())
            raise
        self.run(transaction.commit() if commit else transaction.rollback())
        if before is not None:
            self.world, self.ended = before
        self.seen["steps"] += 1

    def count_ends(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.ended[job.id, job.fence] += 1

    @initialize(target=ids, specs=strategies.lists(new_jobs, min_size=3, max_size=8))
    def there_are_jobs_and_a_worker(self, specs: list[Spec]) -> Any:
        self.beat(next(iter(WORKERS)))
        return self.enqueue_many(specs, commit=True)

    # --- enqueue ---

    def insert(self, jobs: dict[UUID, Job], job_id: UUID, new: NewJob, now: datetime) -> None:
        """``new`` must have become a job with this id, unless its key was taken."""
        taken = self.world.with_key(new.job_type, new.idempotency_key)
        if taken is None and new.idempotency_key is not None:
            key = (new.job_type, new.idempotency_key)
            taken = next((job for job in jobs.values() if (job.job_type, job.key) == key), None)
        if taken is not None:
            assert job_id == taken.id
            self.seen["duplicate"] += 1
            return
        assert job_id not in self.world.jobs
        assert job_id not in jobs
        jobs[job_id] = Job(
            job_id, new.job_type, new.queue, new.priority, new.idempotency_key, new.max_attempts, new.run_at or now
        )

    def would_wait(self, new: NewJob) -> bool:
        """A key that was inserted by a transaction that is still open makes others wait for its end."""
        open_keys = {(job.job_type, job.key) for job in (self.uncommitted or {}).values()}
        return new.idempotency_key is not None and (new.job_type, new.idempotency_key) in open_keys

    @rule(target=ids, spec=new_jobs, commit=committing)
    def enqueue(self, spec: Spec, commit: bool) -> Any:
        new, delay = spec
        if self.would_wait(new):
            return multiple()
        with self.transaction(commit) as now:
            new = new._replace(run_at=None if delay is None else now + delay)
            job_id: UUID = self.run(enqueue.insert_job(self.conn, new, schema=self.schema))
            self.insert(self.world.jobs, job_id, new, now)
        return job_id

    @rule(target=ids, specs=strategies.lists(new_jobs, min_size=2, max_size=5), commit=committing)
    def enqueue_many(self, specs: list[Spec], commit: bool) -> Any:
        specs = [(new, delay) for new, delay in specs if not self.would_wait(new)]
        with self.transaction(commit) as now:
            many = [new._replace(run_at=None if delay is None else now + delay) for new, delay in specs]
            found: list[UUID] = self.run(enqueue.insert_jobs(self.conn, many, schema=self.schema))
            for job_id, new in zip(found, many, strict=True):
                self.insert(self.world.jobs, job_id, new, now)
        return multiple(*found)

    @precondition(lambda self: self.uncommitted is None)
    @rule()
    def a_service_begins(self) -> None:
        self.run(self.service.execute("BEGIN"))
        self.service_now = self.run(self.service.fetchval("SELECT now()"))
        self.uncommitted = {}

    @precondition(lambda self: self.uncommitted is not None)
    @rule(target=ids, spec=new_jobs)
    def a_service_enqueues(self, spec: Spec) -> Any:
        assert self.uncommitted is not None
        assert self.service_now is not None
        new, delay = spec
        new = new._replace(run_at=None if delay is None else self.service_now + delay)
        job_id: UUID = self.run(enqueue.insert_job(self.service, new, schema=self.schema))
        self.insert(self.uncommitted, job_id, new, self.service_now)
        return job_id

    @precondition(lambda self: self.uncommitted is not None)
    @rule(commit=committing)
    def a_service_ends_its_transaction(self, commit: bool) -> None:
        assert self.uncommitted is not None
        self.run(self.service.execute("COMMIT" if commit else "ROLLBACK"))
        if commit:
            self.world.jobs.update(self.uncommitted)
            self.seen["late commit"] += len(self.uncommitted)
        self.uncommitted = None

    # --- claims ---

    @rule(worker=worker_ids, queue=queues, limit=limits, floored=strategies.booleans(), commit=committing)
    def claim(self, worker: UUID, queue: str, limit: int, floored: bool, commit: bool) -> None:
        with self.transaction(commit) as now:
            remembered = self.world.floors.get((worker, queue), NO_FLOORS) if floored else NO_FLOORS
            self.take(worker, queue, limit, remembered, now)

    def take(self, worker: UUID, queue: str, limit: int, floors: Floors, now: datetime) -> None:
        lanes = [self.world.lane(queue, priority) for priority in range(4)]
        due = [job for lane in lanes for job in lane if job.run_at <= now]
        above = [job for job in due if (floor := floors[job.priority]) is None or job.run_at >= floor]
        expected = [] if queue in self.world.paused else above[:limit]
        claimed: list[ClaimedJob] = self.run(claims.claim(self.conn, worker, queue, limit, floors, schema=self.schema))
        remembered = list(self.world.floors.get((worker, queue), NO_FLOORS))
        for job in expected:
            job.status, job.locked_by, job.locked_at = "running", worker, now
            job.fence += 1
            remembered[job.priority] = job.run_at
        self.world.floors[worker, queue] = remembered
        assert [(c.id, c.job_type, c.queue, c.priority, c.fence, c.run_at) for c in claimed] == [
            (job.id, job.job_type, queue, job.priority, job.fence, job.run_at) for job in expected
        ]
        assert [(c.attempts, c.max_attempts, c.reclaims) for c in claimed] == [
            (job.attempts, job.max_attempts, job.reclaims) for job in expected
        ]
        self.seen["claimed"] += len(claimed)
        self.seen["below a floor"] += len(due) - len(above)
        self.attempts.extend(Attempt(worker, job.id, job.fence) for job in claimed)

    @rule(worker=worker_ids)
    def claim_all(self, worker: UUID) -> None:
        """What is left to chance alone claims too little for the rest to have much to do."""
        with self.transaction() as now:
            for queue in QUEUES:
                self.take(worker, queue, 100, NO_FLOORS, now)

    @rule(worker=worker_ids, queue=queues, floored=strategies.booleans())
    def look(self, worker: UUID, queue: str, floored: bool) -> None:
        floors = self.world.floors.get((worker, queue), NO_FLOORS) if floored else NO_FLOORS
        with self.transaction() as now:
            seconds: float | None = self.run(claims.look(self.conn, queue, floors, schema=self.schema))
            firsts = self.run(claims.first_pending(self.conn, queue, schema=self.schema))
            pending = [job.run_at for p in range(4) for job in self.world.lane(queue, p, floors[p])]
            if queue in self.world.paused or not pending:
                assert seconds is None
            else:
                assert seconds is not None
                # It asks the clock, which has gone on since the transaction began.
                assert -60 < seconds - (min(pending) - now).total_seconds() <= 0
            due = [[job.run_at for job in self.world.lane(queue, p) if job.run_at <= now] for p in range(4)]
            assert firsts == tuple(min(lane, default=None) for lane in due)

    @rule(worker=worker_ids, knows=strategies.booleans(), commit=committing)
    def release_strays(self, worker: UUID, knows: bool, commit: bool) -> None:
        held = {attempt.id for attempt in self.attempts[::2]} if knows else set()
        with self.transaction(commit):
            strays = [job for job in self.world.jobs.values() if job.locked_by == worker and job.id not in held]
            released: list[UUID] = self.run(claims.release_strays(self.conn, worker, held, schema=self.schema))
            assert sorted(released) == sorted(job.id for job in strays)
            self.count_ends(strays)
            for job in strays:
                job.put_back()
            self.seen["strays"] += len(strays)

    # --- the ends of attempts; a batch is one worker's, and what others hold in it must not move ---

    def draw(self, data: strategies.DataObject) -> tuple[list[Attempt], UUID, list[Job]]:
        """Some attempts, whose batch it is, and what has to move. Among all that ever were, those that are still held
        and those whose job somebody holds now are few, and the ones that matter."""
        held = [attempt for attempt in self.attempts if self.world.held(attempt)]
        beaten = [attempt for attempt in self.attempts if self.world.is_running(attempt.id) and attempt not in held]
        among = data.draw(strategies.sampled_from([held, beaten, held + beaten])) or self.attempts
        batch = data.draw(
            strategies.lists(
                strategies.sampled_from(among), min_size=1, max_size=4, unique_by=lambda attempt: attempt.id
            )
        )
        worker = batch[0].worker
        moving = [job for attempt in batch if (job := self.world.held(attempt._replace(worker=worker)))]
        self.seen["lost"] += len(batch) - len(moving)
        return batch, worker, moving

    @precondition(lambda self: self.attempts)
    @rule(data=strategies.data(), commit=committing)
    def complete(self, data: strategies.DataObject, commit: bool) -> None:
        with self.transaction(commit) as now:
            batch, worker, held = self.draw(data)
            done = [Completion(attempt.id, attempt.fence) for attempt in batch]
            completed: set[UUID] = self.run(finishes.complete(self.conn, worker, done, schema=self.schema))
            assert completed == {job.id for job in held}
            self.count_ends(held)
            for job in held:
                job.end("completed", now)

    @precondition(lambda self: self.attempts)
    @rule(data=strategies.data(), commit=committing)
    def complete_with_its_writes(self, data: strategies.DataObject, commit: bool) -> None:
        with self.transaction(commit) as now:
            [attempt, *_], worker, held = self.draw(data)
            held = [job for job in held if job.id == attempt.id]
            done = Completion(attempt.id, attempt.fence, "{}")
            completed = self.run(finishes.complete_one(self.conn, worker, done, schema=self.schema))
            assert completed == bool(held)
            self.count_ends(held)
            for job in held:
                job.end("completed", now)

    @precondition(lambda self: self.attempts)
    @rule(data=strategies.data(), wait=hours, discard=strategies.sampled_from([False, False, True]), commit=committing)
    def fail(self, data: strategies.DataObject, wait: timedelta, discard: bool, commit: bool) -> None:
        with self.transaction(commit) as now:
            batch, worker, held = self.draw(data)
            failures = [
                Failure(attempt.id, attempt.fence, wait.total_seconds(), discard, 1.0, "E", "m", None)
                for attempt in batch
            ]
            failed = self.run(finishes.fail(self.conn, worker, failures, schema=self.schema))
            self.count_ends(held)
            for job in held:
                job.attempts += 1
                self.world.errors.add((job.id, job.fence, job.attempts, worker, "E"))
                if discard or job.attempts == job.max_attempts:
                    job.end("dead", now)
                    self.seen["dead"] += 1
                else:
                    job.put_back()
                    job.run_at = now + wait
            assert {(f.id, f.fence, f.status, f.attempts) for f in failed} == {
                (job.id, job.fence, job.status, job.attempts) for job in held
            }

    @precondition(lambda self: self.attempts)
    @rule(data=strategies.data(), wait=strategies.none() | hours, commit=committing)
    def release(self, data: strategies.DataObject, wait: timedelta | None, commit: bool) -> None:
        with self.transaction(commit) as now:
            batch, worker, held = self.draw(data)
            releases = [Release(a.id, a.fence, None if wait is None else wait.total_seconds()) for a in batch]
            released: set[UUID] = self.run(finishes.release(self.conn, worker, releases, schema=self.schema))
            assert released == {job.id for job in held}
            self.count_ends(held)
            for job in held:
                job.put_back()
                if wait is not None:
                    job.run_at = now + wait

    # --- leases ---

    @precondition(lambda self: self.attempts)
    @rule(data=strategies.data(), commit=committing)
    def renew(self, data: strategies.DataObject, commit: bool) -> None:
        with self.transaction(commit) as now:
            batch, worker, held = self.draw(data)
            mine = [(attempt.id, attempt.fence) for attempt in batch]
            expected = {(job.id, job.fence) for job in held}
            assert self.run(leases.held(self.conn, worker, mine, schema=self.schema)) == expected
            assert self.run(leases.renew(self.conn, worker, mine, schema=self.schema)) == expected
            for job in held:
                job.locked_at = now

    @rule(limit=limits, commit=committing)
    def reclaim(self, limit: int, commit: bool) -> None:
        with self.transaction(commit) as now:
            orphans = [job for job in self.world.jobs.values() if self.world.orphaned(job, now)]
            reclaimed = self.run(leases.reclaim(self.conn, max_reclaims=MAX_RECLAIMS, limit=limit, schema=self.schema))
            # Those that were claimed together have been silent for equally long: any of them may come first.
            found = [self.world.jobs[job.id] for job in reclaimed]
            assert len({job.id for job in found}) == len(found) == min(limit, len(orphans))
            assert all(job in orphans for job in found)
            assert sorted(map(silent_since, found)) == sorted(map(silent_since, orphans))[: len(found)]
            self.count_ends(found)
            for job in found:
                job.reclaims += 1
                attempt = min(job.attempts + 1, job.max_attempts)
                self.world.errors.add((job.id, job.fence, attempt, None, leases.LEASE_LOST))
                if job.reclaims == MAX_RECLAIMS:
                    job.end("dead", now)
                    self.seen["poison pills"] += 1
                else:
                    job.put_back()
            assert [(r.fence, r.status, r.attempts, r.reclaims) for r in reclaimed] == [
                (job.fence, job.status, job.attempts, job.reclaims) for job in found
            ]
            self.seen["reclaimed"] += len(found)

    @rule(worker=worker_ids)
    def beat(self, worker: UUID) -> None:
        with self.transaction() as now:
            self.run(workers.beat(self.conn, WORKERS[worker], 0, schema=self.schema))
            self.world.heartbeats[worker] = now

    @rule(worker=worker_ids)
    def a_worker_leaves(self, worker: UUID) -> None:
        with self.transaction():
            self.run(workers.remove(self.conn, worker, schema=self.schema))
            self.world.heartbeats.pop(worker, None)

    @rule(commit=committing)
    def remove_silent(self, commit: bool) -> None:
        with self.transaction(commit) as now:
            busy = {job.locked_by for job in self.world.jobs.values()}
            silent = {
                worker
                for worker, heartbeat in self.world.heartbeats.items()
                if heartbeat < now - timedelta(seconds=WORKERS[worker].silence) and worker not in busy
            }
            assert set(self.run(workers.remove_silent(self.conn, schema=self.schema))) == silent
            for worker in silent:
                del self.world.heartbeats[worker]
            self.seen["silent"] += len(silent)

    # An open transaction's rows cannot be moved back.
    @precondition(lambda self: self.uncommitted is None)
    @rule(age=hours, alive=strategies.sets(worker_ids), sweep=strategies.booleans())
    def time_passes(self, age: timedelta, alive: set[UUID], sweep: bool) -> None:
        self.execute(LET_TIME_PASS, age)
        self.world.go_back(age)
        for worker in sorted(alive):
            self.beat(worker)
        if sweep:
            self.reclaim(100, commit=True)

    # --- people ---

    @rule(job_id=ids, commit=committing)
    def cancel(self, job_id: UUID, commit: bool) -> None:
        with self.transaction(commit) as now:
            job = self.world.jobs.get(job_id)
            if job is None or job.status not in ("pending", "running"):
                with pytest.raises(JobNotFound if job is None else IllegalTransition):
                    self.run(admin.cancel(self.conn, job_id, schema=self.schema))
            else:
                self.run(admin.cancel(self.conn, job_id, schema=self.schema))
                if job.status == "running":
                    self.count_ends([job])
                    self.seen["cancelled while running"] += 1
                job.fence += 1
                job.end("cancelled", now)

    @rule(job_id=ids, commit=committing)
    def requeue(self, job_id: UUID, commit: bool) -> None:
        with self.transaction(commit) as now:
            job = self.world.jobs.get(job_id)
            if job is None or job.status in ("pending", "running"):
                with pytest.raises(JobNotFound if job is None else IllegalTransition):
                    self.run(admin.requeue(self.conn, job_id, schema=self.schema))
            else:
                self.run(admin.requeue(self.conn, job_id, schema=self.schema))
                self.seen["requeued"] += 1
                job.start_over(now)

    @rule(
        job_type=strategies.sampled_from([None, None, "a.a"]),
        queue=strategies.sampled_from([None, None, "mail"]),
        before=strategies.sampled_from([None, None, HOUR]),
        limit=limits,
        commit=committing,
    )
    def requeue_dead(
        self, job_type: str | None, queue: str | None, before: timedelta | None, limit: int, commit: bool
    ) -> None:
        with self.transaction(commit) as now:
            until = None if before is None else now - before
            dead = [
                job
                for job in self.world.jobs.values()
                if job.status == "dead"
                and job_type in (None, job.job_type)
                and queue in (None, job.queue)
                and job.finished_at is not None
                and (until is None or job.finished_at < until)
            ]
            dead = sorted(dead, key=lambda job: (job.finished_at, job.id))[:limit]
            requeued: list[UUID] = self.run(
                admin.requeue_dead(
                    self.conn, job_type=job_type, queue=queue, before=until, limit=limit, schema=self.schema
                )
            )
            assert sorted(requeued) == sorted(job.id for job in dead)
            for job in dead:
                job.start_over(now)
            self.seen["requeued while dead"] += len(dead)

    @rule(limit=limits, commit=committing)
    def prune(self, limit: int, commit: bool) -> None:
        """A whole walk, so that nothing has to be known of its pages but their size."""
        with self.transaction(commit) as now:
            old = [
                job
                for job in self.world.jobs.values()
                if job.status in ("completed", "cancelled")
                and job.finished_at is not None
                and job.finished_at < now - KEEP[JobStatus(job.status)]
            ]
            deleted, cursor = 0, retention.FIRST_ID
            while True:
                step = self.run(retention.prune(self.conn, cursor, keep=KEEP, limit=limit, schema=self.schema))
                assert step.deleted <= limit
                deleted, cursor = deleted + step.deleted, step.cursor
                if cursor == retention.FIRST_ID:
                    break
            assert deleted == len(old)
            for job in old:
                del self.world.jobs[job.id]
            gone = {job.id for job in old}
            self.world.errors = {error for error in self.world.errors if error[0] not in gone}
            self.seen["pruned"] += deleted

    @rule(queue=queues, commit=committing)
    def pause(self, queue: str, commit: bool) -> None:
        with self.transaction(commit):
            self.run(admin.pause(self.conn, queue, schema=self.schema))
            self.world.paused.add(queue)

    @rule(queue=queues, commit=committing)
    def resume(self, queue: str, commit: bool) -> None:
        with self.transaction(commit):
            self.run(admin.resume(self.conn, queue, schema=self.schema))
            self.world.paused.discard(queue)

    # --- what holds after every step ---

    @invariant()
    def the_tables_are_as_the_model_says(self) -> None:
        """Nothing lost, nothing doubled, and each column what it has to be."""
        jobs = [Job(*row) for row in self.fetch(SELECT_JOBS)]
        assert {job.id: job for job in jobs} == self.world.jobs
        [(errors, heartbeats, paused)] = self.fetch(SELECT_THE_REST)
        assert {tuple(error) for error in errors} == self.world.errors
        assert len(errors) == len(self.world.errors)
        assert dict(heartbeats) == self.world.heartbeats
        assert set(paused) == self.world.paused
        # What holds whatever the model believes.
        for job in jobs:
            assert (job.status == "running") == (job.locked_by is not None) == (job.locked_at is not None)
            assert (job.status in ("completed", "dead", "cancelled")) == (job.finished_at is not None)
        keys = [(job.job_type, job.key) for job in jobs if job.key is not None]
        assert len(keys) == len(set(keys))
        assert all(times == 1 for times in self.ended.values()), "an attempt has ended twice"


def silent_since(job: Job) -> datetime:
    assert job.locked_at is not None
    return job.locked_at


REACHED = {
    *("duplicate", "late commit", "claimed", "below a floor", "strays", "lost", "dead", "reclaimed", "poison pills"),
    *("silent", "cancelled while running", "requeued", "requeued while dead", "pruned"),
}
"""What the sequences must have come to, or they would prove little."""

THOROUGH = settings(
    max_examples=35,
    stateful_step_count=150,
    derandomize=True,  # the same sequences each time: whoever breaks nothing sees nothing break
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


MOST_ROUNDS = 5
"""One mostly suffices; which steps are possible depends on ids and clocks, too, so rare states may need another."""

Live: TypeAlias = Callable[..., Counter[str]]

QUICK = settings(THOROUGH, phases=[Phase.generate])
"""Without looking for the shortest sequence that fails: here they all should."""


@pytest.fixture
def live(dsn: str, schema: str) -> Iterator[Live]:
    """Lets sequences of steps run, and tells what they have come to. On a loop of its own: hypothesis calls plain
    functions."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:

        def run(awaitable: Awaitable[T]) -> T:
            async def wait() -> T:
                return await awaitable

            return runner.run(wait())

        def live(how: settings, number: int = 0) -> Counter[str]:
            seen: Counter[str] = Counter()

            class Here(Life):
                def __init__(self) -> None:
                    super().__init__(run, conn, service, schema, seen)

            # The first sequences are the same each time, as far as ids and clocks allow.
            run_state_machine_as_test(seed(number)(Here) if number else Here, settings=how)
            return seen

        conn, service = run(asyncpg.connect(dsn)), run(asyncpg.connect(dsn))
        yield live
        run(conn.close())
        run(service.close())


def test_whatever_happens_to_jobs_comes_to_what_the_model_says(live: Live) -> None:
    seen: Counter[str] = Counter()
    for number in range(MOST_ROUNDS):
        seen += live(THOROUGH, number)
        if all(seen[what] for what in REACHED):
            break

    assert seen["steps"] > 2_000
    assert {what for what in REACHED if seen[what] == 0} == set()


WRONG: dict[str, tuple[ModuleType, str, str, str]] = {
    "a claim below the floor": (claims, "CLAIM", "run_at >= coalesce(", "now() >= coalesce("),
    "a completion without the fence": (finishes, "COMPLETE", "j.fence = d.fence", "true"),
    "a renewal of another worker's": (leases, "RENEW", "j.locked_by = d.worker_id", "true"),
    "a reclaim that knows no lease": (leases, "RECLAIM", "j.locked_at >=", "now() >="),
    "a cancellation that leaves the fence": (admin, "CANCEL", "fence = fence % 2147483647 + 1", "fence = fence"),
    "a pruning of what is young": (retention, "PRUNE", "finished_at < now() - r.age", "true"),
}
"""What to break: a statement, and what becomes of a part of it."""


def live_often(live: Live) -> None:
    for number in range(MOST_ROUNDS):
        live(QUICK, number)


@pytest.mark.parametrize("mistake", WRONG)
def test_the_model_notices(mistake: str, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, right, wrong = WRONG[mistake]
    statement = getattr(module, name)
    assert right in statement
    monkeypatch.setattr(module, name, statement.replace(right, wrong))

    with pytest.raises((AssertionError, asyncpg.PostgresError)):
        live_often(live)
