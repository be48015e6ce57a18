"""Migrations against a real server. In this module ``dsn``, and so ``conn`` and ``connect``, mean an empty database."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

from recado.errors import ConfigurationError, MigrationError, SchemaMismatch
from recado.queue import migrate
from recado.queue.locks import lock_key
from recado.queue.migrate import Migration
from tests import catalog

Connect = Callable[[], Awaitable[asyncpg.Connection]]

ONE = Migration(1, "one", "CREATE TABLE {schema}.one (a integer);", "DROP TABLE {schema}.one;")
TWO = Migration(2, "two", "ALTER TABLE {schema}.one ADD b integer;", "ALTER TABLE {schema}.one DROP b;")
THREE = Migration(3, "three", "CREATE INDEX one_idx ON {schema}.one (b);", "DROP INDEX {schema}.one_idx;")
STEPS = (ONE, TWO, THREE)

WAITING = """
SELECT count(*) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
WHERE d.datname = current_database() AND l.locktype = 'advisory' AND NOT l.granted
"""


@pytest_asyncio.fixture
async def dsn(recado_server: str) -> AsyncIterator[str]:
    async with catalog.empty_database(recado_server) as dsn:
        yield dsn


@asynccontextmanager
async def turn_held(connect: Connect, schema: str) -> AsyncIterator[Callable[[int], Awaitable[None]]]:
    """Nobody gets the lock of ``schema`` within the block, which can wait for so and so many to queue up for it."""
    holder, observer = await connect(), await connect()

    async def queued(count: int) -> None:
        while await observer.fetchval(WAITING) < count:
            pass

    async with asyncio.timeout(30), holder.transaction():
        await holder.execute(migrate.LOCK, lock_key(migrate.LOCK_PURPOSE, schema))
        yield queued


async def applied(conn: asyncpg.Connection, schema: str) -> list[int]:
    return [row[0] for row in await conn.fetch(f"SELECT number FROM {schema}.schema_migrations ORDER BY number")]


# --- up and down ---


async def test_up_applies_everything_once(conn: asyncpg.Connection) -> None:
    assert await migrate.up(conn) == list(migrate.shipped())
    assert await migrate.up(conn) == []


async def test_up_down_up_leaves_no_residue_and_builds_the_same_again(conn: asyncpg.Connection, schema: str) -> None:
    objects_before = await catalog.user_objects(conn)
    await migrate.up(conn)
    description = await catalog.describe(conn, schema)
    assert len(await catalog.user_objects(conn)) > len(objects_before)

    assert await migrate.down(conn) == list(reversed(migrate.shipped()))
    assert await catalog.user_objects(conn) == objects_before
    assert await catalog.describe(conn, schema) == []

    await migrate.up(conn)
    assert await catalog.describe(conn, schema) == description


async def test_each_migration_is_taken_back_by_its_own_down(conn: asyncpg.Connection, schema: str) -> None:
    for migration in migrate.shipped()[1:]:
        await migrate.up(conn, to=migration.number - 1)
        description = await catalog.describe(conn, schema)
        await migrate.up(conn, to=migration.number)
        assert await catalog.describe(conn, schema) != description
        await migrate.down(conn, to=migration.number - 1)
        assert await catalog.describe(conn, schema) == description


async def test_to_says_where_up_and_down_stop(conn: asyncpg.Connection, schema: str) -> None:
    assert await migrate.up(conn, to=2, migrations=STEPS) == [ONE, TWO]
    assert await applied(conn, schema) == [1, 2]
    assert await migrate.up(conn, to=1, migrations=STEPS) == []
    assert await migrate.up(conn, migrations=STEPS) == [THREE]
    assert await migrate.down(conn, to=1, migrations=STEPS) == [THREE, TWO]
    assert await applied(conn, schema) == [1]
    assert await migrate.down(conn, to=2, migrations=STEPS) == []
    assert await migrate.down(conn, migrations=STEPS) == [ONE]


@pytest.mark.parametrize("to", [-1, 4])
async def test_a_number_that_is_no_migrations_is_refused(conn: asyncpg.Connection, to: int) -> None:
    with pytest.raises(MigrationError, match=f"cannot migrate to {to}: .* 1 to 3"):
        await migrate.up(conn, to=to, migrations=STEPS)
    with pytest.raises(MigrationError, match=f"cannot migrate to {to}: .* 1 to 3"):
        await migrate.down(conn, to=to, migrations=STEPS)
    assert await catalog.user_objects(conn) == []


async def test_a_transaction_that_is_already_open_is_refused(conn: asyncpg.Connection) -> None:
    async with conn.transaction():
        with pytest.raises(MigrationError, match="cannot migrate inside a transaction"):
            await migrate.up(conn)
        with pytest.raises(MigrationError, match="cannot migrate inside a transaction"):
            await migrate.down(conn)
    assert await catalog.user_objects(conn) == []


async def test_a_pools_connection_migrates(dsn: str) -> None:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as pool, pool.acquire() as conn:
        assert await migrate.up(conn) == list(migrate.shipped())
        await migrate.check_schema(conn)


async def test_a_name_that_is_no_identifier_never_reaches_the_server(conn: asyncpg.Connection) -> None:
    with pytest.raises(ConfigurationError, match="cannot use"):
        await migrate.up(conn, schema="x; DROP SCHEMA public")
    assert await catalog.user_objects(conn) == []


# --- failures ---


async def test_a_failing_migration_leaves_nothing_and_names_itself_and_the_cause(
    conn: asyncpg.Connection, schema: str
) -> None:
    broken = replace(TWO, up="CREATE TABLE {schema}.half (); SELECT 1 / 0")
    with pytest.raises(MigrationError, match=r"0002_two .* division by zero"):
        await migrate.up(conn, migrations=(ONE, broken))

    assert await applied(conn, schema) == [1]
    description = await catalog.describe(conn, schema)
    await migrate.up(conn, migrations=(ONE, TWO))
    await migrate.down(conn, to=1, migrations=(ONE, TWO))
    assert await catalog.describe(conn, schema) == description


async def test_a_failing_first_migration_does_not_even_leave_the_schema(conn: asyncpg.Connection) -> None:
    with pytest.raises(MigrationError, match=r"0001_one .* syntax error"):
        await migrate.up(conn, migrations=[replace(ONE, up="CREATE TABLE {schema}.half (); nonsense")])
    assert await catalog.user_objects(conn) == []


async def test_a_failing_down_leaves_its_migration_applied(conn: asyncpg.Connection, schema: str) -> None:
    broken = replace(TWO, down="ALTER TABLE {schema}.one DROP b; DROP TABLE {schema}.nowhere")
    await migrate.up(conn, migrations=(ONE, broken, THREE))
    await migrate.down(conn, to=2, migrations=(ONE, broken, THREE))
    description = await catalog.describe(conn, schema)

    with pytest.raises(MigrationError, match=r"cannot revert migration 0002_two .* does not exist"):
        await migrate.down(conn, migrations=(ONE, broken, THREE))
    assert await applied(conn, schema) == [1, 2]
    assert await catalog.describe(conn, schema) == description


@pytest.mark.parametrize(
    "edited", [replace(ONE, up=ONE.up + " "), replace(ONE, name="uno")], ids=["its text", "its name"]
)
async def test_an_applied_migration_that_was_edited_is_refused_by_name(
    conn: asyncpg.Connection, schema: str, edited: Migration
) -> None:
    await migrate.up(conn, to=2, migrations=STEPS)
    migrations = (edited, TWO, THREE)

    with pytest.raises(MigrationError, match=f"migration {edited} was edited .* 0001_one"):
        await migrate.up(conn, migrations=migrations)
    with pytest.raises(MigrationError, match=f"migration {edited} was edited .* 0001_one"):
        await migrate.down(conn, migrations=migrations)
    assert await applied(conn, schema) == [1, 2]
    assert [s.edited for s in await migrate.status(conn, migrations=migrations)] == [True, False, False]


async def test_a_migration_may_be_edited_until_it_is_applied(conn: asyncpg.Connection) -> None:
    await migrate.up(conn, to=1, migrations=STEPS)
    edited = replace(TWO, up="ALTER TABLE {schema}.one ADD b bigint")
    assert await migrate.up(conn, migrations=(ONE, edited)) == [edited]


# --- several at once ---


async def test_ten_at_once_on_an_empty_database_apply_each_migration_once(connect: Connect, schema: str) -> None:
    connections = [await connect() for _ in range(10)]
    async with turn_held(connect, schema) as queued:
        tasks = [asyncio.create_task(migrate.up(conn, migrations=STEPS)) for conn in connections]
        await queued(len(tasks))
    done = [migration for task in tasks for migration in await task]
    assert sorted(done, key=lambda m: m.number) == list(STEPS)


async def test_ten_at_once_where_the_default_isolation_is_repeatable_read(
    conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    database = await conn.fetchval("SELECT current_database()")
    await conn.execute(f"ALTER DATABASE {database} SET default_transaction_isolation = 'repeatable read'")
    connections = [await connect() for _ in range(10)]
    assert await connections[0].fetchval("SHOW transaction_isolation") == "repeatable read"

    async with turn_held(connect, schema) as queued:
        tasks = [asyncio.create_task(migrate.up(conn, migrations=STEPS)) for conn in connections]
        await queued(len(tasks))
    done = [migration for task in tasks for migration in await task]
    assert sorted(done, key=lambda m: m.number) == list(STEPS)


async def test_ten_at_once_over_and_over_on_warm_connections(connect: Connect, schema: str) -> None:
    connections = [await connect() for _ in range(10)]
    shipped = migrate.shipped()
    for _ in range(5):
        assert sum([len(done) for done in await asyncio.gather(*map(migrate.up, connections))]) == len(shipped)
        assert sum([len(done) for done in await asyncio.gather(*map(migrate.down, connections))]) == len(shipped)


async def test_up_and_down_at_once_come_to_an_end(connect: Connect, schema: str) -> None:
    upwards, downwards = await connect(), await connect()
    async with turn_held(connect, schema) as queued:
        up = asyncio.create_task(migrate.up(upwards, migrations=STEPS))
        await queued(1)
        down = asyncio.create_task(migrate.down(downwards, migrations=STEPS))
        await queued(2)
    # The lock is granted in the order of the queue: one step up, one down, and then the second step up.
    with pytest.raises(MigrationError, match="another process just undid 0001_one"):
        await up
    assert await down == [ONE]


async def test_a_schema_waits_only_for_its_own_turn(connect: Connect, schema: str) -> None:
    async with turn_held(connect, schema):
        assert await migrate.up(await connect(), schema="another") == list(migrate.shipped())


def test_the_locks_key_is_the_same_in_every_process_and_version() -> None:
    assert lock_key(migrate.LOCK_PURPOSE, "recado") == 7203767682365493677


# --- schemas ---


async def test_two_schemas_in_one_database_do_not_touch_each_other(conn: asyncpg.Connection) -> None:
    await migrate.up(conn, schema="first")
    await migrate.up(conn, schema="second")
    second = await catalog.describe(conn, "second")
    with pytest.raises(SchemaMismatch):
        await migrate.check_schema(conn, schema="third")

    await migrate.down(conn, schema="first")
    assert await catalog.describe(conn, "first") == []
    assert await catalog.describe(conn, "second") == second
    await migrate.check_schema(conn, schema="second")


async def test_a_schema_that_holds_other_things_stays(conn: asyncpg.Connection, schema: str) -> None:
    await migrate.up(conn)
    await conn.execute(f"CREATE TABLE {schema}.somebody_elses ()")
    await migrate.down(conn)
    tables = await conn.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)
    assert [table[0] for table in tables] == ["somebody_elses"]
    await migrate.up(conn)
    await migrate.check_schema(conn)


async def test_the_schema_public_stays(conn: asyncpg.Connection) -> None:
    await migrate.up(conn, schema="public")
    description = await catalog.describe(conn, "public")
    await migrate.down(conn, schema="public")
    assert [line for line in description if line.startswith("schema ")] == await catalog.describe(conn, "public")


async def test_a_role_that_may_not_create_schemas_migrates_one_made_for_it(
    conn: asyncpg.Connection, schema: str
) -> None:
    role = f"recado_{uuid.uuid4().hex}"
    await conn.execute(f"CREATE ROLE {role}; CREATE SCHEMA {schema}; GRANT USAGE, CREATE ON SCHEMA {schema} TO {role}")
    try:
        await conn.execute(f"SET ROLE {role}")
        with pytest.raises(MigrationError, match="permission denied for database"):
            await migrate.up(conn, schema="one_it_would_have_to_create")
        await migrate.up(conn)
        await migrate.check_schema(conn)
        await migrate.down(conn)
        assert await conn.fetchval("SELECT to_regnamespace($1) IS NOT NULL", schema)
    finally:
        await conn.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}")


# --- what is there ---


async def test_status_of_an_empty_database_has_everything_pending(conn: asyncpg.Connection) -> None:
    statuses = await migrate.status(conn, migrations=STEPS)
    assert [(s.number, s.name, s.applied_at, s.edited, s.unknown) for s in statuses] == [
        (1, "one", None, False, False),
        (2, "two", None, False, False),
        (3, "three", None, False, False),
    ]
    assert await catalog.user_objects(conn) == []


async def test_status_tells_what_is_applied_pending_and_unknown(conn: asyncpg.Connection) -> None:
    await migrate.up(conn, migrations=(ONE, TWO))
    now = await conn.fetchval("SELECT now()")
    first, second = await migrate.status(conn, migrations=[ONE])
    assert first.applied_at is not None
    assert first.applied_at <= now
    assert (str(first), first.edited, first.unknown) == ("0001_one", False, False)
    assert (str(second), second.edited, second.unknown) == ("0002_two", False, True)
    assert [s.applied_at is None for s in await migrate.status(conn, migrations=STEPS)] == [False, False, True]


async def test_status_and_check_work_inside_the_callers_transaction(conn: asyncpg.Connection) -> None:
    async with conn.transaction():
        await migrate.status(conn)
        with pytest.raises(SchemaMismatch):
            await migrate.check_schema(conn)
        assert await conn.fetchval("SELECT 1") == 1


async def test_a_schema_that_was_never_migrated_is_refused_with_the_command(conn: asyncpg.Connection) -> None:
    with pytest.raises(SchemaMismatch, match=r"cannot use schema recado: .* run `recado migrate up`"):
        await migrate.check_schema(conn, schema="recado")
    with pytest.raises(SchemaMismatch, match=r"cannot use schema other: .* run `recado migrate up --schema other`"):
        await migrate.check_schema(conn, schema="other")


async def test_a_schema_that_is_too_old_is_refused_with_the_command(conn: asyncpg.Connection) -> None:
    await migrate.up(conn, to=1, migrations=STEPS, schema="recado")
    with pytest.raises(SchemaMismatch, match=r"older than .* needs migration 0003_three; run `recado migrate up`"):
        await migrate.check_schema(conn, migrations=STEPS, schema="recado")


async def test_a_schema_that_is_too_new_is_refused_by_all(conn: asyncpg.Connection, schema: str) -> None:
    await migrate.up(conn, migrations=STEPS)
    older = STEPS[:2]
    for function in (migrate.check_schema, migrate.up, migrate.down):
        with pytest.raises(SchemaMismatch, match=r"newer than .* not know migration 0003_three; upgrade recado"):
            await function(conn, migrations=older)
    assert await applied(conn, schema) == [1, 2, 3]


async def test_a_schema_that_is_just_right_passes(conn: asyncpg.Connection) -> None:
    await migrate.up(conn)
    await migrate.check_schema(conn)


# --- the script ---


async def test_the_script_builds_what_up_builds_and_counts_as_applied(
    conn: asyncpg.Connection, schema: str, recado_server: str
) -> None:
    await migrate.up(conn)
    async with catalog.empty_database(recado_server) as dsn, catalog.connection(dsn) as by_hand:
        await by_hand.execute(migrate.sql())
        assert await catalog.describe(by_hand, schema) == await catalog.describe(conn, schema)
        await migrate.check_schema(by_hand)
        assert [s.edited for s in await migrate.status(by_hand)] == [False] * len(migrate.shipped())
        assert await migrate.up(by_hand) == []


async def test_the_script_goes_into_the_schema_it_was_asked_for(conn: asyncpg.Connection) -> None:
    await conn.execute(migrate.sql(schema="other"))
    await migrate.check_schema(conn, schema="other")
    assert await conn.fetchval("SELECT count(*) FROM pg_namespace WHERE nspname = 'recado'") == 0


async def test_the_script_since_a_number_continues_there(conn: asyncpg.Connection) -> None:
    await conn.execute(migrate.sql(to=1, migrations=STEPS))
    assert [s.applied_at is None for s in await migrate.status(conn, migrations=STEPS)] == [False, True, True]
    await conn.execute(migrate.sql(since=1, migrations=STEPS))
    await migrate.check_schema(conn, migrations=STEPS)
    with pytest.raises(MigrationError, match="no migration comes after 3"):
        migrate.sql(since=3, migrations=STEPS)


async def test_the_script_changes_nothing_the_second_time(conn: asyncpg.Connection, schema: str) -> None:
    await conn.execute(migrate.sql())
    description = await catalog.describe(conn, schema)
    with pytest.raises(asyncpg.UniqueViolationError, match="schema_migrations_pkey"):
        await conn.execute(migrate.sql())
    await conn.execute("ROLLBACK")
    assert await catalog.describe(conn, schema) == description


# --- the files ---


def write(directory: Path, *names: str, text: str = "SELECT 1;\n") -> None:
    for name in names:
        (directory / name).write_bytes(text.encode())


def test_files_are_loaded_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    write(tmp_path, "0002_b.up.sql", "0001_a.up.sql", "0002_b.down.sql", "0001_a.down.sql", "README.md")
    assert [str(m) for m in migrate.load(tmp_path)] == ["0001_a", "0002_b"]


def test_line_ends_do_not_change_the_checksum(tmp_path: Path) -> None:
    write(tmp_path, "0001_a.up.sql", "0001_a.down.sql")
    (migration,) = migrate.load(tmp_path)
    write(tmp_path, "0001_a.up.sql", text="SELECT 1;\r\n")
    assert migrate.load(tmp_path)[0].checksum == migration.checksum
    write(tmp_path, "0001_a.up.sql", text="SELECT 2;\n")
    assert migrate.load(tmp_path)[0].checksum != migration.checksum


@pytest.mark.parametrize(
    ("names", "named"),
    [
        (["0001_a.up.sql"], "0001_a"),
        (["0001_a.down.sql"], "0001_a"),
        (["0002_b.up.sql", "0002_b.down.sql"], "0002_b"),
        (["0001_a.up.sql", "0001_a.down.sql", "0001_b.up.sql", "0001_b.down.sql"], "0001_b"),
        (["1_a.up.sql", "1_a.down.sql"], "1_a"),
        (["0001_a.sql"], "0001_a.sql"),
    ],
    ids=["no down", "no up", "a gap", "a number twice", "a short number", "no direction"],
)
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, names: list[str], named: str) -> None:
    write(tmp_path, *names)
    with pytest.raises(MigrationError, match=f"cannot read migration {named}"):
        migrate.load(tmp_path)
