"""``recado/schema.sql`` is what the migrations produce. Here ``dsn``, and so ``conn``, mean an empty database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.resources import files

import asyncpg
import pytest
import pytest_asyncio

from recado.queue import migrate
from recado.settings import DEFAULT_SCHEMA
from tests import catalog

SCHEMA_SQL = (files("recado") / "schema.sql").read_text("utf-8")


@pytest_asyncio.fixture
async def dsn(recado_server: str) -> AsyncIterator[str]:
    async with catalog.empty_database(recado_server) as dsn:
        yield dsn


async def test_the_file_is_what_the_migrations_produce(recado_server: str) -> None:
    current = await catalog.generate(recado_server)
    assert current == SCHEMA_SQL, "run: python -m tests.catalog > recado/schema.sql"


async def test_the_file_alone_builds_what_the_migrations_build(conn: asyncpg.Connection, recado_server: str) -> None:
    await migrate.up(conn, schema=DEFAULT_SCHEMA)
    async with catalog.empty_database(recado_server) as dsn, catalog.connection(dsn) as from_file:
        await from_file.execute(SCHEMA_SQL)
        assert await catalog.describe(from_file, DEFAULT_SCHEMA) == await catalog.describe(conn, DEFAULT_SCHEMA)


async def test_what_is_generated_builds_row_level_security_too(conn: asyncpg.Connection, recado_server: str) -> None:
    await conn.execute(
        """
        CREATE SCHEMA recado;
        CREATE TABLE recado.secrets (organization_id text NOT NULL, "Mixed" text DEFAULT 'a', UNIQUE ("Mixed"));
        ALTER TABLE recado.secrets ENABLE ROW LEVEL SECURITY;
        ALTER TABLE recado.secrets FORCE ROW LEVEL SECURITY;
        CREATE POLICY tenant ON recado.secrets AS RESTRICTIVE FOR UPDATE TO pg_monitor, PUBLIC
            USING (organization_id = current_setting('app.id', true)) WITH CHECK (organization_id <> '');
        CREATE POLICY reading ON recado.secrets FOR SELECT USING (true);
        """
    )
    async with catalog.empty_database(recado_server) as dsn, catalog.connection(dsn) as rebuilt:
        await rebuilt.execute(await catalog.render(conn, "recado"))
        assert await catalog.describe(rebuilt, "recado") == await catalog.describe(conn, "recado")


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE recado.jobs SET (fillfactor = 90)",
        "ALTER TABLE recado.jobs SET (toast.autovacuum_enabled = off)",
        "ALTER TABLE recado.jobs ADD surplus integer",
        "ALTER TABLE recado.jobs ALTER queue SET DEFAULT 'other'",
        "ALTER TABLE recado.jobs ALTER queue DROP NOT NULL",
        "ALTER TABLE recado.jobs ALTER attempts TYPE integer",
        "ALTER TABLE recado.jobs ALTER payload SET STORAGE EXTERNAL",
        "ALTER TABLE recado.jobs DROP CONSTRAINT jobs_priority_check",
        "ALTER TABLE recado.jobs ENABLE ROW LEVEL SECURITY",
        "ALTER TABLE recado.jobs FORCE ROW LEVEL SECURITY",
        "ALTER TABLE recado.jobs SET UNLOGGED",
        "CREATE POLICY everyone ON recado.jobs USING (true)",
        "DROP INDEX recado.jobs_claim_idx",
        "ALTER INDEX recado.jobs_claim_idx SET (fillfactor = 50)",
        "CREATE SEQUENCE recado.numbers",
        "CREATE TYPE recado.mood AS ENUM ('good', 'bad')",
        "CREATE VIEW recado.all_jobs AS SELECT id FROM recado.jobs",
        "CREATE FUNCTION recado.answer() RETURNS integer LANGUAGE sql AS 'SELECT 42'",
        "CREATE RULE never AS ON DELETE TO recado.jobs DO INSTEAD NOTHING",
        "CREATE STATISTICS recado.numbers ON queue, priority FROM recado.jobs",
        "CREATE TRIGGER again BEFORE UPDATE ON recado.jobs EXECUTE FUNCTION suppress_redundant_updates_trigger()",
        "GRANT SELECT ON recado.jobs TO PUBLIC",
        "GRANT SELECT (id) ON recado.jobs TO PUBLIC",
        "GRANT USAGE ON SCHEMA recado TO PUBLIC",
        "ALTER DEFAULT PRIVILEGES IN SCHEMA recado GRANT SELECT ON TABLES TO PUBLIC",
        "COMMENT ON TABLE recado.jobs IS 'the jobs'",
        "COMMENT ON COLUMN recado.jobs.id IS 'the id'",
    ],
)
async def test_no_change_of_the_schema_goes_unnoticed(conn: asyncpg.Connection, change: str) -> None:
    await conn.execute(SCHEMA_SQL)
    description = await catalog.describe(conn, "recado")
    # UNLOGGED, for one, is refused as long as a logged table refers to this one.
    await conn.execute(f"ALTER TABLE recado.job_errors DROP CONSTRAINT job_errors_job_id_fkey; {change}")
    without_key = [line for line in description if "job_errors_job_id_fkey" not in line]
    assert len(without_key) == len(description) - 1
    assert await catalog.describe(conn, "recado") != without_key
