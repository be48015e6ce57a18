"""The adapter for the public harness does what the harness's contract says, and its cells tell good from bad."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from bench.harness.cells import CELLS, Outcome, judged, recovery, run_cell
from bench.harness.environment import ADAPTER, read
from bench.harness.metrics import PERCENTILES, WINDOW, Window
from bench.harness.producer import MAX_CREDIT, Pace
from tests.worker.support import Connect

ROOT = Path(__file__).parents[2]

PATIENCE = 60.0
"""Seconds until what should have come is taken for missing; nothing waits for it where all is well."""

STOP_LIMIT = 5.0
"""Seconds that the harness gives an adapter after SIGTERM."""

PIPE = 65_536
"""Bytes that a pipe holds: who writes more waits until somebody reads."""

RATES = {"enqueue_rate", "completion_rate"}
LATENCIES = {f"{name}_{percentile}_ms" for name in ("claim", "end_to_end") for percentile in PERCENTILES}


class Adapter:
    """A process under test."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(PATIENCE):
            told: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return told

    async def until(self, is_it: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The next line of which ``is_it`` is true."""
        while not is_it(line := await self.line()):
            pass
        return line

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        async with asyncio.timeout(PATIENCE):
            await self.process.stdin.drain()

    async def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_LIMIT):
            return await self.process.wait()


@asynccontextmanager
async def adapter(dsn: str, **variables: str) -> AsyncIterator[Adapter]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.harness"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("RECADO_")}
        | {"DATABASE_URL": dsn, "SAMPLE_EVERY_S": "0.2", "PRODUCER_RATE": "200", **variables},
    )
    try:
        yield Adapter(process)
    finally:
        if process.returncode is None:
            process.kill()
        # To the end: pipes that are left open are reported by the event loop.
        await process.communicate()


async def test_it_describes_itself_tells_every_metric_of_a_tick_and_ends_in_good_order(
    dsn: str, conn: asyncpg.Connection
) -> None:
    async with adapter(dsn) as running:
        descriptor = await running.line()
        assert descriptor["kind"] == "descriptor"
        assert descriptor["system"] == "recado"
        assert descriptor["event_tables"][0] == "recado.jobs"
        wanted = RATES | LATENCIES | {"queue_depth"}
        told: dict[str, dict[str, Any]] = {}
        while told.keys() != wanted:
            line = await running.until(lambda line: line["value"] >= 0)
            told[line["metric"]] = line
        assert {line["kind"] for line in told.values()} == {"adapter"}
        assert {line["instance_id"] for line in told.values()} == {0}
        assert {told[name]["window_s"] for name in LATENCIES} == {WINDOW}
        assert told["claim_p50_ms"]["value"] <= told["end_to_end_p50_ms"]["value"]
        await running.until(lambda line: line["metric"] == "completion_rate" and line["value"] > 0)
        assert await running.terminate() == 0
    assert await conn.fetchval("SELECT count(*) FROM recado.jobs WHERE status = 'completed'") > 0
    assert await conn.fetchval("SELECT count(*) FROM recado.jobs WHERE status = 'running'") == 0


async def test_its_tables_and_indexes_are_there(dsn: str, conn: asyncpg.Connection) -> None:
    async with adapter(dsn) as running:
        await running.line()
    names = [*ADAPTER["event_tables"], *ADAPTER["event_indexes"]]
    assert await conn.fetch("SELECT name FROM unnest($1::text[]) AS name WHERE to_regclass(name) IS NULL", names) == []


async def test_the_control_file_replaces_the_rate_while_it_runs(dsn: str, tmp_path: Path) -> None:
    control = tmp_path / "rate"
    control.write_text("0")
    async with adapter(dsn, PRODUCER_RATE_CONTROL_FILE=str(control)) as running:
        await running.line()
        await running.until(lambda line: line["metric"] == "enqueue_rate" and line["value"] == 0)
        control.write_text("300")
        await running.until(lambda line: line["metric"] == "enqueue_rate" and line["value"] > 0)
        control.write_text("0")
        await running.until(lambda line: line["metric"] == "enqueue_rate" and line["value"] == 0)


async def test_it_enqueues_what_the_harness_asks_for_and_reads_whatever_else_it_writes(
    dsn: str, conn: asyncpg.Connection
) -> None:
    async with adapter(dsn, PRODUCER_PACING="harness") as running:
        await running.line()
        await running.write(b"nothing that it knows\n" * (2 * PIPE // 22))
        await running.write(b"ENQUEUE 200\nENQUEUE x\nENQUEUE 7\n")
        done = 0.0
        while done < 207:
            line = await running.until(lambda line: line["metric"] == "completion_rate")
            done += round(line["value"] * line["window_s"])
        assert await running.terminate() == 0
    assert await conn.fetchval("SELECT count(*) FROM recado.jobs") == 207


async def test_it_keeps_so_many_jobs_in_the_queue(dsn: str) -> None:
    slow = {"WORKER_COUNT": "1", "JOB_WORK_MS": "3600000"}
    async with adapter(dsn, PRODUCER_MODE="depth-target", TARGET_DEPTH="300", **slow) as running:
        await running.line()
        # The job that runs has been enqueued, too, and is not completed.
        await running.until(lambda line: line["metric"] == "queue_depth" and 299 <= line["value"] <= 300)


async def test_it_does_not_end_for_want_of_a_server_but_at_sigterm_in_time(tmp_path: Path) -> None:
    async with adapter(f"postgresql:///x?host={tmp_path}") as running:
        assert running.process.stderr is not None
        async with asyncio.timeout(PATIENCE):
            await running.process.stderr.readline()
            assert b"trying again" in await running.process.stderr.readline()
        assert await running.terminate() == 0


async def test_it_carries_on_when_all_its_sessions_are_ended(dsn: str, connect: Connect) -> None:
    other = await connect()
    async with adapter(dsn) as running:
        await running.line()
        await running.until(lambda line: line["metric"] == "completion_rate" and line["value"] > 0)
        await other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE 'recado %'"
        )
        completed = await other.fetchval("SELECT count(*) FROM recado.jobs WHERE status = 'completed'")
        more = completed + 100
        while await other.fetchval("SELECT count(*) FROM recado.jobs WHERE status = 'completed'") < more:
            await running.until(lambda line: line["metric"] == "completion_rate")
        assert await running.terminate() == 0


async def test_a_chaos_cell_in_short_form(tmp_path: Path) -> None:
    cell = replace(CELLS["backends terminated"], seconds=1.0, rate=200.0)
    outcome = await run_cell(cell, tmp_path, clean=4.0, warm_up=0.5)
    assert outcome.acknowledged > 0
    assert outcome.completed == outcome.found >= outcome.acknowledged
    assert outcome.recovery is not None


async def test_a_pressure_cell_in_short_form(tmp_path: Path) -> None:
    cell = replace(CELLS["transaction held"], seconds=2.5, rate=200.0)
    outcome = await run_cell(cell, tmp_path, clean=1.5, warm_up=0.5)
    assert outcome.completed == outcome.found >= outcome.acknowledged > 0
    assert outcome.p99_last > 0


HELD = Outcome(
    clean_rate=800,
    fault_rate=800,
    offered=800,
    recovery=0.0,
    p99_first=40,
    p99_last=45,
    acknowledged=100,
    found=101,
    completed=101,
)


def test_a_cell_that_held_misses_nothing() -> None:
    assert list(judged(CELLS["server down"], HELD)) == []
    assert list(judged(CELLS["transaction held"], HELD)) == []


@pytest.mark.parametrize(
    ("cell", "outcome", "told"),
    [
        ("server down", replace(HELD, recovery=None), "did not come back"),
        ("server down", replace(HELD, recovery=5.5), "took 5.5 s"),
        ("server down", replace(HELD, acknowledged=102), "102 jobs were acknowledged"),
        ("transaction held", replace(HELD, completed=100), "100 of them completed"),
        ("transaction held", replace(HELD, fault_rate=700), "700/s of 800/s"),
        ("transaction held", replace(HELD, p99_last=61), "p99 grew from 40.0 to 61.0"),
    ],
)
def test_what_falls_short_is_told(cell: str, outcome: Outcome, told: str) -> None:
    [miss] = judged(CELLS[cell], outcome)
    assert told in miss


def test_a_rate_is_back_when_it_stays() -> None:
    after = {100.0 + tick: rate for tick, rate in enumerate([0, 950, 0, 0, 900, 1100, 400, 1000, 1000])}
    assert recovery(after, 1000.0, ended=100.0, closed=109.0) == 4.0
    assert recovery(after, 2000.0, ended=100.0, closed=109.0) is None


def test_percentiles_are_kept_to_2_percent_and_forgotten_after_the_window() -> None:
    window = Window()
    for n in range(1, 1001):
        window.add(n / 1000, now=1000.0 + n / 100)
    for value, expected in zip(window.quantiles([0.5, 0.95, 0.99], now=1010.0), (500, 950, 990), strict=True):
        assert expected <= value <= expected * 1.02
    assert window.quantiles([0.5], now=1011.0 + WINDOW + 1) == []


def test_the_pace_credits_the_time_that_has_passed_but_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now)
        pace = Pace(100.0)
        now += 0.25
        assert pace.due() == 25
        pace.spend(25)
        now += 0.1
        assert pace.due() == 10
        now += 3600
        assert pace.due() == 100 * MAX_CREDIT


@pytest.mark.parametrize(
    "variables", [{}, {"DATABASE_URL": "x", "SCENARIO": "other"}, {"DATABASE_URL": "x", "WORKER_COUNT": "many"}]
)
def test_what_it_cannot_do_it_refuses_at_once(variables: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match="cannot run"):
        read(variables)
