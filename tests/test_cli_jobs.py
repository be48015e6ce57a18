"""``recado jobs`` and ``recado dead``: what they print, what they change, and what they refuse."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio
from uuid6 import uuid7

import recado
from recado import Discard, Recado
from recado.queue import cancel, get_job, migrate
from recado.queue.admin import ROWS_PER_STATEMENT
from recado.testing import drain
from tests.chaos.support import PATIENCE
from tests.commands import Call, Result, calling

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e\u2028[bold red]x[/]\\[/]\ud7ff\N{SNOWMAN}"
"""What takes over a terminal, hides text or turns it round, and rich's markup."""

SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e\u2028[bold red]x[/]\[/]\ud7ff" + "\N{SNOWMAN}"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str) -> Iterator[Call]:
    """``recado`` with ``args`` on the test's database, on a thread of its own; its stdout is no terminal."""
    with calling(monkeypatch=monkeypatch, capsys=capsys, dsn=dsn) as call:
        yield call


def environment(dsn: str, **variables: str) -> dict[str, str]:
    paths = {"PYTHONPATH": str(Path(recado.__file__).parent.parent), "PYTHONWARNINGS": "error"}
    return {**os.environ, **paths, "RECADO_DSN": dsn, **variables}


def table(result: Result) -> list[list[str]]:
    """The lines below the header, by columns; there are two spaces at least in between."""
    assert (result.code, result.err) == (0, "")
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.out.splitlines()[1:]]


def assert_one_sentence(result: Result, says: str) -> None:
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("recado: cannot ")
    assert says in result.err
    assert result.err.count("\n") == 1


@pytest.fixture
def app() -> Recado:
    """Handlers that end in each of the ways."""
    app = Recado()

    @app.job("shop.succeed")
    async def succeed(payload: dict[str, Any]) -> dict[str, Any]:
        return {"seen": payload}

    @app.job("shop.fail", max_attempts=1)
    async def fail(payload: dict[str, Any]) -> None:
        raise ValueError(payload["reason"])

    @app.job("mail.discard", queue="mail")
    async def discard(payload: dict[str, Any]) -> None:
        raise Discard(payload["reason"])

    return app


class Jobs(NamedTuple):
    """One of each, in the order in which they were enqueued."""

    completed: UUID
    failed: UUID
    discarded: UUID
    pending: UUID


@pytest_asyncio.fixture
async def jobs(app: Recado, conn: asyncpg.Connection) -> Jobs:
    completed = await app.enqueue(conn, "shop.succeed", {"order": "ñ"})
    failed = await app.enqueue(conn, "shop.fail", {"reason": f"out of paper, {'x' * 300}\nsecond line"})
    discarded = await app.enqueue(conn, "mail.discard", {"reason": "no such address"})
    await drain(app, conn)
    pending = await app.enqueue(conn, "shop.succeed", {})
    return Jobs(completed, failed, discarded, pending)


# --- looking ---


async def test_jobs_are_listed_newest_first_and_whole_in_a_pipe(call: Call, jobs: Jobs) -> None:
    result = call("jobs", "list")
    assert result.out.startswith("ID ")
    rows = table(result)
    assert [row[0] for row in rows] == [str(job_id) for job_id in reversed(jobs)]
    assert [row[1:5] for row in rows] == [
        ["shop.succeed", "default", "pending", "0/5"],
        ["mail.discard", "mail", "dead", "1/5"],
        ["shop.fail", "default", "dead", "1/1"],
        ["shop.succeed", "default", "completed", "0/5"],
    ]
    assert rows[2][6] == f"ValueError: out of paper, {'x' * 300}"
    assert len({line.index("20", 37) for line in result.out.splitlines()[1:]}) == 1, "columns are aligned"


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--status", "dead"], ["discarded", "failed"]),
        (["--type", "shop.succeed"], ["pending", "completed"]),
        (["--queue", "mail"], ["discarded"]),
        (["-q", "default", "--status", "dead"], ["failed"]),
        (["--type", "shop.unknown"], []),
        (["--limit", "2"], ["pending", "discarded"]),
    ],
)
async def test_lists_are_filtered(call: Call, jobs: Jobs, options: list[str], found: list[str]) -> None:
    assert [row[0] for row in table(call("jobs", "list", *options))] == [str(getattr(jobs, name)) for name in found]


async def test_a_job_is_shown_with_all_that_went_wrong(call: Call, jobs: Jobs) -> None:
    result = call("jobs", "show", jobs.failed)
    assert (result.code, result.err) == (0, "")
    assert f"id               {jobs.failed}\n" in result.out
    assert "status           dead\n" in result.out
    assert f'payload          {{"reason": "out of paper, {"x" * 300}\\nsecond line"}}\n' in result.out
    assert "                 second line\n" in result.out
    assert "result           null\n" in result.out
    assert "\nattempt 1 ended 20" in result.out
    assert "Traceback (most recent call last):\n" in result.out

    result = call("jobs", "show", jobs.completed)
    assert 'result           {"seen": {"order": "ñ"}}\n' in result.out
    assert "attempt 1" not in result.out


async def test_the_dead_are_grouped_by_error(call: Call, app: Recado, conn: asyncpg.Connection, jobs: Jobs) -> None:
    await app.enqueue(conn, "mail.discard", {"reason": "no such address"})
    await drain(app, conn)
    groups = table(call("dead"))
    assert [(group[0], group[1]) for group in groups] == [("2", "mail.discard"), ("1", "shop.fail")]
    assert groups[0][3].endswith("no such address")
    assert groups[1][3] == f"ValueError: out of paper, {'x' * 300}"
    assert len(table(call("dead", "--limit", "1"))) == 1


async def test_an_empty_queue_is_a_header(call: Call) -> None:
    assert table(call("jobs", "list")) == []
    assert table(call("dead")) == []


# --- what must not reach a terminal ---


def on_terminal(dsn: str, *args: object) -> str:
    """What ``recado`` writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "recado", *map(str, args)],
        env=environment(dsn, COLUMNS="80"),
        stdin=follower,
        stdout=follower,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(follower)
        written = b""
        while True:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # how Linux says that nobody has the other end open any more
                break
            if not piece:
                break
            written += piece
        os.close(leader)
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0
    return written.decode().replace("\r\n", "\n")


async def test_a_terminal_gets_nothing_raw_and_ids_whole(
    dsn: str, app: Recado, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await app.enqueue(conn, "shop.fail", {"reason": EVIL}, idempotency_key=EVIL)
    await drain(app, conn)
    await conn.execute(f"UPDATE {schema}.jobs SET job_type = job_type || $1, queue = $1", EVIL)

    shown, listed, dead = await asyncio.gather(
        asyncio.to_thread(on_terminal, dsn, "jobs", "show", job_id),
        asyncio.to_thread(on_terminal, dsn, "jobs", "list"),
        asyncio.to_thread(on_terminal, dsn, "dead"),
    )
    for output in (shown, listed, dead):
        assert [c for c in output if not c.isprintable() and c != "\n"] == []
        assert f"shop.fail{SHOWN}"[:30] in output
    assert f"job_type         shop.fail{SHOWN}\n" in shown
    assert f"idempotency_key  {SHOWN}\n" in shown
    assert shown.count(f"ValueError: {SHOWN}\n") == 2, "as the last error, and at the end of the traceback"
    assert f"\n{job_id}  shop.fail" in listed
    assert all(len(line) <= 80 for line in [*listed.splitlines(), *dead.splitlines()])
    assert listed.splitlines()[1].endswith("…")


async def test_what_a_pipe_cannot_encode_is_escaped(dsn: str, app: Recado, conn: asyncpg.Connection) -> None:
    job_id = await app.enqueue(conn, "shop.succeed", {"name": "ñ\N{SNOWMAN}"})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recado", "jobs", "show", str(job_id)),
        env=environment(dsn, PYTHONIOENCODING="latin-1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert (process.returncode, err) == (0, b"")
    assert r'{"name": "ñ\u2603"}' in out.decode("latin-1")


async def test_a_reader_that_goes_away_is_no_traceback(dsn: str, jobs: Jobs) -> None:
    """As in ``recado jobs list | head -1``."""
    reader, writer = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recado", "jobs", "list"),
        env=environment(dsn),
        stdout=writer,
        stderr=asyncio.subprocess.PIPE,
    )
    os.close(reader)
    os.close(writer)
    _, err = await process.communicate()
    assert err == b""


# --- steering ---


async def test_a_pending_job_is_cancelled_once(call: Call, conn: asyncpg.Connection, jobs: Jobs) -> None:
    assert call("jobs", "cancel", jobs.pending) == (0, f"cancelled {jobs.pending}\n", "")
    assert (await get_job(conn, jobs.pending)).status == "cancelled"
    assert_one_sentence(call("jobs", "cancel", jobs.pending), "it is cancelled already; requeue it")
    assert_one_sentence(call("jobs", "cancel", jobs.completed), "it is completed already; requeue it")


async def test_one_job_is_retried_whatever_its_end(call: Call, conn: asyncpg.Connection, jobs: Jobs) -> None:
    assert_one_sentence(call("jobs", "retry", jobs.pending), "it is pending and will end by itself; cancel it first")
    await cancel(conn, jobs.pending)
    for job_id in (jobs.completed, jobs.failed, jobs.pending):
        assert call("jobs", "retry", job_id) == (0, "requeued 1 job\n", "")
        job = await get_job(conn, job_id)
        assert (job.status, job.attempts) == ("pending", 0)
    assert (await get_job(conn, jobs.discarded)).status == "dead"


@pytest.mark.parametrize(
    ("options", "retried"),
    [
        (["--type", "shop.fail"], ["failed"]),
        (["--queue", "mail"], ["discarded"]),
        (["--type", "shop.fail", "-q", "mail"], []),
        (["--type", "shop.succeed"], []),
        (["--all"], ["failed", "discarded"]),
    ],
)
async def test_the_dead_are_retried_by_type_by_queue_or_all(
    call: Call, conn: asyncpg.Connection, jobs: Jobs, options: list[str], retried: list[str]
) -> None:
    count = f"{len(retried)} job{'' if len(retried) == 1 else 's'}"
    assert call("jobs", "retry", *options) == (0, f"requeued {count}\n", "")
    for name in ("failed", "discarded"):
        assert (await get_job(conn, getattr(jobs, name))).status == ("pending" if name in retried else "dead")
    assert (await get_job(conn, jobs.completed)).status == "completed"


async def test_jobs_that_die_again_at_once_are_retried_once(
    app: Recado, dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    """Else the command would not end as long as a worker is fast enough; the trigger is one."""
    total = 2 * ROWS_PER_STATEMENT + 1
    await app.enqueue_many(conn, [app.new("mail.discard", {"reason": "again"}) for _ in range(total)])
    await conn.execute(f"UPDATE {schema}.jobs SET status = 'dead', finished_at = now()")
    await conn.execute(
        f"""
        CREATE FUNCTION public.die() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN NEW.status = 'dead'; NEW.finished_at = clock_timestamp(); RETURN NEW; END $$;
        CREATE TRIGGER die BEFORE UPDATE ON {schema}.jobs FOR EACH ROW EXECUTE FUNCTION public.die();
        """
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recado", "jobs", "retry", "--all"),
        env=environment(dsn),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert (process.returncode, out) == (0, f"requeued {total} jobs\n".encode())


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--all", "--type", "shop.fail"],
        ["--all", "--queue", "mail"],
        [str(uuid7()), "--all"],
        [str(uuid7()), "--type", "shop.fail"],
        ["not-an-id"],
    ],
)
async def test_a_retry_of_nothing_or_of_two_things_is_refused(
    call: Call, conn: asyncpg.Connection, jobs: Jobs, args: list[str]
) -> None:
    result = call("jobs", "retry", *args)
    assert (result.code, result.out) == (2, "")
    assert "Usage: recado jobs retry" in result.err
    assert (await get_job(conn, jobs.failed)).status == "dead"


@pytest.mark.parametrize("command", ["show", "cancel", "retry"])
async def test_an_unknown_id_is_one_sentence(call: Call, command: str) -> None:
    job_id = uuid7()
    assert_one_sentence(call("jobs", command, job_id), f"cannot find job {job_id}: there is none with this id")


@pytest.mark.parametrize(
    "command", [["jobs", "list"], ["jobs", "show", str(uuid7())], ["jobs", "retry", "--all"], ["dead"]]
)
async def test_a_database_without_a_queue_names_the_command_that_helps(call: Call, command: list[str]) -> None:
    assert_one_sentence(call(*command, "--schema", "other"), "run `recado migrate up --schema other`")


async def test_each_schema_is_a_queue_of_its_own(call: Call, conn: asyncpg.Connection, jobs: Jobs) -> None:
    await migrate.up(conn, schema="other")
    job_id = await Recado(schema="other").enqueue(conn, "_smoke.echo", {})
    assert [row[0] for row in table(call("jobs", "list", "--schema", "other"))] == [str(job_id)]
    assert call("jobs", "retry", "--all", "--schema", "other").out == "requeued 0 jobs\n"
    assert call("jobs", "cancel", job_id, "--schema", "other").code == 0
    assert_one_sentence(call("jobs", "cancel", jobs.failed, "--schema", "other"), "cannot find job")


async def test_an_argument_that_is_no_text_is_one_sentence(call: Call) -> None:
    assert_one_sentence(call("jobs", "list", "--type", os.fsdecode(b"\xff")), "cannot look for job type")


async def test_json_of_any_kind_is_shown(call: Call, conn: asyncpg.Connection, schema: str) -> None:
    """Rows need not come from recado: services in other languages insert them, too."""
    payloads: list[Any] = [None, [1, "two"], "three", 4.5, {}]
    for payload in payloads:
        job_id = uuid7()
        await conn.execute(
            f"INSERT INTO {schema}.jobs (id, job_type, payload) VALUES ($1, 'a.b', $2)", job_id, json.dumps(payload)
        )
        assert f"payload          {json.dumps(payload)}\n" in call("jobs", "show", job_id).out
