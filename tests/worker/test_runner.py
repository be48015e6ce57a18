"""How one attempt ends, and what is written down of it."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest
from pydantic import BaseModel

from recado import ClaimedJob, Discard, JobStatus, Recado, Retry, Snooze
from recado.app import JOB_DIED, JobDied
from recado.queue import list_errors
from recado.queue.admin import CANCEL, cancel
from recado.queue.statements import fill
from recado.worker import EventKind
from tests.worker.support import NEVER, Connect, job_of, waiting_for_a_lock, working


class Payload(BaseModel):
    n: int


@pytest.fixture
def app() -> Recado:
    return Recado()


async def make_due(conn: asyncpg.Connection, schema: str, job_id: UUID) -> timedelta:
    """Let the job's wait be over; how long it would have been."""
    wait: timedelta = await conn.fetchval(
        f"""
        WITH old AS (SELECT id, run_at - updated_at AS wait FROM {schema}.jobs WHERE id = $1)
        UPDATE {schema}.jobs j SET run_at = now() FROM old WHERE j.id = old.id
        RETURNING old.wait, pg_notify('{schema}', j.queue)
        """,
        job_id,
    )
    return wait


async def test_a_result_that_is_json_is_kept(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    @app.job("a.model")
    async def model(payload: Payload) -> Payload:
        return Payload(n=payload.n + 1)

    @app.job("a.plain")
    def plain(payload: dict[str, Any], job: ClaimedJob) -> dict[str, Any]:
        return {"attempt": job.attempt, "thread": threading.current_thread() is threading.main_thread()}

    async with working(app, dsn) as (_, seen):
        first = await model.enqueue(conn, Payload(n=1))
        second = await plain.enqueue(conn, {}, metadata={"trace": "abc"})
        await seen.until(lambda: set(seen.jobs(EventKind.COMPLETED)) == {first, second})
    assert (await job_of(conn, first)).result == {"n": 2}
    assert (await job_of(conn, second)).result == {"attempt": 1, "thread": False}


@pytest.mark.parametrize("value", [object(), {"nan": float("nan")}, "a\0b", "x" * 300_000, {"\ud800": 1}])
async def test_a_result_that_is_not_json_leaves_the_job_completed_without_it(
    app: Recado, dsn: str, conn: asyncpg.Connection, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    @app.job("a.odd")
    async def odd(payload: None) -> object:
        return value

    async with working(app, dsn) as (_, seen):
        job_id = await odd.enqueue(conn, None)
        await seen.seen(EventKind.COMPLETED, job_id)
    job = await job_of(conn, job_id)
    assert (job.status, job.result) == (JobStatus.COMPLETED, None)
    assert f"job {job_id} (a.odd) is completed without its result" in caplog.text


async def test_a_job_that_always_fails_waits_10_s_and_40_s_and_is_dead_at_the_third(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    @app.job("a.broken", max_attempts=3)
    async def broken(payload: Payload, job: ClaimedJob) -> None:
        raise ValueError(f"attempt {job.attempt}")

    async with working(app, dsn) as (_, seen):
        job_id = await broken.enqueue(conn, Payload(n=1))
        for attempt, wait in ((1, 10), (2, 40)):
            await seen.seen(EventKind.FAILED, job_id, times=attempt)
            job = await job_of(conn, job_id)
            assert (job.status, job.attempts) == (JobStatus.PENDING, attempt)
            assert (job.locked_at, job.locked_by) == (None, None)
            assert await make_due(conn, schema, job_id) == timedelta(seconds=wait)
        await seen.seen(EventKind.DIED, job_id)
    job = await job_of(conn, job_id)
    assert (job.status, job.attempts, job.last_error) == (JobStatus.DEAD, 3, "ValueError: attempt 3")
    assert job.finished_at is not None
    errors = await list_errors(conn, job_id)
    assert [(e.attempt, e.error_class, e.message) for e in errors] == [
        (n, "ValueError", f"attempt {n}") for n in (1, 2, 3)
    ]
    assert all(e.traceback and "raise ValueError" in e.traceback for e in errors)
    assert all("recado/worker" not in (e.traceback or "") for e in errors)
    assert all(e.started_at is not None and e.started_at <= e.ended_at for e in errors)


async def test_the_built_in_backoff_is_10_s_40_s_3_min_12_min_50_min_and_50_min_again(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    @app.job("a.broken", max_attempts=8)
    async def broken(payload: None) -> None:
        raise ValueError

    async with working(app, dsn) as (_, seen):
        job_id = await broken.enqueue(conn, None)
        waits = []
        for attempt in range(1, 8):
            await seen.seen(EventKind.FAILED, job_id, times=attempt)
            waits.append((await make_due(conn, schema, job_id)).total_seconds())
        await seen.seen(EventKind.DIED, job_id)
    assert waits == [10, 40, 180, 720, 3000, 3000, 3000]


async def test_retry_waits_as_long_as_the_handler_says_and_counts(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    @app.job("a.later", max_attempts=2)
    async def later(payload: None) -> None:
        raise Retry(after=3600, reason="the partner is closed")

    async with working(app, dsn) as (_, seen):
        job_id = await later.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)
        assert await make_due(conn, schema, job_id) == timedelta(hours=1)
        await seen.seen(EventKind.DIED, job_id)  # the limit counts for every way to fail
    job = await job_of(conn, job_id)
    assert (job.attempts, job.last_error) == (2, "recado.errors.Retry: the partner is closed")


async def test_discard_is_dead_at_once(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    @app.job("a.hopeless")
    async def hopeless(payload: None) -> None:
        raise Discard("the customer is gone")

    async with working(app, dsn) as (_, seen):
        job_id = await hopeless.enqueue(conn, None)
        await seen.seen(EventKind.DIED, job_id)
    job = await job_of(conn, job_id)
    assert (job.status, job.attempts, job.max_attempts) == (JobStatus.DEAD, 1, 5)
    assert [e.message for e in await list_errors(conn, job_id)] == ["the customer is gone"]


async def test_snooze_puts_back_without_counting_as_often_as_asked(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    runs = 0

    @app.job("a.sleepy", max_attempts=1)
    async def sleepy(payload: None) -> None:
        nonlocal runs
        runs += 1
        if runs < 10:
            raise Snooze(60)

    async with working(app, dsn) as (_, seen):
        job_id = await sleepy.enqueue(conn, None)
        for time in range(1, 10):
            await seen.seen(EventKind.RELEASED, job_id, times=time)
            assert await make_due(conn, schema, job_id) == timedelta(seconds=60)
        await seen.seen(EventKind.COMPLETED, job_id)
    assert (await job_of(conn, job_id)).attempts == 0
    assert await list_errors(conn, job_id) == []


@pytest.mark.parametrize("seconds", [float("nan"), "soon", None])
async def test_a_snooze_for_no_time_at_all_is_a_failure(
    app: Recado, dsn: str, conn: asyncpg.Connection, seconds: Any
) -> None:
    @app.job("a.sleepy")
    async def sleepy(payload: None) -> None:
        raise Snooze(seconds)

    async with working(app, dsn) as (_, seen):
        job_id = await sleepy.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)


@pytest.mark.parametrize(
    "backoff",
    [lambda n: 1 / 0, lambda n: float("nan"), lambda n: "x", lambda n: None],
    ids=["raises", "nan", "text", "none"],
)
async def test_a_backoff_that_makes_no_sense_gives_way_to_the_built_in_one(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str, backoff: Any
) -> None:
    @app.job("a.broken", backoff=backoff)
    async def broken(payload: None) -> None:
        raise ValueError

    async with working(app, dsn) as (_, seen):
        job_id = await broken.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)
        assert await make_due(conn, schema, job_id) == timedelta(seconds=10)


async def test_a_backoff_that_overflows_waits_a_year(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    @app.job("a.broken", backoff=lambda n: float("inf"))
    async def broken(payload: None) -> None:
        raise ValueError

    async with working(app, dsn) as (_, seen):
        job_id = await broken.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)
    assert (await job_of(conn, job_id)).run_at > datetime.now().astimezone() + timedelta(days=364)


@pytest.mark.parametrize("plain", [False, True], ids=["coroutine", "thread"])
async def test_a_timeout_fails_the_attempt(app: Recado, dsn: str, conn: asyncpg.Connection, plain: bool) -> None:
    gone_on = threading.Event()

    if plain:

        @app.job("a.slow", timeout=0.05)
        def slow(payload: None) -> None:
            gone_on.wait(10)
    else:

        @app.job("a.slow", timeout=0.05)
        async def slow(payload: None) -> None:
            await asyncio.Event().wait()

    async with working(app, dsn) as (_, seen):
        job_id = await app.enqueue(conn, "a.slow", None)
        await seen.seen(EventKind.FAILED, job_id)
        gone_on.set()
    assert (await job_of(conn, job_id)).last_error == (
        "recado.errors.JobTimeout: cannot finish within 0.05 s: the attempt was cancelled; raise the job type's "
        "timeout, or split the work"
    )


async def test_a_thread_that_ran_out_of_time_keeps_its_slot_until_it_ends(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    release = threading.Event()
    order: list[str] = []

    @app.job("a.slow", timeout=0.05)
    def slow(payload: None) -> None:
        release.wait(10)
        order.append("slow ended")

    @app.job("a.next")
    async def following(payload: None) -> None:
        order.append("next began")

    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        first = await slow.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, first)
        second = await following.enqueue(conn, None)
        release.set()
        await seen.seen(EventKind.COMPLETED, second)
    assert order == ["slow ended", "next began"]


async def test_the_handlers_own_timeout_error_is_its_own(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    @app.job("a.own", timeout=60)
    async def own(payload: None) -> None:
        raise TimeoutError("the partner did not answer")

    async with working(app, dsn) as (_, seen):
        job_id = await own.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)
    assert (await job_of(conn, job_id)).last_error == "TimeoutError: the partner did not answer"


async def test_the_workers_timeout_is_for_types_without_their_own(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    @app.job("a.slow")
    async def slow(payload: None) -> None:
        await asyncio.Event().wait()

    @app.job("a.patient", timeout=60)
    async def patient(payload: None) -> None:
        await failed.wait()

    failed = asyncio.Event()
    async with working(app, dsn, timeout=0.05) as (_, seen):
        second = await patient.enqueue(conn, None)
        first = await slow.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, first)
        failed.set()
        await seen.seen(EventKind.COMPLETED, second)


async def test_an_unregistered_type_fails_and_dies(dsn: str, conn: asyncpg.Connection, schema: str) -> None:
    service = Recado()
    elsewhere = service.declare("else.where", max_attempts=2)
    async with working(Recado(), dsn) as (_, seen):
        job_id = await elsewhere.enqueue(conn, {})
        await seen.seen(EventKind.FAILED, job_id)
        assert await make_due(conn, schema, job_id) == timedelta(seconds=10)
        await seen.seen(EventKind.DIED, job_id)
    assert (await job_of(conn, job_id)).last_error == (
        "recado.errors.RecadoError: cannot run a job of type 'else.where': no handler is registered in this worker's "
        "application; register one, or let another worker serve its queue"
    )


async def test_a_payload_that_does_not_fit_fails_without_showing_it(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    @app.job("a.strict")
    async def strict(payload: Payload) -> None:
        raise AssertionError("must not run")

    loose = Recado().declare("a.strict")
    async with working(app, dsn) as (_, seen):
        job_id = await loose.enqueue(conn, {"n": "s3cret"})
        await seen.seen(EventKind.FAILED, job_id)
    [error] = await list_errors(conn, job_id)
    assert error.error_class == "recado.errors.InvalidPayload"
    assert "n: Input should be a valid integer" in error.message
    assert "s3cret" not in error.message


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt: "),
        (asyncio.CancelledError(), "asyncio.exceptions.CancelledError: "),
        (BaseException("base"), "BaseException: base"),
        (Unspeakable(), "tests.worker.test_runner.Unspeakable: <its str() raised RuntimeError>"),
        (ValueError("a\0b\ud800c"), "ValueError: a\ufffdb\ufffdc"),
        (ValueError("x" * 10_000_000), "ValueError: " + "x" * 1999 + "…"),
    ],
    ids=["exit", "interrupt", "cancel", "base", "unspeakable", "unstorable", "huge"],
)
async def test_whatever_a_handler_raises_is_a_counted_failure(
    app: Recado, dsn: str, conn: asyncpg.Connection, raised: BaseException, message: str
) -> None:
    @app.job("a.wild")
    async def wild(payload: None) -> None:
        raise raised

    @app.job("a.tame")
    async def tame(payload: None) -> None:
        pass

    async with working(app, dsn) as (_, seen):
        job_id = await wild.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)
        await seen.seen(EventKind.COMPLETED, await tame.enqueue(conn, None))  # the worker lives
    job = await job_of(conn, job_id)
    assert (job.attempts, job.last_error) == (1, message)


async def test_a_handler_that_cancels_itself_fails(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    @app.job("a.suicidal")
    async def suicidal(payload: None) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    async with working(app, dsn) as (_, seen):
        job_id = await suicidal.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)


async def test_each_job_has_a_context_of_its_own(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")
    found = []

    @app.job("a.marks")
    async def marks(payload: int) -> None:
        found.append(variable.get())
        variable.set(f"from {payload}")

    async with working(app, dsn, queues={"default": 1}) as (_, seen):
        for n in range(3):
            await marks.enqueue(conn, n)
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == 3)
    assert found == ["clean"] * 3


async def test_handlers_get_what_the_lifespan_yields(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    steps = []

    @app.lifespan
    async def lifespan() -> Any:
        steps.append("up")
        yield {"greeting": "hola"}
        steps.append("down")

    @app.job("a.greets")
    async def greets(payload: None, state: dict[str, str]) -> str:
        steps.append("run")
        return state["greeting"]

    async with working(app, dsn) as (_, seen):
        job_id = await greets.enqueue(conn, None)
        await seen.seen(EventKind.COMPLETED, job_id)
    assert (await job_of(conn, job_id)).result == "hola"
    assert steps == ["up", "run", "down"]


# -- transactional handlers


@pytest.fixture
async def ledger(conn: asyncpg.Connection) -> str:
    await conn.execute("CREATE TABLE public.ledger (job uuid, line text)")
    return "public.ledger"


async def test_a_transactional_handlers_writes_commit_with_its_completion(
    app: Recado, dsn: str, conn: asyncpg.Connection, ledger: str, schema: str
) -> None:
    @app.job("a.books")
    async def books(payload: None, conn: asyncpg.Connection, job: ClaimedJob) -> dict[str, str]:
        await conn.execute(f"INSERT INTO {ledger} VALUES ($1, 'x')", job.id)
        return {"booked": "x"}

    async with working(app, dsn) as (_, seen):
        job_id = await books.enqueue(conn, None)
        await seen.seen(EventKind.COMPLETED, job_id)
    # xmin is the transaction that wrote a row's version: it is the same one.
    written = await conn.fetchval(f"SELECT xmin::text FROM {ledger} WHERE job = $1", job_id)
    completed = await conn.fetchval(f"SELECT xmin::text FROM {schema}.jobs WHERE id = $1", job_id)
    assert written == completed
    assert (await job_of(conn, job_id)).result == {"booked": "x"}


@pytest.mark.parametrize("statement", ["COMMIT", "ROLLBACK"])
async def test_a_handler_that_ends_its_transaction_itself_fails(
    app: Recado, dsn: str, conn: asyncpg.Connection, ledger: str, statement: str
) -> None:
    @app.job("a.meddles")
    async def meddles(payload: None, conn: asyncpg.Connection) -> None:
        await conn.execute(statement)

    async with working(app, dsn) as (_, seen):
        job_id = await meddles.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)
    error = (await job_of(conn, job_id)).last_error
    assert error is not None
    assert "the handler ended the transaction it was given" in error


async def test_a_handler_that_closes_its_connection_fails(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    @app.job("a.closes")
    async def closes(payload: None, conn: asyncpg.Connection) -> None:
        conn.terminate()

    async with working(app, dsn) as (_, seen):
        job_id = await closes.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)
    assert (await job_of(conn, job_id)).attempts == 1


async def test_a_transactional_handler_that_fails_leaves_nothing(
    app: Recado, dsn: str, conn: asyncpg.Connection, ledger: str
) -> None:
    @app.job("a.books")
    async def books(payload: None, conn: asyncpg.Connection, job: ClaimedJob) -> None:
        await conn.execute(f"INSERT INTO {ledger} VALUES ($1, 'x')", job.id)
        raise ValueError

    async with working(app, dsn) as (_, seen):
        job_id = await books.enqueue(conn, None)
        await seen.seen(EventKind.FAILED, job_id)
    assert await conn.fetchval(f"SELECT count(*) FROM {ledger}") == 0
    assert (await job_of(conn, job_id)).attempts == 1


async def test_a_transactional_handler_whose_lease_was_lost_leaves_no_trace(
    app: Recado, dsn: str, conn: asyncpg.Connection, ledger: str, schema: str
) -> None:
    written, go_on = asyncio.Event(), asyncio.Event()

    @app.job("a.books")
    async def books(payload: None, conn: asyncpg.Connection, job: ClaimedJob) -> None:
        await conn.execute(f"INSERT INTO {ledger} VALUES ($1, 'x')", job.id)
        written.set()
        await go_on.wait()

    async with working(app, dsn) as (_, seen):
        job_id = await books.enqueue(conn, None)
        await written.wait()
        # Another worker has taken the job over: the fence has moved, and nobody has told this one.
        await conn.execute(
            f"UPDATE {schema}.jobs SET fence = fence + 1, locked_by = gen_random_uuid() WHERE id = $1", job_id
        )
        go_on.set()
        await seen.seen(EventKind.LOST, job_id)
        assert await conn.fetchval(f"SELECT count(*) FROM {ledger}") == 0
        job = await job_of(conn, job_id)
        assert (job.status, job.fence, job.attempts) == (JobStatus.RUNNING, 2, 0)


async def test_a_database_that_fails_around_the_handler_counts_no_attempt(
    app: Recado, dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    """The backend is ended while the completion waits for the job's row, which somebody else has locked."""
    attempts = []

    @app.job("a.books", max_attempts=1)
    async def books(payload: None, conn: asyncpg.Connection, job: ClaimedJob) -> None:
        attempts.append(job.attempt)
        await locked.wait()

    locked = asyncio.Event()
    locker = await connect()
    async with working(app, dsn) as (_, seen):
        job_id = await books.enqueue(conn, None)
        await seen.seen(EventKind.CLAIMED, job_id)
        async with locker.transaction():
            await locker.execute(f"SELECT FROM {schema}.jobs WHERE id = $1 FOR UPDATE", job_id)
            locked.set()
            await waiting_for_a_lock(conn, "recado handlers")
            await conn.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
                "WHERE application_name = 'recado handlers' AND datname = current_database()"
            )
        await seen.seen(EventKind.RELEASED, job_id)
        assert await make_due(conn, schema, job_id) == timedelta(seconds=1)
        await seen.seen(EventKind.COMPLETED, job_id)
    assert attempts == [1, 1]


# -- cancellation


async def test_a_running_job_that_is_cancelled_is_interrupted(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    running, interrupted = asyncio.Event(), asyncio.Event()

    @app.job("a.long")
    async def long(payload: None) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            interrupted.set()
            raise

    async with working(app, dsn) as (_, seen):
        job_id = await long.enqueue(conn, None)
        await running.wait()
        await cancel(conn, job_id)
        await interrupted.wait()
        await seen.seen(EventKind.LOST, job_id)
    job = await job_of(conn, job_id)
    assert (job.status, job.attempts, job.locked_by) == (JobStatus.CANCELLED, 0, None)


async def test_what_a_cancelled_job_still_returns_is_dropped(app: Recado, dsn: str, conn: asyncpg.Connection) -> None:
    running, cancelled = threading.Event(), threading.Event()

    @app.job("a.thread")
    def thread(payload: None) -> str:
        running.set()
        cancelled.wait(10)
        return "too late"

    async with working(app, dsn) as (_, seen):
        job_id = await thread.enqueue(conn, None)
        await asyncio.to_thread(running.wait)
        await cancel(conn, job_id)
        await seen.seen(EventKind.LOST, job_id)
        cancelled.set()
    job = await job_of(conn, job_id)
    assert (job.status, job.result) == (JobStatus.CANCELLED, None)


async def test_a_cancellation_that_was_rolled_back_never_happened(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.job("a.long")
    async def long(payload: None) -> str:
        running.set()
        await go_on.wait()
        return "done"

    async with working(app, dsn) as (_, seen):
        job_id = await long.enqueue(conn, None)
        await running.wait()
        transaction = conn.transaction()
        await transaction.start()
        await conn.execute(fill(CANCEL, schema), job_id)
        await transaction.rollback()
        go_on.set()
        await seen.seen(EventKind.COMPLETED, job_id)


async def test_a_cancellation_that_anybody_could_have_sent_ends_nothing(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    running, go_on = asyncio.Event(), asyncio.Event()

    @app.job("a.long")
    async def long(payload: None) -> str:
        running.set()
        await go_on.wait()
        return "done"

    async with working(app, dsn, heartbeat=NEVER / 100, silence=NEVER) as (_, seen):
        job_id = await long.enqueue(conn, None)
        await running.wait()
        beats = seen.count(EventKind.BEAT)
        await conn.execute("SELECT pg_notify($1, $2)", f"{schema}_cancel", str(job_id))
        await conn.execute("SELECT pg_notify($1, $2)", f"{schema}_cancel", "no id at all")
        await seen.seen(EventKind.BEAT, times=beats + 1)  # it looked at its leases, and this one stands
        go_on.set()
        await seen.seen(EventKind.COMPLETED, job_id)
    assert seen.count(EventKind.LOST) == 0


# -- alerts


async def test_the_death_of_a_critical_job_enqueues_an_alert_in_the_same_transaction(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    alerts: list[JobDied] = []

    @app.job("money.move", critical=True, max_attempts=1, queue="money")
    async def move(payload: Payload) -> None:
        raise ValueError("no money")

    @app.job(JOB_DIED)
    async def alert(payload: JobDied) -> None:
        alerts.append(payload)

    async with working(app, dsn, queues={"money": 1}) as (_, seen):
        job_id = await move.enqueue(conn, Payload(n=1), idempotency_key="k")
        await seen.until(lambda: bool(alerts))
        await seen.seen(EventKind.COMPLETED)
    assert alerts == [
        JobDied(job_id=job_id, job_type="money.move", queue="money", attempts=1, error_class="ValueError")
    ]
    rows = await conn.fetch(f"SELECT payload, created_at FROM {schema}.jobs WHERE job_type = $1", JOB_DIED)
    died = await conn.fetchval(f"SELECT finished_at FROM {schema}.jobs WHERE id = $1", job_id)
    assert [json.loads(row["payload"])["job_id"] for row in rows] == [str(job_id)]
    assert rows[0]["created_at"] == died  # now() is the transaction's
    assert ("recado.worker", 50) in {(r.name, r.levelno) for r in caplog.records}


async def test_an_alert_handler_that_asks_for_something_else_does_not_keep_the_job_from_dying(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    @app.job("money.move", critical=True, max_attempts=1)
    async def move(payload: None) -> None:
        raise ValueError

    @app.job(JOB_DIED)
    async def alert(payload: Payload) -> None:
        raise AssertionError("must not run: no alert fits its payload")

    async with working(app, dsn) as (_, seen):
        job_id = await move.enqueue(conn, None, idempotency_key="k")
        await seen.seen(EventKind.DIED, job_id)
        await seen.seen(EventKind.FAILED)
        await seen.seen(EventKind.COMPLETED, await app.enqueue(conn, "_smoke.echo", None))  # the worker lives


async def test_a_critical_job_raises_its_alert_on_a_worker_that_does_not_know_its_type(
    dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    move = Recado().declare("money.move", critical=True, max_attempts=1)
    async with working(Recado(), dsn) as (_, seen):
        job_id = await move.enqueue(conn, {}, idempotency_key="k")
        await seen.seen(EventKind.DIED, job_id)
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs WHERE job_type = $1", JOB_DIED) == 1


async def test_the_death_of_an_ordinary_job_enqueues_nothing(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    @app.job("a.broken", max_attempts=1)
    async def broken(payload: None) -> None:
        raise ValueError

    async with working(app, dsn) as (_, seen):
        await seen.seen(EventKind.DIED, await broken.enqueue(conn, None))
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs") == 1


async def test_what_was_done_is_counted_by_the_minute(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    @app.job("a.fine")
    async def fine(payload: None) -> None:
        pass

    @app.job("a.broken", max_attempts=1)
    async def broken(payload: None) -> None:
        raise ValueError

    @app.job("a.books")
    async def books(payload: None, conn: asyncpg.Connection) -> None:
        pass

    async with working(app, dsn) as (_, seen):
        await app.enqueue_many(conn, [fine.new(None)] * 3 + [broken.new(None)] * 2 + [books.new(None)])
        await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == 4 and len(seen.jobs(EventKind.DIED)) == 2)
    rows = await conn.fetch(
        f"SELECT job_type, sum(completed), sum(failed), sum(dead), sum(wait_seconds) > 0 "
        f"FROM {schema}.job_stats GROUP BY 1 ORDER BY 1"
    )
    assert [tuple(row) for row in rows] == [
        ("a.books", 1, 0, 0, True),
        ("a.broken", 0, 2, 2, True),
        ("a.fine", 3, 0, 0, True),
    ]


# -- handed on


async def test_a_connection_goes_from_one_transactional_job_to_the_next_that_waits(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    """Three jobs on one connection: it is reset by the pool once, at the end, not after each."""
    resets = 0

    class Counting(asyncpg.Connection):
        def get_reset_query(self) -> str:
            nonlocal resets
            resets += 1
            return super().get_reset_query()

    @app.job("a.books")
    async def books(payload: None, conn: asyncpg.Connection) -> int:
        return conn.get_server_pid()

    async with asyncpg.create_pool(dsn, min_size=1, max_size=1, connection_class=Counting) as pool:
        resets = 0
        ids = await app.enqueue_many(conn, [books.new(None)] * 3)
        async with working(app, pool) as (_, seen):
            await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) == 3)
            assert resets == 1
    assert len({(await job_of(conn, job_id)).result for job_id in ids}) == 1


async def test_a_connection_whose_handler_failed_is_reset_before_the_next_job_gets_it(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    found = []

    @app.job("a.sets", max_attempts=1)
    async def sets(payload: bool, conn: asyncpg.Connection) -> None:
        found.append(await conn.fetchval("SHOW search_path"))
        await conn.execute("SET search_path = nowhere")
        if payload:
            await conn.execute("COMMIT")  # so that the setting outlives the rollback
            raise ValueError

    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        await app.enqueue_many(conn, [sets.new(True), sets.new(True)])
        async with working(app, pool) as (_, seen):
            await seen.until(lambda: len(seen.jobs(EventKind.DIED)) == 2)
    assert found[0] == found[1]


async def test_whoever_else_wants_a_connection_of_the_pool_gets_one_under_a_backlog(
    app: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    served = asyncio.Event()
    done = 0

    @app.job("a.books")
    async def books(payload: None, conn: asyncpg.Connection) -> None:
        nonlocal done
        done += 1
        if not served.is_set():
            await app.enqueue(conn, "a.books", None)  # a backlog without end, until the service was served

    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool:
        await app.enqueue_many(conn, [books.new(None)] * 20)
        async with working(app, pool) as (_, seen):
            await seen.until(lambda: done > 20)
            async with asyncio.timeout(20):
                assert await pool.fetchval("SELECT 1") == 1
            served.set()
            await seen.until(lambda: len(seen.jobs(EventKind.COMPLETED)) >= done)
