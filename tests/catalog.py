"""What the system catalogs say about a schema: as lines to compare, and as the SQL of ``recado/schema.sql``.

``python -m tests.catalog > recado/schema.sql`` writes that file anew, from the migrations, on an embedded server.
"""

from __future__ import annotations

import asyncio
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg

from recado import embedded
from recado.queue import migrate
from recado.settings import DEFAULT_SCHEMA
from recado.testing import database_url

HEADER = """\
-- The whole current schema, to be read. Generated from the migrations, and held to them by a test:
--     python -m tests.catalog > recado/schema.sql
-- To bring a database to it, use `recado migrate up`, or give psql what `recado migrate sql` prints.
"""

FIRST_USER_OID = 16384
"""FirstNormalObjectId of PostgreSQL's sources: what initdb makes has a lower one."""

PLAIN_SESSION = "SET LOCAL search_path = pg_catalog; SET LOCAL TimeZone = UTC"
"""So that names come out qualified, and points in time the same, however role and server are configured."""

KINDS = {
    "schema": """
        SELECT format('owner=%s acl=%s comment=%s',
            n.nspowner::regrole, n.nspacl, obj_description(n.oid, 'pg_namespace'))
        FROM pg_namespace n WHERE n.nspname = $1""",
    "relation": """
        SELECT format('%s kind=%s persistence=%s owner=%s options=%s toast_options=%s row_security=%s,%s '
                      'replica_identity=%s access_method=%s inherits=%s acl=%s comment=%s',
            c.relname, c.relkind, c.relpersistence, c.relowner::regrole,
            ARRAY(SELECT unnest(c.reloptions) ORDER BY 1), ARRAY(SELECT unnest(t.reloptions) ORDER BY 1),
            c.relrowsecurity, c.relforcerowsecurity, c.relreplident, m.amname,
            ARRAY(SELECT inhparent::regclass FROM pg_inherits WHERE inhrelid = c.oid ORDER BY inhseqno),
            c.relacl, obj_description(c.oid, 'pg_class'))
        FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_class t ON t.oid = c.reltoastrelid LEFT JOIN pg_am m ON m.oid = c.relam
        WHERE n.nspname = $1 AND c.relkind NOT IN ('i', 'I')""",
    "column": """
        SELECT format('%s.%s position=%s type=%s not_null=%s default=%s identity=%s generated=%s collation=%s '
                      'storage=%s compression=%s options=%s acl=%s comment=%s',
            c.relname, a.attname,
            row_number() OVER (PARTITION BY c.oid ORDER BY a.attnum), format_type(a.atttypid, a.atttypmod),
            a.attnotnull, pg_get_expr(d.adbin, d.adrelid), a.attidentity, a.attgenerated,
            nullif(a.attcollation, 0)::regcollation, a.attstorage, a.attcompression, a.attoptions, a.attacl,
            col_description(c.oid, a.attnum))
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE n.nspname = $1 AND c.relkind NOT IN ('i', 'I') AND a.attnum > 0 AND NOT a.attisdropped""",
    # NOT NULL has been a constraint with a name since PostgreSQL 18; the columns tell of it everywhere. Printed
    # pretty, because otherwise `a BETWEEN b AND c AND d` differs from what it is itself printed as, in parentheses.
    "constraint": """
        SELECT format('%s %s %s %s comment=%s', nullif(k.conrelid, 0)::regclass, nullif(k.contypid, 0)::regtype,
            k.conname, pg_get_constraintdef(k.oid, true), obj_description(k.oid, 'pg_constraint'))
        FROM pg_constraint k JOIN pg_namespace n ON n.oid = k.connamespace
        WHERE n.nspname = $1 AND k.contype <> 'n'""",
    "index": """
        SELECT format('%s valid=%s clustered=%s replica_identity=%s comment=%s',
            pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisclustered, i.indisreplident,
            obj_description(i.indexrelid, 'pg_class'))
        FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = $1""",
    "policy": """
        SELECT format('%s.%s %s for=%s to=%s using=%s check=%s', p.tablename, p.policyname, p.permissive, p.cmd,
            p.roles, p.qual, p.with_check)
        FROM pg_policies p WHERE p.schemaname = $1""",
    "trigger": """
        SELECT format('%s enabled=%s', pg_get_triggerdef(t.oid), t.tgenabled)
        FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = $1 AND NOT t.tgisinternal""",
    # The body of a view is its rule.
    "rule": """
        SELECT format('%s enabled=%s', pg_get_ruledef(r.oid), r.ev_enabled)
        FROM pg_rewrite r JOIN pg_class c ON c.oid = r.ev_class JOIN pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = $1""",
    "function": """
        SELECT format('%s kind=%s owner=%s acl=%s comment=%s %s', p.oid::regprocedure, p.prokind, p.proowner::regrole,
            p.proacl, obj_description(p.oid, 'pg_proc'),
            CASE WHEN p.prokind <> 'a' THEN pg_get_functiondef(p.oid) END)
        FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE n.nspname = $1""",
    "sequence": """
        SELECT format('%s type=%s start=%s min=%s max=%s step=%s cycle=%s cache=%s',
            s.sequencename, s.data_type, s.start_value, s.min_value, s.max_value, s.increment_by, s.cycle, s.cache_size)
        FROM pg_sequences s WHERE s.schemaname = $1""",
    # Without the row type of each table and the array type of each type.
    "type": """
        SELECT format('%s kind=%s base=%s not_null=%s default=%s labels=%s acl=%s comment=%s', t.typname, t.typtype,
            format_type(nullif(t.typbasetype, 0), t.typtypmod), t.typnotnull, t.typdefault,
            ARRAY(SELECT enumlabel FROM pg_enum WHERE enumtypid = t.oid ORDER BY enumsortorder),
            t.typacl, obj_description(t.oid, 'pg_type'))
        FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace LEFT JOIN pg_class c ON c.oid = t.typrelid
        WHERE n.nspname = $1 AND coalesce(c.relkind, 'c') = 'c'
            AND NOT EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid)""",
    "statistics": """
        SELECT pg_get_statisticsobjdef(s.oid)
        FROM pg_statistic_ext s JOIN pg_namespace n ON n.oid = s.stxnamespace WHERE n.nspname = $1""",
    "default privileges": """
        SELECT format('role=%s kind=%s acl=%s', d.defaclrole::regrole, d.defaclobjtype, d.defaclacl)
        FROM pg_default_acl d JOIN pg_namespace n ON n.oid = d.defaclnamespace WHERE n.nspname = $1""",
}
"""For each kind of thing a schema can hold, a query for one line per thing in schema ``$1``."""

CATALOGS_WITH_OIDS = """
SELECT c.relname FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'oid'
WHERE c.relnamespace = 'pg_catalog'::regnamespace AND c.relkind = 'r' AND NOT c.relisshared ORDER BY c.relname
"""

TABLES = """
SELECT c.oid, c.oid::regclass::text AS name, c.reloptions, c.relrowsecurity, c.relforcerowsecurity
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = $1 AND c.relkind = 'r' ORDER BY c.relname
"""

COLUMNS = """
SELECT quote_ident(a.attname) AS name, format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull,
    pg_get_expr(d.adbin, d.adrelid) AS default
FROM pg_attribute a LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

CONSTRAINTS = """
SELECT quote_ident(conname) AS name, pg_get_constraintdef(oid, true) AS definition
FROM pg_constraint WHERE conrelid = $1 AND contype = ANY ($2::text::"char"[])
ORDER BY array_position('{p,u,x,c,f}'::"char"[], contype), conname
"""

INDEXES = """
SELECT pg_get_indexdef(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = $1 AND NOT EXISTS (SELECT FROM pg_constraint k WHERE k.conindid = i.indexrelid AND k.contype <> 'f')
ORDER BY c.relname
"""

POLICIES = """
SELECT quote_ident(policyname) AS name, permissive, cmd, array_to_string(roles, ', ') AS roles, qual, with_check
FROM pg_policies WHERE format('%I.%I', schemaname, tablename)::regclass = $1 ORDER BY policyname
"""


async def describe(conn: asyncpg.Connection, schema: str) -> list[str]:
    """Everything there is in ``schema``, one sorted line each; two schemas of the same name are equal if these are."""
    lines = []
    async with conn.transaction():
        await conn.execute(PLAIN_SESSION)
        for kind, query in KINDS.items():
            lines += [f"{kind} {record[0]}" for record in await conn.fetch(query, schema)]
    return sorted(lines)


async def user_objects(conn: asyncpg.Connection) -> list[str]:
    """What the database holds beyond what it was born with, by catalog and oid."""
    catalogs = [record[0] for record in await conn.fetch(CATALOGS_WITH_OIDS)]
    query = " UNION ALL ".join(
        f"SELECT '{name} ' || oid FROM {name} WHERE oid >= {FIRST_USER_OID}" for name in catalogs
    )
    return sorted(record[0] for record in await conn.fetch(query))


async def render(conn: asyncpg.Connection, schema: str) -> str:
    """``schema`` as SQL: tables and what belongs to them. What else it may hold, only :func:`describe` would tell."""
    async with conn.transaction():
        await conn.execute(PLAIN_SESSION)
        tables = await conn.fetch(TABLES, schema)
        blocks = [HEADER, f"CREATE SCHEMA {schema};\n"]
        blocks += ["".join([line async for line in _table(conn, table)]) for table in tables]
        # Last, so that no table has to wait for another.
        foreign_keys = [line for table in tables for line in await _foreign_keys(conn, table)]
        blocks += ["".join(foreign_keys)] if foreign_keys else []
    return "\n".join(blocks)


async def _table(conn: asyncpg.Connection, table: asyncpg.Record) -> AsyncIterator[str]:
    columns = await conn.fetch(COLUMNS, table["oid"])
    constraints = await conn.fetch(CONSTRAINTS, table["oid"], "{p,u,x,c}")
    items = [*_columns(columns), *(f"    CONSTRAINT {c['name']} {c['definition']}" for c in constraints)]
    yield f"CREATE TABLE {table['name']} (\n" + ",\n".join(items) + "\n)"
    if table["reloptions"]:
        yield " WITH (\n" + ",\n".join(f"    {o.replace('=', ' = ', 1)}" for o in sorted(table["reloptions"])) + "\n)"
    yield ";\n"
    for index in await conn.fetch(INDEXES, table["oid"]):
        yield f"{index[0]};\n"
    if table["relrowsecurity"]:
        yield f"ALTER TABLE {table['name']} ENABLE ROW LEVEL SECURITY;\n"
    if table["relforcerowsecurity"]:
        yield f"ALTER TABLE {table['name']} FORCE ROW LEVEL SECURITY;\n"
    for policy in await conn.fetch(POLICIES, table["oid"]):
        yield _policy(policy, table)


def _columns(columns: list[asyncpg.Record]) -> Iterator[str]:
    names, types = (max(len(column[key]) for column in columns) for key in ("name", "type"))
    for column in columns:
        line = f"    {column['name']:{names}} {column['type']:{types}}"
        line += " NOT NULL" if column["attnotnull"] else ""
        line += "" if column["default"] is None else f" DEFAULT {column['default']}"
        yield line.rstrip()


def _policy(policy: asyncpg.Record, table: asyncpg.Record) -> str:
    sql = f"CREATE POLICY {policy['name']} ON {table['name']} AS {policy['permissive']} FOR {policy['cmd']}"
    sql += f" TO {policy['roles']}"
    sql += "" if policy["qual"] is None else f"\n    USING ({policy['qual']})"
    sql += "" if policy["with_check"] is None else f"\n    WITH CHECK ({policy['with_check']})"
    return f"{sql};\n"


async def _foreign_keys(conn: asyncpg.Connection, table: asyncpg.Record) -> list[str]:
    keys = await conn.fetch(CONSTRAINTS, table["oid"], "{f}")
    return [f"ALTER TABLE {table['name']}\n    ADD CONSTRAINT {key['name']} {key['definition']};\n" for key in keys]


@asynccontextmanager
async def connection(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection for the length of a block."""
    conn = await asyncpg.connect(dsn)
    try:
        yield conn
    finally:
        await conn.close()


@asynccontextmanager
async def empty_database(server: str) -> AsyncIterator[str]:
    """The URL of a new database on ``server`` with nothing in it, dropped after the block."""
    name = f"recado_{uuid.uuid4().hex}"
    async with connection(server) as conn:
        await conn.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        try:
            yield database_url(server, name)
        finally:
            await conn.execute(f"DROP DATABASE {name} WITH (FORCE)")


async def generate(server: str) -> str:
    """The text of ``recado/schema.sql``."""
    async with empty_database(server) as dsn, connection(dsn) as conn:
        await migrate.up(conn, schema=DEFAULT_SCHEMA)
        return await render(conn, DEFAULT_SCHEMA)


@contextmanager
def _server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder, embedded.start(Path(folder) / "data", durable=False) as server:
        yield server.dsn()


if __name__ == "__main__":
    with _server() as server:
        print(asyncio.run(generate(server)), end="")
