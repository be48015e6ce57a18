"""What recado gives to its users' tests."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY
from uuid import UUID, uuid4

import asyncpg
import pytest
from pydantic import BaseModel

from recado import ClaimedJob, JobStatus, Recado, Snooze
from recado.app import JOB_DIED
from recado.queue import get_job
from recado.testing import Drained, assert_enqueued, drain


class Receipt(BaseModel):
    order_id: UUID


@pytest.fixture
def app() -> Recado:
    return Recado()


async def test_drain_runs_what_is_due_and_what_that_enqueues(app: Recado, recado_db: asyncpg.Connection) -> None:
    order: list[str] = []

    @app.job("a.first", queue="one")
    async def first(payload: dict[str, Any], conn: asyncpg.Connection) -> None:
        order.append("first")
        await app.enqueue(conn, "a.second", {})

    @app.job("a.second", queue="two")
    def second(payload: dict[str, Any], job: ClaimedJob, state: dict[str, str]) -> str:
        order.append(f"second {state['from']}")
        return "done"

    @app.lifespan
    async def lifespan() -> Any:
        yield {"from": "lifespan"}

    await app.enqueue(recado_db, "a.first", {})
    assert await drain(app, recado_db) == Drained(completed=2)
    assert order == ["first", "second lifespan"]
    assert await drain(app, recado_db) == Drained()


async def test_drain_tells_how_attempts_ended(app: Recado, recado_db: asyncpg.Connection) -> None:
    @app.job("a.broken")
    async def broken(payload: None) -> None:
        raise ValueError

    @app.job("money.move", max_attempts=1, critical=True)
    async def move(payload: None) -> None:
        raise ValueError

    @app.job("a.sleepy")
    async def sleepy(payload: None) -> None:
        raise Snooze(60)

    await app.enqueue_many(recado_db, [broken.new(None), move.new(None, idempotency_key="k"), sleepy.new(None)])
    assert await drain(app, recado_db, state={}) == Drained(completed=1, failed=1, dead=1, snoozed=1)
    with pytest.raises(AssertionError, match="got none at all"):
        await assert_enqueued(recado_db, JOB_DIED)  # it was the one that completed


@pytest.mark.parametrize("begin", ["the driver's", "by hand"])
async def test_drain_works_inside_the_tests_own_transaction(
    app: Recado, recado_db: asyncpg.Connection, begin: str
) -> None:
    @app.job("a.writes")
    async def writes(payload: bool, conn: asyncpg.Connection) -> None:
        await conn.execute("CREATE TABLE public.written ()" if payload else "CREATE TABLE public.undone ()")
        if not payload:
            raise ValueError

    if begin == "by hand":
        await recado_db.execute("BEGIN")
    else:
        await recado_db.transaction().start()
    good, bad = await app.enqueue_many(recado_db, [writes.new(True), writes.new(False)])
    assert await drain(app, recado_db) == Drained(completed=1, failed=1)
    assert (await get_job(recado_db, good)).status is JobStatus.COMPLETED
    assert (await get_job(recado_db, bad)).attempts == 1
    assert await recado_db.fetchval("SELECT to_regclass('public.written') IS NOT NULL")
    assert await recado_db.fetchval("SELECT to_regclass('public.undone') IS NULL")
    await recado_db.execute("ROLLBACK")


async def test_assert_enqueued_finds_a_job_by_part_of_its_payload(app: Recado, recado_db: asyncpg.Connection) -> None:
    receipt = app.declare("email.send_receipt", Receipt)
    tagged = app.declare("a.tagged")
    order = uuid4()
    job_id = await receipt.enqueue(recado_db, Receipt(order_id=order))
    await tagged.enqueue(recado_db, {"tags": ["a", {"b": 1}], "n": 1}, queue="other")
    for payload in (None, {"order_id": ANY}, {"order_id": order}, {"order_id": str(order)}, Receipt(order_id=order)):
        assert (await assert_enqueued(recado_db, "email.send_receipt", payload)).id == job_id
    await assert_enqueued(recado_db, "a.tagged", {"tags": ["a", {"b": ANY}]}, queue="other")
    for payload, queue in (({"order_id": uuid4()}, None), ({"order": ANY}, None), (None, "elsewhere")):
        with pytest.raises(AssertionError, match=r"expected a pending job 'email\.send_receipt'.* got .*order_id"):
            await assert_enqueued(recado_db, "email.send_receipt", payload, queue=queue)
    with pytest.raises(AssertionError, match=r"got \{'n': 1"):
        await assert_enqueued(recado_db, "a.tagged", {"tags": ["a"]})
