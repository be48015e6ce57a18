"""Workers that sleep, turn sated and turn hungry again lose no wake-up, in whatever order things happen.

Nothing polls here: a job to which no notification, no alarm and no watch leads never begins. Left out are the two ways
to enqueue that are documented to wait for the poll: from a snapshot that is older than its transaction's id (REPEATABLE
READ), and in an INSERT that waits for another one with the same key.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from uuid import UUID

import asyncpg
import pytest

from recado import ClaimedJob, Recado
from recado.queue import pause, requeue, resume
from recado.worker import EventKind, claimer
from tests.worker.support import Connect, Observed, working

PATIENCE = 10.0
"""Seconds after which a job is taken for forgotten."""

SLOTS = {"default": 2}


class Runs:
    """Two kinds of jobs, and how often each job has run to its end."""

    def __init__(self, app: Recado) -> None:
        self.number: Counter[UUID] = Counter()
        self._changed = asyncio.Event()

        @app.job("a.works")
        async def works(payload: float, job: ClaimedJob) -> None:
            await asyncio.sleep(payload)
            self._count(job)

        @app.job("a.retried", backoff=lambda attempt: 0.02)
        async def retried(payload: None, job: ClaimedJob) -> None:
            if job.attempt == 1:
                raise ConnectionRefusedError
            self._count(job)

    def _count(self, job: ClaimedJob) -> None:
        self.number[job.id] += 1
        self._changed.set()

    def missing(self, wanted: Counter[UUID]) -> int:
        return (wanted - self.number).total()

    async def until(self, wanted: Counter[UUID]) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.missing(wanted):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def app() -> Recado:
    return Recado()


@pytest.fixture
async def runs(app: Recado) -> Runs:
    return Runs(app)


@pytest.fixture
def easily_sated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sated at the second full claim, and as often as that happens: each time is another chance to go wrong."""
    monkeypatch.setattr("recado.worker.claimer.SATED_AFTER", 0)
    monkeypatch.setattr("recado.worker.hunger.SATED_EVERY", 0)


# --- one thing after the other ---

WAYS = ["one", "soon", "few", "many"]
"""To enqueue: an INSERT, one for a job that is due soon, one for several jobs, a COPY."""


async def enqueue(app: Recado, conn: asyncpg.Connection, way: str) -> list[UUID]:
    match way:
        case "one":
            return [await app.enqueue(conn, "a.works", 0)]
        case "soon":
            return [await app.enqueue(conn, "a.works", 0, run_at=datetime.now(UTC) + timedelta(seconds=0.1))]
        case "retried":
            return [await app.enqueue(conn, "a.retried", None)]
        case "few":
            return await app.enqueue_many(conn, [app.new("a.works", 0)] * 3)
        case _:
            return await app.enqueue_many(conn, [app.new("a.works", 0)] * 110)


async def test_each_way_to_enqueue_wakes_a_sleeping_worker(
    app: Recado, runs: Runs, dsn: str, conn: asyncpg.Connection
) -> None:
    async with working(app, dsn, queues=SLOTS) as (_, seen):
        for way in WAYS:
            await seen.idle()
            await runs.until(Counter(await enqueue(app, conn, way)))
        job_id = await app.enqueue(conn, "a.works", 0)
        await seen.seen(EventKind.COMPLETED, job_id)
        await seen.idle()
        await requeue(conn, job_id)
        await runs.until(Counter({job_id: 2}))


async def test_what_was_not_notified_because_the_worker_was_sated_wakes_it_when_it_sleeps(
    app: Recado, runs: Runs, dsn: str, conn: asyncpg.Connection, connect: Connect, easily_sated: None
) -> None:
    """By each way to enqueue, in a transaction that commits when the worker has long been asleep."""
    others = {way: await connect() for way in [*WAYS, "requeued"]}
    async with working(app, dsn, queues=SLOTS) as (_, seen):
        again = await app.enqueue(conn, "a.works", 0)
        await seen.seen(EventKind.COMPLETED, again)
        await app.enqueue_many(conn, [app.new("a.works", 0.002)] * 200)
        await seen.seen(EventKind.SATED)
        wanted = {}
        for way, other in others.items():
            await other.execute("BEGIN")
            if way == "requeued":
                await requeue(other, again)
                wanted[way] = Counter({again: 2})
            else:
                wanted[way] = Counter(await enqueue(app, other, way))
        assert seen.count(EventKind.HUNGRY) == 0
        for way, other in others.items():
            await seen.seen(EventKind.HUNGRY)
            await seen.idle()
            await other.execute("COMMIT")
            await runs.until(wanted[way])


async def test_a_load_that_comes_and_goes_is_told_enqueuers_once_a_second_at_most(
    app: Recado, runs: Runs, dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recado.worker.claimer.SATED_AFTER", 0)
    async with working(app, dsn, queues=SLOTS) as (_, seen):
        began = time.monotonic()
        for _ in range(8):
            await runs.until(Counter(await app.enqueue_many(conn, [app.new("a.works", 0.001)] * 60)))
            await seen.idle()
        assert 1 <= seen.count(EventKind.SATED) <= 1 + (time.monotonic() - began)


# --- all at once ---

SEEDS = range(30)

STEPS = 14
"""Of one interleaving, before it comes to its end."""

TRANSACTIONS = 4
"""That may be open at once."""


class Transaction:
    """A connection for transactions that stay open for a while."""

    def __init__(self, conn: asyncpg.Connection) -> None:
        self.conn = conn
        self.jobs: list[UUID] = []
        """To be run if it is committed."""


class Interleaving:
    """Random steps of those who enqueue, on several connections."""

    def __init__(
        self,
        seed: int,
        app: Recado,
        runs: Runs,
        conn: asyncpg.Connection,
        others: Sequence[asyncpg.Connection],
        workers: Sequence[Observed],
    ) -> None:
        self.steps: list[str] = []
        self.wanted: Counter[UUID] = Counter()
        """How often each job has to run."""
        self._random = random.Random(seed)
        self._app = app
        self._runs = runs
        self._conn = conn
        self._workers = workers
        self._idle = [Transaction(other) for other in others]
        self._open: list[Transaction] = []

    async def run(self) -> None:
        """Take the steps, and wait until everything that was committed has run."""
        steps = {
            self.enqueue: 3,
            self.saturate: 4,
            self.begin: 4,
            self.add: 2,
            self.add_in_vain: 1,
            self.requeue: 2,
            self.commit: 2,
            self.roll_back: 1,
            self.pause: 1,
            self.let_pass: 3,
            self.rest: 2,
        }
        for step in self._random.choices(list(steps), list(steps.values()), k=STEPS):
            self.steps.append(step.__name__)
            await step()
        await self.rest()
        while self._open:
            await self.commit()
            await self.rest()  # or the next one's notification might wake them for this one, too

    # -- steps

    async def enqueue(self) -> None:
        self.wanted.update(await self._jobs(self._conn))

    async def saturate(self) -> None:
        """Claims come back full for a while, and whoever enqueues meanwhile need not notify."""
        number = self._random.randrange(20, 100)
        self.wanted.update(await self._app.enqueue_many(self._conn, [self._app.new("a.works", 0.001)] * number))
        await self.let_pass()
        await self.add()

    async def begin(self) -> None:
        if self._idle:
            transaction = self._idle.pop()
            await transaction.conn.execute("BEGIN")
            self._open.append(transaction)

    async def add(self) -> None:
        if self._open:
            transaction = self._random.choice(self._open)
            transaction.jobs += await self._jobs(transaction.conn)

    async def add_in_vain(self) -> None:
        if self._open:
            transaction = self._random.choice(self._open)
            await transaction.conn.execute("SAVEPOINT vain")
            await self._jobs(transaction.conn)
            await transaction.conn.execute("ROLLBACK TO vain")

    async def requeue(self) -> None:
        """Run a job again that has ended; at once, or when an open transaction commits."""
        completed = Counter(job for seen in self._workers for job in seen.jobs(EventKind.COMPLETED))
        taken = {job for transaction in self._open for job in transaction.jobs}
        ended = sorted(job for job, times in completed.items() if times == self.wanted[job] and job not in taken)
        if not ended:
            return
        job = self._random.choice(ended)
        if self._open and self._random.random() < 0.5:
            transaction = self._random.choice(self._open)
            await requeue(transaction.conn, job)
            transaction.jobs.append(job)
        else:
            await requeue(self._conn, job)
            self.wanted[job] += 1

    async def commit(self) -> None:
        await self._end("COMMIT")

    async def roll_back(self) -> None:
        await self._end("ROLLBACK")

    async def pause(self) -> None:
        await pause(self._conn, "default")
        await self.let_pass()
        await resume(self._conn, "default")

    async def let_pass(self) -> None:
        """Some time, so that the steps fall into different moments of a worker; nothing relies on it."""
        await asyncio.sleep(self._random.choice([0, 0.001, 0.005, 0.02, 0.06]))

    async def rest(self) -> None:
        """Until all that is committed has run, and every worker sleeps."""
        await self._runs.until(self.wanted)
        for seen in self._workers:
            await seen.idle()

    # -- their parts

    async def _jobs(self, conn: asyncpg.Connection) -> list[UUID]:
        return await enqueue(self._app, conn, self._random.choice([*WAYS, "retried"]))

    async def _end(self, how: str) -> None:
        if not self._open:
            return
        transaction = self._open.pop(self._random.randrange(len(self._open)))
        await transaction.conn.execute(how)
        if how == "COMMIT":
            self.wanted.update(transaction.jobs)
        transaction.jobs = []
        self._idle.append(transaction)


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_committed_job_is_run(
    seed: int,
    app: Recado,
    runs: Runs,
    dsn: str,
    conn: asyncpg.Connection,
    connect: Connect,
    easily_sated: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if seed % 4 > 1:  # with one worker and with two: every sweep is dear, and made beside the claims
        monkeypatch.setattr(claimer, "DEAR_SWEEP", -1.0)
    others = [await connect() for _ in range(TRANSACTIONS)]
    async with AsyncExitStack() as stack:
        number = 1 + seed % 2
        workers = [(await stack.enter_async_context(working(app, dsn, queues=SLOTS)))[1] for _ in range(number)]
        interleaving = Interleaving(seed, app, runs, conn, others, workers)
        try:
            await interleaving.run()
        except TimeoutError:
            missing = runs.missing(interleaving.wanted)
            pytest.fail(f"seed {seed}: {missing} jobs were not run after {', '.join(interleaving.steps)}")
    assert runs.number == interleaving.wanted
