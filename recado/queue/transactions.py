"""All or nothing, on a connection that may be in a transaction of its owner's."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from recado.queue.connections import Connection

SAVEPOINT = "SAVEPOINT recado_{number}"
"""By hand, since ``conn.transaction()`` makes one only within another ``conn.transaction()``, and refuses where the
caller has said BEGIN, as those do who come from psycopg."""

RELEASE = "RELEASE SAVEPOINT recado_{number}"

ROLLBACK = "ROLLBACK TO SAVEPOINT recado_{number}; RELEASE SAVEPOINT recado_{number}"

_numbers = itertools.count(1)
"""Of the savepoints' names. With one name for all, a savepoint whose block was cancelled before it was released would
hide the one around it, and a rollback to that would undo only a part."""


@asynccontextmanager
async def atomic(conn: Connection) -> AsyncIterator[None]:
    """A block whose statements take effect together or not at all: a transaction, or within one that is open, however
    it was begun, a savepoint.

    Raises:
        asyncpg.InFailedSQLTransactionError: the open transaction has failed already.
    """
    if not conn.is_in_transaction():
        async with conn.transaction():
            yield
        return
    number = next(_numbers)
    await conn.execute(numbered(SAVEPOINT, number))
    try:
        yield
    except BaseException:
        await conn.execute(numbered(ROLLBACK, number))
        raise
    await conn.execute(numbered(RELEASE, number))


def numbered(statement: str, number: int) -> str:
    """``statement`` with ``number``, which can be nothing else, in place of ``{number}``."""
    return statement.replace("{number}", format(number, "d"))
