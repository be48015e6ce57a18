"""``recado check``: what it prints, and its exit code."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest
import pytest_asyncio

from recado.queue import pause
from tests.commands import Call, calling
from tests.queue.support import insert, ordinary_role


@pytest_asyncio.fixture
async def role(conn: asyncpg.Connection, dsn: str, schema: str) -> AsyncIterator[str]:
    """The URL for an ordinary role with all rights to the tables."""
    async with ordinary_role(conn, dsn, schema) as url:
        yield url


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], role: str) -> Iterator[Call]:
    """``recado check`` with ``args`` as an ordinary role, on a thread of its own."""
    with calling("check", monkeypatch=monkeypatch, capsys=capsys, dsn=role) as call:
        yield call


async def test_where_all_is_well_it_says_so(call: Call) -> None:
    assert call() == (0, "nothing to mend\n", "")
    assert call("--json") == (0, "[]\n", "")


async def test_a_warning_is_a_line_and_no_failure(call: Call, conn: asyncpg.Connection) -> None:
    await pause(conn, "mail")
    code, out, err = call()
    assert (code, err) == (0, "")
    assert out.startswith("warning: queue mail has been paused for ")
    assert out.count("\n") == 1


async def test_what_must_be_mended_fails_the_command(call: Call, conn: asyncpg.Connection, schema: str) -> None:
    await pause(conn, "mail")
    await insert(conn, schema)
    await conn.execute(f"ALTER TABLE {schema}.operations DISABLE ROW LEVEL SECURITY")
    code, out, err = call()
    assert (code, err) == (1, "")
    assert [line.partition(":")[0] for line in out.splitlines()] == ["error", "warning", "error"]
    assert f"ALTER TABLE {schema}.operations ENABLE ROW LEVEL SECURITY" in out


async def test_as_json_it_says_the_same(call: Call, conn: asyncpg.Connection, schema: str) -> None:
    await insert(conn, schema)
    code, out, err = call("--json")
    assert (code, err) == (1, "")
    [finding] = json.loads(out)
    assert finding.keys() == {"level", "sentence"}
    assert f"{finding['level']}: {finding['sentence']}\n" == call().out


async def test_a_superuser_is_told(call: Call, conn: asyncpg.Connection, dsn: str) -> None:
    name = await conn.fetchval("SELECT current_user")
    code, out, err = call("--dsn", dsn)
    assert (code, err) == (1, "")
    assert out.startswith(f"error: role {name} is a superuser: row-level security does not hold for it")


async def test_a_database_without_the_schema_is_a_finding_like_others(call: Call) -> None:
    code, out, err = call("--schema", "nowhere")
    assert (code, err) == (1, "")
    assert "run `recado migrate up --schema nowhere`" in out


async def test_what_others_have_named_cannot_steer_the_terminal(
    call: Call, conn: asyncpg.Connection, schema: str
) -> None:
    await insert(conn, schema, queue="\x1b[2J\nerror: all is lost")
    out = call().out
    assert out.count("\n") == 1
    assert r"queue \x1b[2J\nerror: all is lost has no live worker" in out


async def test_a_database_that_cannot_be_reached_is_one_sentence(call: Call) -> None:
    code, out, err = call("--dsn", "postgresql://u:hunter2@127.0.0.1:1/db")
    assert (code, out) == (1, "")
    assert err.startswith("recado: cannot connect: ")
    assert "hunter2" not in err
