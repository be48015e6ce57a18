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

READY_TIMEOUT = 0.7
"""Seconds to get a connection and to look at the schema; the answer is promised within one."""

RELEASE_TIMEOUT = 0.2
"""Seconds to give the connection back; a server that answers needs a millisecond."""

DATABASE_TROUBLE = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError)
"""The server's errors, the driver's, and the network's, TimeoutError among them."""


async def healthz(request: Request) -> JSONResponse:
    """200 as long as the process answers; the database is not asked, since a restart would not mend it."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> JSONResponse:
    """200 when the database answers and its schema is the one this version works with; else 503 and why."""
    state = request.app.state
    try:
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
    deadline = asyncio.get_running_loop().time() + READY_TIMEOUT
    conn = await pool.acquire(timeout=READY_TIMEOUT)
    try:
        async with asyncio.timeout_at(deadline):
            await check_schema(conn, schema=schema)
    finally:
        # Outside of the deadline, since a release that is cancelled goes on unattended. It has the server cancel
        # what still runs there, and drops the connection when the server does not say in time that it has.
        await pool.release(conn, timeout=RELEASE_TIMEOUT)


def _unavailable(reason: str) -> JSONResponse:
    return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)
