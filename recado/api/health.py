"""Whether the process lives, and whether it is any use to send it requests. Neither asks for credentials."""

from __future__ import annotations

import asyncio
import logging

import asyncpg
from starlette.requests import Request
from starlette.responses import JSONResponse

from recado.errors import SchemaMismatch
from recado.queue.connections import Pool
from recado.queue.migrate import check_schema

logger = logging.getLogger("recado.api")

READY_TIMEOUT = 0.8
"""Seconds to find out; the answer is promised within one."""

DATABASE_TROUBLE = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""What asyncpg raises: the server's errors, the driver's own, a server that does not speak PostgreSQL's
protocol, and the network's, TimeoutError among them."""


async def healthz(request: Request) -> JSONResponse:
    """200 as long as the process answers; the database is not asked, since a restart would not mend it."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> JSONResponse:
    """200 when the database answers and its schema is the one this version works with; else 503 and why."""
    state = request.app.state
    try:
        async with asyncio.timeout(READY_TIMEOUT):
            await _check(state.pool, state.schema)
    except SchemaMismatch as error:
        return _unavailable(str(error))
    except TimeoutError:
        return _unavailable(
            f"cannot reach the database: neither an answer nor a free connection within {READY_TIMEOUT} s; "
            "look at the server, or give the pool more connections"
        )
    except DATABASE_TROUBLE as error:
        # Not in the answer, which needs no credentials: it may name hosts, roles and databases.
        logger.warning("cannot reach the database: %s: %s", type(error).__name__, error)
        return _unavailable("cannot reach the database: the connection failed; the API's log says why")
    return JSONResponse({"status": "ready"})


async def _check(pool: Pool, schema: str) -> None:
    # The pool's own timeout bounds the release as well.
    async with pool.acquire(timeout=READY_TIMEOUT) as conn:
        try:
            await check_schema(conn, schema=schema)
        except asyncio.CancelledError:
            # To give it back, the pool would first have the server cancel the statement, and wait for that: a
            # server that hangs would hold up the answer. Dropped, it makes room for a new connection.
            conn.terminate()
            raise


def _unavailable(reason: str) -> JSONResponse:
    return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
