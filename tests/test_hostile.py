"""Hostile input to what services call besides an enqueue, whose is in ``queue/test_limits`` and ``test_payloads``.

Each is refused in one sentence that says what to do, and the caller's transaction goes on.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from recado import Recado
from recado.errors import RecadoError
from recado.queue import cancel, get_job, pause, requeue, resume
from recado.queue.operations import cancel_operation, get_operation, list_operations, tenant
from tests import commands
from tests.commands import calling

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
    "organizations": ([enter, start_for, list_operations], [*TEXTS, "0", 0, True, 10**5_000]),
    "people": ([start_by], ["x" * 10_000, "a\0b", "a\ud800b", "a\nb", b"ada", [], object(), True, 1.0, 10**5_000]),
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


# --- on the command line ---


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str) -> Iterator[commands.Call]:
    with calling(monkeypatch=monkeypatch, capsys=capsys, dsn=dsn) as call:
        yield call


NO_TEXTS = ["\udcff", "a\0b", "x" * 10_000]
"""An argument's bytes that are no UTF-8 arrive as lone surrogates; a NUL could only come from within Python."""


@pytest.mark.parametrize("text", NO_TEXTS, ids=["no UTF-8", "NUL", "long"])
def test_a_filter_that_nothing_can_have_is_one_sentence(text: str, call: commands.Call) -> None:
    for args in [
        ("jobs", "list", "--type", text),
        ("jobs", "list", "--queue", text),
        ("jobs", "retry", "--type", text),
        ("jobs", "retry", "--queue", text),
        ("schedules", "list", "--app-name", text),
        ("schedules", "pause", text),
        ("schedules", "resume", "report.daily", "--app-name", text),
    ]:
        result = call(*args)
        assert (result.code, result.out) == (1, ""), args
        assert result.err.startswith("recado: cannot look for "), args
        assert result.err.count("\n") == 1
        assert len(result.err) < 400
        assert result.err[:-1].isprintable()


@pytest.mark.parametrize(
    "args",
    [
        *(("jobs", "list", "--limit", str(limit)) for limit in (0, -1, 2**31, 2**70, "1.5", "x", "")),
        *(("dead", "--limit", str(limit)) for limit in (0, -1, 2**70)),
        *(
            ("jobs", verb, job_id)
            for verb in ("show", "cancel", "retry")
            for job_id in ("7", "", "\udcff", "x" * 9_999)
        ),
        *(("jobs", "list", "--status", status) for status in ("Dead", "", "\udcff")),
    ],
)
def test_a_command_that_was_called_wrongly_says_so(args: tuple[str, ...], call: commands.Call) -> None:
    result = call(*args)
    assert (result.code, result.out) == (2, "")
    assert "Usage: recado " in result.err
    assert "Traceback" not in result.err
