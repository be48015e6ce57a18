"""Enqueueing: five rules, also under races, on whatever connection a service has; and a NOTIFY only when it helps."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import RFC_4122, UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio
from pydantic import BaseModel
from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from recado import NewJob, Recado
from recado.errors import ConfigurationError, EnqueueError, InvalidPayload, MissingIdempotencyKey
from recado.queue import enqueue, get_job
from recado.queue.claims import claim
from recado.queue.connections import asyncpg_connection
from recado.queue.enqueue import insert_job, insert_jobs
from recado.queue.statements import wake_channel
from tests.queue.support import Connect, Ear, blocked, count, hungry, row, statements

MAIL = "mail.send"
PAYMENT = "payment.process"


class Mail(BaseModel):
    order_id: int


@pytest.fixture
def app() -> Recado:
    app = Recado()
    app.declare(MAIL, Mail)
    app.declare("mail.archive", Mail, queue="archive")
    app.declare(PAYMENT, Mail, critical=True)
    return app


@pytest_asyncio.fixture
async def ear(connect: Connect, schema: str) -> Ear:
    return await Ear.on(await connect(), wake_channel(schema))


# --- rule 1: in the caller's transaction ---


async def test_a_job_is_there_with_the_callers_commit_and_not_before(
    app: Recado, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    other = await connect()
    async with conn.transaction():
        await app.enqueue(conn, MAIL, {"order_id": 1})
        assert conn.is_in_transaction()
        assert await count(other, schema) == 0

    assert await count(other, schema) == 1


async def test_a_rollback_takes_the_job_with_it(app: Recado, conn: asyncpg.Connection, schema: str) -> None:
    transaction = conn.transaction()
    await transaction.start()
    await app.enqueue(conn, MAIL, {"order_id": 1})
    await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 2})])
    await transaction.rollback()

    assert await count(conn, schema) == 0


async def test_a_rolled_back_savepoint_takes_only_its_own_jobs(
    app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    async with conn.transaction():
        kept = await app.enqueue(conn, MAIL, {"order_id": 1})
        inner = conn.transaction()
        await inner.start()
        await app.enqueue(conn, MAIL, {"order_id": 2})
        await inner.rollback()

    assert [r["id"] for r in await conn.fetch(f"SELECT id FROM {schema}.jobs")] == [kept]


async def test_a_job_is_stored_as_it_was_asked_for(app: Recado, conn: asyncpg.Connection) -> None:
    run_at = datetime(2100, 1, 2, 3, 4, 5, tzinfo=UTC)

    job = await get_job(
        conn,
        await app.enqueue(
            conn,
            MAIL,
            Mail(order_id=1),
            run_at=run_at,
            idempotency_key="k",
            max_attempts=3,
            queue="slow",
            priority=2,
            metadata={"trace": "t"},
        ),
    )

    assert (job.job_type, job.payload, job.run_at, job.idempotency_key) == (MAIL, {"order_id": 1}, run_at, "k")
    assert (job.max_attempts, job.queue, job.priority, job.metadata) == (3, "slow", 2, {"trace": "t"})
    assert (job.status, job.attempts, job.fence, job.locked_by, job.finished_at) == ("pending", 0, 0, None, None)


async def test_what_is_not_said_is_the_job_types(conn: asyncpg.Connection) -> None:
    app = Recado()
    own = app.declare("a.own", queue="own", priority=3, max_attempts=9)
    plain = app.declare("a.plain")

    job = await get_job(conn, await own.enqueue(conn, None))
    assert (job.queue, job.priority, job.max_attempts) == ("own", 3, 9)
    job = await get_job(conn, await plain.enqueue(conn, None))
    assert (job.queue, job.priority, job.max_attempts) == ("default", 1, 5)
    assert job.run_at == job.created_at


async def test_both_ways_to_enqueue_many_store_what_enqueue_stores(app: Recado, conn: asyncpg.Connection) -> None:
    options: dict[str, Any] = {"priority": 0, "max_attempts": 2, "queue": "q", "metadata": {"a": 1}}
    one = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="1", **options)
    [many] = await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1}, idempotency_key="2", **options)])

    first, second = await get_job(conn, one), await get_job(conn, many)
    for name in ("job_type", "payload", "status", "attempts", "fence", *options):
        assert getattr(first, name) == getattr(second, name)


# --- rule 2: a duplicate is the existing job ---


async def test_a_duplicate_gets_the_existing_jobs_id(app: Recado, conn: asyncpg.Connection, schema: str) -> None:
    first = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")

    assert await app.enqueue(conn, MAIL, {"order_id": 2}, idempotency_key="k") == first
    assert await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 3}, idempotency_key="k")]) == [first]
    assert await count(conn, schema) == 1


async def test_a_duplicate_does_not_spoil_the_callers_transaction(app: Recado, conn: asyncpg.Connection) -> None:
    async with conn.transaction():
        first = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
        assert await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k") == first
        assert await conn.fetchval("SELECT 1") == 1


async def test_a_key_belongs_to_its_job_type(app: Recado, conn: asyncpg.Connection) -> None:
    jobs = [app.new(job_type, {"order_id": 1}, idempotency_key="k") for job_type in (MAIL, PAYMENT, "mail.archive")]

    ids = [await insert_job(conn, job) for job in jobs]

    assert len(set(ids)) == 3
    assert [await insert_job(conn, job) for job in jobs] == ids
    assert await app.enqueue_many(conn, jobs) == ids


async def test_jobs_without_a_key_are_never_duplicates(app: Recado, conn: asyncpg.Connection, schema: str) -> None:
    ids = {await app.enqueue(conn, MAIL, {"order_id": 1}) for _ in range(3)}
    ids |= set(await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1})] * 3))

    assert len(ids) == await count(conn, schema) == 6


@pytest.mark.parametrize("status", ["pending", "running", "completed", "dead", "cancelled"])
async def test_a_conflict_never_touches_the_existing_job(
    status: str, app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
    await conn.execute(f"UPDATE {schema}.jobs SET status = $1", status)
    before = await row(conn, schema, job_id)

    other: dict[str, Any] = {"idempotency_key": "k", "priority": 0, "queue": "other", "max_attempts": 1}
    assert await app.enqueue(conn, MAIL, {"order_id": 2}, **other) == job_id
    assert await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 2}, **other)]) == [job_id]

    assert await row(conn, schema, job_id) == before


@pytest.mark.parametrize("bulk", [False, True], ids=["one", "many"])
async def test_a_second_enqueuer_waits_for_the_first_and_gets_its_job(
    bulk: bool, app: Recado, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    other, observer = await connect(), await connect()
    transaction = conn.transaction()
    await transaction.start()
    first = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")

    async with asyncio.TaskGroup() as group:
        second = group.create_task(keyed(app, other, bulk=bulk))
        await blocked(observer, other)
        await transaction.commit()

    assert second.result() == first
    assert await count(conn, schema) == 1


@pytest.mark.parametrize("bulk", [False, True], ids=["one", "many"])
async def test_a_second_enqueuer_inserts_its_own_job_when_the_first_rolls_back(
    bulk: bool, app: Recado, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    other, observer = await connect(), await connect()
    transaction = conn.transaction()
    await transaction.start()
    first = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")

    async with asyncio.TaskGroup() as group:
        second = group.create_task(keyed(app, other, bulk=bulk))
        await blocked(observer, other)
        await transaction.rollback()

    assert second.result() != first
    assert [r["id"] for r in await conn.fetch(f"SELECT id FROM {schema}.jobs")] == [second.result()]


async def keyed(app: Recado, conn: asyncpg.Connection, *, bulk: bool) -> UUID:
    """Enqueue the job with the key ``k``."""
    if bulk:
        return (await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 2}, idempotency_key="k")]))[0]
    return await app.enqueue(conn, MAIL, {"order_id": 2}, idempotency_key="k")


@pytest.mark.parametrize("bulk", [False, True], ids=["one", "many"])
async def test_under_repeatable_read_a_job_of_the_snapshot_is_found(
    bulk: bool, app: Recado, conn: asyncpg.Connection, connect: Connect
) -> None:
    existing = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
    other = await connect()

    async with other.transaction(isolation="repeatable_read"):
        assert await keyed(app, other, bulk=bulk) == existing


@pytest.mark.parametrize("isolation", ["repeatable_read", "serializable"])
@pytest.mark.parametrize("bulk", [False, True], ids=["one", "many"])
async def test_under_repeatable_read_a_job_from_after_the_snapshot_is_a_serialization_error(
    bulk: bool, isolation: Any, app: Recado, conn: asyncpg.Connection, connect: Connect
) -> None:
    other = await connect()
    transaction = other.transaction(isolation=isolation)
    await transaction.start()
    await other.execute("SELECT 1")  # takes the snapshot
    existing = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")

    with pytest.raises(asyncpg.SerializationError):
        await keyed(app, other, bulk=bulk)
    await transaction.rollback()

    # The remedy is the usual one there: the whole transaction once more.
    async with other.transaction(isolation=isolation):
        assert await keyed(app, other, bulk=bulk) == existing


class DeletedInBetween:
    """A connection before whose SELECT of the existing jobs these are deleted by somebody else, the first time."""

    def __init__(self, conn: asyncpg.Connection, other: asyncpg.Connection, delete: str) -> None:
        self._conn = conn
        self._other = other
        self._delete: str | None = delete
        self.deleted = ""

    async def _before(self, query: str) -> None:
        if query.lstrip().startswith("SELECT") and self._delete is not None:
            delete, self._delete = self._delete, None
            self.deleted = await self._other.execute(delete)

    async def fetchrow(self, query: str, *args: Any) -> Any:
        return await self._conn.fetchrow(query, *args)

    async def fetchval(self, query: str, *args: Any) -> Any:
        await self._before(query)
        return await self._conn.fetchval(query, *args)

    async def fetch(self, query: str, *args: Any) -> Any:
        await self._before(query)
        return await self._conn.fetch(query, *args)


async def test_a_job_that_vanishes_in_between_is_inserted_anew(
    app: Recado, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    existing = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
    vanishing: Any = DeletedInBetween(conn, await connect(), f"DELETE FROM {schema}.jobs")

    new = await app.enqueue(vanishing, MAIL, {"order_id": 2}, idempotency_key="k")

    assert vanishing.deleted == "DELETE 1"
    assert new != existing
    assert (await get_job(conn, new)).payload == {"order_id": 2}


async def test_jobs_that_vanish_in_between_are_inserted_anew_by_a_bulk(
    app: Recado, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    a, b = [await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key=key) for key in "ab"]
    vanishing: Any = DeletedInBetween(conn, await connect(), f"DELETE FROM {schema}.jobs WHERE idempotency_key = 'b'")

    ids = await app.enqueue_many(vanishing, [app.new(MAIL, {"order_id": 2}, idempotency_key=key) for key in "cab"])

    assert vanishing.deleted == "DELETE 1"
    assert ids[1] == a
    assert ids[2] != b
    assert {r["id"] for r in await conn.fetch(f"SELECT id FROM {schema}.jobs")} == set(ids)


# --- rule 3: the key protects the enqueue ---


@pytest.mark.parametrize("status", ["completed", "dead", "cancelled"])
async def test_a_key_stays_taken_after_the_job_has_ended_and_is_free_once_it_is_deleted(
    status: str, app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    first = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
    await conn.execute(f"UPDATE {schema}.jobs SET status = $1, finished_at = now()", status)

    assert await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k") == first
    await conn.execute(f"DELETE FROM {schema}.jobs")
    assert await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k") != first


# --- rules 4 and 5: refused before any SQL ---


async def test_a_critical_job_without_a_key_is_refused_before_any_sql(app: Recado, conn: asyncpg.Connection) -> None:
    async with statements(conn) as sent:
        with pytest.raises(MissingIdempotencyKey, match=r"'payment\.process'.*idempotency_key"):
            await app.enqueue(conn, PAYMENT, {"order_id": 1})
        with pytest.raises(ValueError):
            app.new(PAYMENT, {"order_id": 1})
        with pytest.raises(EnqueueError):
            await app.enqueue(conn, PAYMENT, {"order_id": 1}, idempotency_key="")
    assert sent == []

    await app.enqueue(conn, PAYMENT, {"order_id": 1}, idempotency_key="event")


async def test_a_payload_that_does_not_fit_is_refused_before_any_sql(app: Recado, conn: asyncpg.Connection) -> None:
    async with statements(conn) as sent:
        with pytest.raises(InvalidPayload, match="order_id"):
            await app.enqueue(conn, MAIL, {"order": 1})

    assert sent == []


# --- ids ---


async def test_ids_are_uuids_of_version_7_from_python_in_the_order_of_time(
    app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    ids = [await app.enqueue(conn, MAIL, {"order_id": n}) for n in range(3)]
    ids += await app.enqueue_many(conn, [app.new(MAIL, {"order_id": n}) for n in range(50)])

    for job_id in ids:
        assert (job_id.version, job_id.variant) == (7, RFC_4122)
        assert abs((job_id.int >> 80) / 1000 - time.time()) < 60
    assert ids == sorted(ids)
    assert [r["id"] for r in await conn.fetch(f"SELECT id FROM {schema}.jobs ORDER BY id")] == ids


async def test_the_database_makes_no_ids_and_has_nothing_that_could(conn: asyncpg.Connection, schema: str) -> None:
    functions = await conn.fetch(
        "SELECT proname FROM pg_proc WHERE pronamespace NOT IN ('pg_catalog'::regnamespace, "
        "'information_schema'::regnamespace)"
    )
    extensions = await conn.fetch("SELECT extname FROM pg_extension")
    triggers = await conn.fetch(
        f"SELECT tgname FROM pg_trigger JOIN pg_class c ON c.oid = tgrelid "
        f"WHERE relnamespace = '{schema}'::regnamespace AND NOT tgisinternal"
    )
    defaults = await conn.fetch(
        f"SELECT attname FROM pg_attrdef JOIN pg_attribute ON attrelid = adrelid AND attnum = adnum "
        f"WHERE adrelid = '{schema}.jobs'::regclass"
    )

    assert functions == []
    assert [r["extname"] for r in extensions] == ["plpgsql"]
    assert triggers == []
    assert {"run_at", "created_at"} <= {r["attname"] for r in defaults}
    assert "id" not in {r["attname"] for r in defaults}
    with pytest.raises(asyncpg.NotNullViolationError):
        await conn.execute(f"INSERT INTO {schema}.jobs (job_type, payload) VALUES ('a.b', '{{}}')")


# --- connections ---


async def test_enqueue_works_on_a_pools_connection(app: Recado, dsn: str, schema: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=0, max_size=1) as pool:
        async with pool.acquire() as conn, conn.transaction():
            await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
            await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
            await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 2})])
        assert await pool.fetchval(f"SELECT count(*) FROM {schema}.jobs") == 2


def wrapped_json(value: Any) -> str:
    return json.dumps({"wrapped": value})


async def test_enqueue_passes_by_the_codecs_of_the_connection(
    app: Recado, conn: asyncpg.Connection, connect: Connect
) -> None:
    def same(value: str) -> str:
        assert isinstance(value, str)
        return value

    for name in ("json", "jsonb"):
        await conn.set_type_codec(name, encoder=wrapped_json, decoder=json.loads, schema="pg_catalog")
    await conn.set_type_codec("uuid", encoder=same, decoder=same, schema="pg_catalog")

    first = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k", metadata={"a": 1})
    again = await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
    keyed, plain = app.new(MAIL, {"order_id": 1}, idempotency_key="k"), app.new(MAIL, {"order_id": 2})
    ids = await app.enqueue_many(conn, [keyed, plain])
    many = await app.enqueue_many(conn, [plain] * 500)

    assert all(isinstance(job_id, UUID) for job_id in (first, again, *ids))
    assert first == again == ids[0]
    other = await connect()
    job = await get_job(other, first)
    assert (job.payload, job.metadata) == ({"order_id": 1}, {"a": 1})
    assert (await get_job(other, many[-1])).payload == {"order_id": 2}


@pytest_asyncio.fixture
async def engine(dsn: str) -> AsyncIterator[AsyncEngine]:
    async def creator() -> asyncpg.Connection:
        return await asyncpg.connect(dsn)

    engine = create_async_engine("postgresql+asyncpg://", async_creator=creator)
    yield engine
    await engine.dispose()


@pytest_asyncio.fixture
async def session(engine: AsyncEngine) -> AsyncIterator[AsyncSession]:
    async with async_sessionmaker(engine)() as session:
        yield session


async def test_sqlalchemys_asyncpg_connection_enqueues_in_its_transaction(
    app: Recado, engine: AsyncEngine, conn: asyncpg.Connection, schema: str
) -> None:
    async with engine.begin() as connection:
        await connection.execute(text("SELECT 1"))
        driver: Any = (await connection.get_raw_connection()).driver_connection
        job_id = await app.enqueue(driver, MAIL, {"order_id": 1}, idempotency_key="k")
        assert await app.enqueue(driver, MAIL, {"order_id": 1}, idempotency_key="k") == job_id
        assert await count(conn, schema) == 0

    assert (await get_job(conn, job_id)).payload == {"order_id": 1}


async def test_a_job_that_is_the_first_statement_on_sqlalchemys_connection_is_in_its_transaction(
    app: Recado, engine: AsyncEngine, conn: asyncpg.Connection, schema: str
) -> None:
    async with engine.connect() as connection:
        await app.enqueue(await asyncpg_connection(connection), MAIL, {"order_id": 1})
        await connection.rollback()
        assert await count(conn, schema) == 0

    async with engine.begin() as connection:
        await app.enqueue(await asyncpg_connection(connection), MAIL, {"order_id": 1})
        assert await count(conn, schema) == 0
    assert await count(conn, schema) == 1


async def test_a_job_that_is_the_first_statement_in_sqlalchemys_session_is_in_its_transaction(
    app: Recado, session: AsyncSession, conn: asyncpg.Connection, schema: str
) -> None:
    await app.enqueue(await asyncpg_connection(session), MAIL, {"order_id": 1})
    await session.rollback()
    assert await count(conn, schema) == 0

    await app.enqueue(await asyncpg_connection(session), MAIL, {"order_id": 1})
    assert await count(conn, schema) == 0
    await session.commit()
    assert await count(conn, schema) == 1


async def test_a_transaction_that_sqlalchemy_has_begun_costs_no_further_statement(session: AsyncSession) -> None:
    driver: Any = await asyncpg_connection(session)

    async with statements(driver) as sent:
        assert await asyncpg_connection(session) is driver

    assert sent == []


async def test_another_driver_beneath_sqlalchemy_is_refused_by_name() -> None:
    class Connection:
        async def get_raw_connection(self) -> Any:
            return SimpleNamespace(driver_connection=asyncio.Lock())

    with pytest.raises(ConfigurationError, match=r"its driver is asyncio; .*postgresql\+asyncpg"):
        await asyncpg_connection(Connection())


# --- many ---


SHAPES: dict[str, Callable[[int], dict[str, Any]]] = {
    "keyed": lambda n: {"idempotency_key": f"k{n}"},
    "scheduled": lambda n: {"run_at": datetime(2030, 1, 1, tzinfo=UTC)},
    "plain": lambda n: {},
    "mixed": lambda n: SHAPES[("keyed", "scheduled", "plain")[n % 3]](n),
}


@pytest.mark.parametrize("options", SHAPES.values(), ids=SHAPES)
async def test_enqueue_many_answers_in_the_order_of_its_jobs_in_one_statement_per_thousand(
    options: Callable[[int], dict[str, Any]], app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    jobs = [app.new(MAIL, {"order_id": n}, **options(n)) for n in range(2_500)]

    async with statements(conn) as sent:
        ids = await app.enqueue_many(conn, jobs)

    assert len(sent) <= 3
    assert ids == sorted(ids)
    rows = await conn.fetch(f"SELECT id, payload->>'order_id' FROM {schema}.jobs")
    assert {r[0]: int(r[1]) for r in rows} == {job_id: n for n, job_id in enumerate(ids)}


async def test_a_large_bulk_stores_what_enqueue_stores(app: Recado, conn: asyncpg.Connection) -> None:
    options: dict[str, Any] = {"priority": 0, "max_attempts": 2, "queue": "q", "metadata": {"a": 'ü"\\\t\n'}}
    one = await app.enqueue(conn, MAIL, {"order_id": 1}, **options)
    async with conn.transaction():
        began = await conn.fetchval("SELECT now()")
        [*_, last] = await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1}, **options)] * 500)

    first, many = await get_job(conn, one), await get_job(conn, last)
    for name in ("job_type", "payload", "status", "attempts", "fence", "idempotency_key", "locked_at", *options):
        assert getattr(first, name) == getattr(many, name)
    assert many.run_at == many.created_at == many.updated_at == began


async def test_a_large_bulk_is_rolled_back_with_its_transaction(
    app: Recado, conn: asyncpg.Connection, schema: str, ear: Ear
) -> None:
    await hungry(conn, "default")

    transaction = conn.transaction()
    await transaction.start()
    await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1})] * 500)
    await transaction.rollback()

    assert await count(conn, schema) == 0
    assert await ear.heard(conn) == []


async def test_enqueue_many_of_nothing_sends_nothing(app: Recado, conn: asyncpg.Connection) -> None:
    async with statements(conn) as sent:
        assert await app.enqueue_many(conn, []) == []

    assert sent == []


async def test_duplicates_within_a_bulk_and_with_the_table_get_the_one_jobs_id(
    app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    old = await app.enqueue(conn, MAIL, {"order_id": 0}, idempotency_key="old")
    jobs = [
        app.new(MAIL, {"order_id": 1}, idempotency_key="a"),
        app.new(MAIL, {"order_id": 2}, idempotency_key="old"),
        app.new(MAIL, {"order_id": 3}),
        app.new(MAIL, {"order_id": 4}, idempotency_key="a"),
        app.new("mail.archive", {"order_id": 5}, idempotency_key="a"),
    ]

    async with statements(conn) as sent:
        ids = await app.enqueue_many(conn, jobs)

    assert len(sent) == 2
    assert ids[1] == old
    assert ids[3] == ids[0]
    assert len({ids[0], ids[1], ids[2], ids[4]}) == await count(conn, schema) == 4
    assert (await get_job(conn, ids[0])).payload == {"order_id": 1}  # the first of two that share a key


class Halting:
    """A connection that halts after its first INSERT, until it may go on."""

    def __init__(self, conn: asyncpg.Connection) -> None:
        self._conn = conn
        self.halted = asyncio.Event()
        self.go_on = asyncio.Event()

    async def fetchval(self, query: str, *args: Any) -> Any:
        value = await self._conn.fetchval(query, *args)
        self.halted.set()
        await self.go_on.wait()
        return value

    async def fetch(self, query: str, *args: Any) -> Any:
        return await self._conn.fetch(query, *args)


async def test_two_bulks_with_the_same_keys_in_opposite_order_never_deadlock(
    app: Recado, conn: asyncpg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueue, "ROWS_PER_STATEMENT", 2)
    other, observer, halting = await connect(), await connect(), Halting(conn)
    forward = [app.new(MAIL, {"order_id": 1}, idempotency_key=key) for key in "abcdef"]

    async def bulk(conn: Any, owner: asyncpg.Connection, jobs: list[NewJob]) -> list[UUID]:
        async with owner.transaction():
            return await app.enqueue_many(conn, jobs)

    async with asyncio.TaskGroup() as group:
        first = group.create_task(bulk(halting, conn, forward))
        await halting.halted.wait()  # the first has some of the keys, and goes on to the others …
        second = group.create_task(bulk(other, other, forward[::-1]))
        await blocked(observer, other)
        halting.go_on.set()  # … while the second waits for it, holding none of them

    assert second.result() == first.result()[::-1]


async def test_jobs_of_one_transaction_are_claimed_in_the_order_they_were_enqueued(
    app: Recado, conn: asyncpg.Connection
) -> None:
    async with conn.transaction():
        ids = [await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key=key) for key in ("z", None, "a")]
        ids += await app.enqueue_many(
            conn, [app.new(MAIL, {"order_id": 1}, idempotency_key=key) for key in ("y", None, "m", "b", None)]
        )

    claimed = [(await claim(conn, uuid4(), "default", 1, [None] * 4))[0].id for _ in ids]

    assert claimed == ids


# --- notifications ---


async def test_nobody_is_notified_while_no_worker_is_hungry(app: Recado, conn: asyncpg.Connection, ear: Ear) -> None:
    await app.enqueue(conn, MAIL, {"order_id": 1})
    await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1})])

    assert await ear.heard(conn) == []


async def test_nobody_is_notified_of_a_queue_that_no_worker_is_hungry_for(
    app: Recado, conn: asyncpg.Connection, ear: Ear
) -> None:
    await hungry(conn, "archive")

    await app.enqueue(conn, MAIL, {"order_id": 1})
    await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1})])

    assert await ear.heard(conn) == []


async def test_a_hungry_worker_is_notified_once_per_queue_and_transaction_and_at_the_commit(
    app: Recado, conn: asyncpg.Connection, connect: Connect, ear: Ear
) -> None:
    await hungry(conn, "default")
    await hungry(conn, "default", "archive")
    speaker = await connect()

    async with conn.transaction():
        for _ in range(3):
            await app.enqueue(conn, MAIL, {"order_id": 1})
            await app.enqueue(conn, "mail.archive", {"order_id": 1})
            await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1}), app.new("mail.archive", {"order_id": 1})] * 2)
        assert await ear.heard(speaker) == []

    assert sorted(await ear.heard(speaker)) == ["archive", "default"]
    await app.enqueue(conn, MAIL, {"order_id": 1})
    assert await ear.heard(speaker) == ["default"]


@pytest.mark.parametrize("size", [20, 600])
async def test_a_bulk_notifies_once_for_each_of_its_queues(
    size: int, app: Recado, conn: asyncpg.Connection, ear: Ear
) -> None:
    jobs = [app.new(name, {"order_id": n}) for n in range(size) for name in (MAIL, "mail.archive")]
    await app.enqueue_many(conn, jobs)
    assert await ear.heard(conn) == []
    await hungry(conn, "default", "archive", "idle")

    async with conn.transaction():
        await app.enqueue_many(conn, jobs)

    assert sorted(await ear.heard(conn)) == ["archive", "default"]


async def test_a_rollback_notifies_nobody(app: Recado, conn: asyncpg.Connection, ear: Ear) -> None:
    await hungry(conn, "default")

    transaction = conn.transaction()
    await transaction.start()
    await app.enqueue(conn, MAIL, {"order_id": 1})
    await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1})])
    await transaction.rollback()

    assert await ear.heard(conn) == []


@pytest.mark.parametrize(("seconds", "heard"), [(-3600, ["default"]), (1, ["default"]), (60, []), (3600, [])])
async def test_a_scheduled_job_notifies_only_when_it_is_due_before_the_next_poll(
    seconds: float, heard: list[str], app: Recado, conn: asyncpg.Connection, ear: Ear
) -> None:
    await hungry(conn, "default")
    run_at = datetime.now(UTC) + timedelta(seconds=seconds)

    await app.enqueue(conn, MAIL, {"order_id": 1}, run_at=run_at)
    assert await ear.heard(conn) == heard
    await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1}, run_at=run_at)])
    assert await ear.heard(conn) == heard


async def test_a_duplicate_notifies_nobody(app: Recado, conn: asyncpg.Connection, ear: Ear) -> None:
    await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
    await hungry(conn, "default")

    await app.enqueue(conn, MAIL, {"order_id": 1}, idempotency_key="k")
    await app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1}, idempotency_key="k")])

    assert await ear.heard(conn) == []


async def test_the_notification_is_part_of_the_inserts_own_statement(
    app: Recado, conn: asyncpg.Connection, ear: Ear
) -> None:
    await hungry(conn, "default")

    for one_statement in (
        lambda: app.enqueue(conn, MAIL, {"order_id": 1}),
        lambda: app.enqueue_many(conn, [app.new(MAIL, {"order_id": 1})]),
    ):
        async with statements(conn) as sent:
            await one_statement()
        assert len(sent) == 1
        assert await ear.heard(conn) == ["default"]


async def test_another_schema_is_another_queue(conn: asyncpg.Connection, schema: str, ear: Ear) -> None:
    await conn.execute(f"CREATE SCHEMA second; CREATE TABLE second.jobs (LIKE {schema}.jobs INCLUDING ALL)")
    await conn.execute(f"CREATE TABLE second.workers (LIKE {schema}.workers INCLUDING ALL)")
    await hungry(conn, "default")
    app = Recado(schema="second")

    first = await insert_job(conn, app.new("_smoke.echo", None, idempotency_key="k"), schema=schema)
    assert await ear.heard(conn) == ["default"]
    second = await app.enqueue(conn, "_smoke.echo", None, idempotency_key="k")
    [many] = await insert_jobs(conn, [app.new("_smoke.echo", None, idempotency_key="k")], schema="second")

    assert first != second == many
    assert await count(conn, schema) == await count(conn, "second") == 1
    assert await ear.heard(conn) == []
