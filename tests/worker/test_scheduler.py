"""Ticks: each enqueued once, by whichever worker, whatever happens to workers, clocks and releases."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from recado import Recado, Worker
from recado.errors import ConfigurationError
from recado.queue import Job, list_jobs, operations, pause_schedule, resume_schedule, schedules, server_time, workers
from recado.queue.connections import Connection, Link, connector
from recado.queue.schedules import SYSTEM, ScheduleRow
from recado.queue.workers import WorkerInfo, beat
from recado.settings import settings
from recado.worker import EventKind
from recado.worker.scheduler import Scheduler, SystemTask
from tests.queue.support import insert
from tests.worker.support import NEVER, PATIENCE, Observed, logged, working

LONG_AGO = datetime(2023, 1, 1, tzinfo=UTC)

OFTEN = 0.05
"""Seconds between two syncs, where a test waits for several rounds."""

JOB_TYPE = "report.yearly"

YEARLY = "0 0 1 1 *"
"""No tick comes while a test runs, unless somebody celebrates with it."""


def shop(expression: str = YEARLY, *, name: str = "shop", **options: Any) -> Recado:
    """An application with one schedule."""
    app = Recado(name)

    @app.cron(expression, **{"payload": {"kind": "long"}} | options)
    @app.job(JOB_TYPE, queue="reports", priority=2, max_attempts=3, critical=True)
    async def yearly(payload: dict[str, str]) -> None: ...

    return app


async def register(conn: asyncpg.Connection) -> UUID:
    worker_id = uuid4()
    await beat(conn, WorkerInfo(worker_id, "host", 1, "0", ("default",), 1, 300.0), 0)
    return worker_id


@asynccontextmanager
async def scheduling(
    app: Recado,
    dsn: str,
    conn: asyncpg.Connection,
    *,
    system: Mapping[str, SystemTask] | None = None,
    sync_interval: float = OFTEN,
) -> AsyncIterator[Observed]:
    """The scheduler of a worker of its own, which signs off at the end."""
    observed, worker_id, link = Observed(), await register(conn), Link(connector(dsn), "upkeep")
    scheduler = Scheduler(app, link, worker_id, system or {}, sync_interval=sync_interval, observe=observed)
    task = asyncio.create_task(scheduler.run())
    try:
        yield observed
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await link.close()
        await workers.remove(conn, worker_id)


async def round_after(*seen: Observed) -> None:
    """Wait until each has made a whole round that began after this call: between its next sync and the one after."""
    for observed in seen:
        await observed.seen(EventKind.SYNCED, times=observed.count(EventKind.SYNCED) + 2)


async def behind(app: Recado, conn: asyncpg.Connection, schema: str, last_tick: datetime = LONG_AGO) -> None:
    """The rows of ``app`` as a worker left them that was the last to tick long ago."""
    worker_id = await register(conn)
    async with conn.transaction():
        await schedules.sync(conn, app.name, worker_id, list(app.schedules.values()))
    await conn.execute(f"UPDATE {schema}.schedules SET last_tick = $1", last_tick)
    await workers.remove(conn, worker_id)


async def jobs(conn: asyncpg.Connection) -> list[Job]:
    return await list_jobs(conn, job_type=JOB_TYPE)


async def last_tick(conn: asyncpg.Connection, schema: str) -> datetime:
    value: datetime = await conn.fetchval(f"SELECT last_tick FROM {schema}.schedules WHERE application <> ''")
    return value


def new_year(moment: datetime) -> datetime:
    """The last tick before ``moment``."""
    return datetime(moment.year, 1, 1, tzinfo=UTC)


async def test_a_tick_enqueues_the_job_as_its_type_and_the_schedule_say(
    dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    """After three years without a worker, too: one job, for the last tick."""
    app = shop()
    await behind(app, conn, schema)
    async with scheduling(app, dsn, conn) as seen:
        await seen.seen(EventKind.TICKED)
        await round_after(seen)
    (job,) = await jobs(conn)
    tick = new_year(job.created_at)
    assert seen.jobs(EventKind.TICKED) == [job.id]
    assert (job.queue, job.priority, job.max_attempts, job.critical) == ("reports", 2, 3, True)
    assert job.payload == {"kind": "long"}
    assert job.metadata == {"schedule": JOB_TYPE, "tick": tick.isoformat()}
    assert job.idempotency_key == f"schedule:shop:{JOB_TYPE}:{tick.isoformat()}"
    assert await last_tick(conn, schema) == tick


async def test_a_new_schedule_waits_for_its_first_tick(dsn: str, conn: asyncpg.Connection) -> None:
    async with scheduling(shop(), dsn, conn) as seen:
        await round_after(seen)
        assert seen.count(EventKind.TICKED) == 0
    assert await jobs(conn) == []


async def test_of_many_workers_that_see_the_same_tick_one_enqueues_it(
    dsn: str, conn: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 8
    lock, together = schedules.lock_schedule, asyncio.Barrier(number)

    async def lock_together(*args: Any, **kwargs: Any) -> ScheduleRow | None:
        await together.wait()
        return await lock(*args, **kwargs)

    monkeypatch.setattr(schedules, "lock_schedule", lock_together)
    await behind(shop(), conn, schema)
    async with AsyncExitStack() as stack:
        seen = [await stack.enter_async_context(scheduling(shop(), dsn, conn)) for _ in range(number)]
        await round_after(*seen)
    assert len(await jobs(conn)) == 1
    assert sum(observed.count(EventKind.TICKED) for observed in seen) == 1


async def test_a_worker_that_comes_late_to_a_tick_it_saw_finds_it_made(
    dsn: str, conn: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stands before the row that it saw due, until the second has made the tick."""
    lock, arrived, go_on = schedules.lock_schedule, asyncio.Event(), asyncio.Event()

    async def lock_late(*args: Any, **kwargs: Any) -> ScheduleRow | None:
        if not arrived.is_set():
            arrived.set()
            await go_on.wait()
        return await lock(*args, **kwargs)

    monkeypatch.setattr(schedules, "lock_schedule", lock_late)
    await behind(shop(), conn, schema)
    async with scheduling(shop(), dsn, conn) as late:
        async with asyncio.timeout(PATIENCE):
            await arrived.wait()
        async with scheduling(shop(), dsn, conn) as early:
            await early.seen(EventKind.TICKED)
            go_on.set()
            await round_after(late, early)
    assert (late.count(EventKind.TICKED), early.count(EventKind.TICKED)) == (0, 1)
    assert len(await jobs(conn)) == 1


async def test_a_worker_sleeps_until_the_next_tick_and_no_longer(
    dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    app = shop(overlap="queue")
    await behind(app, conn, schema, await server_time(conn))
    # Every second, which only a row that was changed by hand can be: a test does not wait for minutes.
    await conn.execute(f"UPDATE {schema}.schedules SET expression = '* * * * * *'")
    async with scheduling(app, dsn, conn, sync_interval=NEVER) as seen:
        await seen.seen(EventKind.TICKED, times=3)
    assert seen.count(EventKind.SYNCED) == 1
    ticks = {job.id: datetime.fromisoformat(job.metadata["tick"]) for job in await jobs(conn)}
    assert len(set(ticks.values())) == len(ticks) >= 3
    assert all(job.created_at >= ticks[job.id] for job in await jobs(conn))  # and none before its time


# --- who dies, and when ---


async def test_a_worker_that_dies_within_a_tick_leaves_it_to_another(
    dsn: str, conn: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job is inserted and the tick is not moved yet: while the first worker is at it the second passes by, and
    when its connection is gone, so is the job, and the second one enqueues it."""
    set_tick, reached, dying = schedules.set_tick, asyncio.Event(), asyncio.Event()

    async def die(conn: Connection, row: ScheduleRow, tick: datetime, job_id: UUID | None, **kwargs: Any) -> None:
        if not reached.is_set():
            reached.set()
            await dying.wait()
            await conn.execute("SELECT pg_terminate_backend(pg_backend_pid())")
        await set_tick(conn, row, tick, job_id, **kwargs)

    monkeypatch.setattr(schedules, "set_tick", die)
    app = shop()
    await behind(app, conn, schema)
    async with scheduling(app, dsn, conn) as first:
        async with asyncio.timeout(PATIENCE):
            await reached.wait()
        async with scheduling(shop(), dsn, conn) as second:
            await round_after(second)
            assert second.count(EventKind.TICKED) == 0
            assert await jobs(conn) == []
            assert await last_tick(conn, schema) == LONG_AGO
            dying.set()
            await round_after(first, second)
    (job,) = await jobs(conn)
    assert first.jobs(EventKind.TICKED) + second.jobs(EventKind.TICKED) == [job.id]
    assert await last_tick(conn, schema) == new_year(job.created_at)


async def test_a_worker_whose_connection_was_cut_ticks_on(dsn: str, conn: asyncpg.Connection, schema: str) -> None:
    app = shop()
    await behind(app, conn, schema, await server_time(conn))
    async with scheduling(app, dsn, conn) as seen:
        await seen.seen(EventKind.SYNCED)
        await conn.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'recado upkeep' AND datname = current_database()"
        )
        await conn.execute(f"UPDATE {schema}.schedules SET last_tick = $1", LONG_AGO)
        await seen.seen(EventKind.TICKED)
    assert len(await jobs(conn)) == 1


async def test_a_workers_own_clock_plays_no_part(
    dsn: str, conn: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour fast, what is due in half an hour would look due; an hour slow, what is due would not."""
    now = await server_time(conn)
    soon, just = now + timedelta(minutes=30), now - timedelta(minutes=30)
    app = shop(f"{soon.minute} {soon.hour} * * *", name="fast")
    late = shop(f"{just.minute} {just.hour} * * *", name="slow")
    for application in (app, late):
        await behind(application, conn, schema, now - timedelta(hours=2))
    clock = time.time
    for application, error in ((app, 3600.0), (late, -3600.0)):
        monkeypatch.setattr(time, "time", lambda error=error: clock() + error)
        async with scheduling(application, dsn, conn) as seen:
            await round_after(seen)
            assert seen.count(EventKind.TICKED) == (application is late)
    monkeypatch.undo()
    (job,) = await jobs(conn)
    assert job.metadata["tick"] == just.replace(second=0, microsecond=0).isoformat()


# --- overlap, pause ---


@pytest.mark.parametrize("status", ["pending", "running", "completed", "dead", "cancelled", None])
@pytest.mark.parametrize("overlap", ["skip", "queue"])
async def test_a_tick_is_skipped_only_while_the_last_job_has_not_ended(
    dsn: str, conn: asyncpg.Connection, schema: str, overlap: str, status: str | None
) -> None:
    app = shop(overlap=overlap)
    await behind(app, conn, schema)
    last = uuid4() if status is None else await insert(conn, schema, status)  # None: pruned
    await conn.execute(f"UPDATE {schema}.schedules SET last_job_id = $1", last)
    async with scheduling(app, dsn, conn) as seen:
        await seen.seen(EventKind.TICKED)
    skipped = overlap == "skip" and status in ("pending", "running")
    enqueued = await jobs(conn)
    assert len(enqueued) == (0 if skipped else 1)
    assert await last_tick(conn, schema) == new_year(await server_time(conn))
    expected = last if skipped else enqueued[0].id
    assert await conn.fetchval(f"SELECT last_job_id FROM {schema}.schedules WHERE application <> ''") == expected


async def test_a_paused_schedule_rests_and_catches_nothing_up(dsn: str, conn: asyncpg.Connection, schema: str) -> None:
    app = shop()
    await behind(app, conn, schema)
    await pause_schedule(conn, "shop", JOB_TYPE)
    async with scheduling(app, dsn, conn) as seen:
        await round_after(seen)
        await resume_schedule(conn, "shop", JOB_TYPE)
        await round_after(seen)
        assert seen.count(EventKind.TICKED) == 0
        # Had it been due, the rounds would have ticked it.
        await conn.execute(f"UPDATE {schema}.schedules SET last_tick = $1", LONG_AGO)
        await seen.seen(EventKind.TICKED)


# --- releases and applications ---


async def test_during_a_deploy_the_old_definition_ticks_once_and_then_the_new_one_takes_over(
    dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    old, new = shop(payload={"kind": "old"}), shop("0 0 2 1 *", payload={"kind": "new"})
    await behind(old, conn, schema, await server_time(conn))
    expression = f"SELECT expression FROM {schema}.schedules"
    async with AsyncExitStack() as old_release:
        release = await old_release.enter_async_context(scheduling(old, dsn, conn))
        await release.seen(EventKind.SYNCED)
        async with scheduling(new, dsn, conn) as next_release:
            await round_after(release, next_release)
            await conn.execute(f"UPDATE {schema}.schedules SET last_tick = $1", LONG_AGO)
            await round_after(release, next_release)
            assert await conn.fetchval(expression) == YEARLY
            (job,) = await jobs(conn)
            assert job.payload == {"kind": "old"}
            await old_release.aclose()
            await round_after(next_release)
            assert await conn.fetchval(expression) == "0 0 2 1 *"
            assert len(await jobs(conn)) == 1


async def test_a_schedule_that_left_the_code_goes_with_the_last_worker_that_has_it(
    dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    async with scheduling(Recado("shop"), dsn, conn) as new:
        async with scheduling(shop(), dsn, conn) as old:
            await round_after(new, old)
            assert await conn.fetchval(f"SELECT count(*) FROM {schema}.schedules") == 1
        await round_after(new)
        assert await conn.fetchval(f"SELECT count(*) FROM {schema}.schedules") == 0


async def test_two_applications_in_one_database_tick_their_own(dsn: str, conn: asyncpg.Connection, schema: str) -> None:
    apps = [shop(name="shop"), shop(name="blog")]
    for app in apps:
        await behind(app, conn, schema)
    async with scheduling(apps[0], dsn, conn) as one, scheduling(apps[1], dsn, conn) as two:
        await one.seen(EventKind.TICKED)
        await two.seen(EventKind.TICKED)
        await round_after(one, two)
    assert (one.count(EventKind.TICKED), two.count(EventKind.TICKED)) == (1, 1)
    keys = sorted(str(job.idempotency_key).rsplit(":", 3)[0] for job in await jobs(conn))
    assert [key.split(":")[1] for key in keys] == ["blog", "shop"]


async def test_what_this_worker_cannot_read_or_does_not_know_keeps_nothing_from_its_tick(
    dsn: str, conn: asyncpg.Connection, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = shop()
    handler: Any = app.job_types[JOB_TYPE]
    for name in ("broken", "elsewhere"):
        app.cron(YEARLY, name=name, payload={})(handler)
    await behind(app, conn, schema)
    await conn.execute(f"UPDATE {schema}.schedules SET timezone = 'Mars/Olympus' WHERE name = 'broken'")
    await conn.execute(f"UPDATE {schema}.schedules SET job_type = 'of.another_release' WHERE name = 'elsewhere'")
    with caplog.at_level(logging.WARNING, "recado"):
        async with scheduling(app, dsn, conn) as seen:
            await seen.seen(EventKind.TICKED)
            await round_after(seen)
    assert [job.metadata["schedule"] for job in await jobs(conn)] == [JOB_TYPE]
    assert [r.getMessage() for r in caplog.records if "does not run on this worker" in r.getMessage()] == [
        "schedule broken of 'shop' does not run on this worker: cannot use 'Mars/Olympus' as a time zone: this system "
        "does not know it; write one like 'Europe/Madrid', or install tzdata"
    ]


async def test_a_tick_that_the_database_refuses_keeps_no_other_from_being_made(
    dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    app = shop()
    handler: Any = app.job_types[JOB_TYPE]
    for name in ("a.refused", "z.refused"):  # whichever way they are sorted
        app.cron(YEARLY, name=name, payload={})(handler)
    await behind(app, conn, schema)
    await conn.execute(
        f"ALTER TABLE {schema}.jobs ADD CHECK (coalesce(metadata ->> 'schedule', '') NOT LIKE '%refused')"
    )
    async with scheduling(app, dsn, conn) as seen, logged("schedule z.refused cannot enqueue: CheckViolationError"):
        await seen.seen(EventKind.TICKED)
        await round_after(seen)
    assert [job.metadata["schedule"] for job in await jobs(conn)] == [JOB_TYPE]


# --- recado's own ---


async def test_one_worker_does_the_work_of_a_system_schedule(dsn: str, conn: asyncpg.Connection) -> None:
    ran: list[int] = []

    def task(n: int) -> SystemTask:
        async def run() -> None:
            ran.append(n)

        return SystemTask(YEARLY, run)

    async with AsyncExitStack() as stack:
        seen = [
            await stack.enter_async_context(
                scheduling(Recado(f"app-{n}"), dsn, conn, system={"recado.test": task(n)}, sync_interval=OFTEN)
            )
            for n in range(4)
        ]
        await round_after(*seen)
    assert len(ran) == 1


async def test_a_long_system_task_keeps_no_tick_waiting_and_is_not_begun_twice(
    dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    begun, end = asyncio.Semaphore(0), asyncio.Event()
    runs = 0

    async def run() -> None:
        nonlocal runs
        runs += 1
        begun.release()
        await end.wait()

    app = shop()
    async with scheduling(app, dsn, conn, system={"recado.test": SystemTask("* * * * *", run)}) as seen:
        async with asyncio.timeout(PATIENCE):
            await begun.acquire()
        await conn.execute(f"UPDATE {schema}.schedules SET last_tick = $1", LONG_AGO)
        await seen.seen(EventKind.TICKED, times=2)  # the task's, and the application's
        await round_after(seen)
        assert runs == 1
        end.set()
        async with asyncio.timeout(PATIENCE):
            await begun.acquire()  # due since, and free now


async def test_a_system_task_that_meets_trouble_in_the_database_is_left_to_its_next_tick(
    dsn: str, conn: asyncpg.Connection, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        raise asyncpg.DeadlockDetectedError("deadlock detected")

    app = shop()
    await behind(app, conn, schema)
    async with scheduling(app, dsn, conn, system={"recado.test": SystemTask(YEARLY, run)}) as seen:
        await seen.seen(EventKind.TICKED, times=2)
        await round_after(seen)
    assert [r.getMessage() for r in caplog.records] == [
        "cannot run recado.test: DeadlockDetectedError: deadlock detected; its next tick will"
    ]
    assert seen.count(EventKind.TICKED) == 2


async def is_there(conn: asyncpg.Connection, schema: str, job_id: UUID) -> bool:
    found: bool = await conn.fetchval(f"SELECT EXISTS (SELECT FROM {schema}.jobs WHERE id = $1)", job_id)
    return found


OLD_ID = UUID("01800000-0000-7000-8000-000000000000")
"""Of a job of 2022."""


async def test_a_worker_prunes_on_a_new_database_at_once_and_after_a_restart_when_it_is_due(
    dsn: str, conn: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recado.worker.worker.Scheduler", partial(Scheduler, sync_interval=OFTEN))
    app = Recado()
    async with working(app, dsn) as (_, seen):
        await seen.seen(EventKind.PRUNED)
    await insert(conn, schema, "completed", id=OLD_ID, finished_at=LONG_AGO)
    await conn.execute(f"UPDATE {schema}.schedules SET last_tick = now() + interval '1 hour'")
    async with working(app, dsn) as (_, seen):
        await round_after(seen)
        assert await is_there(conn, schema, OLD_ID)
    await conn.execute(f"UPDATE {schema}.schedules SET last_tick = now() - interval '5 minutes'")
    async with working(app, dsn) as (_, seen):
        await seen.seen(EventKind.PRUNED)
        assert not await is_there(conn, schema, OLD_ID)


async def test_a_worker_ends_operations_that_nobody_works_on(dsn: str, conn: asyncpg.Connection, schema: str) -> None:
    app = Recado()

    @app.operation("import", queue="nobody")
    async def run(payload: None) -> None: ...

    async with operations.tenant(conn, "acme"):
        job_id = await app.start_operation(conn, "import", None)
    async with operations.system(conn):
        await conn.execute(f"UPDATE {schema}.operations SET created_at = $1, updated_at = $1", LONG_AGO)
    async with working(app, dsn) as (_, seen):
        await seen.seen(EventKind.EXPIRED, job_id)
    async with operations.tenant(conn, "acme"):
        assert (await operations.get_operation(conn, job_id)).error == operations.INTERRUPTED


async def test_a_worker_with_schedules_enqueues_and_runs_them(
    dsn: str, conn: asyncpg.Connection, schema: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recado.worker.worker.Scheduler", partial(Scheduler, sync_interval=OFTEN))
    app = shop()
    await behind(app, conn, schema)
    async with working(app, dsn, queues={"reports": 1}) as (worker, seen):
        await seen.until(lambda: bool(seen.jobs(EventKind.COMPLETED)))
        held = await conn.fetchval(f"SELECT count(*) FROM {schema}.schedule_holders WHERE worker_id = $1", worker.id)
        assert held == 3  # recado's own two, too
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.schedule_holders") == 0
    assert {(await jobs(conn))[0].id} == set(seen.jobs(EventKind.COMPLETED))
    assert json.loads(await conn.fetchval(f"SELECT payload FROM {schema}.schedules WHERE application <> ''")) == {
        "kind": "long"
    }
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.schedules WHERE application = $1", SYSTEM) == 2


def test_a_worker_refuses_an_expiry_that_is_no_expression(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    monkeypatch.setenv("RECADO_EXPIRY_SCHEDULE", "now and then")
    settings.cache_clear()
    try:
        with pytest.raises(ConfigurationError, match="RECADO_EXPIRY_SCHEDULE is wrong: cannot use 'now and then'"):
            Worker(Recado(), dsn)
    finally:
        monkeypatch.undo()
        settings.cache_clear()
