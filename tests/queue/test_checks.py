"""``recado check``: each thing that can be wrong is found, told with what to do, and not found where all is well."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
import pytest_asyncio

from recado import Recado, embedded
from recado.queue import (
    JobStatus,
    NewJob,
    admin,
    checks,
    claims,
    counts,
    enqueue,
    finishes,
    leases,
    migrate,
    operations,
    pause,
    requeue_dead,
    resume,
    retention,
    schedules,
    stats,
    workers,
)
from recado.queue.checks import Finding, Level, check
from recado.queue.finishes import Completion, Failure, Release
from recado.queue.grants import PURPOSES, ROLES, Needs, Role, columns_of
from recado.queue.schedules import Schedule
from recado.queue.workers import WorkerInfo
from recado.testing import drain
from tests.queue.support import WORKER, Connect, insert, ordinary_role
from tests.worker.support import working

NEVER = timedelta(days=365)
AT_ONCE = timedelta(seconds=-1)
"""Also what this very transaction has written is older."""


@pytest_asyncio.fixture
async def role(conn: asyncpg.Connection, dsn: str, schema: str) -> AsyncIterator[str]:
    """The URL for an ordinary role with all rights to the tables."""
    async with ordinary_role(conn, dsn, schema) as url:
        yield url


@pytest_asyncio.fixture
async def plain(role: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection as the ordinary role; what is found there is what a test has made."""
    conn = await asyncpg.connect(role)
    yield conn
    await conn.close()


async def found(conn: asyncpg.Connection, schema: str | None = None, *, old: timedelta = NEVER) -> list[Finding]:
    return await check(conn, schema=schema, old=old)


def only(findings: list[Finding], level: Level) -> str:
    """The sentence of the one thing that was found."""
    [finding] = findings
    assert finding.level is level
    what, _, rest = finding.sentence.partition(": ")
    assert what
    assert "; " in rest  # why, and what to do
    return finding.sentence


# --- all is well ---


async def test_where_all_is_well_nothing_is_found(plain: asyncpg.Connection) -> None:
    assert await check(plain) == []


async def test_a_check_changes_nothing_and_works_within_a_transaction(plain: asyncpg.Connection) -> None:
    async with plain.transaction(readonly=True):
        assert await found(plain) == []


# --- the role ---


async def test_a_superuser_is_found(conn: asyncpg.Connection) -> None:
    name = await conn.fetchval("SELECT current_user")
    sentence = only(await found(conn), Level.ERROR)
    assert sentence.startswith(f"role {name} is a superuser: row-level security does not hold for it")


async def test_a_role_that_bypasses_row_level_security_is_found(
    conn: asyncpg.Connection, plain: asyncpg.Connection
) -> None:
    name = await plain.fetchval("SELECT current_user")
    await conn.execute(f"ALTER ROLE {name} BYPASSRLS")
    sentence = only(await found(plain), Level.ERROR)
    assert f"role {name} has BYPASSRLS" in sentence
    assert sentence.endswith(f"ALTER ROLE {name} NOBYPASSRLS")


async def test_a_role_that_is_the_system_from_the_start_is_found(
    conn: asyncpg.Connection, plain: asyncpg.Connection, role: str
) -> None:
    name = await plain.fetchval("SELECT current_user")
    await conn.execute(f"ALTER ROLE {name} SET app.current_org_id = '0'")
    fresh = await asyncpg.connect(role)
    try:
        assert "app.current_org_id is '0' before anybody has set it" in only(await found(fresh), Level.ERROR)
        async with operations.tenant(fresh, "7"):
            pass
    finally:
        await fresh.close()


async def test_what_a_pooled_connections_setting_is_after_a_tenant_is_nothing_to_find(
    plain: asyncpg.Connection,
) -> None:
    async with operations.tenant(plain, "7"):
        pass
    assert await found(plain) == []


# --- the schema ---


async def test_a_schema_that_is_missing_is_found(plain: asyncpg.Connection) -> None:
    sentence = only(await found(plain, "nowhere"), Level.ERROR)
    assert "it holds no queue yet; run `recado migrate up --schema nowhere`" in sentence


async def test_an_older_schema_is_found(conn: asyncpg.Connection, plain: asyncpg.Connection) -> None:
    await migrate.down(conn, to=1)
    assert "it is older than this version of recado" in only(await found(plain), Level.ERROR)


async def test_a_newer_schema_is_found(conn: asyncpg.Connection, plain: asyncpg.Connection, schema: str) -> None:
    await conn.execute(f"INSERT INTO {schema}.schema_migrations VALUES (99, 'future', 'unknown')")
    assert "it is newer than this version of recado" in only(await found(plain), Level.ERROR)


async def test_an_edited_migration_is_found(conn: asyncpg.Connection, plain: asyncpg.Connection, schema: str) -> None:
    await conn.execute(f"UPDATE {schema}.schema_migrations SET checksum = 'another' WHERE number = 1")
    assert only(await found(plain), Level.WARNING).startswith("migration 0001_queue was edited after it was applied")


# --- row-level security ---


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("ALTER TABLE {}.operations DISABLE ROW LEVEL SECURITY", "is disabled"),
        ("ALTER TABLE {}.operations NO FORCE ROW LEVEL SECURITY", "is not forced"),
        ("DROP POLICY tenant_isolation ON {}.operations", "is missing or was changed"),
        ("ALTER POLICY tenant_isolation ON {}.operations USING (true)", "is missing or was changed"),
        ("ALTER POLICY tenant_isolation ON {}.operations WITH CHECK (true)", "is missing or was changed"),
        ("ALTER POLICY tenant_isolation ON {}.operations TO pg_monitor", "is missing or was changed"),
        ("CREATE POLICY support ON {}.operations FOR SELECT USING (true)", "policy support on {}.operations is not"),
    ],
)
async def test_a_hole_in_row_level_security_is_found(
    conn: asyncpg.Connection, plain: asyncpg.Connection, schema: str, statement: str, says: str
) -> None:
    await conn.execute(statement.format(schema))
    assert says.format(schema) in only(await found(plain), Level.ERROR)


async def test_a_policy_that_restricts_further_is_nothing_to_find(
    conn: asyncpg.Connection, plain: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(f"CREATE POLICY narrower ON {schema}.operations AS RESTRICTIVE USING (kind <> 'secret')")
    assert await found(plain) == []


async def test_what_to_do_about_row_level_security_mends_it(
    conn: asyncpg.Connection, plain: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(
        f"ALTER TABLE {schema}.operations DISABLE ROW LEVEL SECURITY, NO FORCE ROW LEVEL SECURITY;"
        f"CREATE POLICY support ON {schema}.operations USING (true)"
    )
    findings = await found(plain)
    assert len(findings) == 3
    for finding in findings:
        await conn.execute(finding.sentence.rpartition("; ")[2].removesuffix(", or make it restrictive"))
    assert await found(plain) == []


# --- rights ---


async def grant(conn: asyncpg.Connection, role: str, schema: str, needs: Needs) -> None:
    """These rights, and no others."""
    name = urlsplit(role).username
    await conn.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA {schema} FROM {name}")
    for table, rights in needs.items():
        if rights:
            await conn.execute(f"GRANT {', '.join(rights)} ON {schema}.{table} TO {name}")


async def test_a_role_that_may_not_look_into_the_schema_is_found(
    conn: asyncpg.Connection, plain: asyncpg.Connection, role: str, schema: str
) -> None:
    await conn.execute(f"REVOKE USAGE ON SCHEMA {schema} FROM {urlsplit(role).username}")
    assert f"may not look into schema {schema}" in only(await found(plain), Level.ERROR)


@pytest.mark.parametrize("purpose", PURPOSES)
async def test_a_right_that_is_missing_is_named_with_what_it_is_for(
    conn: asyncpg.Connection, plain: asyncpg.Connection, role: str, schema: str, purpose: str
) -> None:
    needs = PURPOSES[purpose]
    table = list(needs)[-1]
    privilege, _ = columns_of(needs[table][-1])
    await conn.execute(f"REVOKE {privilege} ON {schema}.{table} FROM {urlsplit(role).username}")
    [sentence] = [f.sentence for f in await found(plain) if f"the role may not {purpose}: " in f.sentence]
    assert f"{needs[table][-1]} ON {schema}.{table}; GRANT that as `recado grants` prints it" in sentence


async def test_a_role_that_only_enqueues_may_be_meant_to_and_one_that_cannot_is_not(
    conn: asyncpg.Connection, plain: asyncpg.Connection, role: str, schema: str
) -> None:
    bookkeeping: Needs = {"schema_migrations": ("SELECT",)}
    await grant(conn, role, schema, {**PURPOSES["enqueue jobs"], **bookkeeping})
    assert [f.level for f in await found(plain)] == [Level.WARNING] * 3

    await grant(conn, role, schema, bookkeeping)
    first, *others = await found(plain)
    assert first.level is Level.ERROR
    columns = PURPOSES["enqueue jobs"]["jobs"][0]
    assert f"it lacks {columns}, INSERT ON {schema}.jobs; SELECT (hungry_queues) ON {schema}.workers" in first.sentence
    assert [f.level for f in others] == [Level.WARNING] * 3


@pytest.mark.parametrize("kind", Role)
async def test_a_role_that_has_what_it_is_for_lacks_nothing_that_must_be_mended(
    conn: asyncpg.Connection, dsn: str, schema: str, kind: Role
) -> None:
    async with ordinary_role(conn, dsn, schema, kind) as url:
        asking = await asyncpg.connect(url)
        try:
            findings = await found(asking)
        finally:
            await asking.close()
    assert findings
    assert {f.level for f in findings} == {Level.WARNING}
    assert not [f for f in findings if f"may not {ROLES[kind]}" in f.sentence]


async def as_enqueuer(conn: asyncpg.Connection) -> None:
    job = NewJob("a.b", "{}", idempotency_key="k")
    assert await enqueue.insert_job(conn, job) == await enqueue.insert_job(conn, job)
    await enqueue.insert_jobs(conn, [NewJob("a.b", "{}") for _ in range(enqueue.COPY_FROM)])
    await enqueue.insert_jobs(conn, [job, job._replace(idempotency_key="l")])


async def as_tenant(conn: asyncpg.Connection) -> None:
    async with operations.tenant(conn, "7"):
        job = NewJob("operation.a", "{}", idempotency_key="k")
        job_id = await operations.start(conn, job, organization_id=None)
        assert await operations.start(conn, job, organization_id=None) == job_id
        assert len(await operations.list_operations(conn, "7")) == 1
        await operations.cancel_operation(conn, job_id)


async def as_worker(conn: asyncpg.Connection) -> None:
    me = WorkerInfo(WORKER, "host", 1, "0", ("default",), 1, 300.0)
    await workers.beat(conn, me, 0)
    await workers.beat(conn, me, 0)
    assert await workers.set_hungry(conn, WORKER, ["default"])
    for n in range(5):
        await enqueue.insert_job(conn, NewJob("operation.a" if n == 0 else "a.b", "{}"))
    await claims.look(conn, "default")
    jobs = await claims.claim(conn, WORKER, "default", 4, claims.NO_FLOORS)
    one, two, three, four = ((job.id, job.fence) for job in jobs)
    assert len(await leases.renew(conn, WORKER, [one, two])) == 2
    assert len(await leases.held(conn, WORKER, [one])) == 1
    await finishes.complete(conn, WORKER, [Completion(*one)])
    await finishes.complete_one(conn, WORKER, Completion(*two))
    await finishes.fail(conn, WORKER, [Failure(*three, 1.0, True, 1.0, "E", "m", None)])
    await finishes.release(conn, WORKER, [Release(*four)])
    await claims.claim(conn, WORKER, "default", 4, claims.NO_FLOORS)
    await claims.release_strays(conn, WORKER, [])
    await claims.claim(conn, WORKER, "default", 4, claims.NO_FLOORS)
    await stats.add(conn, {("default", "a.b"): stats.Tally()})
    await stats.add(conn, {("default", "a.b"): stats.Tally()})
    await schedules.sync(conn, "shop", WORKER, [Schedule("s", "a.b", "* * * * *")])
    await schedules.sync(conn, "shop", WORKER, [])
    async with operations.system(conn):
        job_id = await operations.start(conn, NewJob("operation.a", "{}"), organization_id="7")
        await operations.mark_processing(conn, job_id, 1)
        await operations.set_progress(conn, job_id, 1, 50)
        assert await operations.mark_done(conn, [(job_id, 1, None)]) == {job_id}
        assert await operations.mark_error(conn, [job_id], "no") == set()
        await operations.start(conn, NewJob("operation.a", "{}"), organization_id="7")
    async with operations.system(conn):
        assert len(await operations.expire(conn, after=AT_ONCE)) == 1
        await operations.prune(conn, retention=AT_ONCE)
    await workers.remove(conn, WORKER)
    assert len(await leases.reclaim(conn)) == 2
    await workers.remove_silent(conn)
    await retention.prune(conn)
    await retention.prune_stats(conn)


async def as_api(conn: asyncpg.Connection) -> None:
    [group] = await admin.dead_by_error(conn)
    assert group.count == 2
    [pending] = await admin.list_jobs(conn, status=JobStatus.PENDING, job_type="mail.send")
    assert await admin.list_errors(conn, pending.id) == []
    await admin.cancel(conn, pending.id)
    await admin.requeue(conn, pending.id)
    assert len(await requeue_dead(conn)) == 2
    await pause(conn, "default")
    await pause(conn, "default")
    await resume(conn, "default")
    await counts.counts(conn)
    await counts.queue_depths(conn)
    [schedule] = await schedules.list_schedules(conn)
    await schedules.pause_schedule(conn, schedule.application, schedule.name)
    await schedules.resume_schedule(conn, schedule.application, schedule.name)
    async with operations.tenant(conn, "7"):
        [operation] = await operations.list_operations(conn, "7")
        await operations.cancel_operation(conn, operation.job_id)


async def prepared(conn: asyncpg.Connection, schema: str) -> None:
    """Something of each kind that the API shows."""
    for status in ("dead", "dead", "pending"):
        await insert(conn, schema, status)
    await operations.start(conn, NewJob("operation.a", "{}"), organization_id="7")
    worker = uuid4()
    await workers.beat(conn, WorkerInfo(worker, "host", 1, "0", ("default",), 1, 300.0), 0)
    await schedules.sync(conn, "shop", worker, [Schedule("s", "a.b", "* * * * *")])


USES = {
    "enqueue jobs": as_enqueuer,
    "start and cancel operations": as_tenant,
    "run a worker": as_worker,
    "serve the API": as_api,
}


@pytest.mark.parametrize("purpose", PURPOSES)
async def test_the_rights_that_are_asked_for_suffice(
    conn: asyncpg.Connection, plain: asyncpg.Connection, role: str, schema: str, purpose: str
) -> None:
    if purpose == "serve the API":
        await prepared(conn, schema)
    await grant(conn, role, schema, PURPOSES[purpose])
    if "schema_migrations" in PURPOSES[purpose]:
        await migrate.check_schema(plain)
    await USES[purpose](plain)


@pytest.mark.parametrize("purpose", PURPOSES)
async def test_no_right_is_asked_for_that_is_not_needed(
    conn: asyncpg.Connection, plain: asyncpg.Connection, role: str, schema: str, purpose: str
) -> None:
    """With any one of them missing, something does not work."""
    needs = {table: rights for table, rights in PURPOSES[purpose].items() if table != "schema_migrations"}
    if purpose == "serve the API":
        await prepared(conn, schema)
    unneeded = []
    for table, rights in needs.items():
        for right in rights:
            await grant(conn, role, schema, {**needs, table: tuple(r for r in rights if r != right)})
            transaction = plain.transaction()
            await transaction.start()
            try:
                await USES[purpose](plain)
                said = "nothing"
            except asyncpg.InsufficientPrivilegeError as error:
                said = str(error)
            await transaction.rollback()
            if said != f"permission denied for table {table}":
                unneeded.append((table, right, said))
    assert unneeded == []


async def test_a_worker_runs_as_a_role_with_the_workers_rights_alone(
    conn: asyncpg.Connection, role: str, schema: str
) -> None:
    await grant(conn, role, schema, PURPOSES["run a worker"])
    app = Recado()

    @app.operation("count")
    async def count() -> int:
        return 3

    @app.job("shop.fail", max_attempts=1)
    async def fail() -> None:
        raise ValueError("no")

    ids = [await count.start(conn, None, organization_id="7"), await fail.enqueue(conn, None)]
    async with working(app, role) as (_, seen):
        await seen.until(lambda: len([job for e in seen.events for job in e.jobs if job in ids]) >= 4)
    assert [job.status for job in await admin.list_jobs(conn)] == ["dead", "completed"]
    async with operations.tenant(conn, "7"):
        assert (await operations.get_operation(conn, ids[0])).result == 3
    assert (await drain(app, conn)).completed == 0


# --- what keeps VACUUM from its work ---


def sessions(findings: list[Finding]) -> list[str]:
    return [f.sentence for f in findings if f.sentence.startswith("session ")]


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read"])
async def test_an_old_transaction_is_found(
    conn: asyncpg.Connection, connect: Connect, schema: str, isolation: str
) -> None:
    other = await connect()
    await other.execute("SET application_name = 'an old report'")
    transaction = other.transaction(isolation=isolation)  # type: ignore[arg-type]
    await transaction.start()
    await other.execute(f"SELECT FROM {schema}.jobs")  # and not fetch(), whose portal stays open until the next one
    if isolation == "read_committed":
        assert sessions(await found(conn, old=timedelta(0))) == []  # between two statements it keeps nothing
        await other.execute("SELECT pg_current_xact_id()")
    [sentence] = sessions(await found(conn, old=timedelta(0)))
    assert sessions(await found(conn)) == []
    await transaction.rollback()
    assert sessions(await found(conn, old=timedelta(0))) == []

    pid = other.get_server_pid()
    name = await conn.fetchval("SELECT current_user")
    assert sentence.startswith(f"session {pid} of role {name} (application 'an old report', idle in transaction)")
    assert sentence.endswith(f"; end it, if need be by SELECT pg_terminate_backend({pid})")


async def test_a_transaction_in_another_database_is_not_the_queues(
    conn: asyncpg.Connection, recado_server: str
) -> None:
    other = await asyncpg.connect(recado_server)
    try:
        async with other.transaction():
            await other.execute("SELECT pg_current_xact_id()")
            assert sessions(await found(conn, old=timedelta(0))) == []
    finally:
        await other.close()


@pytest.fixture(scope="module")
def neglected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that nobody has set up for a queue."""
    options = {"autovacuum": "off", "track_counts": "off", "max_prepared_transactions": "1"}
    with embedded.start(tmp_path_factory.mktemp("neglected") / "home", durable=False, options=options) as server:
        yield server.dsn()


async def test_a_server_that_does_not_vacuum_and_a_forgotten_prepared_transaction_are_found(neglected: str) -> None:
    conn = await asyncpg.connect(neglected)
    try:
        await conn.execute("BEGIN; SELECT pg_current_xact_id(); PREPARE TRANSACTION 'forgotten'")
        old = [f"{f.level}: {f.sentence}" for f in await found(conn, old=timedelta(0))]
        young = [f.sentence for f in await found(conn)]
        await conn.execute("ROLLBACK PREPARED 'forgotten'")
    finally:
        await conn.close()
    assert [line for line in old if line.startswith("error: track_counts is off: ")]
    assert [line for line in old if line.startswith("error: autovacuum is off: ")]
    [sentence] = [line for line in old if "prepared" in line]
    assert sentence.startswith("warning: transaction 'forgotten' of role postgres has been prepared for 0 s: ")
    assert not [line for line in young if "prepared" in line]


def test_a_server_that_is_too_old_is_found() -> None:
    assert only(checks._server_findings(12, "12.4", True, True), Level.ERROR) == (
        "the server is PostgreSQL 12.4: recado's statements need 13 or newer; upgrade it"
    )
    assert checks._server_findings(13, "13.0", True, True) == []


@pytest.mark.parametrize("off", ["false", "off", "0"])
async def test_a_table_without_autovacuum_is_found(
    conn: asyncpg.Connection, plain: asyncpg.Connection, schema: str, off: str
) -> None:
    await conn.execute(f"ALTER TABLE {schema}.jobs SET (autovacuum_enabled = {off})")
    sentence = only(await found(plain), Level.ERROR)
    assert f"autovacuum is switched off for {schema}.jobs" in sentence
    await conn.execute(sentence.rpartition("; ")[2])
    assert await found(plain) == []


# --- what there is to do ---


async def serve(conn: asyncpg.Connection, *queues: str, silence: float = 60.0) -> None:
    await workers.beat(conn, WorkerInfo(uuid4(), "host", 1, "0", queues, 1, 300.0, silence=silence), 0)


async def test_due_jobs_in_a_queue_without_a_live_worker_are_found(plain: asyncpg.Connection, schema: str) -> None:
    await serve(plain, "default", "mail")
    await serve(plain, "slow", silence=0.0)  # its heartbeat is gone
    for queue in ("default", "mail", "slow", "slow"):
        await insert(plain, schema, queue=queue)
    await plain.execute(
        f"UPDATE {schema}.jobs SET run_at = now() - interval '3 hours', job_type = job_type || '.' || fence"
        " WHERE queue = 'slow'"
    )
    assert only(await found(plain), Level.ERROR) == (
        "queue slow has no live worker, and 2 jobs are due in it, the oldest for 3 h: nobody will run them; start a "
        "worker with `-q slow`"
    )


async def test_jobs_of_several_types_in_one_queue_are_one_finding(plain: asyncpg.Connection, schema: str) -> None:
    await insert(plain, schema, job_type="a.a")
    await insert(plain, schema, job_type="a.b")
    assert "queue default has no live worker, and 2 jobs are due in it" in only(await found(plain), Level.ERROR)


@pytest.mark.parametrize("status", ["running", "completed", "cancelled"])
async def test_a_queue_in_which_nothing_is_due_needs_no_worker(
    plain: asyncpg.Connection, schema: str, status: str
) -> None:
    await insert(plain, schema, status)
    later = await insert(plain, schema)
    await plain.execute(f"UPDATE {schema}.jobs SET run_at = now() + interval '1 hour' WHERE id = $1", later)
    assert await found(plain) == []


async def test_a_paused_queue_is_found_and_needs_no_worker(plain: asyncpg.Connection, schema: str) -> None:
    await pause(plain, "mail")
    await plain.execute(f"UPDATE {schema}.queues SET paused_at = now() - interval '49 hours'")
    await insert(plain, schema, queue="mail")
    assert only(await found(plain), Level.WARNING).startswith("queue mail has been paused for 2 days, and 1 job is due")
    await resume(plain, "mail")
    assert "queue mail has no live worker" in only(await found(plain), Level.ERROR)


async def test_dead_jobs_are_found(plain: asyncpg.Connection, schema: str) -> None:
    await insert(plain, schema, "dead")
    assert only(await found(plain), Level.WARNING).startswith("1 job is dead: ")
    await insert(plain, schema, "dead", job_type="a.b")
    assert only(await found(plain), Level.WARNING).startswith("2 jobs are dead: ")


async def test_a_full_notify_queue_is_found(plain: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MAX_NOTIFY_USAGE", -1.0)
    assert only(await found(plain), Level.ERROR).startswith("the server's NOTIFY queue is 0% full: ")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (119, "119 s"), (120, "2 min"), (7_199, "120 min"), (7_200, "2 h"), (200_000, "2 days")],
)
def test_a_duration_is_told_as_people_do(seconds: float, text: str) -> None:
    assert checks._duration(seconds) == text
