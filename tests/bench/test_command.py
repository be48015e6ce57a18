"""``recado bench``: what it prints, what it refuses, and that nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

import recado
from recado.bench.options import SCHEMA
from recado.bench.scenarios import SCENARIOS

PATIENCE = 60.0
"""Seconds until what should have come is taken for missing; nothing waits for it where all is well."""

AT_WORK = """
SELECT EXISTS (SELECT FROM pg_stat_activity
               WHERE datname = current_database() AND application_name = 'recado finisher' AND query LIKE '%UPDATE%')
"""
"""Whether a worker has completed a job."""


class Result(NamedTuple):
    code: int
    out: str
    err: str


async def start(*args: object, **environment: str) -> asyncio.subprocess.Process:
    """``python -m recado.bench`` with ``args``."""
    paths = {"PYTHONPATH": str(Path(recado.__file__).parent.parent), "PYTHONWARNINGS": "error"}
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recado.bench", *map(str, args)),
        env=os.environ | paths | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def bench(*args: object, **environment: str) -> Result:
    """The same, to its end."""
    process = await start(*args, **environment)
    out, err = await process.communicate()
    assert process.returncode is not None
    return Result(process.returncode, out.decode(), err.decode())


def figures(result: Result) -> dict[str, Any]:
    assert result.code == 0, result.err
    [line] = result.out.splitlines()
    found: dict[str, Any] = json.loads(line)
    return found


async def schemas(conn: asyncpg.Connection) -> list[str]:
    return [row[0] for row in await conn.fetch("SELECT nspname FROM pg_namespace WHERE nspname = $1", SCHEMA)]


async def test_all_scenarios_measure_both_sides_and_leave_nothing_behind(dsn: str, conn: asyncpg.Connection) -> None:
    found = figures(await bench("all", "--jobs", 40, "--repeat", 1, "--dsn", dsn, "--json"))
    assert found["scenario"] == "all"
    assert [each["scenario"] for each in found["scenarios"]] == list(SCENARIOS)
    for each in found["scenarios"]:
        name = each["scenario"]
        assert (each["jobs"], each["repeat"], each["workers"]) == (40, 1, 1), name
        for key in ("rate", "bare_rate", "ratio", "client_cpu_us", "bare_client_cpu_us", "peak_rss_mb"):
            assert isinstance(each[key], float), (name, key)
            assert each[key] > 0, (name, key)
        assert len(each["fifths"]) == 5, name
        assert len(each["memory_mb"]) == 10, name
        if name not in ("latency", "pinned"):
            assert each["ratio"] == pytest.approx(each["rate"] / each["bare_rate"], rel=1e-3), name
    by_name = {each["scenario"]: each for each in found["scenarios"]}
    for side in ("", "bare_"):
        waits = [by_name["latency"][f"{side}{which}_ms"] for which in ("p50", "p95", "p99", "max")]
        assert waits[0] > 0
        assert waits == sorted(waits)
        assert by_name["drain"][f"{side}claim_batch"] >= 1
    assert by_name["latency"]["rate"] == pytest.approx(50, rel=0.2)
    pinned = by_name["pinned"]
    assert pinned["ratio"] == pytest.approx(pinned["fifths"][-1] / pinned["fifths"][0], rel=1e-3)
    assert found["machine"]["cores"] == os.cpu_count()
    assert found["server"]["server_version"] == await conn.fetchval("SHOW server_version")
    assert await schemas(conn) == []


async def test_workers_share_the_jobs_and_a_table_is_printed_for_people(dsn: str, conn: asyncpg.Connection) -> None:
    options = ("--jobs", 101, "--workers", 2, "--concurrency", 3, "--work-ms", 1, "--repeat", 1)
    result = await bench("transactional", *options, "--dsn", dsn)
    assert result.code == 0, result.err
    header, row, *_ = result.out.splitlines()
    assert header.split()[:4] == ["scenario", "recado", "bare", "ratio"]
    assert row.startswith("transactional")
    assert "server_version" in result.out
    assert result.err == ""
    assert await schemas(conn) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_and_nothing_stays_behind(
    number: signal.Signals, dsn: str, conn: asyncpg.Connection
) -> None:
    process = await start("latency", "--jobs", 100_000, "--dsn", dsn)
    async with asyncio.timeout(PATIENCE):
        # The server has no signal for what its clients do but this view.
        while not await conn.fetchval(AT_WORK):
            pass
    process.send_signal(number)
    out, err = await process.communicate()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err
    assert await schemas(conn) == []


async def test_a_schema_that_exists_is_left_alone(dsn: str, conn: asyncpg.Connection) -> None:
    await conn.execute(f"CREATE SCHEMA {SCHEMA} CREATE TABLE precious ()")
    result = await bench("drain", "--jobs", 10, "--dsn", dsn, "--json")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(f"recado: cannot run the benchmark: there is a schema {SCHEMA}")
    assert result.err.count("\n") == 1
    assert await conn.fetchval(f"SELECT count(*) FROM {SCHEMA}.precious") == 0


async def test_without_a_url_it_starts_a_server_of_its_own_that_is_gone_afterwards(tmp_path: Path) -> None:
    environment = {"RECADO_DSN": "postgresql://127.0.0.1:1/x", "RECADO_SCHEMA": "elsewhere", "TMPDIR": str(tmp_path)}
    result = await bench("enqueue", "--jobs", 10, "--connections", 2, "--repeat", 1, "--json", **environment)
    found = figures(result)
    assert (found["jobs"], found["connections"], found["repeat"]) == (10, 2, 1)
    assert (found["server"]["fsync"], found["server"]["synchronous_commit"]) == ("on", "on")
    assert os.listdir(tmp_path) == []


async def test_a_database_out_of_reach_is_one_sentence() -> None:
    result = await bench("drain", "--dsn", "postgresql://127.0.0.1:1/x")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("recado: cannot connect to the database: ")
    assert result.err.count("\n") == 1


async def test_an_unknown_scenario_is_a_wrong_call() -> None:
    result = await bench("everything")
    assert result.code == 2
    assert "must be one of enqueue, enqueue-many, drain" in " ".join(result.err.replace("│", " ").split())
