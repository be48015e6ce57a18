"""Where claims begin: not before the last one's jobs, and now and then at the very start.

One slot, nothing fetched ahead, and a backlog whose jobs end when they are told to: each claim takes one job.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias
from uuid import UUID, uuid4

import asyncpg
import pytest

from recado import ClaimedJob, Recado, Retry
from recado.queue import claims, leases, pause, resume, workers
from recado.queue.connections import Connection
from recado.queue.statements import fill
from recado.queue.workers import WorkerInfo
from recado.worker import EventKind, claimer
from tests.worker.support import NEVER, PATIENCE, Connect, waiting_for_a_lock, working

ONE_SLOT = {"default": 1}
BACKLOG = 12

NO_FLOORS = (None,) * len(claims.PRIORITIES)


class Line:
    """An application whose jobs say when they begin, and end when they are told to."""

    def __init__(self) -> None:
        self.app = Recado()
        self.begun: list[UUID] = []
        self._may_end: asyncio.Queue[BaseException | None] = asyncio.Queue()
        self._changed = asyncio.Event()

        @self.app.job("a.waits")
        async def waits(payload: None, job: ClaimedJob) -> None:
            self.begun.append(job.id)
            self._changed.set()
            if (error := await self._may_end.get()) is not None:
                raise error

        self.job = waits

    async def until_begun(self, number: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while len(self.begun) < number:
                self._changed.clear()
                await self._changed.wait()

    def end(self, error: BaseException | None = None) -> None:
        """Let the longest running job end."""
        self._may_end.put_nowait(error)

    async def go_on(self, number: int) -> list[UUID]:
        """Let one job after the other end; which ones took their place."""
        for _ in range(number):
            before = len(self.begun)
            self.end()
            await self.until_begun(before + 1)
        return self.begun[-number:]


@pytest.fixture
async def line(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.setattr("recado.worker.runner.PREFETCH_WINDOW", 0.0)
    monkeypatch.setattr(claimer, "DEAR_SWEEP", NEVER)  # however slow this machine is, the claims sweep themselves
    return Line()


Sweeps: TypeAlias = Callable[[float], None]


@pytest.fixture
def sweep_every(monkeypatch: pytest.MonkeyPatch) -> Sweeps:
    """Sets how many seconds lie between two sweeps under a backlog; until then there are none, but for the first claim
    of a worker."""
    monkeypatch.setattr(claimer, "SWEEP_INTERVAL", NEVER)
    monkeypatch.setattr(claimer, "SWEEP_SHARE", 0)
    return lambda seconds: monkeypatch.setattr(claimer, "SWEEP_INTERVAL", seconds)


# --- how a job gets below the floor: it is older than the backlog, but can be claimed only when the block has ended ---


@dataclass
class Database:
    dsn: str
    schema: str
    conn: asyncpg.Connection
    connect: Connect


@pytest.fixture
def database(dsn: str, schema: str, conn: asyncpg.Connection, connect: Connect) -> Database:
    return Database(dsn, schema, conn, connect)


@asynccontextmanager
async def committed_late(database: Database) -> AsyncIterator[UUID]:
    conn = await database.connect()
    async with conn.transaction():
        yield await Line().job.enqueue(conn, None)


@asynccontextmanager
async def given_back(database: Database) -> AsyncIterator[UUID]:
    line = Line()
    async with working(line.app, database.dsn, grace=NEVER) as (worker, seen):
        job_id = await line.job.enqueue(database.conn, None)
        await line.until_begun(1)
        worker.stop()
        await seen.seen(EventKind.STOPPING)  # it claims no more
        yield job_id
        worker.stop_now()


@asynccontextmanager
async def retried(database: Database) -> AsyncIterator[UUID]:
    """At once, which is when its failure began to be written down: a lock keeps that from its end."""
    line = Line()
    lock = await database.connect()
    async with working(line.app, database.dsn, grace=NEVER) as (worker, seen):
        job_id = await line.job.enqueue(database.conn, None)
        await line.until_begun(1)
        worker.stop()
        await seen.seen(EventKind.STOPPING)
        async with lock.transaction():
            await lock.execute(f"SELECT FROM {database.schema}.jobs WHERE id = $1 FOR UPDATE", job_id)
            line.end(Retry(after=0))
            await waiting_for_a_lock(database.conn, "recado finisher")
            yield job_id


@asynccontextmanager
async def taken_over(database: Database) -> AsyncIterator[UUID]:
    job_id = await Line().job.enqueue(database.conn, None)
    lost = WorkerInfo(uuid4(), "host", 1, "0", ("default",), 1, NEVER)
    await workers.beat(database.conn, lost, 1)
    [job] = await claims.claim(database.conn, lost.id, "default", 1, NO_FLOORS)
    assert job.id == job_id
    yield job_id
    await workers.remove(database.conn, lost.id)
    assert [orphan.id for orphan in await leases.reclaim(database.conn)] == [job_id]


Hides: TypeAlias = Callable[[Database], AbstractAsyncContextManager[UUID]]


@pytest.mark.parametrize("hides", [committed_late, retried, given_back, taken_over], ids=lambda hides: hides.__name__)
async def test_under_a_backlog_a_sweep_finds_what_lies_below_the_floor(
    line: Line, database: Database, sweep_every: Sweeps, hides: Hides
) -> None:
    async with AsyncExitStack() as stack:
        async with hides(database) as hidden:
            backlog = await line.app.enqueue_many(database.conn, [line.job.new(None)] * BACKLOG)
            await stack.enter_async_context(working(line.app, database.dsn, queues=ONE_SLOT, grace=0))
            await line.until_begun(1)
        assert await line.go_on(3) == backlog[1:4]  # without a sweep it is not seen
        sweep_every(0)
        assert await line.go_on(1) == [hidden]


async def test_once_a_sweep_has_found_something_the_claims_go_on_from_there(
    line: Line, database: Database, sweep_every: Sweeps
) -> None:
    late = await database.connect()
    async with late.transaction():
        hidden = await line.app.enqueue_many(late, [line.job.new(None)] * 3)
        backlog = await line.app.enqueue_many(database.conn, [line.job.new(None)] * BACKLOG)
        stack = AsyncExitStack()
        await stack.enter_async_context(working(line.app, database.dsn, queues=ONE_SLOT, grace=0))
        await line.until_begun(1)
    async with stack:
        sweep_every(0)
        await line.go_on(1)
        sweep_every(NEVER)
        assert [line.begun[-1], *await line.go_on(4)] == [*hidden, *backlog[1:3]]


@pytest.mark.parametrize(("floor", "other"), [(1, 0), (3, 2), (1, 3)])
async def test_the_floor_of_one_priority_hides_nothing_in_another(
    line: Line, database: Database, sweep_every: Sweeps, floor: int, other: int
) -> None:
    backlog = await line.app.enqueue_many(database.conn, [line.job.new(None, priority=floor)] * BACKLOG)
    async with working(line.app, database.dsn, queues=ONE_SLOT, grace=0):
        await line.until_begun(1)
        await line.go_on(1)
        long_ago = datetime.now(UTC) - timedelta(days=1)
        older = await line.job.enqueue(database.conn, None, priority=other, run_at=long_ago)
        expected = [older, *backlog[2:]] if other < floor else [*backlog[2:], older]
        assert await line.go_on(len(expected)) == expected


async def test_without_a_backlog_no_claim_has_a_floor(line: Line, database: Database, sweep_every: Sweeps) -> None:
    async with working(line.app, database.dsn, queues=ONE_SLOT, grace=0) as (_, seen):
        async with committed_late(database) as hidden:
            await line.job.enqueue(database.conn, None)
            await line.until_begun(1)
            line.end()
            await seen.asleep()
        await line.until_begun(2)
    assert line.begun[1] == hidden


async def test_what_came_below_the_floor_while_the_queue_was_paused_is_found_when_it_is_resumed(
    line: Line, database: Database, sweep_every: Sweeps
) -> None:
    backlog = await line.app.enqueue_many(database.conn, [line.job.new(None)] * BACKLOG)
    long_ago = datetime.now(UTC) - timedelta(days=1)
    async with working(line.app, database.dsn, queues=ONE_SLOT, grace=0) as (_, seen):
        await line.until_begun(1)
        await line.go_on(1)
        await pause(database.conn, "default")
        line.end()
        await seen.asleep()
        looked = seen.count(EventKind.LOOKED)
        hidden = await line.job.enqueue(database.conn, None, run_at=long_ago)
        await seen.seen(EventKind.LOOKED, times=looked + 1)
        assert line.begun == backlog[:2]
        await resume(database.conn, "default")
        await line.until_begun(3)
        assert [line.begun[2], *await line.go_on(3)] == [hidden, *backlog[2:5]]


async def test_no_more_than_a_twentieth_of_the_time_goes_into_sweeps(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They last for as long as if an old snapshot kept dead rows in their way."""
    claim, lasts, sweeps = claims.claim, 0.005, 0

    async def slow_without_floors(
        conn: Connection, worker_id: UUID, queue: str, limit: int, floors: Sequence[datetime | None], **options: Any
    ) -> list[ClaimedJob]:
        nonlocal sweeps
        if not any(floors):
            sweeps += 1
            await asyncio.sleep(lasts)
        return await claim(conn, worker_id, queue, limit, floors, **options)

    monkeypatch.setattr(claimer, "SWEEP_INTERVAL", 0)
    monkeypatch.setattr(claimer, "DEAR_SWEEP", NEVER)
    monkeypatch.setattr(claims, "claim", slow_without_floors)
    app, number = Recado(), 1_000

    @app.job("a.short")
    async def short(payload: None) -> None:
        await asyncio.sleep(0.001)

    await app.enqueue_many(database.conn, [short.new(None)] * number)
    began = time.monotonic()
    async with working(app, database.dsn, queues={"default": 4}) as (_, seen):
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == number)
        assert 1 < sweeps <= 1 + (time.monotonic() - began) / (20 * lasts)


async def test_under_an_old_snapshot_a_claim_from_its_floor_reads_no_more_than_the_first_one(
    database: Database,
) -> None:
    conn, schema, app, rounds, limit = database.conn, database.schema, Recado(), 20, 100
    await conn.execute(f"ALTER TABLE {schema}.jobs SET (autovacuum_enabled = false)")
    for _ in range(rounds + 1):
        await app.enqueue_many(conn, [app.new("_smoke.echo", n) for n in range(limit)])
    await conn.execute(f"ANALYZE {schema}.jobs")

    async def claim(floor: datetime | None) -> int:
        """Claim; how many blocks were read to find the jobs."""
        explain = f"EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) {fill(claims.CLAIM, schema)}"
        arguments = (uuid4(), "default", limit, None, floor, None, None)
        [explained] = json.loads(await conn.fetchval(explain, *arguments))
        return sum(
            node["Shared Hit Blocks"] + node["Shared Read Blocks"]
            for node in nodes(explained["Plan"])
            if node.get("Index Name") == "jobs_claim_idx"
        )

    old = await database.connect()
    async with old.transaction(isolation="repeatable_read"):
        await old.execute(f"SELECT FROM {schema}.jobs LIMIT 1")
        read = []
        for _ in range(rounds):
            floor = await conn.fetchval(f"SELECT max(run_at) FROM {schema}.jobs WHERE status = 'running'")
            read.append(await claim(floor))
        from_the_start = await claim(None)
    assert max(read) <= 2 * read[0]
    assert from_the_start > 2 * max(read)


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


@pytest.mark.parametrize("hides", [committed_late, retried, given_back, taken_over], ids=lambda hides: hides.__name__)
async def test_a_dear_sweep_is_made_beside_the_claims_and_finds_the_same(
    line: Line, database: Database, sweep_every: Sweeps, hides: Hides, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From here on every sweep counts as dear: no claim goes without floors, so what lies below is found aside."""
    async with AsyncExitStack() as stack:
        async with hides(database) as hidden:
            backlog = await line.app.enqueue_many(database.conn, [line.job.new(None)] * BACKLOG)
            await stack.enter_async_context(working(line.app, database.dsn, queues=ONE_SLOT, grace=0))
            await line.until_begun(1)
        monkeypatch.setattr(claimer, "DEAR_SWEEP", -1.0)
        assert await line.go_on(3) == backlog[1:4]
        swept = asyncio.Event()
        count_sweep = claimer.Claimer._count_sweep

        def told(self: claimer.Claimer, began: float) -> None:
            count_sweep(self, began)
            swept.set()  # whoever waits for it goes on when this step of the sweep is over, floors included

        monkeypatch.setattr(claimer.Claimer, "_count_sweep", told)
        sweep_every(0)
        [following] = await line.go_on(1)  # this claim only asks for the sweep
        assert following == backlog[4]
        async with asyncio.timeout(PATIENCE):
            await swept.wait()
        assert await line.go_on(1) == [hidden]


@pytest.mark.parametrize("share", [0, 20, 100])
async def test_a_job_that_is_committed_late_on_an_idle_queue_begins_though_sweeps_are_dear(
    line: Line, database: Database, sweep_every: Sweeps, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """One slow sweep is enough for that: a moment without a processor. The next poll must not be needed."""
    monkeypatch.setattr(claimer, "DEAR_SWEEP", -1.0)
    monkeypatch.setattr(claimer, "SWEEP_SHARE", share)
    async with working(line.app, database.dsn, queues=ONE_SLOT, grace=0) as (_, seen):
        async with committed_late(database) as hidden:
            await line.job.enqueue(database.conn, None)
            await line.until_begun(1)
            line.end()
            await seen.asleep()
        await line.until_begun(2)
    assert line.begun[1] == hidden


async def test_without_a_backlog_what_is_committed_a_moment_late_waits_for_no_sweep(
    line: Line, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claimer.Claimer, "_may_sweep", lambda *_: False)
    monkeypatch.setattr(claimer, "TRAIL", timedelta(seconds=PATIENCE))
    async with working(line.app, database.dsn, queues=ONE_SLOT, grace=0) as (_, seen):
        async with committed_late(database) as hidden:
            await line.job.enqueue(database.conn, None)
            await line.until_begun(1)
            line.end()
            await seen.asleep()
        await line.until_begun(2)
    assert line.begun[1] == hidden


async def test_a_trail_that_is_dear_is_rationed_like_a_sweep(
    line: Line, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed_from: list[datetime | None] = []
    claim = claims.claim

    async def noting(
        conn: Connection, worker_id: UUID, queue: str, limit: int, floors: Sequence[datetime | None], **options: Any
    ) -> list[ClaimedJob]:
        claimed_from.append(floors[line.job.priority])
        await asyncio.sleep(2 * PATIENCE / NEVER)  # so dear that the test is over before the next may be
        return await claim(conn, worker_id, queue, limit, floors, **options)

    monkeypatch.setattr(claims, "claim", noting)
    monkeypatch.setattr(claimer.Claimer, "_may_sweep", lambda *_: False)
    monkeypatch.setattr(claimer, "DEAR_SWEEP", -1.0)
    monkeypatch.setattr(claimer, "SWEEP_SHARE", NEVER)
    run_at = datetime(2020, 1, 1, tzinfo=UTC)
    async with working(line.app, database.dsn, queues=ONE_SLOT, grace=0) as (_, seen):
        for number in (1, 2):
            await line.job.enqueue(database.conn, None, run_at=run_at)
            await line.until_begun(number)
            line.end()
            await seen.asleep()
    assert claimed_from[0] is None
    assert set(claimed_from[1:]) <= {None, run_at}
