"""Jobs that wait for nothing follow each other in one task, and notice nothing of it."""

from __future__ import annotations

import asyncio
import contextvars
import time
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from recado import Recado
from recado.worker import EventKind
from recado.worker.runner import MAX_TURN
from tests.worker.support import NEVER, working

NUMBER = 30


class Incomparable:
    """As a numpy array is: whoever compares it gets an exception."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("the truth value is ambiguous")

    __hash__ = None  # type: ignore[assignment]


MARK: contextvars.ContextVar[Any] = contextvars.ContextVar("mark", default="clean")


@pytest.fixture
def app() -> Recado:
    return Recado()


async def test_jobs_that_wait_for_nothing_share_a_task(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    tasks = []

    @app.job("a.quick")
    async def quick(payload: None) -> None:
        tasks.append(asyncio.current_task())  # kept, so that no two have one id

    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        await app.enqueue_many(conn, [quick.new(None)] * NUMBER)
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == NUMBER)
    assert len(set(map(id, tasks))) < NUMBER / 2


async def test_a_job_that_waits_has_a_task_to_itself(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    tasks = []

    @app.job("a.patient")
    async def patient(payload: None) -> None:
        tasks.append(asyncio.current_task())
        await asyncio.sleep(0)

    async with working(app, dsn, queues={"default": 3}) as (_, seen):
        await app.enqueue_many(conn, [patient.new(None)] * NUMBER)
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == NUMBER)
    assert len(set(map(id, tasks))) == NUMBER


@pytest.mark.parametrize("value", ["another", Incomparable()], ids=["text", "incomparable"])
async def test_what_a_handler_sets_the_next_one_does_not_see(
    app: Recado, dsn: str, conn: asyncpg.Connection, value: object
) -> None:
    found = []

    @app.job("a.marks")
    async def marks(payload: int) -> None:
        found.append(MARK.get())
        if payload % 3 == 0:
            MARK.set(value)

    token = MARK.set("the worker's")
    try:
        async with working(app, dsn, queues={"default": 1}) as (_, seen):
            await app.enqueue_many(conn, [marks.new(n) for n in range(NUMBER)])
            await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == NUMBER)
    finally:
        MARK.reset(token)
    assert found == ["the worker's"] * NUMBER


async def test_a_handler_that_cancels_itself_and_is_through_before_it_notices_cancels_no_other(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    @app.job("a.careless")
    async def careless(payload: int) -> None:
        if payload % 2 == 0:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        else:
            await asyncio.sleep(0)

    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        await app.enqueue_many(conn, [careless.new(n) for n in range(NUMBER)])
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == NUMBER)
    assert not seen.count(EventKind.FAILED)


async def test_all_slots_are_taken_when_jobs_begin_to_wait_after_others_that_did_not(
    app: Recado, dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recado.worker.runner.MAX_WAITING", NEVER)  # or it would give back what does not begin
    slots = 10
    all_here = asyncio.Barrier(slots)

    @app.job("a.quick")
    async def quick(payload: None) -> None:
        """Nothing to do."""

    @app.job("a.meeting")
    async def meeting(payload: None) -> None:
        await all_here.wait()

    jobs = [quick.new(None)] * NUMBER + [meeting.new(None)] * slots
    async with working(app, dsn, queues={"default": slots}) as (_, seen):
        await app.enqueue_many(conn, jobs)
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == len(jobs))


async def test_jobs_that_take_their_time_leave_the_loop_a_turn_after_each(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    loop = asyncio.get_running_loop()
    turns = 0
    ticking: asyncio.Handle | None = None
    ran_in = []

    @app.job("a.busy")
    async def busy(payload: None) -> None:
        ran_in.append(turns)
        until = time.monotonic() + MAX_TURN
        while time.monotonic() <= until:
            pass

    def count() -> None:
        nonlocal turns, ticking
        turns += 1
        ticking = loop.call_soon(count)

    ticking = loop.call_soon(count)
    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        await app.enqueue_many(conn, [busy.new(None)] * NUMBER)
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == NUMBER)
        assert ticking is not None
        ticking.cancel()
    assert len(set(ran_in)) == NUMBER


async def test_urgent_jobs_overtake_what_waits_in_the_process(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    holding, go_on = asyncio.Event(), asyncio.Event()
    order: list[int] = []

    @app.job("a.quick")
    async def quick(payload: int) -> None:
        if payload < 0:
            holding.set()
            await go_on.wait()
        order.append(payload)

    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        # Short jobs teach it to prefetch; then one takes its only slot.
        await app.enqueue_many(conn, [quick.new(0)] * 500)
        await app.enqueue_many(conn, [quick.new(-1)])
        await holding.wait()
        begun = len(order)
        async with conn.transaction():
            late = [await quick.enqueue(conn, n, priority=2) for n in range(1, 5)]
        await seen.until(lambda: set(late) <= set(seen.jobs(EventKind.CLAIMED)))
        urgent: UUID = await quick.enqueue(conn, 9, priority=0)
        await seen.seen(EventKind.CLAIMED, urgent)
        go_on.set()
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) >= begun + 6)
    assert order[begun:] == [-1, 9, 1, 2, 3, 4]
