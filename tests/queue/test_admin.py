"""Looking at jobs and steering them by hand, each in the caller's transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

from recado import Recado
from recado.errors import EnqueueError, IllegalTransition, JobNotFound
from recado.queue import (
    DeadGroup,
    JobStatus,
    cancel,
    dead_by_error,
    get_job,
    list_errors,
    list_jobs,
    pause,
    requeue,
    requeue_dead,
    resume,
    server_time,
)
from recado.queue.claims import claim, look
from recado.queue.finishes import Completion, Failure, Release, complete, complete_one, fail, release
from recado.queue.leases import held, renew
from recado.queue.statements import cancel_channel, wake_channel
from tests.queue.support import PATIENCE, WORKER, Connect, Ear, blocked, count, hungry, insert, row

ENDED = ["completed", "dead", "cancelled"]


async def claim_one(conn: asyncpg.Connection, queue: str = "default") -> UUID:
    [job] = await claim(conn, WORKER, queue, 1, [None] * 4)
    return job.id


def failure(job_id: UUID, fence: int, message: str = "no", *, discard: bool = False) -> Failure:
    return Failure(
        job_id, fence, 10.0, discard=discard, run_time=1.5, error_class="ValueError", message=message, traceback="tb"
    )


# --- looking ---


async def test_a_job_is_shown_whole(conn: asyncpg.Connection, schema: str) -> None:
    run_at = datetime(2030, 1, 2, tzinfo=UTC)
    job_id = await insert(
        conn,
        schema,
        "running",
        queue="q",
        priority=3,
        payload='{"a": ["secret", null]}',
        result='{"pages": 12}',
        metadata='{"trace": "t"}',
        attempts=2,
        max_attempts=7,
        reclaims=1,
        run_at=run_at,
        last_error="secret",
        idempotency_key="k",
    )

    job = await get_job(conn, job_id)

    assert (job.id, job.job_type, job.queue, job.priority) == (job_id, "mail.send", "q", 3)
    assert (job.payload, job.result, job.metadata) == ({"a": ["secret", None]}, {"pages": 12}, {"trace": "t"})
    assert (job.status, job.attempts, job.max_attempts, job.reclaims) == (JobStatus.RUNNING, 2, 7, 1)
    assert (job.fence, job.locked_by, job.run_at, job.last_error) == (1, WORKER, run_at, "secret")
    assert (job.idempotency_key, job.locked_at, job.finished_at) == ("k", None, None)
    assert job.created_at == job.updated_at
    assert "secret" not in repr(job)  # what may be private is no part of a log


async def test_a_job_that_does_not_exist_is_named(conn: asyncpg.Connection) -> None:
    missing = uuid4()
    asks: list[Callable[..., Awaitable[Any]]] = [get_job, cancel, requeue]

    for ask in asks:
        with pytest.raises(JobNotFound, match=f"cannot find job {missing}"):
            await ask(conn, missing)
    with pytest.raises(LookupError):
        await get_job(conn, missing)


async def test_jobs_are_listed_newest_first_page_by_page(conn: asyncpg.Connection, schema: str) -> None:
    ids = [await insert(conn, schema) for _ in range(7)]

    pages = [await list_jobs(conn, limit=3)]
    for _ in range(3):
        pages.append(await list_jobs(conn, limit=3, before=pages[-1][-1].id))

    assert [len(page) for page in pages] == [3, 3, 1, 0]
    assert [job.id for page in pages for job in page] == ids[::-1]


async def test_a_page_does_not_move_when_jobs_are_added_meanwhile(conn: asyncpg.Connection, schema: str) -> None:
    ids = [await insert(conn, schema) for _ in range(4)]
    first = await list_jobs(conn, limit=2)
    await insert(conn, schema)

    assert [job.id for job in await list_jobs(conn, limit=2, before=first[-1].id)] == [ids[1], ids[0]]


async def test_a_list_is_narrowed_by_status_queue_and_job_type(conn: asyncpg.Connection, schema: str) -> None:
    a = await insert(conn, schema, "dead", queue="a", job_type="mail.send")
    b = await insert(conn, schema, "pending", queue="a", job_type="mail.send")
    c = await insert(conn, schema, "dead", queue="b", job_type="mail.archive")

    async def listed(**filters: Any) -> list[UUID]:
        return [job.id for job in await list_jobs(conn, **filters)]

    assert await listed() == [c, b, a]
    assert await listed(status=JobStatus.DEAD) == [c, a]
    assert await listed(queue="a") == [b, a]
    assert await listed(job_type="mail.archive") == [c]
    assert await listed(status=JobStatus.DEAD, queue="a", job_type="mail.send") == [a]
    assert await listed(status=JobStatus.DEAD, before=c) == [a]
    assert await listed(status=JobStatus.RUNNING) == []


async def test_every_attempts_error_is_listed_in_order(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema, "running", max_attempts=3)
    other = await insert(conn, schema)
    await fail(conn, WORKER, [failure(job_id, 1, "first")])
    await conn.execute(f"UPDATE {schema}.jobs SET status = 'running', locked_by = $1, fence = 2", WORKER)
    await fail(conn, WORKER, [failure(job_id, 2, "second")])

    first, second = await list_errors(conn, job_id)

    assert (first.job_id, first.fence, first.attempt, first.worker_id) == (job_id, 1, 1, WORKER)
    assert (first.error_class, first.message, first.traceback) == ("ValueError", "first", "tb")
    assert first.started_at is not None
    assert first.ended_at - first.started_at == timedelta(seconds=1.5)
    assert (second.fence, second.attempt, second.message) == (2, 2, "second")
    assert await list_errors(conn, other) == []


async def test_the_dead_are_grouped_by_type_and_the_first_line_of_their_error(
    conn: asyncpg.Connection, schema: str
) -> None:
    early, late = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)
    await insert(conn, schema, "dead", last_error="ValueError: a\nline 1", finished_at=late)
    await insert(conn, schema, "dead", last_error="ValueError: a\nline 2", finished_at=early)
    await insert(conn, schema, "dead", last_error="ValueError: a", finished_at=late, job_type="mail.archive")
    await insert(conn, schema, "dead", last_error=None, finished_at=late)
    await insert(conn, schema, "pending", last_error="ValueError: a")
    await insert(conn, schema, "completed", last_error="ValueError: a")

    groups = await dead_by_error(conn)

    assert groups == [
        DeadGroup("mail.send", "ValueError: a", 2, newest=late, oldest=early),
        DeadGroup("mail.archive", "ValueError: a", 1, newest=late, oldest=late),
        DeadGroup("mail.send", "", 1, newest=late, oldest=late),
    ]
    assert await dead_by_error(conn, limit=1) == groups[:1]


# --- cancel ---


async def test_a_pending_job_is_cancelled_and_never_claimed(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema)

    await cancel(conn, job_id)

    job = await get_job(conn, job_id)
    assert (job.status, job.fence) == (JobStatus.CANCELLED, 1)
    assert job.finished_at is not None
    assert await claim(conn, WORKER, "default", 10, [None] * 4) == []


async def test_a_running_job_is_cancelled_and_its_attempt_can_change_nothing_any_more(
    conn: asyncpg.Connection, schema: str
) -> None:
    await insert(conn, schema)
    job_id = await claim_one(conn)
    fence = (await get_job(conn, job_id)).fence

    await cancel(conn, job_id)
    before = await row(conn, schema, job_id)

    assert (before["status"], before["fence"], before["locked_by"]) == ("cancelled", fence + 1, None)
    assert await complete(conn, WORKER, [Completion(job_id, fence, "1")]) == set()
    assert not await complete_one(conn, WORKER, Completion(job_id, fence, "1"))
    assert await fail(conn, WORKER, [failure(job_id, fence)]) == []
    assert await release(conn, WORKER, [Release(job_id, fence)]) == set()
    assert await renew(conn, WORKER, [(job_id, fence)]) == set()
    assert await held(conn, WORKER, [(job_id, fence)]) == set()
    assert await row(conn, schema, job_id) == before
    assert await list_errors(conn, job_id) == []


@pytest.mark.parametrize("status", ENDED)
async def test_a_job_that_has_ended_is_not_cancelled(status: str, conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema, status)
    before = await row(conn, schema, job_id)

    with pytest.raises(IllegalTransition, match=f"cannot cancel job {job_id}: it is {status} already; requeue it"):
        await cancel(conn, job_id)
    assert await row(conn, schema, job_id) == before


async def test_only_the_cancellation_of_a_job_that_was_claimed_is_told_and_at_the_commit(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    speaker = await connect()
    ear = await Ear.on(await connect(), cancel_channel(schema))
    await insert(conn, schema)
    claimed, pending = await claim_one(conn), await insert(conn, schema)

    async with conn.transaction():
        await cancel(conn, claimed)
        await cancel(conn, pending)
        assert await ear.heard(speaker) == []

    assert await ear.heard(speaker) == [str(claimed)]


async def test_a_cancellation_waits_for_a_claim_that_is_under_way_and_takes_the_job_from_it(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    other, observer = await connect(), await connect()
    job_id = await insert(conn, schema)
    transaction = conn.transaction()
    await transaction.start()
    await claim_one(conn)

    async with asyncio.TaskGroup() as group:
        group.create_task(cancel(other, job_id))
        await blocked(observer, other)
        await transaction.commit()

    job = await get_job(conn, job_id)
    assert (job.status, job.fence, job.locked_by) == (JobStatus.CANCELLED, 2, None)


# --- requeue ---


@pytest.mark.parametrize("status", ENDED)
async def test_a_job_that_has_ended_runs_once_more_with_all_its_attempts(
    status: str, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await insert(
        conn, schema, status, attempts=5, reclaims=5, fence=7, result="1", last_error="no", idempotency_key="k"
    )

    await requeue(conn, job_id)

    job = await get_job(conn, job_id)
    assert (job.status, job.attempts, job.reclaims) == (JobStatus.PENDING, 0, 0)
    assert (job.result, job.finished_at, job.idempotency_key, job.last_error) == (None, None, "k", "no")
    assert job.run_at == job.updated_at
    assert job.fence == 7  # only ever forward, or an attempt from before could end the next one
    assert await claim_one(conn) == job_id


@pytest.mark.parametrize("status", ["pending", "running"])
async def test_a_job_that_will_end_by_itself_is_not_requeued(
    status: str, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await insert(conn, schema, status)
    before = await row(conn, schema, job_id)

    with pytest.raises(IllegalTransition, match=f"cannot requeue job {job_id}: it is {status} and .*; cancel it"):
        await requeue(conn, job_id)
    assert await row(conn, schema, job_id) == before


async def test_the_errors_of_the_first_life_are_kept(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema, "running")
    await fail(conn, WORKER, [failure(job_id, 1, discard=True)])

    await requeue(conn, job_id)
    assert await claim_one(conn) == job_id
    await fail(conn, WORKER, [failure(job_id, 2, discard=True)])

    assert [(error.fence, error.attempt) for error in await list_errors(conn, job_id)] == [(1, 1), (2, 1)]


async def test_the_dead_are_requeued_those_that_died_first_before_the_others(
    conn: asyncpg.Connection, schema: str
) -> None:
    day = datetime(2026, 1, 1, tzinfo=UTC)
    late, early, middle = [
        await insert(conn, schema, "dead", finished_at=day + timedelta(days=days)) for days in (3, 1, 2)
    ]
    others = [await insert(conn, schema, status) for status in ("pending", "running", "completed", "cancelled")]

    assert set(await requeue_dead(conn, limit=2)) == {early, middle}
    assert await requeue_dead(conn, limit=2) == [late]
    assert await requeue_dead(conn) == []
    assert [str((await get_job(conn, job_id)).status) for job_id in others] == [
        *("pending", "running", "completed", "cancelled")
    ]


async def test_the_dead_are_requeued_by_type_and_queue(conn: asyncpg.Connection, schema: str) -> None:
    a = await insert(conn, schema, "dead", queue="a", job_type="mail.send")
    b = await insert(conn, schema, "dead", queue="b", job_type="mail.send")
    c = await insert(conn, schema, "dead", queue="b", job_type="mail.archive")

    assert await requeue_dead(conn, job_type="mail.send", queue="b") == [b]
    assert await requeue_dead(conn, queue="b") == [c]
    assert await requeue_dead(conn, job_type="mail.send") == [a]


async def test_only_those_are_requeued_that_had_died_by_a_given_time(conn: asyncpg.Connection, schema: str) -> None:
    """So that jobs which die again at once do not keep busy for ever whoever goes on until none is left."""
    job_id = await insert(conn, schema, "dead")
    began = await server_time(conn)
    assert await requeue_dead(conn, before=began) == [job_id]
    assert await claim_one(conn) == job_id
    await fail(conn, WORKER, [failure(job_id, (await get_job(conn, job_id)).fence, discard=True)])

    assert await requeue_dead(conn, before=began) == []
    assert await requeue_dead(conn) == [job_id]


async def test_dead_jobs_that_another_transaction_is_changing_are_passed_over(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    other = await connect()
    busy, free = await insert(conn, schema, "dead"), await insert(conn, schema, "dead")

    async with asyncio.timeout(PATIENCE), other.transaction():
        await requeue(other, busy)
        assert await requeue_dead(conn) == [free]


async def test_a_requeue_wakes_a_hungry_worker(conn: asyncpg.Connection, connect: Connect, schema: str) -> None:
    ear = await Ear.on(await connect(), wake_channel(schema))
    job_id, _ = await insert(conn, schema, "cancelled"), await insert(conn, schema, "dead")
    await hungry(conn, "default")

    await requeue(conn, job_id)
    assert await ear.heard(conn) == ["default"]
    await requeue_dead(conn)
    assert await ear.heard(conn) == ["default"]
    await requeue_dead(conn)
    assert await ear.heard(conn) == []


# --- pause ---


async def test_nothing_is_claimed_from_a_paused_queue_until_it_is_resumed(
    conn: asyncpg.Connection, schema: str
) -> None:
    job_id, other = await insert(conn, schema), await insert(conn, schema, queue="other")

    await pause(conn, "default")
    await pause(conn, "default")

    assert await claim(conn, WORKER, "default", 10, [None] * 4) == []
    assert await look(conn, "default") is None
    assert await claim_one(conn, "other") == other
    await resume(conn, "default")
    waited = await look(conn, "default")
    assert waited is not None
    assert waited <= 0
    assert await claim_one(conn) == job_id


async def test_a_queue_stays_paused_since_it_was_first_paused(conn: asyncpg.Connection, schema: str) -> None:
    async def since() -> Any:
        return await conn.fetchval(f"SELECT paused_at FROM {schema}.queues WHERE name = 'default'")

    await pause(conn, "default")
    first = await since()
    await pause(conn, "default")
    assert await since() == first
    await resume(conn, "default")
    assert await since() is None
    await pause(conn, "default")
    assert await since() > first


async def test_jobs_enqueued_to_a_paused_queue_wait_there(conn: asyncpg.Connection, schema: str) -> None:
    await pause(conn, "default")

    await insert(conn, schema)

    assert await claim(conn, WORKER, "default", 10, [None] * 4) == []
    assert await count(conn, schema, "status = 'pending'") == 1


async def test_a_resumed_queue_is_told_and_one_that_was_never_paused_is_not(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    ear = await Ear.on(await connect(), wake_channel(schema))
    await pause(conn, "default")

    await resume(conn, "other")
    assert await ear.heard(conn) == []
    await resume(conn, "default")
    assert await ear.heard(conn) == ["default"]


@pytest.mark.parametrize("name", ["", "Bad Name", "a\0", "x" * 200])
async def test_what_is_no_queues_name_cannot_be_paused(name: str, conn: asyncpg.Connection) -> None:
    with pytest.raises(EnqueueError, match="as a queue: it must consist of"):
        await pause(conn, name)


# --- in the caller's transaction, on the caller's connection ---


async def test_a_rollback_undoes_every_step_and_tells_nobody(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    listener = await connect()
    ears = [await Ear.on(listener, channel(schema)) for channel in (wake_channel, cancel_channel)]
    await hungry(conn, "default", "paused")
    await pause(conn, "paused")
    ids = {status: await insert(conn, schema, status) for status in ("pending", "running", *ENDED)}
    before = [await row(conn, schema, job_id) for job_id in ids.values()]

    transaction = conn.transaction()
    await transaction.start()
    await cancel(conn, ids["pending"])
    await cancel(conn, ids["running"])
    await requeue(conn, ids["completed"])
    await requeue_dead(conn)
    await pause(conn, "default")
    await resume(conn, "paused")
    assert conn.is_in_transaction()
    await transaction.rollback()

    assert [await row(conn, schema, job_id) for job_id in ids.values()] == before
    assert [await ear.heard(conn) for ear in ears] == [[], []]
    assert await look(conn, "default") is not None
    assert [r["name"] for r in await conn.fetch(f"SELECT name FROM {schema}.queues WHERE paused_at IS NOT NULL")] == [
        "paused"
    ]


async def test_an_error_does_not_spoil_the_callers_transaction(conn: asyncpg.Connection, schema: str) -> None:
    async with conn.transaction():
        job_id = await insert(conn, schema, "completed")
        with pytest.raises(IllegalTransition):
            await cancel(conn, job_id)
        with pytest.raises(JobNotFound):
            await requeue(conn, uuid4())

    assert await count(conn, schema) == 1


@pytest_asyncio.fixture
async def own_codecs(connect: Connect) -> asyncpg.Connection:
    """A connection whose owner wants JSON and UUIDs as the text they are."""
    conn = await connect()
    for name in ("json", "jsonb", "uuid"):
        await conn.set_type_codec(name, encoder=str, decoder=str, schema="pg_catalog")
    return conn


async def test_the_codecs_of_the_connection_do_not_matter(
    conn: asyncpg.Connection, own_codecs: asyncpg.Connection, schema: str
) -> None:
    job_id = await insert(conn, schema, "running", payload='{"a": 1}')
    await fail(conn, WORKER, [failure(job_id, 1, discard=True)])

    assert await get_job(own_codecs, job_id) == await get_job(conn, job_id)
    assert await list_jobs(own_codecs) == await list_jobs(conn)
    assert await list_jobs(own_codecs, before=job_id) == []
    assert await list_errors(own_codecs, job_id) == await list_errors(conn, job_id)
    assert await requeue_dead(own_codecs) == [job_id]
    await cancel(own_codecs, job_id)
    await requeue(own_codecs, job_id)
    assert (await get_job(own_codecs, job_id)).id == job_id


async def test_a_number_too_long_for_python_does_not_keep_a_list_from_being_read(
    conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await Recado().enqueue(conn, "_smoke.echo", None)
    await conn.execute(f"UPDATE {schema}.jobs SET payload = repeat('9', 5000)::jsonb")
    [job] = await list_jobs(conn)
    assert (job.id, job.payload) == (job_id, "9" * 5000)
