"""What a worker costs and holds at most: counted in statements, claims, jobs and blocks, never in time."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from recado import ClaimedJob, Recado
from recado.queue import claims
from recado.queue.connections import Connection, Connector
from recado.queue.finishes import COMPLETE
from recado.queue.leases import HEARTBEAT_INTERVAL, RECLAIM
from recado.queue.statements import fill
from recado.queue.workers import BEAT, PROBE
from recado.worker import EventKind
from recado.worker.claimer import POLL_INTERVAL, Claimer
from recado.worker.listener import PROBE_INTERVAL, Listener
from recado.worker.runner import MAX_PREFETCH, PREFETCH_WINDOW
from recado.worker.upkeep import RECLAIM_INTERVAL
from tests.worker.support import PATIENCE, Connect, working

LONG = 1.5 * PREFETCH_WINDOW
"""Seconds of work that make a job too long to be fetched ahead."""


@pytest.fixture
def app() -> Recado:
    return Recado()


class Statements:
    """What the workers' own connections send, each statement noted when its answer has come."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def note(self, logged: Any) -> None:
        """Called by asyncpg; in the thread of the leases, too."""
        self.sent.append(logged.query)
        self._loop.call_soon_threadsafe(self._changed.set)

    def count(self, statement: str, schema: str) -> int:
        return self.sent.count(fill(statement, schema))

    async def seen(self, statement: str, schema: str) -> None:
        """Wait until ``statement`` was sent."""
        async with asyncio.timeout(PATIENCE):
            while not self.count(statement, schema):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    statements = Statements()
    connect = Connector.connect

    async def connect_and_log(self: Connector, role: str, **overrides: Any) -> asyncpg.Connection:
        conn = await connect(self, role, **overrides)
        conn.add_query_logger(statements.note)
        return conn

    monkeypatch.setattr(Connector, "connect", connect_and_log)
    return statements


Take: TypeAlias = Callable[..., Awaitable[list[ClaimedJob]]]


@dataclass(eq=False)
class Claim:
    """One claim of some worker."""

    took: list[UUID] | None = None
    """``None`` while it is under way."""


class Jobs:
    """Which claims took which jobs, and which of these have begun and ended, as the handlers tell."""

    def __init__(self, take: Take) -> None:
        self.claims: list[Claim] = []
        """In the order in which they were sent."""
        self.begun: list[UUID] = []
        self.ended: list[UUID] = []
        self.most_held: Counter[UUID] = Counter()
        """By worker: how many jobs it has had at once, running or waiting for a slot."""
        self._take = take
        self._held: defaultdict[UUID, set[UUID]] = defaultdict(set)
        self._changed = asyncio.Event()

    async def claim(
        self,
        conn: Connection,
        worker_id: UUID,
        queue: str,
        limit: int,
        floors: Sequence[datetime | None],
        *,
        schema: str | None = None,
    ) -> list[ClaimedJob]:
        """Stands in for :func:`recado.queue.claims.claim`, which it calls."""
        claim = Claim()
        self.claims.append(claim)
        jobs = await self._take(conn, worker_id, queue, limit, floors, schema=schema)
        claim.took = [job.id for job in jobs]
        held = self._held[worker_id]
        held.update(claim.took)
        self.most_held[worker_id] = max(self.most_held[worker_id], len(held))
        return jobs

    def begin(self, job: ClaimedJob) -> None:
        self.begun.append(job.id)
        self._changed.set()

    def end(self, job: ClaimedJob) -> None:
        self.ended.append(job.id)
        for held in self._held.values():
            held.discard(job.id)

    def waiting(self) -> int:
        """How many have been taken and have not begun."""
        return sum(map(len, self._held.values())) - (len(self.begun) - len(self.ended))

    async def until_begun(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.begun) < number:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def jobs(monkeypatch: pytest.MonkeyPatch) -> Jobs:
    jobs = Jobs(claims.claim)
    monkeypatch.setattr(claims, "claim", jobs.claim)
    return jobs


# --- with little to do ---

HERD = 20
"""Workers. Each has four connections while it finishes nothing, and a server takes 100."""


async def test_a_herd_of_idle_workers_makes_fewer_than_three_claims_a_job(
    app: Recado, dsn: str, conn: asyncpg.Connection, jobs: Jobs
) -> None:
    number = 30
    async with AsyncExitStack() as stack:
        herd = [(await stack.enter_async_context(working(app, dsn)))[1] for _ in range(HERD)]
        jobs.claims.clear()
        for n in range(number):
            for seen in herd:
                seen.clear()
            await app.enqueue(conn, "_smoke.echo", n)
            for seen in herd:
                await seen.seen(EventKind.LOOKED)  # it sleeps again
        assert number <= len(jobs.claims) < 3 * number


WINDOW = 2.5
"""Seconds for which an idle worker is watched: that it does next to nothing gives no signal."""


@pytest.mark.parametrize("speed", [1, 10], ids=["as it is", "ten times as fast"])
async def test_an_idle_worker_sends_fewer_than_two_statements_a_second(
    app: Recado,
    dsn: str,
    conn: asyncpg.Connection,
    statements: Statements,
    schema: str,
    monkeypatch: pytest.MonkeyPatch,
    speed: int,
) -> None:
    """Ten times as fast, all that it does from time to time comes within the window."""
    monkeypatch.setattr("recado.worker.worker.Listener", partial(Listener, probe_interval=PROBE_INTERVAL / speed))
    intervals = {
        "poll_interval": POLL_INTERVAL / speed,
        "reclaim_interval": RECLAIM_INTERVAL / speed,
        "heartbeat": HEARTBEAT_INTERVAL / speed,
    }
    async with working(app, dsn, **intervals) as (_, seen):
        await seen.seen(EventKind.LOOKED)
        await seen.seen(EventKind.PRUNED)  # the end of what it does at its start
        await seen.seen(EventKind.EXPIRED)
        # What the clock brings every five minutes might come right now, and would count ten times.
        await conn.execute(f"UPDATE {schema}.schedules SET last_tick = now() + interval '1 hour'")
        statements.sent.clear()
        await asyncio.sleep(WINDOW)
        sent = list(statements.sent)
    assert len(sent) < 2 * WINDOW * speed
    expected = (claims.LOOK,) if speed == 1 else (claims.LOOK, BEAT, RECLAIM, PROBE)
    assert {fill(statement, schema) for statement in expected} <= set(sent)


STORM = 50_000
"""Notifications at least, each of a commit of its own: a third of a second."""

NOTIFY = """
DO $$ BEGIN
    FOR n IN 1..5000 LOOP
        PERFORM pg_notify('{schema}', 'default');
        COMMIT;
    END LOOP;
END $$
"""


async def test_a_storm_of_notifications_makes_few_claims_and_lets_handlers_go_on(
    app: Recado,
    dsn: str,
    conn: asyncpg.Connection,
    connect: Connect,
    statements: Statements,
    schema: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard, enough, over = 0, asyncio.Event(), asyncio.Event()
    wake = Claimer.wake

    def count(self: Claimer) -> None:
        nonlocal heard
        heard += 1
        if heard == STORM:
            enough.set()
        wake(self)

    steps: list[int] = []

    @app.job("a.walks")
    async def walks(payload: None) -> None:
        while not over.is_set():
            steps.append(heard)
            await asyncio.sleep(0)

    notifier = await connect()

    async def storm() -> None:
        while not over.is_set():
            await notifier.execute(fill(NOTIFY, schema))

    async with working(app, dsn) as (_, seen), asyncio.TaskGroup() as group:
        await seen.seen(EventKind.LOOKED)
        monkeypatch.setattr(Claimer, "wake", count)
        statements.sent.clear()
        group.create_task(storm())
        await walks.enqueue(conn, None)
        for n in range(5):
            await seen.seen(EventKind.COMPLETED, await app.enqueue(conn, "_smoke.echo", n))
        async with asyncio.timeout(PATIENCE):
            await enough.wait()
        sent = statements.count(claims.CLAIM, schema) + statements.count(claims.LOOK, schema)
        over.set()
    assert sent < STORM / 100
    # Between two steps of a handler there is one read from the socket: 256 KiB at most, of 24 bytes a notification.
    assert max(after - before for before, after in pairwise(steps)) < STORM / 4


# --- with much to do ---


async def test_long_jobs_are_never_fetched_ahead(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str, jobs: Jobs
) -> None:
    slots, number = 3, 30
    may_end = asyncio.Semaphore(0)

    @app.job("a.long")
    async def long(payload: None, job: ClaimedJob) -> None:
        jobs.begin(job)
        await asyncio.sleep(LONG)
        await may_end.acquire()
        jobs.end(job)

    # What has ended counts no more, though its end may not be written down yet.
    held = f"SELECT locked_by, count(*) FROM {schema}.jobs WHERE status = 'running' AND id <> ALL ($1) GROUP BY 1"
    await app.enqueue_many(conn, [long.new(None)] * number)
    queues = {"default": slots}
    async with working(app, dsn, queues=queues) as (first, _), working(app, dsn, queues=queues) as (second, _):
        ended = 0
        for more in (0, 1, 2, 3, 6, 6):
            ended += more
            for _ in range(more):
                may_end.release()
            await jobs.until_begun(2 * slots + ended)
            rows = await conn.fetch(held, jobs.ended)
            assert {row[0]: row[1] for row in rows} == {first.id: slots, second.id: slots}
        for _ in range(number):
            may_end.release()
    assert jobs.most_held == {first.id: slots, second.id: slots}


async def test_no_more_jobs_are_fetched_ahead_than_the_slots_begin_within_the_window(
    app: Recado, dsn: str, conn: asyncpg.Connection, jobs: Jobs
) -> None:
    slots, work, number = 4, 0.005, 300

    @app.job("a.short")
    async def short(payload: None, job: ClaimedJob) -> None:
        await asyncio.sleep(work)
        jobs.end(job)

    await app.enqueue_many(conn, [short.new(None)] * number)
    async with working(app, dsn, queues={"default": slots}) as (worker, seen):
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == number)
    shortest = work - 0.001  # a loop's clock counts milliseconds
    assert slots < jobs.most_held[worker.id] <= slots + slots * PREFETCH_WINDOW / shortest


async def test_quick_jobs_are_claimed_and_finished_in_large_batches_and_few_wait_in_the_process(
    app: Recado, dsn: str, conn: asyncpg.Connection, jobs: Jobs, statements: Statements, schema: str
) -> None:
    slots, number = 10, 3_000

    @app.job("a.quick")
    async def quick(payload: None, job: ClaimedJob) -> None:
        jobs.end(job)

    await app.enqueue_many(conn, [quick.new(None)] * number)
    async with working(app, dsn, queues={"default": slots}) as (worker, seen):
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == number)
    assert len(jobs.claims) < number / 30
    assert statements.count(COMPLETE, schema) < number / 5
    assert slots < jobs.most_held[worker.id] <= slots + MAX_PREFETCH


@pytest.mark.parametrize("work", [0, LONG], ids=["quick jobs", "long jobs"])
async def test_a_backlog_does_not_delay_an_urgent_job_beyond_one_claim(
    app: Recado, dsn: str, conn: asyncpg.Connection, jobs: Jobs, work: float
) -> None:
    slots, backlog = 10, 10_000

    @app.job("a.works")
    async def works(payload: float, job: ClaimedJob) -> None:
        jobs.begin(job)
        await asyncio.sleep(payload)
        jobs.end(job)

    await app.enqueue_many(conn, [works.new(work, priority=2)] * backlog)
    async with working(app, dsn, queues={"default": slots}) as (_, seen):
        for n in range(1, 4):
            await jobs.until_begun(n * 3 * slots)
            urgent = await works.enqueue(conn, 0, priority=0)
            # Committed. From here on:
            begun, waiting, sent = len(jobs.begun), jobs.waiting(), len(jobs.claims)
            under_way = [claim for claim in jobs.claims if claim.took is None]
            await seen.seen(EventKind.COMPLETED, urgent)

            taken_by = next(n for n, claim in enumerate(jobs.claims) if claim.took and urgent in claim.took)
            assert taken_by <= sent  # the claim that was under way, or the next one
            before = [job for claim in under_way if claim.took and urgent not in claim.took for job in claim.took]
            # Nothing begins before it but what had been claimed by then.
            assert jobs.begun.index(urgent) - begun <= waiting + len(before)
            assert jobs.begun.index(urgent) < backlog  # there still was one


# --- what is not a claim's business ---

FILL = """
INSERT INTO {schema}.jobs (id, job_type, queue, priority, payload, status, run_at, finished_at)
SELECT gen_random_uuid(), 'mail.send', 'default', 1, '{{}}', $1, now() + $2::interval + n * interval '1 ms',
       CASE WHEN $1 <> 'pending' THEN now() END
FROM generate_series(1, $3::integer) AS n
"""


async def blocks(conn: asyncpg.Connection, schema: str, statement: str, *arguments: Any) -> int:
    """How many blocks a statement reads; what it does is rolled back."""
    await conn.execute(f"VACUUM ANALYZE {schema}.jobs")
    transaction = conn.transaction()
    await transaction.start()
    explain = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {fill(statement, schema)}"
    [explained] = json.loads(await conn.fetchval(explain, *arguments))
    await transaction.rollback()
    hit, read = (explained["Plan"][f"Shared {kind} Blocks"] for kind in ("Hit", "Read"))
    return int(hit + read)


@pytest.mark.parametrize("ready", [1, 300])
async def test_what_is_scheduled_completed_or_dead_costs_a_claim_nothing(
    ready: int, conn: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(f"ALTER TABLE {schema}.jobs SET (autovacuum_enabled = false)")

    async def put(status: str, when: timedelta, number: int) -> None:
        await conn.execute(FILL.format(schema=schema), status, when, number)

    async def costs() -> tuple[int, int]:
        claim = await blocks(conn, schema, claims.CLAIM, uuid4(), "default", 500, None, None, None, None)
        return claim, await blocks(conn, schema, claims.LOOK, "default", *claims.NO_FLOORS)

    await put("pending", timedelta(hours=-1), ready)
    claim, look = await costs()
    await put("pending", timedelta(days=1), 20_000)
    await put("completed", timedelta(hours=-2), 20_000)
    await put("dead", timedelta(hours=-2), 5_000)
    later_claim, later_look = await costs()
    # One level more in each of the indexes that are written to for each job, and in those that are read.
    assert later_claim <= claim + 3 * ready + 10
    assert later_look <= look + 10
