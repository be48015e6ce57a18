"""``recado schedules``: what it prints, and what it changes."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from uuid import uuid4

import asyncpg
import pytest
import pytest_asyncio

from recado.queue import list_schedules
from recado.queue.schedules import SYSTEM, Schedule, get_schedules, set_tick, sync
from recado.queue.workers import WorkerInfo, beat
from tests.commands import Call, Result, calling
from tests.queue.support import insert

DAILY = Schedule("report.daily", "report.render", "0 6 1 1 *", "Europe/Madrid")
PRUNE = Schedule("recado.prune", None, "0 0 1 1 *")

TICK = datetime(2024, 1, 1, 5, tzinfo=UTC)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str) -> Iterator[Call]:
    """``recado schedules`` with ``args`` on the test's database, on a thread of its own."""
    with calling("schedules", monkeypatch=monkeypatch, capsys=capsys, dsn=dsn) as call:
        yield call


@pytest_asyncio.fixture(autouse=True)
async def schedules(conn: asyncpg.Connection, schema: str) -> None:
    """Of two applications, one of which has ticked, and of recado itself."""
    worker_id = uuid4()
    await beat(conn, WorkerInfo(worker_id, "host", 1, "0", ("default",), 1, 300.0), 0)
    weekly = Schedule("report.weekly", "report.render", "0 6 1 1 *")
    for application, entries in {"shop": [DAILY, weekly], "blog": [DAILY], SYSTEM: [PRUNE]}.items():
        async with conn.transaction():
            await sync(conn, application, worker_id, entries)
    (row,) = await get_schedules(conn, [("shop", "report.daily")])
    await set_tick(conn, row, TICK, await insert(conn, schema, "dead"))


async def paused(conn: asyncpg.Connection) -> set[tuple[str, str]]:
    return {(s.application, s.name) for s in await list_schedules(conn) if s.paused_at is not None}


def table(result: Result) -> list[list[str]]:
    """The lines below the header, by columns; there are two spaces at least in between."""
    assert (result.code, result.err) == (0, "")
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in result.out.splitlines()[1:]]


async def test_a_list_has_all_schedules_or_those_of_an_application(call: Call, conn: asyncpg.Connection) -> None:
    lines = table(call("list"))
    assert [line[:2] for line in lines] == [
        ["recado.prune", "-"], ["report.daily", "blog"], ["report.daily", "shop"], ["report.weekly", "shop"],
    ]  # fmt: skip
    (daily,) = (s for s in await list_schedules(conn, application="shop") if s.name == "report.daily")
    assert lines[2] == [
        "report.daily", "shop", "0 6 1 1 *", "Europe/Madrid", "2024-01-01 05:00:00",
        f"{daily.next_tick:%Y-%m-%d} 05:00:00", "dead",
    ]  # fmt: skip
    assert [line[1] for line in table(call("list", "--app-name", "blog"))] == ["blog"]


async def test_a_schedule_is_paused_and_resumed_by_its_name(call: Call, conn: asyncpg.Connection) -> None:
    assert call("pause", "report.weekly") == (0, "paused report.weekly\n", "")
    assert await paused(conn) == {("shop", "report.weekly")}
    assert table(call("list"))[3][5] == "paused"
    assert call("pause", "recado.prune") == (0, "paused recado.prune\n", "")
    assert await paused(conn) == {("shop", "report.weekly"), ("", "recado.prune")}
    assert call("resume", "report.weekly") == (0, "resumed report.weekly\n", "")
    assert call("resume", "recado.prune") == (0, "resumed recado.prune\n", "")
    assert await paused(conn) == set()


@pytest.mark.parametrize("verb", ["pause", "resume"])
async def test_a_name_that_two_applications_have_needs_the_application(
    call: Call, conn: asyncpg.Connection, verb: str
) -> None:
    refused = call(verb, "report.daily")
    assert (refused.code, refused.out) == (2, "")
    assert "--app-name" in refused.err
    assert await paused(conn) == set()
    assert call(verb, "report.daily", "--app-name", "blog").code == 0
    assert await paused(conn) == ({("blog", "report.daily")} if verb == "pause" else set())


@pytest.mark.parametrize("args", [["report.hourly"], ["report.weekly", "--app-name", "blog"]])
async def test_an_unknown_schedule_is_one_sentence(call: Call, args: list[str]) -> None:
    for verb in ("pause", "resume"):
        result = call(verb, *args)
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith(f"recado: cannot {verb} schedule '{args[0]}': application ")
        assert result.err.count("\n") == 1
