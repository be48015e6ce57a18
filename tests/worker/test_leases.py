"""Leases: kept whatever the loop does, lost when somebody else has the job, taken over when a worker is gone."""

from __future__ import annotations

import asyncio
import threading
import time
from uuid import UUID, uuid4

import asyncpg
import pytest

from recado import ClaimedJob, JobStatus, Recado
from recado.app import JOB_DIED
from recado.errors import RecadoError
from recado.queue import list_errors
from recado.queue.leases import MAX_RECLAIMS, reclaim
from recado.queue.workers import WorkerInfo, beat
from recado.worker import EventKind
from tests.worker.support import NEVER, job_of, logged, working


@pytest.fixture
def app() -> Recado:
    return Recado()


async def orphan(
    conn: asyncpg.Connection, schema: str, app: Recado, *, reclaims: int = 0, by: UUID | None = None
) -> UUID:
    """A job that runs on a worker nobody knows (or on ``by``)."""
    job_id = await app.enqueue(conn, "_smoke.echo", None)
    await conn.execute(
        f"UPDATE {schema}.jobs SET status = 'running', fence = 1, locked_at = now(), locked_by = $2, reclaims = $3 "
        "WHERE id = $1",
        job_id,
        by or uuid4(),
        reclaims,
    )
    return job_id


async def test_a_handler_that_blocks_the_loop_beyond_its_lease_keeps_its_job_and_is_named(
    app: Recado, dsn: str, conn: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    runs = []

    @app.job("a.blocks")
    async def blocks(payload: None, job: ClaimedJob) -> None:
        runs.append(job.id)
        time.sleep(1.8)  # noqa: ASYNC251 - that is what is tested

    # The second worker has a loop of its own, which is not blocked.
    stop = threading.Event()
    swept = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(sweep()))

    async def sweep() -> None:
        async with working(Recado(), dsn, queues={"other": 1}, reclaim_interval=0.05):
            swept.set()
            await asyncio.to_thread(stop.wait)

    thread.start()
    try:
        await asyncio.to_thread(swept.wait)
        async with working(app, dsn, lease=0.9, heartbeat=0.2, silence=0.9, queues={"default": 1}) as (_, seen):
            job_id = await blocks.enqueue(conn, None)
            await seen.seen(EventKind.COMPLETED, job_id)
            await seen.seen(EventKind.BLOCKED, job_id)
    finally:
        stop.set()
        await asyncio.to_thread(thread.join)
    job = await job_of(conn, job_id)
    assert runs == [job_id]
    assert (job.reclaims, job.fence) == (0, 1)
    [warning] = [r.message for r in caplog.records if "blocked the event loop" in r.message]
    assert f"job {job_id} (a.blocks) has blocked the event loop for 1." in warning
    assert "test_leases.py" in warning


async def test_a_worker_that_learns_that_its_lease_is_lost_cancels_the_task(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    running, interrupted = asyncio.Event(), asyncio.Event()

    @app.job("a.long")
    async def long(payload: None) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            interrupted.set()

    async with working(app, dsn, heartbeat=0.1) as (_, seen):
        job_id = await long.enqueue(conn, None)
        await running.wait()
        await conn.execute(f"UPDATE {schema}.jobs SET fence = fence + 1, locked_by = gen_random_uuid()")
        await interrupted.wait()
        await seen.seen(EventKind.LOST, job_id)
        job = await job_of(conn, job_id)
        assert (job.status, job.fence, job.attempts) == (JobStatus.RUNNING, 2, 0)


async def test_long_jobs_are_renewed_and_short_ones_never(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.job("a.long")
    async def long(payload: None) -> None:
        running.set()
        await go_on.wait()

    async with working(app, dsn, lease=0.6, heartbeat=0.1, silence=NEVER) as (_, seen):
        job_id = await long.enqueue(conn, None)
        await running.wait()
        claimed = (await job_of(conn, job_id)).locked_at
        await seen.seen(EventKind.BEAT, times=seen.count(EventKind.BEAT) + 8)
        renewed = (await job_of(conn, job_id)).locked_at
        go_on.set()
        await seen.seen(EventKind.COMPLETED, job_id)
    assert claimed is not None
    assert renewed is not None
    assert renewed > claimed


async def test_a_beat_that_the_server_refuses_is_tried_again(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    """No error of the server's may end the thread: the jobs would be taken over while they run."""
    async with working(app, dsn, heartbeat=0.1) as (_, seen):
        async with logged("cannot renew leases: CheckViolationError"):
            await conn.execute(f"ALTER TABLE {schema}.workers ADD CONSTRAINT refused CHECK (running < 0) NOT VALID")
        await conn.execute(f"ALTER TABLE {schema}.workers DROP CONSTRAINT refused")
        await seen.seen(EventKind.BEAT, times=seen.count(EventKind.BEAT) + 1)


async def test_a_worker_whose_lease_thread_dies_does_not_go_on(
    app: Recado, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012 - it is the block's end that raises
        async with working(app, dsn, heartbeat=0.1) as (worker, _):
            monkeypatch.setattr("recado.worker.leases.Leases._look_after_leases", fails)
            assert worker._task is not None
            await asyncio.wait({worker._task})
    assert caught.group_contains(RecadoError, match="cannot keep leases")


async def test_an_orphan_goes_back_without_counting_an_attempt(
    app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await orphan(conn, schema, app)
    [taken] = await reclaim(conn)
    assert (taken.id, taken.status) == (job_id, JobStatus.PENDING)
    job = await job_of(conn, job_id)
    assert (job.status, job.attempts, job.reclaims, job.locked_at, job.locked_by) == ("pending", 0, 1, None, None)
    assert [(e.error_class, e.message) for e in await list_errors(conn, job_id)] == [
        ("recado.errors.LeaseLost", "the worker that ran the job disappeared (1 of 5)")
    ]


async def test_a_job_is_an_orphan_when_its_own_workers_lease_is_over_or_its_heartbeat_is_gone(
    app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    patient = WorkerInfo(uuid4(), "host", 1, "0", ("default",), 1, lease=600.0)
    hasty = WorkerInfo(uuid4(), "host", 2, "0", ("default",), 1, lease=10.0)
    silent = WorkerInfo(uuid4(), "host", 3, "0", ("default",), 1, lease=600.0)
    for worker in (patient, hasty, silent):
        await beat(conn, worker, 1)
    jobs = {worker.pid: await orphan(conn, schema, app, by=worker.id) for worker in (patient, hasty, silent)}
    assert await reclaim(conn) == []
    await conn.execute(f"UPDATE {schema}.jobs SET locked_at = now() - interval '11 seconds'")
    assert [job.id for job in await reclaim(conn)] == [jobs[2]]
    await conn.execute(f"UPDATE {schema}.workers SET heartbeat_at = now() - interval '61 seconds' WHERE pid = 3")
    assert [job.id for job in await reclaim(conn)] == [jobs[3]]
    assert (await job_of(conn, jobs[1])).status is JobStatus.RUNNING


async def test_what_is_claimed_behind_an_outage_before_the_next_beat_is_not_taken_for_a_dead_workers(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.job("a.long")
    async def long(payload: None) -> None:
        running.set()
        await go_on.wait()

    async with working(app, dsn, heartbeat=NEVER, silence=3 * NEVER) as (_, seen):
        await seen.idle()
        await conn.execute(f"UPDATE {schema}.workers SET heartbeat_at = now() - 2 * silence")
        await conn.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE application_name = 'recado claims' AND datname = current_database()"
        )
        job_id = await long.enqueue(conn, None)
        await running.wait()
        assert await reclaim(conn) == []
        go_on.set()
        await seen.seen(EventKind.COMPLETED, job_id)


async def test_a_job_that_took_five_workers_down_is_dead_and_raises_its_alert(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    @app.job("money.move", critical=True)
    async def move(payload: None) -> None:
        raise AssertionError("must not run")

    job_id = await app.enqueue(conn, "money.move", None, idempotency_key="k")
    for _ in range(MAX_RECLAIMS - 1):
        await conn.execute(f"UPDATE {schema}.jobs SET status = 'running', fence = fence + 1, locked_at = now()")
        [taken] = await reclaim(conn)
        assert taken.status is JobStatus.PENDING
    await conn.execute(f"UPDATE {schema}.jobs SET status = 'running', fence = fence + 1, locked_at = now()")
    async with working(app, dsn, reclaim_interval=0.05, queues={"other": 1}) as (_, seen):
        await seen.seen(EventKind.RECLAIMED, job_id)
    job = await job_of(conn, job_id)
    assert (job.status, job.reclaims, job.attempts) == (JobStatus.DEAD, MAX_RECLAIMS, 0)
    assert len(await list_errors(conn, job_id)) == MAX_RECLAIMS
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs WHERE job_type = $1", JOB_DIED) == 1


async def test_a_row_that_somebody_has_locked_does_not_hold_up_the_sweep(
    app: Recado, conn: asyncpg.Connection, schema: str, dsn: str
) -> None:
    first, second = await orphan(conn, schema, app), await orphan(conn, schema, app)
    other = await asyncpg.connect(dsn)
    try:
        async with other.transaction():
            await other.execute(f"SELECT FROM {schema}.jobs WHERE id = $1 FOR UPDATE", first)
            assert [job.id for job in await reclaim(conn)] == [second]
        assert [job.id for job in await reclaim(conn)] == [first]
    finally:
        await other.close()


async def test_of_several_workers_each_orphan_is_taken_over_once(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    ids = {await orphan(conn, schema, app) for _ in range(20)}
    async with (
        working(app, dsn, reclaim_interval=0.05, queues={"other": 1}) as (_, first),
        working(app, dsn, reclaim_interval=0.05, queues={"other": 1}) as (_, second),
    ):
        reclaimed: list[UUID] = []

        def collected() -> bool:
            reclaimed[:] = first.jobs(EventKind.RECLAIMED) + second.jobs(EventKind.RECLAIMED)
            return len(reclaimed) >= 20

        async with asyncio.TaskGroup() as group:
            waiters = [group.create_task(seen.until(collected)) for seen in (first, second)]
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            for waiter in waiters:
                waiter.cancel()
    assert len(reclaimed) == 20
    assert set(reclaimed) == ids
