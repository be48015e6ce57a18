"""The life of a worker: how it starts, what it refuses, and the order in which it stops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from recado import ClaimedJob, JobStatus, Recado, Worker
from recado.errors import ConfigurationError, SchemaMismatch
from recado.queue import migrate
from recado.worker import EventKind
from tests.worker.support import NEVER, Observed, job_of, working


@pytest.fixture
def app() -> Recado:
    return Recado()


async def test_a_worker_inside_a_service_runs_what_its_pool_leads_to(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=2) as pool:
        async with working(app, pool) as (_, seen):
            job_id = await app.enqueue(conn, "_smoke.echo", None)
            await seen.seen(EventKind.COMPLETED, job_id)
        assert await pool.fetchval("SELECT 1") == 1  # the pool is the service's: it is still open


async def test_handlers_that_hold_every_connection_of_the_pool_keep_nothing_from_being_claimed_or_finished(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    holding, go_on = asyncio.Event(), asyncio.Event()

    @app.job("a.holds")
    async def holds(payload: None, conn: asyncpg.Connection) -> None:
        holding.set()
        await go_on.wait()

    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, working(app, pool) as (_, seen):
        first = await holds.enqueue(conn, None)
        await holding.wait()
        second = await app.enqueue(conn, "_smoke.echo", None)
        await seen.seen(EventKind.COMPLETED, second)
        go_on.set()
        await seen.seen(EventKind.COMPLETED, first)


async def test_a_stop_waits_for_what_runs_and_gives_back_what_has_not_begun(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.job("a.long")
    async def long(payload: None) -> str:
        running.set()
        await go_on.wait()
        return "in peace"

    async with working(app, dsn, queues={"default": 1}, grace=NEVER) as (worker, seen):
        slots = worker  # one slot: the second job can only have been prefetched
        first = await long.enqueue(conn, None)
        await running.wait()
        second = await long.enqueue(conn, None)
        slots.stop()
        await seen.seen(EventKind.STOPPING)
        assert await conn.fetchval(f"SELECT count(*) FROM {schema}.workers") == 1  # it goes on beating
        go_on.set()
    assert (await job_of(conn, first)).result == "in peace"
    job = await job_of(conn, second)
    assert (job.status, job.attempts, job.reclaims) == (JobStatus.PENDING, 0, 0)
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.workers") == 0
    assert seen.events[-1].kind is EventKind.STOPPED


async def test_what_was_prefetched_is_given_back_at_a_stop(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    blocking, go_on = asyncio.Event(), asyncio.Event()

    @app.job("a.mixed")
    async def mixed(payload: int) -> None:
        if payload == 300:
            blocking.set()
            await go_on.wait()

    async with working(app, dsn, queues={"default": 1}, grace=NEVER) as (worker, seen):
        # Short jobs teach it to prefetch; then one takes its only slot.
        await app.enqueue_many(conn, [mixed.new(n) for n in range(2000)])
        await blocking.wait()
        running = f"SELECT count(*) FROM {schema}.jobs WHERE status = 'running' AND payload <> '300'"
        worker.stop()
        await seen.seen(EventKind.RELEASED)
        go_on.set()
    assert await conn.fetchval(running) == 0
    assert await conn.fetchval(f"SELECT max(attempts) FROM {schema}.jobs") == 0
    done = await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs WHERE status = 'completed'")
    assert done == 301
    assert len(set(seen.jobs(EventKind.RELEASED))) > 1


@pytest.mark.parametrize("hurry", [False, True], ids=["after the grace", "at once"])
async def test_what_does_not_end_in_time_is_cancelled_and_given_back_uncounted(
    app: Recado, dsn: str, conn: asyncpg.Connection, hurry: bool
) -> None:
    running = asyncio.Event()
    cleaned_up = False

    @app.job("a.endless")
    async def endless(payload: None) -> None:
        nonlocal cleaned_up
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned_up = True

    async with working(app, dsn, grace=NEVER if hurry else 0.05) as (worker, _):
        job_id = await endless.enqueue(conn, None)
        await running.wait()
        if hurry:
            worker.stop()
            worker.stop_now()
    job = await job_of(conn, job_id)
    assert (job.status, job.attempts, job.locked_by) == (JobStatus.PENDING, 0, None)
    assert cleaned_up


async def test_prefetched_jobs_are_not_kept_behind_a_long_one(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    """Short jobs teach a worker to prefetch; then a long one takes its only slot, while another worker is idle."""
    blocking, go_on = asyncio.Event(), asyncio.Event()
    done: list[int] = []

    @app.job("a.mixed")
    async def mixed(payload: int) -> None:
        if payload == 300:
            blocking.set()
            await go_on.wait()
        done.append(payload)

    await app.enqueue_many(conn, [mixed.new(n) for n in range(400)])
    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        await blocking.wait()
        async with working(app, dsn, queues={"default": 1}) as (_, other):
            await other.until(lambda: len(seen.jobs(EventKind.COMPLETED)) + len(other.jobs(EventKind.COMPLETED)) >= 399)
            assert 300 not in done
            go_on.set()
            await seen.until(lambda: len(done) == 400)


async def test_a_handler_that_ignores_its_cancellation_is_given_back_without_it(
    app: Recado, dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("recado.worker.runner.CANCEL_GRACE", 0.05)
    running, go_on, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    @app.job("a.stubborn")
    async def stubborn(payload: None) -> None:
        running.set()
        while not go_on.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await go_on.wait()
        ended.set()

    async with working(app, dsn, grace=0) as (_, _seen):
        job_id = await stubborn.enqueue(conn, None)
        await running.wait()
    job = await job_of(conn, job_id)
    assert (job.status, job.attempts) == (JobStatus.PENDING, 0)
    assert f"job {job_id} (a.stubborn) ignores its cancellation" in caplog.text
    go_on.set()
    await ended.wait()
    await asyncio.sleep(0)


async def test_a_thread_that_does_not_end_is_reported_to_whoever_wants_to_exit(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    running, go_on = threading.Event(), threading.Event()

    @app.job("a.thread")
    def thread(payload: None) -> None:
        running.set()
        go_on.wait(20)

    seen = Observed()
    worker = Worker(app, dsn, observe=seen, grace=0)
    task = asyncio.create_task(worker.run())
    job_id = await thread.enqueue(conn, None)
    await asyncio.to_thread(running.wait)
    worker.stop()
    assert await task is False
    assert (await job_of(conn, job_id)).status is JobStatus.PENDING
    go_on.set()


async def test_a_stop_before_the_start_and_a_second_stop_are_fine(app: Recado, dsn: str) -> None:
    worker = Worker(app, dsn)
    worker.stop()
    worker.stop()
    async with asyncio.timeout(20):
        assert await worker.run() is True


async def test_a_worker_that_is_cancelled_gives_its_jobs_back(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    running = asyncio.Event()

    @app.job("a.endless")
    async def endless(payload: None) -> None:
        running.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(Worker(app, dsn).run())
    job_id = await endless.enqueue(conn, None)
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # It could not write any more; but it is off the registry, so that the next sweep takes the job over.
    assert await conn.fetch(f"SELECT FROM {schema}.workers") == []
    assert (await job_of(conn, job_id)).attempts == 0


async def test_an_error_in_the_block_stops_the_worker(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    with pytest.raises(ZeroDivisionError):
        async with working(app, dsn):
            raise ZeroDivisionError


async def test_a_lifespan_that_fails_keeps_the_worker_from_starting(app: Recado, dsn: str, schema: str) -> None:
    @app.lifespan
    async def lifespan() -> AsyncIterator[dict[str, Any]]:
        raise ConnectionRefusedError("no smtp")
        yield {}

    with pytest.raises(ConnectionRefusedError, match="no smtp"):
        async with Worker(app, dsn):
            pytest.fail("must not start")


async def test_a_worker_refuses_a_schema_that_is_not_its_own(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(f"INSERT INTO {schema}.schema_migrations (number, name, checksum) VALUES (9999, 'future', 'x')")
    with pytest.raises(SchemaMismatch, match="upgrade"):
        async with Worker(app, dsn):
            pytest.fail("must not start")
    await conn.execute(f"DELETE FROM {schema}.schema_migrations WHERE number = 9999")
    await migrate.down(conn, to=0, schema=schema)
    with pytest.raises(SchemaMismatch, match="recado migrate up"):
        async with Worker(app, dsn):
            pytest.fail("must not start")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"queues": {}}, "serves no queue"),
        ({"queues": {"mail": 0}}, "'mail' has 0 slots"),
        ({"queues": {"No Good": 1}}, "'No Good' as a queue"),
        ({"lease": 0}, "must be positive"),
        ({"lease": 1e12}, "at most 31,622,400, a year"),
        ({"silence": 1e12}, "at most 31,622,400, a year"),
        ({"heartbeat": 30.0}, "at least three heartbeats"),
        ({"poll_interval": 60.0}, "every 60 s"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(app: Recado, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigurationError, ValueError), match=sentence):
        Worker(app, "postgresql://nowhere", **options)


def test_a_worker_without_a_database_says_what_to_do(app: Recado) -> None:
    with pytest.raises(ConfigurationError, match="set RECADO_DSN"):
        Worker(app)


async def test_two_schemas_in_one_database_are_two_queues(dsn: str, conn: asyncpg.Connection) -> None:
    await migrate.up(conn, schema="second")
    first, second = Recado(), Recado(schema="second")
    done: dict[str, list[str]] = {"first": [], "second": []}
    for name, app in (("first", first), ("second", second)):

        @app.job("a.names")
        async def names(payload: str, job: ClaimedJob, *, name: str = name) -> None:
            done[name].append(payload)

    async with working(first, dsn) as (_, in_first), working(second, dsn) as (_, in_second):
        await first.enqueue(conn, "a.names", "one")
        await second.enqueue(conn, "a.names", "two")
        await in_first.seen(EventKind.COMPLETED)
        await in_second.seen(EventKind.COMPLETED)
        await in_first.idle()
        await in_second.idle()
    assert done == {"first": ["one"], "second": ["two"]}


async def test_urgent_jobs_come_first_and_equals_in_the_order_they_came(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    order: list[tuple[int, int]] = []

    @app.job("a.ordered")
    async def ordered(payload: int, job: ClaimedJob) -> None:
        order.append((job.priority, payload))

    jobs = [ordered.new(n, priority=priority) for n in range(20) for priority in (3, 0, 2, 1)]
    await app.enqueue_many(conn, jobs)
    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == 80)
    assert order == sorted(order)


async def test_a_bucket_made_by_hand_at_its_types_end_does_not_keep_a_worker_from_writing_down_what_it_did(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    @app.job("a.short")
    async def short(payload: None) -> None:
        """Nothing to do."""

    for minutes in 0, 1:  # the next one, too, should that begin meanwhile
        await conn.execute(
            f"INSERT INTO {schema}.job_stats (minute, queue, job_type, completed, run_seconds, wait_seconds) VALUES "
            "(date_trunc('minute', now()) + make_interval(mins => $1), 'default', 'a.short', 9223372036854775807, "
            "1.7e308, 1.7e308)",
            minutes,
        )
    async with working(app, dsn) as (_, seen):
        job_id = await short.enqueue(conn, None)
        await seen.seen(EventKind.COMPLETED, job_id)
    assert await conn.fetchval(
        f"SELECT min(completed) FROM {schema}.job_stats WHERE completed < 9223372036854775807"
    ) == (2**62 + 1)
