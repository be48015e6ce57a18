"""What ``recado bench`` asks of the server besides the queue's own statements: a schema to itself, and numbers."""

from __future__ import annotations

import asyncpg

from recado.errors import ConfigurationError
from recado.queue.connections import Connection
from recado.queue.enqueue import INSERT
from recado.queue.models import JobStatus
from recado.queue.statements import fill

CREATE = "CREATE SCHEMA {schema}"
"""Without IF NOT EXISTS: a schema that is there belongs to somebody, perhaps to another benchmark."""

DROP = "DROP SCHEMA {schema} CASCADE"
"""Only for a schema that :data:`CREATE` has made."""

EMPTY = "TRUNCATE {schema}.jobs, {schema}.workers, {schema}.queues, {schema}.job_stats CASCADE"
"""New files for tables and indexes, so that no run meets the dead rows of the one before."""

SETTLE = "VACUUM (ANALYZE) {schema}.jobs"
"""What autovacuum would do soon after so many inserts, done before the clock starts."""

CHECKPOINT = "CHECKPOINT"
"""So that one run's dirty pages are not written out during the next."""

COUNT = "SELECT status, count(*) FROM {schema}.jobs GROUP BY status"
"""Reads the whole table; nobody else waits for it."""

BARE_INSERT = INSERT.partition("RETURNING")[0]
"""The enqueue without its gate: neither looks for hungry workers nor notifies."""

SERVER_SETTINGS = (
    "server_version",
    "shared_buffers",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_level",
    "max_wal_size",
    "checkpoint_timeout",
    "autovacuum",
    "jit",
)
"""What a figure depends on, and so is told beside it."""

READ_SETTINGS = "SELECT name, current_setting(name) FROM unnest($1::text[]) AS name"
"""As a person would write them: ``256MB``, not 32768 pages."""


async def create_schema(conn: Connection, schema: str) -> None:
    """Make an empty schema.

    Raises:
        ConfigurationError: it is there already.
    """
    try:
        await conn.execute(fill(CREATE, schema))
    except asyncpg.DuplicateSchemaError:
        raise ConfigurationError(
            f"cannot run the benchmark: there is a schema {schema} in this database already, and it may be somebody's; "
            "wait for the benchmark that made it, or drop it"
        ) from None


async def drop_schema(conn: Connection, schema: str) -> None:
    """Drop the schema with all that is in it."""
    await conn.execute(fill(DROP, schema))


async def empty(conn: Connection, schema: str) -> None:
    """Make the queue as it was when it was created."""
    await conn.execute(fill(EMPTY, schema))


async def settle(conn: Connection, schema: str, *, checkpoint: bool) -> None:
    """Let the server do now what it would else do at a time of its own choice.

    Args:
        checkpoint: also write out all dirty pages, of the whole server; takes a superuser.
    """
    await conn.execute(fill(SETTLE, schema))
    if checkpoint:
        await conn.execute(CHECKPOINT)


async def count_by_status(conn: Connection, schema: str) -> dict[JobStatus, int]:
    """How many jobs there are of each status; one that no job has is left out."""
    return {JobStatus(row[0]): row[1] for row in await conn.fetch(fill(COUNT, schema))}


async def server_settings(conn: Connection) -> dict[str, str]:
    """The server's version, and the settings that figures depend on."""
    return {row[0]: row[1] for row in await conn.fetch(READ_SETTINGS, SERVER_SETTINGS)}
