"""What one claim takes, and what it leaves."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import asyncpg
import pytest

from recado import Recado
from recado.queue.claims import claim, first_pending, look, release_strays
from recado.queue.locks import try_upkeep_lock
from tests.worker.support import Connect

NO_FLOORS = [None] * 4
ME = UUID(int=1)
OTHER = UUID(int=2)


@pytest.fixture
def app() -> Recado:
    return Recado()


async def add(app: Recado, conn: asyncpg.Connection, count: int = 1, **options: object) -> list[UUID]:
    return await app.enqueue_many(conn, [app.new("_smoke.echo", n, **options) for n in range(count)])


async def test_a_claim_takes_as_many_as_asked_and_marks_them(
    app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    ids = await add(app, conn, 5)
    jobs = await claim(conn, ME, "default", 3, NO_FLOORS)
    assert [job.id for job in jobs] == ids[:3]  # jobs of one transaction share their run_at: first in, first out
    assert all((job.fence, job.attempt, job.reclaims) == (1, 1, 0) for job in jobs)
    rows = await conn.fetch(f"SELECT status, fence, locked_by, locked_at IS NOT NULL FROM {schema}.jobs ORDER BY id")
    assert [tuple(row) for row in rows] == [("running", 1, ME, True)] * 3 + [("pending", 0, None, False)] * 2


async def test_a_claim_does_not_touch_later_jobs_other_queues_or_what_is_locked(
    app: Recado, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    [locked], [free] = await add(app, conn), await add(app, conn)
    await add(app, conn, run_at=datetime.now(UTC) + timedelta(minutes=1))
    await add(app, conn, queue="other")
    other = await connect()
    async with other.transaction():
        await other.execute(f"SELECT FROM {schema}.jobs WHERE id = $1 FOR UPDATE", locked)
        async with asyncio.timeout(5):
            assert [job.id for job in await claim(conn, ME, "default", 10, NO_FLOORS)] == [free]
    assert [job.id for job in await claim(conn, ME, "default", 10, NO_FLOORS)] == [locked]


async def test_two_claims_at_once_never_take_the_same_job(
    app: Recado, conn: asyncpg.Connection, connect: Connect
) -> None:
    ids = await add(app, conn, 1000)
    connections = [await connect() for _ in range(4)]

    async def take(worker: UUID, own: asyncpg.Connection) -> list[UUID]:
        taken: list[UUID] = []
        while jobs := await claim(own, worker, "default", 7, NO_FLOORS):
            taken += [job.id for job in jobs]
        return taken

    taken = await asyncio.gather(*(take(uuid4(), own) for own in connections))
    assert sorted(job for jobs in taken for job in jobs) == sorted(ids)


async def test_urgent_jobs_are_taken_first_and_the_rest_fills_up(app: Recado, conn: asyncpg.Connection) -> None:
    late = await add(app, conn, 2, priority=3)
    urgent = await add(app, conn, 2, priority=0)
    middle = await add(app, conn, 2, priority=2)
    jobs = await claim(conn, ME, "default", 5, NO_FLOORS)
    assert [job.id for job in jobs] == [*urgent, *middle, late[0]]


async def test_a_floor_hides_what_lies_below_it_and_only_in_its_own_priority(
    app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    past = datetime.now(UTC) - timedelta(minutes=1)
    [below] = await add(app, conn, run_at=past)
    [at] = await add(app, conn, run_at=past + timedelta(seconds=10))
    [other] = await add(app, conn, run_at=past, priority=2)
    floors = [None, past + timedelta(seconds=10), None, None]
    assert [job.id for job in await claim(conn, ME, "default", 9, floors)] == [at, other]
    assert [job.id for job in await claim(conn, ME, "default", 9, NO_FLOORS)] == [below]


async def test_each_claim_moves_the_fence(app: Recado, conn: asyncpg.Connection, schema: str) -> None:
    await add(app, conn)
    fences = []
    for _ in range(3):
        [job] = await claim(conn, ME, "default", 1, NO_FLOORS)
        fences.append(job.fence)
        await conn.execute(f"UPDATE {schema}.jobs SET status = 'pending'")
    assert fences == [1, 2, 3]


async def test_a_claims_commit_does_not_wait_for_the_disk_and_leaves_the_setting_alone(
    app: Recado, conn: asyncpg.Connection
) -> None:
    await add(app, conn)
    async with conn.transaction():
        assert len(await claim(conn, ME, "default", 1, NO_FLOORS)) == 1
        assert await conn.fetchval("SHOW synchronous_commit") == "off"
    assert await conn.fetchval("SHOW synchronous_commit") == "on"


async def test_the_sweeps_lock_ends_with_a_client_that_falls_silent(conn: asyncpg.Connection, connect: Connect) -> None:
    other = await connect()
    async with other.transaction():
        assert await try_upkeep_lock(other, "reclaim")
        assert not await try_upkeep_lock(conn, "reclaim")
        assert await try_upkeep_lock(conn, "prune")
        assert await other.fetchval("SHOW idle_in_transaction_session_timeout") == "5s"
    assert await other.fetchval("SHOW idle_in_transaction_session_timeout") == "0"
    assert await try_upkeep_lock(conn, "reclaim")


@pytest.mark.parametrize(("seconds", "low", "high"), [(60, 59, 60), (-60, -61, -59)])
async def test_a_look_tells_when_the_first_job_is_due(
    app: Recado, conn: asyncpg.Connection, seconds: int, low: float, high: float
) -> None:
    assert await look(conn, "default") is None
    await add(app, conn, run_at=datetime.now(UTC) + timedelta(hours=1), priority=0)
    await add(app, conn, run_at=datetime.now(UTC) + timedelta(seconds=seconds), priority=3)
    due = await look(conn, "default")
    assert due is not None
    assert low <= due <= high
    assert await look(conn, "other") is None


async def test_strays_are_what_the_table_says_a_worker_has_and_the_worker_has_not(
    app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    ids = await add(app, conn, 4)
    held = await claim(conn, ME, "default", 1, NO_FLOORS)
    strays = await claim(conn, ME, "default", 1, NO_FLOORS)
    await claim(conn, OTHER, "default", 1, NO_FLOORS)
    assert await release_strays(conn, ME, [job.id for job in held]) == [job.id for job in strays]
    rows = await conn.fetch(f"SELECT status FROM {schema}.jobs ORDER BY id")
    assert [row[0] for row in rows] == ["running", "pending", "running", "pending"]
    assert len(ids) == 4


async def test_where_the_lanes_begin_is_told_for_each_priority(app: Recado, conn: asyncpg.Connection) -> None:
    past = datetime.now(UTC) - timedelta(minutes=1)
    await add(app, conn, run_at=past, priority=2)
    await add(app, conn, run_at=past + timedelta(seconds=1), priority=2)
    await add(app, conn, run_at=datetime.now(UTC) + timedelta(hours=1), priority=0)
    assert await first_pending(conn, "default") == (None, None, past, None)


async def test_a_look_with_floors_sees_nothing_below_them(app: Recado, conn: asyncpg.Connection) -> None:
    past = datetime.now(UTC) - timedelta(minutes=1)
    await add(app, conn, run_at=past)
    floor = past + timedelta(seconds=1)
    assert await look(conn, "default", [None, floor, None, None]) is None
    assert await look(conn, "default", [floor, past, None, None]) is not None
