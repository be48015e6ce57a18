"""Advisory locks, one for each purpose and schema; all end with their transaction."""

from __future__ import annotations

import hashlib

from recado.queue.connections import Connection
from recado.queue.statements import BOUNDED, resolve_schema

TRY_LOCK = f"SELECT pg_try_advisory_xact_lock($1), {BOUNDED}"
"""Ends with the transaction: behind a transaction-mode pooler a session's lock would stay with a stranger.

The transaction ends by itself when its client falls silent, which would else keep everybody from the sweep."""

WAIT_FOR_LOCK = TRY_LOCK.replace("pg_try_advisory_xact_lock", "pg_advisory_xact_lock")
"""For what everybody has to do in turn, not one for all. The same timeouts bound the wait."""


def lock_key(purpose: str, schema: str | None) -> int:
    """The lock's number: the same in every process, whatever its hash seed."""
    digest = hashlib.sha256(f"recado:{resolve_schema(schema)}:{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], signed=True)


async def try_upkeep_lock(conn: Connection, purpose: str, *, schema: str | None = None) -> bool:
    """Take the lock for ``purpose`` until the transaction ends, if nobody has it."""
    taken: bool = await conn.fetchval(TRY_LOCK, lock_key(purpose, schema))
    return taken


async def wait_for_lock(conn: Connection, purpose: str, *, schema: str | None = None) -> None:
    """Take the lock for ``purpose`` until the transaction ends, after whoever has it."""
    await conn.execute(WAIT_FOR_LOCK, lock_key(purpose, schema))
