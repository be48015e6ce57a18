"""Whether a pooler stands between us and the server, and what it does to what connections keep.

PgBouncer in transaction mode gives a client a server for one transaction at a time. LISTEN then hears nothing, for the
server that listens serves somebody else; and a prepared statement is looked for on a server that has never heard of
it, or that keeps another client's SQL under its name. PgBouncer keeps prepared statements apart from 1.21 on, where
``max_prepared_statements`` is not 0.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import Enum
from uuid import uuid4

import asyncpg

from recado.errors import DatabaseUnavailable
from recado.queue.connections import Connector, Link

PID = "SELECT pg_backend_pid()"
"""A pooler invents the pid that it tells at the start, since clients cancel by it; this one is the server's. Of
PgBouncer 1.18 and 1.24 in either mode they differ, of a server itself they never do."""

NAMED = ("SELECT pg_backend_pid(), 1", "SELECT pg_backend_pid(), 2")
"""What two connections prepare under the same name. The number tells whose statement was run."""

ROUNDS = 10
"""How often both are run. A pooler that shares its servers hands out the one that came free last, so in a quiet pool
the first round tells; in a busy one the two may by chance meet different servers, but not each its own all the time."""

SERVER_TIMEOUT = 10.0
"""Seconds to wait for a server of the pooler's; one that has none to spare for so long is of no use to a worker."""


class Sharing(Enum):
    """What becomes of connections on their way to the server."""

    NONE = "none"
    """Each has a server to itself: there is no pooler, or it pools sessions."""
    TRANSACTIONS = "transactions"
    """They share servers; prepared statements work all the same."""
    STATEMENTS = "statements"
    """They share servers, and mix up their prepared statements."""


async def sharing(connector: Connector) -> Sharing:
    """Find out, with one connection of ``connector``'s, and with a second one where there is a pooler.

    Raises:
        DatabaseUnavailable: the server refuses the connection, or the pooler has no two servers to spare.
        OSError: there is no server.
    """
    try:
        async with _connection(connector) as first:
            if not await is_pooled(first):
                return Sharing.NONE
            async with _connection(connector) as second:
                return await _compare(first, second)
    except TimeoutError as error:
        raise DatabaseUnavailable(
            f"cannot connect twice: no server was to be had for {SERVER_TIMEOUT:g} s; raise the pooler's pool size, or "
            "see to the server"
        ) from error


async def is_pooled(conn: asyncpg.Connection[asyncpg.Record]) -> bool:
    """Whether a pooler of any kind stands in between; one statement, which keeps nothing."""
    pid: int = await conn.fetchval(PID)
    return pid != conn.get_server_pid()


async def _compare(*conns: asyncpg.Connection[asyncpg.Record]) -> Sharing:
    name = f"recado_{uuid4().hex}"  # what a pooler's server keeps of it is in nobody's way
    seen: list[tuple[int, int]] = []
    try:
        statements = []
        for conn, query in zip(conns, NAMED, strict=True):
            statement = await conn.prepare(query, name=name)
            # Run at once: until then the connection keeps the server that has parsed it, and there may be but one.
            seen += [(pid, number) for pid, number in await statement.fetch()]
            statements.append(statement)
        for _ in range(ROUNDS):
            for statement in statements:
                seen += [(pid, number) for pid, number in await statement.fetch()]
    except (asyncpg.DuplicatePreparedStatementError, asyncpg.InvalidSQLStatementNameError):
        return Sharing.STATEMENTS
    pids = [pid for pid, _ in seen]
    if [number for _, number in seen] != [1, 2] * (ROUNDS + 1):
        return Sharing.STATEMENTS
    apart = pids[0] != pids[1] and pids == pids[:2] * (ROUNDS + 1)
    return Sharing.NONE if apart else Sharing.TRANSACTIONS


@asynccontextmanager
async def _connection(connector: Connector) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    hasty = replace(connector, kwargs={**connector.kwargs, "command_timeout": SERVER_TIMEOUT})
    link = Link(without_cache(hasty), "probe")
    try:
        async with link.connection() as conn:
            yield conn
    finally:
        await link.close()


def caches_statements(connector: Connector) -> bool:
    """Whether connections keep the statements that they have prepared, as asyncpg's do unless told otherwise."""
    return bool(connector.kwargs.get("statement_cache_size", True))


def without_cache(connector: Connector) -> Connector:
    """The same, with connections that prepare each statement anew, without a name."""
    return replace(connector, kwargs={**connector.kwargs, "statement_cache_size": 0})
