"""What is wrong with a database, or soon will be, and what to do about it; what ``recado check`` prints.

Nothing here changes anything, and each question may be asked by an ordinary role. The role that asks is the one that is
looked at: ask as the one the services connect as.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

import asyncpg

from recado.errors import SchemaMismatch
from recado.queue import migrate
from recado.queue.connections import Connection, Connector
from recado.queue.counts import Depths, queue_depths
from recado.queue.grants import ENQUEUE, PURPOSES, SELECT, Needs, columns_of
from recado.queue.poolers import Sharing, sharing
from recado.queue.statements import fill, resolve_schema

MIN_SERVER = 13
"""The oldest major version of PostgreSQL that has pg_current_snapshot(), and autovacuum's settings for inserts."""

OLD = timedelta(hours=1)
"""A transaction as old as this is an oversight: within an hour a busy queue leaves millions of dead row versions, all
of which stay until it ends."""

MAX_NOTIFY_USAGE = 0.5
"""How full the server's NOTIFY queue may be: where a listener has left half of it unread, it will not read the rest."""


class Level(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """Must be mended: something does not work, or is open to whom it should not be."""
    WARNING = "warning"
    """Should be looked at; it may be meant."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    level: Level
    sentence: str
    """What it is, why it matters, and what to do: "what: why; do Y"."""


SERVER = """
SELECT current_setting('server_version_num')::integer / 10000, current_setting('server_version'),
       current_setting('track_counts')::boolean, current_setting('autovacuum')::boolean
"""

ROLE = """
SELECT current_user, rolsuper, rolbypassrls, coalesce(current_setting('app.current_org_id', true), '')
FROM pg_roles WHERE rolname = current_user
"""
"""``current_user`` and not ``session_user``: after SET ROLE its rights are those that count."""

MAY_USE_SCHEMA = "SELECT has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = '{schema}'"

MISSING_RIGHTS = """
SELECT c.relname, n.needed
FROM unnest($1::text[], $2::text[], $3::text[], $4::text[]) WITH ORDINALITY
    AS n (name, needed, privilege, column_name, position)
JOIN pg_class c ON c.relname = n.name
JOIN pg_namespace s ON s.oid = c.relnamespace AND s.nspname = '{schema}'
WHERE NOT CASE WHEN n.column_name IS NULL THEN has_table_privilege(c.oid, n.privilege)
               ELSE has_column_privilege(c.oid, n.column_name, n.privilege) END
GROUP BY c.relname, n.needed ORDER BY min(n.position)
"""
"""From the catalogs, which everybody may read: trying it out would spoil the caller's transaction. A table that is not
there is the migrations' business; whoever has a right to a table has it to each of its columns."""

ROW_SECURITY = """
SELECT c.relrowsecurity, c.relforcerowsecurity,
       coalesce(bool_or(
           p.polname = 'tenant_isolation' AND p.polpermissive AND p.polcmd = '*' AND p.polroles = '{0}'
           AND pg_get_expr(p.polqual, p.polrelid) LIKE '%app.current_org_id%'
           AND pg_get_expr(p.polwithcheck, p.polrelid) LIKE '%app.current_org_id%'
       ), false),
       array_remove(array_agg(CASE WHEN p.polpermissive THEN p.polname::text END), 'tenant_isolation')
FROM pg_class c
JOIN pg_namespace s ON s.oid = c.relnamespace
LEFT JOIN pg_policy p ON p.polrelid = c.oid
WHERE s.nspname = '{schema}' AND c.relname = 'operations'
GROUP BY c.oid
"""
"""Permissive policies are joined by OR, so that each further one opens what the first one closes."""

NOT_VACUUMED = """
SELECT c.relname
FROM pg_class c
JOIN pg_namespace s ON s.oid = c.relnamespace
CROSS JOIN pg_options_to_table(c.reloptions) AS o
WHERE s.nspname = '{schema}' AND o.option_name = 'autovacuum_enabled' AND NOT o.option_value::boolean
ORDER BY c.relname
"""

OLD_SESSIONS = """
SELECT pid, usename, application_name, state, extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start < clock_timestamp() - $1::interval
  AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
ORDER BY xact_start
"""
"""Only those that keep something: an idle transaction under READ COMMITTED which has written nothing has neither. A
role without pg_read_all_stats sees its own sessions alone."""

OLD_PREPARED = """
SELECT gid, owner, extract(epoch FROM clock_timestamp() - prepared)::float8
FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < clock_timestamp() - $1::interval
ORDER BY prepared
"""

IDLE_SLOTS = "SELECT slot_name FROM pg_replication_slots WHERE xmin IS NOT NULL AND NOT active ORDER BY slot_name"
"""Of any database, since a standby's horizon is the whole server's. How old it is only PostgreSQL 17 knows."""

SERVED = """
SELECT DISTINCT unnest(queues) FROM {schema}.workers WHERE heartbeat_at >= statement_timestamp() - silence
"""

PAUSED = """
SELECT name, extract(epoch FROM statement_timestamp() - paused_at)::float8
FROM {schema}.queues WHERE paused_at IS NOT NULL ORDER BY name
"""


async def check(conn: Connection, *, schema: str | None = None, old: timedelta = OLD) -> list[Finding]:
    """Look at the server, the connection's role, the schema and what stands in it.

    Args:
        conn: outside of :func:`~recado.queue.operations.tenant`; behind a transaction-mode pooler in a transaction.
        schema: the schema to look at; ``None`` takes the setting's. It need not exist.
        old: how old a transaction may be.

    Returns:
        What was found, by subject; what cannot be told because of another finding is left out.
    """
    findings = [*await _server(conn), *await _role(conn), *await _horizon(conn, old)]
    trouble = await _schema(conn, schema)
    findings += trouble
    if any(finding.level is Level.ERROR for finding in trouble):
        return findings
    findings += [*await _row_security(conn, schema), *await _rights(conn, schema), *await _vacuum(conn, schema)]
    if not await _missing(conn, {"jobs": SELECT, "workers": SELECT, "queues": SELECT}, schema):
        findings += await _work(conn, schema)
    return findings


async def check_poolers(database: Connector, direct: Connector | None) -> list[Finding]:
    """Look for a pooler in transaction mode between us and the server.

    Args:
        database: how services connect.
        direct: how workers and the API connect for LISTEN, if that is another way.

    Raises:
        DatabaseUnavailable: the server refuses a connection, or the pooler has no two servers to spare.
        OSError: there is no server.
    """
    findings = []
    shared = await sharing(database)
    if direct is not None and await sharing(direct) is not Sharing.NONE:
        findings.append(
            _error(
                "RECADO_LISTEN_DSN leads through a pooler in transaction mode: nothing is heard there, and workers "
                "refuse to start; let it name the server itself, or leave it out"
            )
        )
    if direct is None and shared is not Sharing.NONE:
        findings.append(
            _warning(
                "the database is behind a pooler in transaction mode: LISTEN hears nothing through it, so that workers "
                "poll, and jobs start up to two seconds late; let RECADO_LISTEN_DSN name the server itself"
            )
        )
    if shared is Sharing.STATEMENTS:
        findings.append(
            _warning(
                "the pooler mixes up prepared statements: connections may run each other's SQL; create the services' "
                "pools with statement_cache_size=0, or set max_prepared_statements in PgBouncer 1.21 or newer"
            )
        )
    return findings


# --- the server ---


async def _server(conn: Connection) -> list[Finding]:
    [row] = await conn.fetch(SERVER)
    return _server_findings(*row)


def _server_findings(major: int, version: str, track_counts: bool, autovacuum: bool) -> list[Finding]:
    findings = []
    if major < MIN_SERVER:
        findings.append(
            _error(f"the server is PostgreSQL {version}: recado's statements need {MIN_SERVER} or newer; upgrade it")
        )
    for name, on in {"track_counts": track_counts, "autovacuum": autovacuum}.items():
        if not on:
            findings.append(
                _error(
                    f"{name} is off: nothing cleans up after the queue, whose every job leaves dead row versions, and "
                    f"it gets slower and slower; set {name} = on"
                )
            )
    return findings


async def _horizon(conn: Connection, old: timedelta) -> list[Finding]:
    findings = []
    for pid, role, application, state, age in await conn.fetch(OLD_SESSIONS, old):
        findings.append(
            _warning(
                f"session {pid} of role {role} (application {application!r}, {state}) has been in a transaction for "
                f"{_duration(age)}: {_KEEPS}; end it, if need be by SELECT pg_terminate_backend({pid})"
            )
        )
    for gid, role, age in await conn.fetch(OLD_PREPARED, old):
        findings.append(
            _warning(
                f"transaction {gid!r} of role {role} has been prepared for {_duration(age)}: {_KEEPS}; COMMIT PREPARED "
                "or ROLLBACK PREPARED it"
            )
        )
    for [name] in await conn.fetch(IDLE_SLOTS):
        findings.append(
            _warning(
                f"replication slot {name} is not in use: {_KEEPS}; start the standby it is for, or SELECT "
                f"pg_drop_replication_slot('{name}')"
            )
        )
    return findings


_KEEPS = "as long as it stands, VACUUM can remove nothing that was changed since, and the queue gets slower"


# --- who asks ---


async def _role(conn: Connection) -> list[Finding]:
    [(role, superuser, bypasses, organization)] = await conn.fetch(ROLE)
    findings = []
    if superuser or bypasses:
        what, mend = (
            ("is a superuser", "let services connect as an ordinary role, and check as that one")
            if superuser
            else ("has BYPASSRLS", f"ALTER ROLE {role} NOBYPASSRLS")
        )
        findings.append(
            _error(
                f"role {role} {what}: row-level security does not hold for it, and tenants see each other's "
                f"operations; {mend}"
            )
        )
    if organization:
        findings.append(
            _error(
                f"app.current_org_id is {organization!r} before anybody has set it: who forgets to name a tenant is "
                "taken for that one; find where it is set, for the role, the database or the server, and RESET it there"
            )
        )
    return findings


# --- the schema ---


async def _schema(conn: Connection, schema: str | None) -> list[Finding]:
    name = resolve_schema(schema)
    usable = await conn.fetchval(fill(MAY_USE_SCHEMA, schema))
    if usable is False or await _missing(conn, {"schema_migrations": SELECT}, schema):
        return [
            _error(
                f"the role may not look into schema {name}: it can neither enqueue nor work; GRANT USAGE ON SCHEMA "
                f"{name} and SELECT ON {name}.schema_migrations to it"
            )
        ]
    try:
        await migrate.check_schema(conn, schema=schema)
    except SchemaMismatch as error:
        return [_error(str(error))]
    return [
        _warning(
            f"migration {migration} was edited after it was applied: the schema is not quite what this version of "
            "recado expects, and will refuse the next migration; put the file back, and compare the schema"
        )
        for migration in await migrate.status(conn, schema=schema)
        if migration.edited
    ]


async def _row_security(conn: Connection, schema: str | None) -> list[Finding]:
    table = f"{resolve_schema(schema)}.operations"
    [(enabled, forced, policy, others)] = await conn.fetch(fill(ROW_SECURITY, schema))
    findings = []
    if not enabled:
        findings.append(
            _error(
                f"row-level security on {table} is disabled: tenants see each other's operations; ALTER TABLE "
                f"{table} ENABLE ROW LEVEL SECURITY"
            )
        )
    if not forced:
        findings.append(
            _error(
                f"row-level security on {table} is not forced: it does not hold for the table's owner; ALTER TABLE "
                f"{table} FORCE ROW LEVEL SECURITY"
            )
        )
    if not policy:
        findings.append(
            _error(
                f"policy tenant_isolation on {table} is missing or was changed: tenants see each other's operations, "
                "or none; create it as `recado migrate sql` prints it"
            )
        )
    findings += [
        _error(
            f"policy {name} on {table} is not recado's: it shows operations that tenant_isolation hides; DROP POLICY "
            f"{name} ON {table}, or make it restrictive"
        )
        for name in filter(None, others)
    ]
    return findings


async def _rights(conn: Connection, schema: str | None) -> list[Finding]:
    lacking = {purpose: await _missing(conn, needs, schema) for purpose, needs in PURPOSES.items()}
    useless = all(lacking.values())
    findings = []
    for purpose, missing in lacking.items():
        if missing:
            # What a role is meant for, only people know; but it is meant for something, and most enqueue.
            must = useless and PURPOSES[purpose] is ENQUEUE
            tell, unless = (_error, "") if must else (_warning, ", if it is meant to")
            rights = [f"{', '.join(names)} ON {resolve_schema(schema)}.{table}" for table, names in missing.items()]
            findings.append(
                tell(
                    f"the role may not {purpose}: it lacks {'; '.join(rights)}; GRANT that as `recado grants` prints "
                    f"it{unless}"
                )
            )
    return findings


async def _missing(conn: Connection, needs: Needs, schema: str | None) -> dict[str, list[str]]:
    """Those of ``needs`` that the connection's role does not have."""
    asked = [
        (table, right, privilege, column)
        for table, rights in needs.items()
        for right in rights
        for privilege, columns in [columns_of(right)]
        for column in columns
    ]
    rows = await conn.fetch(fill(MISSING_RIGHTS, schema), *map(list, zip(*asked, strict=True)))
    missing: dict[str, list[str]] = {}
    for table, right in rows:
        missing.setdefault(table, []).append(right)
    return missing


async def _vacuum(conn: Connection, schema: str | None) -> list[Finding]:
    name = resolve_schema(schema)
    return [
        _error(
            f"autovacuum is switched off for {name}.{table}: nothing cleans up in it, and it gets slower and slower; "
            f"ALTER TABLE {name}.{table} RESET (autovacuum_enabled)"
        )
        for [table] in await conn.fetch(fill(NOT_VACUUMED, schema))
    ]


# --- what there is to do ---


async def _work(conn: Connection, schema: str | None) -> list[Finding]:
    depths = await queue_depths(conn, schema=schema)
    paused = await conn.fetch(fill(PAUSED, schema))
    served = {row[0] for row in await conn.fetch(fill(SERVED, schema))}
    dead = sum(depth.dead for depth in depths.depths)
    findings = _queues(depths, paused, served)
    if dead:
        findings.append(
            _warning(f"{_jobs(dead)} dead: nobody will try again by itself; see `recado dead`, and `recado jobs retry`")
        )
    if depths.notification_queue_usage > MAX_NOTIFY_USAGE:
        findings.append(
            _error(
                f"the server's NOTIFY queue is {depths.notification_queue_usage:.0%} full: once it is, every commit "
                "that notifies fails; end the session that listens and does not read, in whichever database"
            )
        )
    return findings


def _queues(depths: Depths, paused: list[asyncpg.Record], served: set[str]) -> list[Finding]:
    ready: dict[str, int] = {}
    oldest: dict[str, float] = {}
    for depth in depths.depths:
        if depth.oldest_ready is not None:
            ready[depth.queue] = ready.get(depth.queue, 0) + depth.ready
            oldest[depth.queue] = max(oldest.get(depth.queue, 0.0), depth.oldest_ready)
    findings = [
        _warning(
            f"queue {name} has been paused for {_duration(age)}, and {_jobs(ready.pop(name, 0))} due in it: nobody "
            "claims them; call recado.queue.resume() when they may run"
        )
        for name, age in paused
    ]
    findings += [
        _error(
            f"queue {name} has no live worker, and {_jobs(number)} due in it, the oldest for "
            f"{_duration(oldest[name])}: nobody will run them; start a worker with `-q {name}`"
        )
        for name, number in ready.items()
        if name not in served
    ]
    return findings


def _jobs(number: int) -> str:
    return "1 job is" if number == 1 else f"{number:,} jobs are"


def _duration(seconds: float) -> str:
    """About how long that is, in the unit a person would take."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _error(sentence: str) -> Finding:
    return Finding(Level.ERROR, sentence)


def _warning(sentence: str) -> Finding:
    return Finding(Level.WARNING, sentence)
