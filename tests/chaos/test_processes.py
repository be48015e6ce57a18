"""Real worker processes, and what is left when they are killed."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest

from recado import JobStatus, Recado
from recado.queue import get_job
from recado.queue.operations import OperationRow, OperationStatus, channel, get_operation, tenant
from tests.chaos.apps import endless
from tests.chaos.support import Watch, lines, worker_process
from tests.worker.support import Connect

HASTY = ("--lease", "1.5", "--silence", "1.2")


@pytest.fixture
def service() -> Recado:
    app = Recado()
    for name in ("chaos.quick", "chaos.books", "chaos.hangs"):
        app.declare(name)
    return app


async def test_5000_jobs_on_4_processes_are_each_handled_exactly_once(
    service: Recado, dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str, tmp_path: Path
) -> None:
    handled = tmp_path / "handled"
    await conn.execute("CREATE TABLE public.effects (job uuid)")
    jobs = [service.new("chaos.books" if n % 10 == 0 else "chaos.quick", {"n": n}) for n in range(5000)]
    async with AsyncExitStack() as stack:
        watch = await stack.enter_async_context(Watch(await connect(), schema))
        workers = [await stack.enter_async_context(worker_process(dsn, handled)) for _ in range(4)]
        await watch.until(f"count(*) = 4 FROM {schema}.workers")
        ids = await service.enqueue_many(conn, jobs)
        await watch.until(f"count(*) = 0 FROM {schema}.jobs WHERE status <> 'completed'")
        for worker in workers:
            worker.send(signal.SIGTERM)
        assert [await worker.ended() for worker in workers] == [0] * 4
    counts = Counter(job_id for job_id, _, _ in lines(handled))
    assert counts == Counter(str(job_id) for job_id in ids)
    assert len({pid for _, _, pid in lines(handled)}) > 1
    assert await conn.fetchval("SELECT count(*) = 500 AND count(DISTINCT job) = 500 FROM public.effects")
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs WHERE fence <> 1 OR attempts <> 0") == 0
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.workers") == 0


async def test_a_job_survives_kill_9_of_its_worker(
    service: Recado, dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str, tmp_path: Path
) -> None:
    handled = tmp_path / "handled"
    async with Watch(await connect(), schema) as watch:
        async with worker_process(dsn, handled, *HASTY) as first:
            job_id = await service.enqueue(conn, "chaos.hangs", {})
            await watch.until(f"status = 'running' FROM {schema}.jobs")
            first.send(signal.SIGKILL)
            assert await first.ended() == -signal.SIGKILL
            job = await get_job(conn, job_id)
            assert (job.status, job.fence) == (JobStatus.RUNNING, 1)
            assert job.locked_by == await conn.fetchval(f"SELECT id FROM {schema}.workers")
        async with worker_process(dsn, handled, *HASTY) as second:
            await watch.until(f"status = 'completed' FROM {schema}.jobs")
            second.send(signal.SIGTERM)
            assert await second.ended() == 0
    job = await get_job(conn, job_id)
    assert (job.result, job.fence, job.reclaims, job.attempts) == ("fence 2", 2, 1, 0)
    assert {line[2] for line in lines(handled)} <= {str(first.pid), str(second.pid)}
    assert (lines(handled) or [[]])[-1][1:] == ["fence2", str(second.pid)]


async def test_a_worker_that_was_stopped_for_longer_than_its_lease_cannot_finish_the_job_any_more(
    service: Recado, dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str, tmp_path: Path
) -> None:
    handled = tmp_path / "handled"
    async with Watch(await connect(), schema) as watch, worker_process(dsn, handled, *HASTY, HANG="1") as first:
        job_id = await service.enqueue(conn, "chaos.hangs", {})
        await watch.until(f"status = 'running' FROM {schema}.jobs")
        first.send(signal.SIGSTOP)
        async with worker_process(dsn, handled, *HASTY) as second:
            await watch.until(f"status = 'completed' FROM {schema}.jobs")
            second.send(signal.SIGTERM)
            assert await second.ended() == 0
        before = await conn.fetchrow(f"SELECT * FROM {schema}.jobs WHERE id = $1", job_id)
        first.send(signal.SIGCONT)
        # It finds out, drops its attempt, and goes on: the next job is its own.
        following = await service.enqueue(conn, "chaos.quick", {})
        await watch.until(f"status = 'completed' FROM {schema}.jobs WHERE id = '{following}'")
        first.send(signal.SIGTERM)
        assert await first.ended() == 0
    assert await conn.fetchrow(f"SELECT * FROM {schema}.jobs WHERE id = $1", job_id) == before
    job = await get_job(conn, job_id)
    assert (job.result, job.fence) == ("fence 2", 2)


async def test_sigterm_gives_a_job_that_does_not_end_back_to_others(
    service: Recado, dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str, tmp_path: Path
) -> None:
    handled = tmp_path / "handled"
    async with Watch(await connect(), schema) as watch, worker_process(dsn, handled, "--grace", "0.1") as worker:
        job_id = await service.enqueue(conn, "chaos.hangs", {})
        await watch.until(f"status = 'running' FROM {schema}.jobs")
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0
    job = await get_job(conn, job_id)
    assert (job.status, job.attempts, job.reclaims, job.locked_by) == (JobStatus.PENDING, 0, 0, None)


@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_does_not_wait_for_the_grace(
    service: Recado,
    dsn: str,
    conn: asyncpg.Connection,
    connect: Connect,
    schema: str,
    tmp_path: Path,
    again: signal.Signals,
) -> None:
    handled = tmp_path / "handled"
    async with Watch(await connect(), schema) as watch, worker_process(dsn, handled, "--grace", "3600") as worker:
        job_id = await service.enqueue(conn, "chaos.hangs", {})
        await watch.until(f"status = 'running' FROM {schema}.jobs")
        if again is signal.SIGTERM:
            worker.send(signal.SIGTERM)
            # A signal that is sent while one of its number is pending is no second one: the kernel keeps just one.
            await worker.logged("SIGTERM: stopping; once more")
        worker.send(again)
        assert await worker.ended() == 0
    assert (await get_job(conn, job_id)).attempts == 0


async def test_an_operation_whose_worker_was_killed_and_never_replaced_ends_as_interrupted(
    dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str, tmp_path: Path
) -> None:
    """The workers that are left serve other queues: they give the job back, and in the end give the operation up."""
    handled = tmp_path / "handled"
    async with Watch(await connect(), schema) as watch:
        async with worker_process(dsn, handled, *HASTY) as worker:
            job_id = await endless.start(conn, None, organization_id="acme")
            await watch.until(f"status = 'running' FROM {schema}.jobs")
            async with operations_listened(await connect()) as changed:
                while (await operation_of(conn, job_id)).progress != 40:
                    changed.clear()
                    await changed.wait()
            worker.send(signal.SIGKILL)
            await worker.ended()
        await conn.execute(f"UPDATE {schema}.schedules SET last_tick = 'epoch'")  # a quarter of an hour later
        async with worker_process(dsn, handled, "-q", "other", RECADO_EXPIRY_AFTER="PT0.001S") as other:
            await watch.until(f"status = 'cancelled' FROM {schema}.jobs")
            other.send(signal.SIGTERM)
            assert await other.ended() == 0
    operation = await operation_of(conn, job_id)
    assert (operation.status, operation.progress) == (OperationStatus.ERROR, 40)
    assert operation.error == "The operation was interrupted before finishing. Please try again."


async def operation_of(conn: asyncpg.Connection, job_id: UUID) -> OperationRow:
    async with tenant(conn, "acme"):
        return await get_operation(conn, job_id)


@asynccontextmanager
async def operations_listened(conn: asyncpg.Connection) -> AsyncIterator[asyncio.Event]:
    changed = asyncio.Event()
    await conn.add_listener(channel(None), lambda *_: changed.set())
    yield changed
    await conn.reset()
