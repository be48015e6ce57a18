"""Tenants: what an ordinary role can see and do, for whom, on connections that many tenants share.

Superusers and the role that owns a table by default are beyond row-level security, so nothing here runs as one: the
fixtures make an ordinary role, and connect as that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

from recado.errors import OperationNotFound, TenantError
from recado.queue import JobStatus, NewJob, get_job
from recado.queue.connections import Connection, Pool
from recado.queue.ids import new_id
from recado.queue.operations import (
    CURRENT_TENANT,
    SET_TENANT,
    cancel_operation,
    check_organization,
    expire,
    get_operation,
    list_operations,
    mark_done,
    mark_error,
    mark_processing,
    prune,
    set_progress,
    start,
    system,
    tenant,
)
from tests.queue.support import ordinary_role

JOB = NewJob("operation.autoplan", "{}")
ANA, BEN = "1", "2"

ATTEMPTS = 8
"""Executions of one prepared statement: after five PostgreSQL may go over to a plan for any parameters."""


class House(NamedTuple):
    """A database with an operation of each of two organizations, and an ordinary role."""

    role: str
    """The URL by which the role connects."""
    schema: str
    ana: UUID
    ben: UUID


@pytest_asyncio.fixture
async def house(conn: asyncpg.Connection, dsn: str, schema: str) -> AsyncIterator[House]:
    ana, ben = [await start(conn, JOB, organization_id=organization) for organization in (ANA, BEN)]
    async with ordinary_role(conn, dsn, schema) as role:
        yield House(role, schema, ana, ben)


@pytest_asyncio.fixture
async def plain(house: House) -> AsyncIterator[asyncpg.Connection]:
    """One connection of the ordinary role's, which has never heard of a tenant."""
    conn = await asyncpg.connect(house.role)
    yield conn
    await conn.close()


@pytest_asyncio.fixture(params=[1, 3], ids=["a pool of one", "a pool of three"])
async def pool(house: House, request: pytest.FixtureRequest) -> AsyncIterator[Pool]:
    async with asyncpg.create_pool(house.role, min_size=1, max_size=request.param) as pool:
        yield pool


async def seen(conn: Connection, schema: str) -> set[UUID]:
    """The operations that are visible on ``conn``; always the same statement, so prepared once on each connection."""
    return {row[0] for row in await conn.fetch(f"SELECT job_id FROM {schema}.operations")}


@asynccontextmanager
async def as_setting(conn: asyncpg.Connection, value: str) -> AsyncIterator[None]:
    """A transaction with any organization whatever, past the check of :func:`tenant`."""
    async with conn.transaction():
        await conn.execute(SET_TENANT, value)
        yield


# --- who sees what ---


async def test_the_role_of_these_tests_is_an_ordinary_one(plain: asyncpg.Connection, house: House) -> None:
    [row] = await plain.fetch(
        "SELECT rolsuper, rolbypassrls, pg_has_role(relowner, 'MEMBER'), row_security_active(c.oid)"
        " FROM pg_roles, pg_class c WHERE rolname = current_user AND c.oid = $1::text::regclass",
        f"{house.schema}.operations",
    )
    assert tuple(row) == (False, False, False, True)


async def test_who_has_never_said_for_whom_it_asks_sees_nothing(plain: asyncpg.Connection, house: House) -> None:
    assert await plain.fetchval("SELECT current_setting('app.current_org_id', true)") is None
    assert await seen(plain, house.schema) == set()


async def test_each_tenant_sees_its_own_and_the_system_all(plain: asyncpg.Connection, house: House) -> None:
    async with tenant(plain, ANA):
        assert await seen(plain, house.schema) == {house.ana}
    async with tenant(plain, int(BEN)):
        assert await seen(plain, house.schema) == {house.ben}
    async with tenant(plain, uuid4()):
        assert await seen(plain, house.schema) == set()
    async with system(plain):
        assert await seen(plain, house.schema) == {house.ana, house.ben}


async def test_after_a_tenant_the_connection_sees_nothing(plain: asyncpg.Connection, house: House) -> None:
    """Its setting is then empty, and not unset any more."""
    for around in (tenant(plain, ANA), system(plain)):
        async with around:
            pass
        assert await plain.fetchval("SELECT current_setting('app.current_org_id', true)") == ""
        assert await seen(plain, house.schema) == set()


async def test_0_set_for_the_session_is_the_system_too(plain: asyncpg.Connection, house: House) -> None:
    """What an operator does in psql."""
    await plain.execute("SET app.current_org_id = '0'")
    assert await seen(plain, house.schema) == {house.ana, house.ben}
    await plain.execute("RESET app.current_org_id")
    assert await seen(plain, house.schema) == set()


@pytest.mark.parametrize(
    "organization",
    [
        "x' OR '1'='1",
        "' OR organization_id <> '",
        "'; SET app.current_org_id = '0'; --",
        "0'",
        "'0'",
        "00",
        " 0",
        "0 ",
        "+0",
        "0.0",
        "0\t",
        "\n0",
        "\u0660",
        "0,1",
        "%",
        "1 ",
        '"1"',
        "{0,1}",
        "NULL",
        "$1",
        "\\30",
    ],
)
async def test_whatever_text_an_organization_is_it_is_only_compared(
    plain: asyncpg.Connection, house: House, organization: str
) -> None:
    async with as_setting(plain, organization):
        assert await seen(plain, house.schema) == set()
        assert await plain.fetchval(CURRENT_TENANT) == organization
    assert await seen(plain, house.schema) == set()


async def test_an_organization_may_be_called_by_sql_text_and_is_one_like_any_other(
    plain: asyncpg.Connection, house: House
) -> None:
    name = "x' OR '1'='1'; SET app.current_org_id = '0'; --"
    async with tenant(plain, name):
        own = await start(plain, JOB, organization_id=None)
        assert await seen(plain, house.schema) == {own}
        assert [row.job_id for row in await list_operations(plain, name)] == [own]
    async with tenant(plain, ANA):
        assert await seen(plain, house.schema) == {house.ana}


@pytest.mark.parametrize(
    "organization", ["", "0", 0, None, True, False, b"1", 1.0, ["1"], "a\0b", "a\nb", "\ud800", "x" * 257]
)
async def test_nobody_can_be_such_a_tenant(plain: asyncpg.Connection, house: House, organization: Any) -> None:
    with pytest.raises(TenantError, match="cannot ask for organization"):
        check_organization(organization)
    with pytest.raises(TenantError):
        async with tenant(plain, organization):
            pytest.fail("a transaction was opened")
    with pytest.raises(TenantError):
        async with system(plain):  # which could write any
            await start(plain, JOB, organization_id=organization)
    assert not plain.is_in_transaction()


async def test_the_owner_of_the_table_is_no_exception(
    plain: asyncpg.Connection, conn: asyncpg.Connection, house: House
) -> None:
    """Enabled alone, row-level security would not hold for it: it is forced."""
    role = await plain.fetchval("SELECT current_user")
    before = await conn.fetchval("SELECT current_user")
    await conn.execute(f"ALTER TABLE {house.schema}.operations OWNER TO {role}")
    try:
        assert await seen(plain, house.schema) == set()
        async with tenant(plain, ANA):
            assert await seen(plain, house.schema) == {house.ana}
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with plain.transaction():
                    await insert(plain, house.schema, BEN)
    finally:
        await conn.execute(f'ALTER TABLE {house.schema}.operations OWNER TO "{before}"')


# --- what the functions do for another tenant ---


async def test_another_tenants_operation_is_as_if_it_were_not_there(plain: asyncpg.Connection, house: House) -> None:
    nowhere = new_id()
    async with tenant(plain, ANA):
        said = []
        for job_id in (house.ben, nowhere):
            for ask in (get_operation, cancel_operation):
                with pytest.raises(OperationNotFound) as error:
                    await ask(plain, job_id)
                said.append(str(error.value).replace(str(job_id), "ID"))
    assert len(set(said)) == 1


async def test_another_tenants_job_is_not_even_waited_for(
    plain: asyncpg.Connection, conn: asyncpg.Connection, house: House
) -> None:
    """The jobs know no tenants: how long a cancellation takes must tell nothing, and hold nothing up."""
    async with conn.transaction(), tenant(plain, ANA):
        await conn.execute(f"SELECT FROM {house.schema}.jobs WHERE id = $1 FOR UPDATE", house.ben)
        await plain.execute("SET LOCAL lock_timeout = '1ms'")
        with pytest.raises(OperationNotFound):
            await cancel_operation(plain, house.ben)


async def test_a_list_for_another_organization_is_empty(plain: asyncpg.Connection, house: House) -> None:
    """Its own condition finds them, and the policy does not."""
    async with tenant(plain, ANA):
        assert await list_operations(plain, BEN) == []
    async with system(plain):
        assert [row.job_id for row in await list_operations(plain, BEN)] == [house.ben]


async def test_no_move_of_a_tenant_reaches_another_ones_operation_or_job(
    plain: asyncpg.Connection, conn: asyncpg.Connection, house: House
) -> None:
    async with system(plain):
        await mark_processing(plain, house.ben, 1)
        before = await get_operation(plain, house.ben)
    async with tenant(plain, ANA):
        with pytest.raises(OperationNotFound):
            await cancel_operation(plain, house.ben)
        with pytest.raises(OperationNotFound):
            await mark_processing(plain, house.ben, 2)
        with pytest.raises(OperationNotFound):
            await set_progress(plain, house.ben, 1, 50)
        assert await mark_done(plain, [(house.ben, 1, None)]) == set()
        assert await mark_error(plain, [house.ben], "no") == set()
    async with system(plain):
        assert await get_operation(plain, house.ben) == before
    assert (await get_job(conn, house.ben)).status is JobStatus.PENDING


async def test_expiry_and_pruning_are_the_systems(plain: asyncpg.Connection, house: House) -> None:
    async with system(plain):
        await plain.execute(f"UPDATE {house.schema}.operations SET created_at = '2020-1-1', updated_at = '2020-1-1'")
        await plain.execute(f"DELETE FROM {house.schema}.jobs")
    age = timedelta(hours=1)
    async with plain.transaction():
        assert await expire(plain, after=age) == []
    async with system(plain):
        assert set(await expire(plain, after=age)) == {house.ana, house.ben}
        await plain.execute(f"UPDATE {house.schema}.operations SET updated_at = '2020-1-1'")
    async with plain.transaction():
        assert await prune(plain, retention=age) == 0
    async with system(plain):
        assert await prune(plain, retention=age) == 2


async def test_a_key_of_another_organization_leads_to_an_operation_of_ones_own(
    plain: asyncpg.Connection, house: House
) -> None:
    keyed = JOB._replace(idempotency_key="k")
    async with tenant(plain, BEN):
        bens = await start(plain, keyed, organization_id=None)
    async with tenant(plain, ANA):
        anas = await start(plain, keyed, organization_id=None)
        assert (await get_operation(plain, anas)).organization_id == ANA
    assert anas != bens


# --- what plain SQL does for another tenant ---


async def insert(conn: Connection, schema: str, organization: str, job_id: UUID | None = None, rest: str = "") -> str:
    return await conn.execute(
        f"INSERT INTO {schema}.operations (job_id, organization_id, kind) VALUES ($1, $2, 'k') {rest}",
        job_id or new_id(),
        organization,
    )


async def test_nothing_is_written_into_another_organization(plain: asyncpg.Connection, house: House) -> None:
    async with tenant(plain, ANA):
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
            async with plain.transaction():
                await insert(plain, house.schema, BEN)
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
            async with plain.transaction():
                await plain.execute(f"UPDATE {house.schema}.operations SET organization_id = $1", BEN)
        await insert(plain, house.schema, ANA)
    async with system(plain):
        assert len(await list_operations(plain, ANA)) == 2
        assert len(await list_operations(plain, BEN)) == 1


async def test_what_a_tenant_does_not_see_it_neither_changes_nor_deletes_nor_locks(
    plain: asyncpg.Connection, house: House
) -> None:
    async with tenant(plain, ANA):
        for statement in (
            "UPDATE {}.operations SET kind = 'mine' WHERE organization_id = '2'",
            "UPDATE {}.operations SET kind = 'mine' WHERE job_id = $1",
            "DELETE FROM {}.operations WHERE job_id = $1",
            "SELECT FROM {}.operations WHERE job_id = $1 FOR UPDATE",
        ):
            args = [house.ben] if "$1" in statement else []
            tag = await plain.execute(statement.format(house.schema), *args)
            assert tag.endswith(" 0")
        assert await plain.execute(f"DELETE FROM {house.schema}.operations") == "DELETE 1"  # its own
    async with system(plain):
        assert await seen(plain, house.schema) == {house.ben}


async def test_a_conflict_with_another_organizations_row_neither_shows_nor_changes_it(
    plain: asyncpg.Connection, house: House
) -> None:
    async with tenant(plain, ANA):
        done = await insert(plain, house.schema, ANA, house.ben, "ON CONFLICT (job_id) DO NOTHING")
        assert done == "INSERT 0 0"
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with plain.transaction():
                await insert(
                    plain, house.schema, ANA, house.ben, "ON CONFLICT (job_id) DO UPDATE SET organization_id = '1'"
                )
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            async with plain.transaction():
                await insert(plain, house.schema, BEN, house.ben, "ON CONFLICT (job_id) DO NOTHING")
    async with system(plain):
        assert (await get_operation(plain, house.ben)).organization_id == BEN


@pytest.mark.parametrize("organization", ["", "0"])
async def test_no_row_can_belong_to_the_system_or_to_nobody(
    plain: asyncpg.Connection, house: House, organization: str
) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        async with system(plain):
            await insert(plain, house.schema, organization)
    with pytest.raises((asyncpg.CheckViolationError, asyncpg.InsufficientPrivilegeError)):
        async with as_setting(plain, organization):
            await insert(plain, house.schema, organization)


async def test_row_security_cannot_be_switched_off(plain: asyncpg.Connection, house: House) -> None:
    """For an ordinary role the setting makes an error of what it would filter."""
    async with tenant(plain, ANA):
        await plain.execute("SET LOCAL row_security = off")
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
            await seen(plain, house.schema)


# --- settings changed within a transaction, and what follows ---


@pytest.mark.parametrize(
    ("statement", "until_the_end"),
    [
        ("RESET app.current_org_id", set()),
        ("RESET ALL", set()),
        ("SET LOCAL app.current_org_id = ''", set()),
        ("SET LOCAL app.current_org_id TO DEFAULT", set()),
        ("SET app.current_org_id = '2'", {"ben"}),
        ("SET LOCAL app.current_org_id = '2'", {"ben"}),
        ("SET SESSION app.current_org_id = '0'", {"ana", "ben"}),
    ],
)
async def test_whatever_became_of_the_setting_the_next_tenant_of_the_connection_sees_its_own(
    pool: Pool, house: House, statement: str, until_the_end: set[str]
) -> None:
    """Whoever runs such SQL is the application itself. It ends with the connection's way back to its pool."""
    async with tenant(pool, ANA) as conn:
        await conn.execute(statement)
        assert await seen(conn, house.schema) == {getattr(house, name) for name in until_the_end}
    for organization, own in ((ANA, house.ana), (BEN, house.ben)) * pool.get_max_size():
        async with tenant(pool, organization) as conn:
            assert await seen(conn, house.schema) == {own}
    async with asyncio.TaskGroup() as tasks:
        for _ in range(pool.get_max_size()):
            tasks.create_task(_sees_nothing(pool, house))


async def _sees_nothing(pool: Pool, house: House) -> None:
    async with pool.acquire() as conn:
        assert await seen(conn, house.schema) == set()


async def test_a_tenant_after_a_session_setting_is_itself(plain: asyncpg.Connection, house: House) -> None:
    await plain.execute("SET app.current_org_id = '0'")
    async with tenant(plain, ANA):
        assert await seen(plain, house.schema) == {house.ana}


async def broken(around: AbstractAsyncContextManager[Connection], schema: str, sees: UUID) -> None:
    """A tenant's or the system's transaction that ends with an error of the server."""
    async with around as conn:
        assert sees in await seen(conn, schema)
        await conn.execute("SELECT 1 / 0")


@pytest.mark.parametrize("organization", [ANA, None], ids=["a tenant", "the system"])
async def test_after_an_exception_the_connection_sees_nothing(
    pool: Pool, house: House, organization: str | None
) -> None:
    for _ in range(pool.get_max_size() + 1):
        around = system(pool) if organization is None else tenant(pool, organization)
        with pytest.raises(asyncpg.DivisionByZeroError):
            await broken(around, house.schema, house.ana)
        await _sees_nothing(pool, house)


async def test_after_an_error_of_the_server_that_was_swallowed_nothing_is_committed(
    plain: asyncpg.Connection, house: House
) -> None:
    """Within a transaction of the caller's, which must not take what is no savepoint any more for one."""

    async def swallowing() -> None:
        async with plain.transaction(), tenant(plain, ANA):
            await start(plain, JOB, organization_id=None)
            with suppress(asyncpg.DivisionByZeroError):
                await plain.execute("SELECT 1 / 0")

    with pytest.raises(asyncpg.InFailedSQLTransactionError):
        await swallowing()
    async with system(plain):
        assert await seen(plain, house.schema) == {house.ana, house.ben}


async def test_a_task_that_is_cancelled_leaves_no_tenant_behind(pool: Pool, house: House) -> None:
    inside = asyncio.Event()

    async def request() -> None:
        async with tenant(pool, ANA) as conn:
            assert await seen(conn, house.schema) == {house.ana}
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _sees_nothing(pool, house)


# --- tenants within each other ---


async def test_after_a_tenant_within_a_transaction_its_setting_is_as_before(
    plain: asyncpg.Connection, house: House
) -> None:
    async with plain.transaction():
        async with tenant(plain, ANA):
            assert await seen(plain, house.schema) == {house.ana}
            async with system(plain):
                assert await seen(plain, house.schema) == {house.ana, house.ben}
                async with tenant(plain, BEN):
                    assert await seen(plain, house.schema) == {house.ben}
                assert await seen(plain, house.schema) == {house.ana, house.ben}
            assert await seen(plain, house.schema) == {house.ana}
        assert await seen(plain, house.schema) == set()


@pytest.mark.parametrize("inner", [BEN, None], ids=["a tenant", "the system"])
async def test_after_an_exception_within_a_tenant_the_outer_one_goes_on(
    plain: asyncpg.Connection, house: House, inner: str | None
) -> None:
    async with tenant(plain, ANA):
        with pytest.raises(asyncpg.DivisionByZeroError):
            await broken(system(plain) if inner is None else tenant(plain, inner), house.schema, house.ben)
        assert await seen(plain, house.schema) == {house.ana}
        own = await start(plain, JOB, organization_id=None)
    async with tenant(plain, ANA):
        assert await seen(plain, house.schema) == {house.ana, own}


async def test_a_savepoint_of_the_callers_takes_the_tenant_back_with_it(
    plain: asyncpg.Connection, house: House
) -> None:
    async with tenant(plain, ANA):
        savepoint = plain.transaction()
        await savepoint.start()
        async with tenant(plain, BEN):
            pass
        await plain.execute(SET_TENANT, BEN)
        await savepoint.rollback()
        assert await seen(plain, house.schema) == {house.ana}


# --- connections that change tenants ---


async def test_a_pools_connections_change_tenants_and_never_mix_them_up(pool: Pool, house: House) -> None:
    """Many at once, each statement prepared once on each connection and executed for whoever comes next."""

    async def request(organization: str) -> None:
        own = {ANA: house.ana, BEN: house.ben}[organization]
        async with tenant(pool, organization) as conn:
            assert await seen(conn, house.schema) == {own}
            assert (await get_operation(conn, own)).organization_id == organization
            assert [row.job_id for row in await list_operations(conn, organization)] == [own]

    async def nobody() -> None:
        async with pool.acquire() as conn:
            assert await seen(conn, house.schema) == set()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(20):
            tasks.create_task(request(ANA))
            tasks.create_task(nobody())
            tasks.create_task(request(BEN))


@pytest.mark.parametrize("mode", ["auto", "force_generic_plan", "force_custom_plan"])
async def test_a_statement_that_was_prepared_for_one_tenant_shows_nothing_of_it_to_the_next(
    plain: asyncpg.Connection, house: House, mode: str
) -> None:
    """The setting must be no constant of a cached plan."""
    await plain.execute(f"SET plan_cache_mode = {mode}")
    visible = await plain.prepare(f"SELECT job_id FROM {house.schema}.operations WHERE kind = $1 ORDER BY job_id")

    async def shown() -> list[UUID]:
        return [row[0] for row in await visible.fetch("autoplan")]

    for _ in range(ATTEMPTS):
        async with tenant(plain, ANA):
            assert await shown() == [house.ana]
    for _ in range(ATTEMPTS):
        async with tenant(plain, BEN):
            assert await shown() == [house.ben]
        assert await shown() == []
    async with system(plain):
        assert await shown() == sorted([house.ana, house.ben])
    async with tenant(plain, ANA):
        assert await shown() == [house.ana]
        await plain.execute(SET_TENANT, BEN)  # within one transaction, too
        assert await shown() == [house.ben]
    if mode == "auto":
        generic = await plain.fetchval("SELECT sum(generic_plans) FROM pg_prepared_statements")
        assert generic > 0  # or nothing of this was tried


async def test_a_statement_that_was_prepared_for_one_tenant_writes_nothing_for_the_next(
    plain: asyncpg.Connection, house: House
) -> None:
    change = await plain.prepare(
        f"UPDATE {house.schema}.operations SET version = version + 1 WHERE job_id = $1 RETURNING job_id"
    )
    for _ in range(ATTEMPTS):
        async with tenant(plain, BEN):
            assert await change.fetchval(house.ben) == house.ben
        async with tenant(plain, ANA):
            assert await change.fetchval(house.ben) is None


async def test_a_cursor_does_not_outlive_its_tenant(plain: asyncpg.Connection, house: House) -> None:
    async with tenant(plain, ANA):
        await plain.execute(f"DECLARE c CURSOR FOR SELECT job_id FROM {house.schema}.operations")
    with pytest.raises(asyncpg.InvalidCursorNameError):
        await plain.fetch("FETCH ALL FROM c")
