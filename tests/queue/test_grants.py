"""``recado grants``: what it gives suffices for the whole way of a job, and for nothing beside it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.routing import Mount

from recado import Recado
from recado.api import create_app, operation_routes
from recado.errors import ConfigurationError
from recado.queue import (
    JobStatus,
    NewJob,
    cancel,
    dead_by_error,
    get_job,
    list_errors,
    list_jobs,
    operations,
    pause,
    requeue,
    resume,
    workers,
)
from recado.queue.checks import MISSING_RIGHTS
from recado.queue.connections import Pool
from recado.queue.grants import PURPOSES, ROLES, Needs, Role, columns_of, grants
from recado.queue.operations import OperationStatus, tenant
from recado.queue.retention import RETENTION
from recado.queue.statements import fill
from recado.queue.workers import WorkerInfo
from recado.worker import EventKind
from tests.api.conftest import bearer, client, token
from tests.queue.support import WORKER, insert, ordinary_role
from tests.queue.test_checks import USES, prepared
from tests.worker.support import PATIENCE, working

ORGANIZATION, OTHER = "acme", "globex"

TOKENS = [token("admin", "jobs:admin"), token("acme", organization=ORGANIZATION)]

YEARLY = "0 0 1 1 *"


class Roles(NamedTuple):
    """The URL of a role of each kind."""

    enqueuer: str
    operations: str
    worker: str
    api: str


@pytest_asyncio.fixture
async def roles(conn: asyncpg.Connection, dsn: str, schema: str) -> AsyncIterator[Roles]:
    async with (
        ordinary_role(conn, dsn, schema, Role.ENQUEUER) as enqueuer,
        ordinary_role(conn, dsn, schema, Role.OPERATIONS) as starter,
        ordinary_role(conn, dsn, schema, Role.WORKER) as worker,
        ordinary_role(conn, dsn, schema, Role.API) as api,
    ):
        yield Roles(enqueuer, starter, worker, api)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[asyncpg.Connection]:
    conn = await asyncpg.connect(url)
    try:
        yield conn
    finally:
        await conn.close()


# --- the script ---


@pytest.mark.parametrize("name", ["shop", "Shop-Web", 'we"b', "x; DROP TABLE jobs --", "{table}", "ñandú", "select"])
async def test_any_name_of_a_role_is_quoted_and_the_script_may_be_run_again(
    conn: asyncpg.Connection, schema: str, name: str
) -> None:
    unique = f"{name} {uuid4().hex[:20]}"  # roles belong to the whole server
    quoted = '"' + unique.replace('"', '""') + '"'
    await conn.execute(f"CREATE ROLE {quoted}")
    try:
        for _ in range(2):
            await conn.execute(grants(unique, [Role.ENQUEUER], schema=schema))
        await conn.execute(f"SET ROLE {quoted}")
        assert await missing(conn, PURPOSES[ROLES[Role.ENQUEUER]], schema) == []
        assert await missing(conn, {"jobs": ("DELETE",)}, schema) == [("jobs", "DELETE")]
    finally:
        await conn.execute(f"RESET ROLE; DROP OWNED BY {quoted}; DROP ROLE {quoted}")


async def missing(conn: asyncpg.Connection, needs: Needs, schema: str) -> list[tuple[str, str]]:
    asked = [
        (table, right, columns_of(right)[0], column)
        for table, rights in needs.items()
        for right in rights
        for column in columns_of(right)[1]
    ]
    rows = await conn.fetch(fill(MISSING_RIGHTS, schema), *map(list, zip(*asked, strict=True)))
    return [(row[0], row[1]) for row in rows]


@pytest.mark.parametrize("name", ["", "public", "none", "a\nb", "a\0b", "\ud800", "x" * 64, "ñ" * 32])
def test_what_can_be_no_roles_name_or_means_everybody_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^cannot grant to [^;]+; name the one that a service connects as$"):
        grants(name, [Role.API])


@pytest.mark.parametrize("name", ["", "a b", 'recado"; DROP SCHEMA recado; --', "pg_catalog", "Recado", "x" * 49])
def test_what_can_be_no_schemas_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^cannot use .* as the schema's name"):
        grants("shop", [Role.API], schema=name)


def test_a_role_for_several_purposes_gets_each_right_once() -> None:
    script = grants("shop", [Role.ENQUEUER, Role.OPERATIONS, Role.WORKER, Role.OPERATIONS], schema="q")

    assert script.count("GRANT USAGE ON SCHEMA") == 1
    tables = re.findall(r" ON (q\.\w+) TO ", script)
    assert len(tables) == len(set(tables))
    assert 'GRANT SELECT, INSERT, UPDATE, DELETE ON q.jobs TO "shop";\n' in script
    both = grants("shop", [Role.ENQUEUER, Role.OPERATIONS], schema="q")
    assert both == grants("shop", [Role.OPERATIONS], schema="q")


def test_the_script_grants_and_does_nothing_else() -> None:
    lines = grants("shop", Role).splitlines()
    assert {line.split()[0] for line in lines} == {"GRANT"}
    assert all(line.endswith(' TO "shop";') for line in lines)
    assert not [line for line in lines if "WITH GRANT OPTION" in line or " ALL " in line]


# --- no more than is needed ---


COLUMNS = [
    (role, table, right, column)
    for role, purpose in ROLES.items()
    for table, rights in PURPOSES[purpose].items()
    for right in rights
    for column in columns_of(right)[1]
    if column is not None
]


@pytest.mark.parametrize("role", [Role.ENQUEUER, Role.OPERATIONS, Role.API])
async def test_no_column_is_granted_that_is_not_needed(
    conn: asyncpg.Connection, dsn: str, schema: str, role: Role
) -> None:
    """With any one of them missing, something does not work."""
    if role is Role.API:
        await prepared(conn, schema)
    unneeded = []
    async with ordinary_role(conn, dsn, schema, role) as url, connected(url) as plain:
        name = await plain.fetchval("SELECT current_user")
        for table, right, column in [rest for kind, *rest in COLUMNS if kind is role]:
            one = f"{columns_of(right)[0]} ({column}) ON {schema}.{table}"
            await conn.execute(f"REVOKE {one} FROM {name}")
            transaction = plain.transaction()
            await transaction.start()
            try:
                await USES[ROLES[role]](plain)
                unneeded.append(one)
            except asyncpg.InsufficientPrivilegeError:
                pass
            finally:
                await transaction.rollback()
            await conn.execute(f"GRANT {one} TO {name}")
        await USES[ROLES[role]](plain)  # or nothing of this was tried
    assert unneeded == []


FORBIDDEN = {
    Role.ENQUEUER: [
        "SELECT payload FROM {}.jobs",
        "SELECT result FROM {}.jobs",
        "SELECT last_error FROM {}.jobs",
        "SELECT metadata FROM {}.jobs",
        "SELECT * FROM {}.jobs",
        "INSERT INTO {}.jobs (id, job_type, payload) VALUES (gen_random_uuid(), 'a.b', '{{}}') RETURNING payload",
        "COPY {}.jobs TO STDOUT",
        "UPDATE {}.jobs SET status = 'cancelled'",
        "UPDATE {}.jobs SET payload = '{{}}'",
        "SELECT id FROM {}.jobs FOR UPDATE",
        "DELETE FROM {}.jobs",
        "SELECT FROM {}.job_errors",
        "SELECT host FROM {}.workers",
        "SELECT FROM {}.operations",
        "INSERT INTO {}.operations (job_id, organization_id, kind) VALUES (gen_random_uuid(), 'acme', 'a')",
        "INSERT INTO {}.queues (name) VALUES ('default')",
        "SELECT FROM {}.schedules",
        "SELECT FROM {}.job_stats",
    ],
    Role.OPERATIONS: [
        "SELECT payload FROM {}.jobs",
        "SELECT last_error FROM {}.jobs",
        "UPDATE {}.jobs SET payload = '{{}}'",
        "UPDATE {}.jobs SET job_type = 'a.b'",
        "UPDATE {}.jobs SET attempts = 0",
        "DELETE FROM {}.jobs",
        "SELECT FROM {}.job_errors",
        "SELECT host FROM {}.workers",
        "UPDATE {}.operations SET organization_id = 'globex'",
        "UPDATE {}.operations SET result = '1'",
        "UPDATE {}.operations SET created_by = 'me'",
        "DELETE FROM {}.operations",
        "INSERT INTO {}.queues (name) VALUES ('default')",
        "SELECT FROM {}.schedules",
    ],
    Role.WORKER: [
        "SELECT FROM {}.job_errors",
        "DELETE FROM {}.job_errors",
        "UPDATE {}.queues SET paused_at = NULL",
        "DELETE FROM {}.queues",
        "INSERT INTO {}.queues (name) VALUES ('default')",
    ],
    Role.API: [
        "INSERT INTO {}.jobs (id, job_type, payload) VALUES (gen_random_uuid(), 'a.b', '{{}}')",
        "UPDATE {}.jobs SET payload = '{{}}'",
        "UPDATE {}.jobs SET job_type = 'a.b'",
        "DELETE FROM {}.jobs",
        "DELETE FROM {}.job_errors",
        "INSERT INTO {}.operations (job_id, organization_id, kind) VALUES (gen_random_uuid(), 'acme', 'a')",
        "UPDATE {}.operations SET organization_id = 'globex'",
        "UPDATE {}.operations SET result = '1'",
        "UPDATE {}.schedules SET job_type = 'a.b'",
        "UPDATE {}.schedules SET expression = '* * * * *'",
        "DELETE FROM {}.schedules",
        "DELETE FROM {}.queues",
        "INSERT INTO {}.workers (id) VALUES (gen_random_uuid())",
        "DELETE FROM {}.workers",
        "SELECT FROM {}.job_stats",
    ],
}

FORBIDDEN_TO_ALL = [
    "INSERT INTO {}.schema_migrations (number, name, checksum) VALUES (99, 'a', 'b')",
    "DELETE FROM {}.schema_migrations",
    "TRUNCATE {}.jobs CASCADE",
    "CREATE TABLE {}.extra ()",
    "ALTER TABLE {}.operations DISABLE ROW LEVEL SECURITY",
    "DROP POLICY tenant_isolation ON {}.operations",
    "CREATE TRIGGER t BEFORE INSERT ON {}.jobs EXECUTE FUNCTION suppress_redundant_updates_trigger()",
    "DROP TABLE {}.jobs CASCADE",
    'SET ROLE "{1}"',
    "COPY {}.jobs FROM PROGRAM 'true'",
    "SELECT pg_read_file('/etc/passwd')",
]


@pytest.mark.parametrize("role", Role)
async def test_a_role_can_do_nothing_beside_what_it_is_for(
    conn: asyncpg.Connection, dsn: str, schema: str, role: Role
) -> None:
    await insert(conn, schema)
    owner = await conn.fetchval("SELECT current_user")
    done = []
    async with ordinary_role(conn, dsn, schema, role) as url, connected(url) as plain:
        for statement in FORBIDDEN[role] + FORBIDDEN_TO_ALL:
            try:
                await plain.execute(statement.format(schema, owner) if "{1}" in statement else statement.format(schema))
                done.append(statement)
            except asyncpg.InsufficientPrivilegeError:
                pass
    assert done == []


async def test_what_an_enqueuer_can_see_and_do_beside_its_own_jobs(
    conn: asyncpg.Connection, roles: Roles, schema: str
) -> None:
    """Said in docs/security.md, so held here: jobs know no owners, and whoever may insert one may insert any."""
    others = await insert(conn, schema, idempotency_key="theirs", payload='{"secret": 1}')
    async with connected(roles.enqueuer) as plain:
        [seen] = await plain.fetch(f"SELECT id, job_type, queue, status, run_at, idempotency_key FROM {schema}.jobs")
        assert (seen["id"], seen["idempotency_key"]) == (others, "theirs")
        await plain.execute(
            f"INSERT INTO {schema}.jobs (id, job_type, payload, status) VALUES ($1, 'a.b', '{{}}', 'completed')",
            uuid4(),
        )


async def test_the_policy_is_no_wall_against_whoever_may_send_any_sql(
    conn: asyncpg.Connection, roles: Roles, schema: str
) -> None:
    """Said in docs/security.md: the setting it goes by is one that every role may set."""
    await operations.start(conn, NewJob("operation.a", "{}"), organization_id=OTHER)
    async with connected(roles.operations) as plain, plain.transaction():
        count = f"SELECT count(*) FROM {schema}.operations"
        assert await plain.fetchval(count) == 0
        await plain.execute("SET LOCAL app.current_org_id = '0'")
        assert await plain.fetchval(count) == 1


# --- the whole way ---


class Kit:
    """An application with something of everything."""

    def __init__(self) -> None:
        self.app = app = Recado()
        self.going = asyncio.Event()
        self.go_on = asyncio.Event()

        @app.job("shop.charge")
        async def charge(payload: dict[str, int], conn: asyncpg.Connection) -> int:
            return payload["cents"]

        @app.job("shop.fail", max_attempts=1, critical=True)
        async def fail() -> None:
            raise ValueError("no")

        @app.job("shop.hang")
        async def hang() -> None:
            self.going.set()
            await asyncio.Event().wait()

        @app.job("recado.job_died")
        async def died(payload: dict[str, Any]) -> None: ...

        @app.cron(YEARLY, name="yearly", payload={"cents": 2})
        @app.job("shop.report")
        async def report(payload: dict[str, int]) -> int:
            return payload["cents"]

        @app.operation("import")
        async def load(operation: Any) -> int:
            await operation.progress(50)
            await self.go_on.wait()
            return 3

        self.charge, self.fail, self.hang, self.load = charge, fail, hang, load


async def test_with_these_rights_jobs_go_the_whole_way(conn: asyncpg.Connection, roles: Roles, schema: str) -> None:
    """Enqueued in a transaction, run, reclaimed, ticked, pruned and expired; watched and cancelled over HTTP."""
    kit = Kit()
    orphan = await insert(conn, schema, "running", job_type="shop.charge", payload='{"cents": 5}', locked_by=WORKER)
    await conn.execute(f"UPDATE {schema}.jobs SET locked_at = now() - interval '1 day' WHERE id = $1", orphan)
    old = await insert(conn, schema, "completed", job_type="shop.charge", id=UUID(int=1))
    age = RETENTION[JobStatus.COMPLETED] * 2
    await conn.execute(f"UPDATE {schema}.jobs SET finished_at = now() - $2::interval WHERE id = $1", old, age)
    stale = await operations.start(conn, NewJob("operation.import", "{}"), organization_id=ORGANIZATION)
    await conn.execute(
        f"UPDATE {schema}.operations SET created_at = now() - interval '1 day', updated_at = now() - interval '1 day'"
    )
    await conn.execute(f"UPDATE {schema}.jobs SET run_at = now() + interval '1 day' WHERE id = $1", stale)
    silent = WorkerInfo(WORKER, "host", 1, "0", ("default",), 1, 300.0, silence=0.0)
    await workers.beat(conn, silent, 0)

    async with connected(roles.enqueuer) as service, connected(roles.operations) as starter:
        async with service.transaction():
            charged = await kit.charge.enqueue(service, {"cents": 7}, idempotency_key="order-1")
            assert await kit.charge.enqueue(service, {"cents": 8}, idempotency_key="order-1") == charged
            died = await kit.fail.enqueue(service, None, idempotency_key="fail-1")
            hanging = await kit.hang.enqueue(service, None)
        rolled_back = service.transaction()
        await rolled_back.start()
        gone = await kit.charge.enqueue(service, {"cents": 9})
        await rolled_back.rollback()
        async with tenant(starter, ORGANIZATION) as within:
            loaded = await kit.load.start(within, None)
        async with (
            asyncio.timeout(PATIENCE),
            asyncpg.create_pool(roles.api, min_size=0) as api_pool,
            asyncpg.create_pool(roles.operations, min_size=0) as service_pool,
            working(kit.app, roles.worker, queues={"default": 5}) as (_, seen),
        ):
            await seen.seen(EventKind.RECLAIMED, orphan)
            await seen.seen(EventKind.COMPLETED, charged)
            await seen.seen(EventKind.COMPLETED, orphan)
            await seen.seen(EventKind.DIED, died)
            await seen.seen(EventKind.PRUNED)
            await seen.seen(EventKind.EXPIRED, stale)
            await kit.going.wait()
            await over_http(kit, api_pool, service_pool, loaded)
            await seen.seen(EventKind.COMPLETED, loaded)
            async with connected(roles.api) as operator:
                await operations_of_a_person(operator, hanging, died)
            await seen.seen(EventKind.LOST, hanging)
            await seen.seen(EventKind.DIED, died, times=2)

    assert (await get_job(conn, charged)).status is JobStatus.COMPLETED
    assert (await get_job(conn, hanging)).status is JobStatus.CANCELLED
    left = {row[0] for row in await conn.fetch(f"SELECT id FROM {schema}.jobs")}
    assert not left & {old, gone}
    async with tenant(conn, ORGANIZATION):
        assert (await operations.get_operation(conn, loaded)).result == 3
        assert (await operations.get_operation(conn, stale)).status is OperationStatus.ERROR
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.schedules WHERE name = 'yearly'") == 1
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.job_stats") > 0
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.job_errors") > 0


async def over_http(kit: Kit, api_pool: Pool, service_pool: Pool, loaded: UUID) -> None:
    """The API as the API's role has it, and a service's own routes as a service has them."""
    api = create_app(kit.app, api_pool, tokens=TOKENS)
    service = Starlette(
        routes=[
            Mount(
                "/shop",
                routes=operation_routes(kit.app, service_pool, organization=lambda request: request.headers["x-org"]),
            )
        ]
    )
    ask, shop = client(api), client(service)
    assert (await ask.get("/readyz")).status_code == 200
    assert (await ask.get("/api/v1/jobs/metricas", headers=bearer("admin"))).json()["fallidos"] == 1
    assert "recado_workers 1.0" in (await ask.get("/metrics", headers=bearer("admin"))).text
    mine = await ask.get(f"/api/jobs/{loaded}", headers=bearer("acme"))
    assert mine.json()["status"] == "processing"
    assert (await shop.get(f"/shop/api/jobs/{loaded}", headers={"x-org": OTHER})).status_code == 404
    cancelled = await started(kit, service_pool)
    answer = await ask.post(f"/api/jobs/{cancelled}/cancel", headers=bearer("acme"))
    assert (answer.status_code, answer.json()["status"]) == (200, "error")
    again = await started(kit, service_pool)
    assert (await shop.post(f"/shop/api/jobs/{again}/cancel", headers={"x-org": ORGANIZATION})).status_code == 200

    kit.go_on.set()
    events = await ask.get(f"/api/jobs/{loaded}/events", headers=bearer("acme"))  # to its end
    assert '"status":"done"' in events.text.splitlines()[-2]


async def started(kit: Kit, pool: Pool) -> UUID:
    async with tenant(pool, ORGANIZATION) as conn:
        return await kit.load.start(conn, None)


async def operations_of_a_person(conn: asyncpg.Connection, hanging: UUID, died: UUID) -> None:
    """What the commands do."""
    assert [group.job_type for group in await dead_by_error(conn)] == ["shop.fail"]
    assert len(await list_jobs(conn)) > 1
    [error] = await list_errors(conn, died)
    assert error.error_class == "ValueError"
    await pause(conn, "mail")
    await resume(conn, "mail")
    await cancel(conn, hanging)
    await requeue(conn, died)
