"""The command line: what it does to a database, what it prints, and its exit code.

In this module ``dsn``, and so ``conn``, mean an empty database.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest
import pytest_asyncio

import recado
import recado.testing
from recado.queue import migrate
from recado.queue.locks import lock_key
from recado.settings import Settings, Token, settings
from tests import catalog
from tests.commands import Call, Result, run_command

SHIPPED = [str(migration) for migration in migrate.shipped()]


END_WHO_WAITS = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND wait_event_type = 'Lock' AND wait_event = 'advisory'
"""


async def run(*args: str, stdin: str = "", **environment: str) -> Result:
    """``recado`` with ``args`` in a process of its own, which sees of the ``RECADO_*`` variables only these."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RECADO_")}
    paths = {"PYTHONPATH": str(Path(recado.__file__).parent.parent), "PYTHONWARNINGS": "error"}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "recado",
        *args,
        env=kept | paths | environment,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate(stdin.encode())
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """As :func:`run`, and faster: in this process."""

    def call(*args: str, **environment: str) -> Result:
        monkeypatch.delenv("RECADO_SCHEMA", raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        settings.cache_clear()
        return run_command(monkeypatch, capsys, *args)

    yield call
    settings.cache_clear()


@pytest_asyncio.fixture
async def dsn(recado_server: str) -> AsyncIterator[str]:
    async with catalog.empty_database(recado_server) as dsn:
        yield dsn


# --- recado migrate ---


async def test_up_status_and_down_from_the_command_line(dsn: str, conn: asyncpg.Connection) -> None:
    status = await run("migrate", "status", RECADO_DSN=dsn)
    assert (status.code, status.err) == (0, "")
    assert [line.split() for line in status.out.splitlines()] == [[name, "pending"] for name in SHIPPED]
    assert await run("migrate", "up", RECADO_DSN=dsn) == (0, "".join(f"applied {name}\n" for name in SHIPPED), "")
    await migrate.check_schema(conn, schema="recado")

    assert await run("migrate", "up", "--dsn", dsn) == (0, "nothing to apply\n", "")
    status = await run("migrate", "status", "--dsn", dsn)
    assert [line.split()[:2] for line in status.out.splitlines()] == [[name, "applied"] for name in SHIPPED]

    down = await run("migrate", "down", "--yes", "--dsn", dsn)
    assert down == (0, "".join(f"reverted {name}\n" for name in reversed(SHIPPED)), "")
    assert await catalog.user_objects(conn) == []


async def test_ten_processes_at_once_on_an_empty_database_apply_each_migration_once(
    dsn: str, conn: asyncpg.Connection
) -> None:
    results = await asyncio.gather(*(run("migrate", "up", RECADO_DSN=dsn) for _ in range(10)))
    assert [(result.code, result.err) for result in results] == [(0, "")] * 10
    applied = [line for result in results for line in result.out.splitlines() if line != "nothing to apply"]
    assert sorted(applied) == [f"applied {name}" for name in SHIPPED]
    await migrate.check_schema(conn, schema="recado")


async def test_down_asks_first_and_says_that_the_jobs_go(dsn: str, conn: asyncpg.Connection) -> None:
    await migrate.up(conn, schema="other")
    options = ("--dsn", dsn, "--schema", "other")

    refused = await run("migrate", "down", *options, stdin="n\n")
    assert refused.code == 1
    assert "In schema other this deletes all its jobs." in refused.out
    await migrate.check_schema(conn, schema="other")

    assert (await run("migrate", "down", *options, stdin="y\n")).code == 0
    assert await catalog.user_objects(conn) == []


async def test_to_is_passed_on(dsn: str, conn: asyncpg.Connection) -> None:
    await migrate.up(conn, schema="recado")
    everything = await catalog.user_objects(conn)
    last = str(len(SHIPPED))
    assert await run("migrate", "down", "--to", last, "--yes", "--dsn", dsn) == (0, "nothing to revert\n", "")
    assert await catalog.user_objects(conn) == everything
    assert await run("migrate", "up", "--to", "0", "--schema", "new", "--dsn", dsn) == (0, "nothing to apply\n", "")
    assert await catalog.user_objects(conn) == everything


async def test_sql_needs_no_database_and_is_what_an_operator_can_run_by_hand(conn: asyncpg.Connection) -> None:
    result = await run("migrate", "sql", RECADO_SCHEMA="other")
    assert result == (0, migrate.sql(schema="other"), "")
    await conn.execute(result.out)
    await migrate.check_schema(conn, schema="other")


async def test_status_tells_of_edited_and_unknown_migrations(dsn: str, conn: asyncpg.Connection) -> None:
    await migrate.up(conn, schema="recado")
    await conn.execute("UPDATE recado.schema_migrations SET checksum = 'another' WHERE number = 1")
    await conn.execute("INSERT INTO recado.schema_migrations VALUES (99, 'future', 'unknown')")
    lines = (await run("migrate", "status", "--dsn", dsn)).out.splitlines()
    assert lines[0].startswith(f"{SHIPPED[0]} ")
    assert lines[0].endswith(" UTC, edited since")
    assert lines[-1].startswith("0099_future ")
    assert lines[-1].endswith(" UTC, unknown to this version of recado")

    refused = await run("migrate", "up", "--dsn", dsn)
    assert (refused.code, refused.out) == (1, "")
    assert "0099_future; upgrade recado" in refused.err


# --- trouble is one sentence ---


@pytest.mark.parametrize(
    ("args", "environment", "says"),
    [
        ([], {}, "no database is named; give --dsn, or set RECADO_DSN"),
        (["--dsn", ""], {}, "no database is named; give --dsn, or set RECADO_DSN"),
        (["--dsn", "postgresql://u:hunter2@127.0.0.1:1/db"], {}, "Connect call failed ('127.0.0.1', 1)"),
        (["--dsn", "postgresql://u:hunter2@nowhere.invalid/db"], {}, "check --dsn or RECADO_DSN"),
        (["--dsn", "postgresql://u:hunter2/hunter2@127.0.0.1:1/db"], {}, "write postgresql://user:password@host"),
        ([], {"RECADO_DSN": "mysql://u:hunter2@h/db"}, "write postgresql://user:password@host"),
        ([], {"RECADO_DSN": "hunter2"}, "write postgresql://user:password@host"),
        ([], {"RECADO_API_PORT": "hunter2"}, "RECADO_API_PORT: Input should be a valid integer"),
        ([], {"RECADO_TOKENS": "hunter2"}, "cannot read the environment"),
        ([], {"RECADO_TOKENS": '[{"name": "a", "sha256": "hunter2"}]'}, "RECADO_TOKENS.0.sha256: String should match"),
    ],
)
def test_trouble_is_one_sentence_without_secrets(
    call: Call, args: list[str], environment: dict[str, str], says: str
) -> None:
    result = call("migrate", "up", *args, **environment)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("recado: cannot ")
    assert result.err.count("\n") == 1
    assert says in result.err
    assert "hunter2" not in result.err


def test_a_database_that_does_not_exist_is_named(call: Call, recado_server: str) -> None:
    result = call("migrate", "up", "--dsn", recado.testing.database_url(recado_server, "nowhere"))
    assert result == (
        1,
        "",
        'recado: cannot connect: database "nowhere" does not exist; check --dsn or RECADO_DSN\n',
    )


async def test_a_connection_that_is_lost_is_one_sentence(dsn: str, conn: asyncpg.Connection) -> None:
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks, conn.transaction():
        await conn.execute(migrate.LOCK, lock_key(migrate.LOCK_PURPOSE, "recado"))
        waiting = tasks.create_task(run("migrate", "up", RECADO_DSN=dsn))
        async with catalog.connection(dsn) as killer:
            while not await killer.fetch(END_WHO_WAITS):
                pass
        result = await waiting
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("recado: cannot finish: ")
    assert "terminating connection due to administrator command" in result.err
    assert result.err.count("\n") == 1


def test_a_bad_schema_name_is_one_sentence(call: Call, recado_server: str) -> None:
    result = call("migrate", "up", "--schema", "Not A Name", "--dsn", recado_server)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("recado: cannot use 'Not A Name' as the schema's name")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "args", [["migrate", "up", "--to", "x"], ["migrate", "sideways"], ["token"], ["token", " "], []]
)
def test_wrong_usage_exits_with_2(call: Call, args: list[str]) -> None:
    assert call(*args).code == 2


# --- the rest ---


def test_a_token_is_printed_once_with_the_entry_the_settings_take(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("token", "grafana", "--scope", "jobs:read", "--scope", "jobs:admin", "--organization", "7")
    assert (result.code, result.err) == (0, "")
    _, secret, _, entry = (line.strip() for line in result.out.splitlines())
    assert len(secret) >= 43
    monkeypatch.setenv("RECADO_TOKENS", f"[{entry}]")
    (token,) = Settings().tokens
    assert token == Token(
        name="grafana",
        sha256=hashlib.sha256(secret.encode()).hexdigest(),
        scopes=frozenset({"jobs:admin", "jobs:read"}),
        organization="7",
    )


def test_two_tokens_are_never_the_same(call: Call) -> None:
    assert call("token", "a").out != call("token", "a").out


def test_the_version(call: Call) -> None:
    assert call("--version") == (0, f"recado {recado.__version__}\n", "")
