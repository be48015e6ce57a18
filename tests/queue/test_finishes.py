"""Ending attempts: the fence decides who may."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from uuid import UUID

import asyncpg
import pytest

from recado import Recado
from recado.queue import finishes, list_errors
from recado.queue.claims import claim
from recado.queue.finishes import Completion, Failure, Release
from recado.queue.leases import held, renew
from recado.queue.models import ClaimedJob
from tests.worker.support import Connect, job_of

ME = UUID(int=1)
OTHER = UUID(int=2)


@pytest.fixture
async def job(conn: asyncpg.Connection) -> ClaimedJob:
    app = Recado()
    await app.enqueue(conn, "_smoke.echo", None)
    [claimed] = await claim(conn, ME, "default", 1, [None] * 4)
    return claimed


def failure(job: ClaimedJob, *, fence: int | None = None, wait: float = 10.0, discard: bool = False) -> Failure:
    return Failure(job.id, job.fence if fence is None else fence, wait, discard, 0.5, "E", "m", None)


@pytest.mark.parametrize(("worker", "fence"), [(OTHER, 1), (ME, 2), (ME, 0)], ids=["other", "newer", "older"])
async def test_who_does_not_hold_the_lease_changes_nothing(
    conn: asyncpg.Connection, schema: str, job: ClaimedJob, worker: UUID, fence: int
) -> None:
    before = await conn.fetchrow(f"SELECT xmin::text, * FROM {schema}.jobs")
    assert await finishes.complete(conn, worker, [Completion(job.id, fence)]) == set()
    assert not await finishes.complete_one(conn, worker, Completion(job.id, fence))
    assert await finishes.fail(conn, worker, [failure(job, fence=fence)]) == []
    assert await finishes.release(conn, worker, [Release(job.id, fence)]) == set()
    assert await renew(conn, worker, [(job.id, fence)]) == set()
    assert await held(conn, worker, [(job.id, fence)]) == set()
    assert await conn.fetchrow(f"SELECT xmin::text, * FROM {schema}.jobs") == before
    assert await list_errors(conn, job.id) == []


async def test_the_same_workers_older_run_cannot_end_the_newer_one(
    conn: asyncpg.Connection, schema: str, job: ClaimedJob
) -> None:
    await conn.execute(f"UPDATE {schema}.jobs SET status = 'pending', locked_by = NULL")
    [newer] = await claim(conn, ME, "default", 1, [None] * 4)
    assert await finishes.complete(conn, ME, [Completion(job.id, job.fence)]) == set()
    assert await finishes.complete(conn, ME, [Completion(newer.id, newer.fence)]) == {job.id}


async def test_what_is_written_twice_changes_nothing_the_second_time(conn: asyncpg.Connection, job: ClaimedJob) -> None:
    assert len(await finishes.fail(conn, ME, [failure(job)])) == 1
    assert await finishes.fail(conn, ME, [failure(job)]) == []
    assert await finishes.complete(conn, ME, [Completion(job.id, job.fence)]) == set()
    assert (await job_of(conn, job.id)).attempts == 1
    assert len(await list_errors(conn, job.id)) == 1


async def test_a_failure_waits_by_the_servers_clock_and_a_release_keeps_its_place(
    conn: asyncpg.Connection, schema: str, job: ClaimedJob
) -> None:
    assert await finishes.release(conn, ME, [Release(job.id, job.fence)]) == {job.id}
    assert (await job_of(conn, job.id)).run_at == job.run_at
    [again] = await claim(conn, ME, "default", 1, [None] * 4)
    await finishes.fail(conn, ME, [failure(again, wait=7.5)])
    wait = await conn.fetchval(f"SELECT run_at - updated_at FROM {schema}.jobs")
    assert wait == timedelta(seconds=7.5)
    [error] = await list_errors(conn, job.id)
    assert error.started_at is not None
    assert error.ended_at - error.started_at == timedelta(seconds=0.5)
    assert (error.worker_id, error.attempt, error.fence) == (ME, 1, 2)


async def test_a_row_with_its_attempts_used_up_dies_instead_of_breaking_the_batch(
    conn: asyncpg.Connection, schema: str, job: ClaimedJob
) -> None:
    await conn.execute(f"UPDATE {schema}.jobs SET attempts = max_attempts")
    [failed] = await finishes.fail(conn, ME, [failure(job)])
    assert (failed.status, failed.attempts) == ("dead", 5)


async def test_batches_in_opposite_orders_never_deadlock(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    app = Recado()
    await app.enqueue_many(conn, [app.new("_smoke.echo", n) for n in range(300)])
    jobs = await claim(conn, ME, "default", 300, [None] * 4)
    first, second = await connect(), await connect()
    done = await asyncio.gather(
        finishes.complete(first, ME, [Completion(job.id, job.fence) for job in jobs]),
        finishes.release(second, ME, [Release(job.id, job.fence) for job in reversed(jobs)]),
    )
    assert len(done[0]) + len(done[1]) == 300
