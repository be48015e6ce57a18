"""Hostile input to what services call besides an enqueue, whose is in ``queue/test_limits`` and ``test_payloads``.

Each is refused in one sentence that says what to do, and the caller's transaction goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from recado import Recado
from recado.errors import RecadoError
from recado.queue import cancel, get_job, pause, requeue, resume
from recado.queue.operations import cancel_operation, get_operation, list_operations, tenant

Call = Callable[[asyncpg.Connection, Any], Awaitable[object]]


async def enqueue(conn: asyncpg.Connection, job_type: Any) -> object:
    return await Recado().enqueue(conn, job_type, None)


async def start(conn: asyncpg.Connection, kind: Any) -> object:
    return await with_operations().start_operation(conn, kind, None, organization_id="7")


async def start_for(conn: asyncpg.Connection, organization: Any) -> object:
    return await with_operations().start_operation(conn, "report", None, organization_id=organization)


async def start_by(conn: asyncpg.Connection, who: Any) -> object:
    return await with_operations().start_operation(conn, "report", None, organization_id="7", created_by=who)


async def start_with_key(conn: asyncpg.Connection, key: Any) -> object:
    return await with_operations().start_operation(conn, "report", None, organization_id="7", idempotency_key=key)


async def enter(conn: asyncpg.Connection, organization: Any) -> None:
    async with tenant(conn, organization):
        pass


def with_operations() -> Recado:
    app = Recado()

    @app.operation("report")
    async def report(payload: None) -> None:
        pass

    return app


IDS = [UUID(int=0), UUID(int=2**128 - 1), UUID("6f1b7e0a-3d5c-4c3e-9a59-3d8f3e3b8a10")]
"""None of version 7."""

TEXTS: list[Any] = ["", "x" * 10_000, "a\0b", "a\ud800b", "a\nb", "\u202e", b"bytes", [], {}, object(), float("nan")]

SURFACES: dict[str, tuple[list[Call], list[Any]]] = {
    "ids": ([get_job, cancel, requeue, get_operation, cancel_operation], IDS),
    "queues": ([pause, resume], [*TEXTS, "Mail", "'; DROP TABLE jobs; --", None, 5, True]),
    "job types": ([enqueue], [*TEXTS, None, 5, "operation.report", "_smoke.ECHO"]),
    "kinds": ([start], [*TEXTS, None, 5, "operation.report"]),
    "organizations": ([enter, start_for, list_operations], [*TEXTS, "0", 0, True]),
    "people": ([start_by], ["x" * 10_000, "a\0b", "a\ud800b", "a\nb"]),
    "keys": ([start_with_key], ["", "x" * 10_000, "a\0b", "a\ud800b", b"bytes", 5, True]),
}


@pytest.mark.parametrize("surface", SURFACES)
async def test_what_cannot_be_is_refused_in_one_sentence(surface: str, conn: asyncpg.Connection, schema: str) -> None:
    calls, values = SURFACES[surface]
    for call in calls:
        for value in values:
            async with conn.transaction():
                with pytest.raises(RecadoError, match=r"^cannot [^\n]+: [^\n]+; [^\n]+$") as raised:
                    await call(conn, value)
                assert await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs") == 0
            message = str(raised.value)
            assert len(message) < 500, (call, value)
            assert message.isprintable(), (call, value)
