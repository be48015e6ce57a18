"""Brings a schema up to this version of recado, back down, and tells which of the two is older.

A migration is a pair of files in ``recado/migrations``, ``NNNN_name.up.sql`` and ``NNNN_name.down.sql``,
numbered from 1 without a gap. What has been applied is written down in ``{schema}.schema_migrations``.

:func:`up` and :func:`down` are the one exception to the rule that functions of :mod:`recado.queue` never
commit: each migration owns its transaction, together with its row in ``schema_migrations``, so that one that
fails leaves nothing behind and one that succeeded stays applied. They refuse a connection that is inside a
transaction already. Any number of processes may call them at once: an advisory lock admits one at a time,
and whoever comes later finds the work done.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

import asyncpg

from recado.errors import MigrationError, SchemaMismatch
from recado.queue.locks import lock_key
from recado.queue.statements import fill, resolve_schema
from recado.settings import DEFAULT_SCHEMA

if TYPE_CHECKING:
    from datetime import datetime
    from importlib.resources.abc import Traversable

    from recado.queue.connections import Connection

LOCK = "SELECT pg_advisory_xact_lock($1)"
"""Ends with the transaction, so that it also works behind PgBouncer and no crash can leave it held."""

LOCK_PURPOSE = "migrate"
"""Must stay: versions of recado that lock on different keys would migrate at the same time."""

SCHEMA_EXISTS = "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = '{schema}')"
"""Asked first, because CREATE SCHEMA IF NOT EXISTS demands CREATE on the database even where the schema
exists; so an administrator can hand a ready-made schema to a role that may not create one."""

CREATE_SCHEMA = "CREATE SCHEMA IF NOT EXISTS {schema}"
"""IF NOT EXISTS for the script of :func:`sql`, which cannot ask first."""

BOOKKEEPING_EXISTS = """\
SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = '{schema}' AND tablename = 'schema_migrations')"""
"""A question rather than a failed SELECT, which would spoil the caller's transaction. Not `to_regclass`: it
answers from the backend's catalog cache, which nothing refreshes between the wait for the advisory lock and
the answer, so that the table just made by the process ahead would seem missing."""

CREATE_BOOKKEEPING = """\
CREATE TABLE IF NOT EXISTS {schema}.schema_migrations (
    number     integer     NOT NULL,
    name       text        NOT NULL,
    checksum   text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT schema_migrations_pkey PRIMARY KEY (number)
)"""
"""Not a migration itself: the first one is written down in it."""

APPLIED = "SELECT number, name, checksum, applied_at FROM {schema}.schema_migrations ORDER BY number"
"""A handful of rows, read as a whole: what is pending, edited or unknown is told by comparing in Python."""

RECORD = "INSERT INTO {schema}.schema_migrations (number, name, checksum) VALUES ($1, $2, $3)"
"""Comes before the migration itself, so that the primary key refuses a second time before anything is done."""

FORGET = "DELETE FROM {schema}.schema_migrations WHERE number = $1"
"""In the transaction of the `down` it belongs to."""

DROP_BOOKKEEPING = "DROP TABLE {schema}.schema_migrations"
"""With the first migration, so that nothing stays behind."""

MAY_DROP_SCHEMA = """\
SELECT pg_has_role(nspowner, 'USAGE') AND nspname <> 'public' FROM pg_namespace WHERE nspname = '{schema}'"""
"""A schema that somebody else made for this role stays, and so does the one every database is born with."""

DROP_SCHEMA = "DROP SCHEMA {schema} RESTRICT"
"""RESTRICT, the default, spelled out: with anything else in it the schema stays."""

SCRIPT_HEADER = """\
-- recado {first} to {last}, for psql. Each migration is one transaction that begins with its row in
-- schema_migrations: one that was applied before fails there and changes nothing.
"""

SCRIPT_STEP = """\

BEGIN ISOLATION LEVEL READ COMMITTED;
SELECT pg_advisory_xact_lock({lock_key});
{preparation}INSERT INTO {schema}.schema_migrations (number, name, checksum)
    VALUES ({number}, '{name}', '{checksum}');

{up}
COMMIT;
"""
"""What :func:`up` does, as text. The values are this package's own, and their form was checked on loading."""

_FILE_NAME = re.compile(r"(?P<number>\d{4})_(?P<name>[a-z0-9_]+)\.(?P<direction>up|down)\.sql")


@dataclass(frozen=True, slots=True)
class Migration:
    """One step of the schema, as it ships."""

    number: int
    name: str
    up: str = field(repr=False)
    """SQL with ``{schema}`` in it; may hold several statements."""
    down: str = field(repr=False)
    """Takes back exactly what ``up`` did."""

    @property
    def checksum(self) -> str:
        """The SHA-256 of ``up`` as it ships, before the schema's name is filled in."""
        return hashlib.sha256(self.up.encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.number:04}_{self.name}"


@dataclass(frozen=True, slots=True)
class MigrationStatus:
    """A migration as the package and the database see it."""

    number: int
    name: str
    applied_at: datetime | None
    """When it was applied, by the server's clock; ``None`` for a pending one."""
    edited: bool
    """It was applied from a file that differs from the one in this package."""
    unknown: bool
    """The database has it and this package does not: the schema is newer than this version of recado."""

    def __str__(self) -> str:
        return f"{self.number:04}_{self.name}"


def load(directory: Traversable) -> tuple[Migration, ...]:
    """The migrations in ``directory``, in order.

    Raises:
        MigrationError: a ``.sql`` file has a name of another form, lacks its counterpart, or a number is
            missing or given twice.
    """
    texts: dict[tuple[int, str], dict[str, str]] = {}
    for file in directory.iterdir():
        if not file.name.endswith(".sql"):
            continue
        match = _FILE_NAME.fullmatch(file.name)
        if match is None:
            raise MigrationError(
                f"cannot read migration {file.name}: its name is not NNNN_name.up.sql or .down.sql; rename it"
            )
        # Text mode: a checkout with CRLF line ends must not change the checksum.
        texts.setdefault((int(match["number"]), match["name"]), {})[match["direction"]] = file.read_text("utf-8")

    migrations = []
    for expected, ((number, name), text) in enumerate(sorted(texts.items()), start=1):
        if number != expected or text.keys() != {"up", "down"}:
            raise MigrationError(
                f"cannot read migration {number:04}_{name}: numbers must run from 1 without a gap and each "
                "needs an .up.sql and a .down.sql; add what is missing"
            )
        migrations.append(Migration(number, name, text["up"], text["down"]))
    return tuple(migrations)


@lru_cache(maxsize=1)
def shipped() -> tuple[Migration, ...]:
    """The migrations of this version of recado, in order."""
    return load(files("recado") / "migrations")


async def up(
    conn: Connection,
    *,
    to: int | None = None,
    schema: str | None = None,
    migrations: Sequence[Migration] | None = None,
) -> list[Migration]:
    """Apply what is pending, each migration in a transaction of its own.

    Args:
        conn: a connection outside any transaction.
        to: the number of the last migration to apply; ``None`` applies all.
        schema: the schema to work in; ``None`` takes the setting's. It is created if it does not exist.
        migrations: as :func:`load` returns them; those of :func:`shipped` unless given.

    Returns:
        What this call applied, in order; empty when there was nothing to do.

    Raises:
        MigrationError: a migration failed and was rolled back (those before it stay applied), an applied one
            was edited, ``to`` is no migration's number, or ``conn`` is inside a transaction.
        SchemaMismatch: the schema is newer than this version of recado.
    """
    known = shipped() if migrations is None else migrations
    target = len(known) if to is None else _checked_target(to, known)
    _refuse_open_transaction(conn)
    done: list[Migration] = []
    while (migration := await _apply_next(conn, known, target, schema, done)) is not None:
        done.append(migration)
    return done


async def down(
    conn: Connection,
    *,
    to: int = 0,
    schema: str | None = None,
    migrations: Sequence[Migration] | None = None,
) -> list[Migration]:
    """Revert what was applied after number ``to``, the newest first; 0 reverts everything, *with all jobs*.

    After the first migration ``schema_migrations`` goes too, and then the schema itself, if it is empty and
    belongs to the connection's role.

    Args:
        conn: a connection outside any transaction.
        to: the number of the last migration that stays applied.
        schema: the schema to work in; ``None`` takes the setting's.
        migrations: as :func:`load` returns them; those of :func:`shipped` unless given.

    Returns:
        What this call reverted, in the order it did.

    Raises:
        MigrationError: a migration could not be reverted and stays applied (those after it are gone), an
            applied one was edited, ``to`` is no migration's number, or ``conn`` is inside a transaction.
        SchemaMismatch: the schema is newer than this version of recado, which cannot know the way back.
    """
    known = shipped() if migrations is None else migrations
    target = _checked_target(to, known)
    _refuse_open_transaction(conn)
    done: list[Migration] = []
    while (migration := await _revert_last(conn, known, target, schema, done)) is not None:
        done.append(migration)
    return done


async def status(
    conn: Connection, *, schema: str | None = None, migrations: Sequence[Migration] | None = None
) -> list[MigrationStatus]:
    """Every migration that the package or the database knows, in order; changes nothing.

    Args:
        conn: a connection, inside a transaction or not.
        schema: the schema to look at; ``None`` takes the setting's. It need not exist.
        migrations: as :func:`load` returns them; those of :func:`shipped` unless given.
    """
    known = shipped() if migrations is None else migrations
    applied = {row["number"]: row for row in await _applied(conn, schema)}
    statuses = []
    for migration in known:
        row = applied.pop(migration.number, None)
        applied_at = None if row is None else row["applied_at"]
        edited = row is not None and _differs(row, migration)
        statuses.append(MigrationStatus(migration.number, migration.name, applied_at, edited, unknown=False))
    statuses += [
        MigrationStatus(row["number"], row["name"], row["applied_at"], edited=False, unknown=True)
        for row in applied.values()
    ]
    return statuses


def sql(
    *,
    since: int = 0,
    to: int | None = None,
    schema: str | None = None,
    migrations: Sequence[Migration] | None = None,
) -> str:
    """What :func:`up` would do on an empty database, as text for ``psql``; needs no database.

    Args:
        since: leave out the migrations up to this number, which were applied before.
        to: the number of the last migration to write; ``None`` writes all.
        schema: the schema to fill in; ``None`` takes the setting's.
        migrations: as :func:`load` returns them; those of :func:`shipped` unless given.

    Raises:
        MigrationError: ``since`` or ``to`` is no migration's number, or there is none between them.
    """
    known = shipped() if migrations is None else migrations
    chosen = known[_checked_target(since, known) : None if to is None else _checked_target(to, known)]
    if not chosen:
        raise MigrationError(f"cannot write SQL: no migration comes after {since} and up to {to}; name others")
    name = resolve_schema(schema)
    return SCRIPT_HEADER.format(first=chosen[0], last=chosen[-1]) + "".join(
        SCRIPT_STEP.format(
            lock_key=lock_key(LOCK_PURPOSE, name),
            preparation=fill(f"{CREATE_SCHEMA};\n{CREATE_BOOKKEEPING};\n", name) if m.number == 1 else "",
            schema=name,
            number=m.number,
            name=m.name,
            checksum=m.checksum,
            up=fill(m.up, name).strip(),
        )
        for m in chosen
    )


async def check_schema(
    conn: Connection, *, schema: str | None = None, migrations: Sequence[Migration] | None = None
) -> None:
    """Let only a schema pass that is exactly as new as this version of recado.

    Args:
        conn: a connection, inside a transaction or not.
        schema: the schema to look at; ``None`` takes the setting's.
        migrations: as :func:`load` returns them; those of :func:`shipped` unless given.

    Raises:
        SchemaMismatch: the schema was never migrated, is too old or is too new; the message names the command
            that helps.
    """
    known = shipped() if migrations is None else migrations
    applied = await _applied(conn, schema)
    _refuse_newer(applied, known, schema)
    name = resolve_schema(schema)
    if not applied:
        raise SchemaMismatch(
            f"cannot use schema {name}: it holds no queue yet; run `{_command(name)}` on this database"
        )
    numbers = {row["number"] for row in applied}
    missing = [m for m in known if m.number not in numbers]
    if missing:
        raise SchemaMismatch(
            f"cannot use schema {name}: it is older than this version of recado, which needs migration "
            f"{missing[-1]}; run `{_command(name)}`"
        )


async def _apply_next(
    conn: Connection, known: Sequence[Migration], target: int, schema: str | None, done: list[Migration]
) -> Migration | None:
    """One transaction of :func:`up`: what is pending is read again under the lock each time."""
    pending = None
    try:
        async with _migrating(conn):
            applied = await _locked(conn, known, schema)
            pending = next((m for m in known[:target] if m.number not in applied), None)
            if pending is None:
                return None
            _refuse_tug_of_war(pending, done, schema)
            if not applied:
                await _prepare(conn, schema)
            await conn.execute(fill(RECORD, schema), pending.number, pending.name, pending.checksum)
            await conn.execute(fill(pending.up, schema))
    except asyncpg.PostgresError as error:
        raise _failed("apply", pending, schema, error) from error
    return pending


async def _revert_last(
    conn: Connection, known: Sequence[Migration], target: int, schema: str | None, done: list[Migration]
) -> Migration | None:
    """One transaction of :func:`down`."""
    last = None
    try:
        async with _migrating(conn):
            applied = await _locked(conn, known, schema)
            last = next((m for m in reversed(known[target:]) if m.number in applied), None)
            if last is None:
                return None
            _refuse_tug_of_war(last, done, schema)
            await conn.execute(fill(last.down, schema))
            await conn.execute(fill(FORGET, schema), last.number)
            if applied == {last.number}:
                await _clear(conn, schema)
    except asyncpg.PostgresError as error:
        raise _failed("revert", last, schema, error) from error
    return last


def _migrating(conn: Connection) -> asyncpg.transaction.Transaction:
    # Named, because a role may default to REPEATABLE READ: its snapshot would date from before the wait for
    # the lock, and what the process ahead has just applied would look pending.
    return conn.transaction(isolation="read_committed")


async def _locked(conn: Connection, known: Sequence[Migration], schema: str | None) -> set[int]:
    """Wait for the schema's turn, and return the numbers that are applied."""
    await conn.execute(LOCK, lock_key(LOCK_PURPOSE, schema))
    applied = await _applied(conn, schema)
    _refuse_newer(applied, known, schema)
    _refuse_edited(applied, known, schema)
    return {row["number"] for row in applied}


async def _applied(conn: Connection, schema: str | None) -> list[asyncpg.Record]:
    if not await conn.fetchval(fill(BOOKKEEPING_EXISTS, schema)):
        return []
    return await conn.fetch(fill(APPLIED, schema))


async def _prepare(conn: Connection, schema: str | None) -> None:
    if not await conn.fetchval(fill(SCHEMA_EXISTS, schema)):
        await conn.execute(fill(CREATE_SCHEMA, schema))
    await conn.execute(fill(CREATE_BOOKKEEPING, schema))


async def _clear(conn: Connection, schema: str | None) -> None:
    await conn.execute(fill(DROP_BOOKKEEPING, schema))
    if not await conn.fetchval(fill(MAY_DROP_SCHEMA, schema)):
        return
    try:
        async with conn.transaction():
            await conn.execute(fill(DROP_SCHEMA, schema))
    except asyncpg.DependentObjectsStillExistError:
        pass  # Somebody keeps other things there. The savepoint saves the transaction around it.


def _checked_target(to: int, known: Sequence[Migration]) -> int:
    if not 0 <= to <= len(known):
        raise MigrationError(
            f"cannot migrate to {to}: this version of recado has migrations 1 to {len(known)}; "
            "name one of them (0 stands for none), or upgrade recado"
        )
    return to


def _refuse_open_transaction(conn: Connection) -> None:
    if conn.is_in_transaction():
        raise MigrationError(
            "cannot migrate inside a transaction: each migration commits its own; "
            "end the transaction first, or use another connection"
        )


def _refuse_tug_of_war(migration: Migration, done: list[Migration], schema: str | None) -> None:
    # Without this, an `up` and a `down` at the same time would undo each other's steps for ever.
    if migration in done:
        raise MigrationError(
            f"cannot migrate schema {resolve_schema(schema)}: another process just undid {migration}; "
            "run only one of up and down at a time"
        )


def _refuse_newer(applied: Sequence[asyncpg.Record], known: Sequence[Migration], schema: str | None) -> None:
    numbers = {m.number for m in known}
    unknown = [f"{row['number']:04}_{row['name']}" for row in applied if row["number"] not in numbers]
    if unknown:
        raise SchemaMismatch(
            f"cannot use schema {resolve_schema(schema)}: it is newer than this version of recado, which "
            f"does not know migration {unknown[-1]}; upgrade recado"
        )


def _refuse_edited(applied: Sequence[asyncpg.Record], known: Sequence[Migration], schema: str | None) -> None:
    by_number = {m.number: m for m in known}
    for row in applied:
        migration = by_number[row["number"]]
        if _differs(row, migration):
            raise MigrationError(
                f"cannot migrate schema {resolve_schema(schema)}: migration {migration} was edited after it "
                f"was applied (as {row['number']:04}_{row['name']}); restore the file, and put the change "
                "into a new migration"
            )


def _differs(row: asyncpg.Record, migration: Migration) -> bool:
    return (row["name"], row["checksum"]) != (migration.name, migration.checksum)


def _failed(
    action: str, migration: Migration | None, schema: str | None, error: asyncpg.PostgresError
) -> MigrationError:
    name = resolve_schema(schema)
    what = f"migrate schema {name}" if migration is None else f"{action} migration {migration} in schema {name}"
    return MigrationError(f"cannot {what}: {error.message or error}; remove the cause and run the command again")


def _command(schema: str) -> str:
    return "recado migrate up" if schema == DEFAULT_SCHEMA else f"recado migrate up --schema {schema}"
