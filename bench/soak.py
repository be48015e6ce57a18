"""Minutes of mixed load on one worker, to see whether it holds more and more of anything.

    python bench/soak.py --minutes 30
    python bench/soak.py --minutes 30 --restart-every 60

Jobs come singly and in bulks; handlers are plain, transactional or in threads, fail, snooze, time out or are
cancelled; operations tell their progress to a browser's stream; a schedule ticks. The worker's memory, tasks,
descriptors, threads and connections are sampled all the time.

**When is it flat?** A straight line is fitted to the second half of each series; the first half is for caches, pools
and the allocator to fill. It is not flat when the line rises by more than matters (:data:`ALLOWED`) *and* by more than
three standard errors of its slope, since single samples jump with the load. In the second half of 30 minutes some
95,000 jobs end: a leak of 100 bytes a job is 9 MB, and one task or connection in a thousand jobs is nearly a hundred.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, mean
from types import MappingProxyType
from typing import Annotated, Any

import asyncpg
import httpx
import typer
from rich.console import Console
from rich.table import Table

from bench.soak_worker import CREATE_EFFECTS, ORGANIZATION, make_app
from recado import Recado, embedded
from recado.queue import cancel, migrate
from recado.queue.operations import tenant
from recado.serve import run
from recado.settings import DEFAULT_SCHEMA

ROOT = Path(__file__).resolve().parents[1]

ALLOWED: Mapping[str, float] = MappingProxyType(
    {"rss": 4.0, "tasks": 3.0, "descriptors": 3.0, "threads": 3.0, "connections": 3.0}
)
"""How much the fitted line may rise over the second half: megabytes of what the allocator keeps for itself, and a
few of what comes and goes with the load."""

STANDARD_ERRORS = 3.0
"""Of the slope: less may be chance."""

SAMPLES = 240
"""Of a run; the more, the smaller the slope's error,"""

MIN_INTERVAL, MAX_INTERVAL = 0.25, 5.0
"""seconds apart."""

SINGLE_INTERVAL = 0.02
"""Seconds between two jobs that are enqueued alone."""

BULK, BULK_INTERVAL = 150, 2.0
"""Jobs at once, more than there are slots, and seconds in between."""

CANCEL_AFTER = 0.5
"""Seconds that a job which would take an hour is left alone."""

OPERATION_INTERVAL = 0.5
"""Seconds between two operations that somebody watches."""

METRICS_INTERVAL = 5.0
"""Seconds between two looks at the metrics."""

MIXTURE = (
    *("soak.plain",) * 8,
    *("soak.books",) * 4,
    *("soak.thread",) * 3,
    *("soak.fails", "soak.rolls_back", "soak.snoozes", "soak.is_late"),
)

CONNECTIONS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'recado %'
"""
"""Of the worker and the API; the load's own bear another name."""

Sample = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Trend:
    """A series and the line through its second half."""

    name: str
    first: float
    """Mean of the first fifth,"""
    middle: float
    """of the third"""
    last: float
    """and of the last."""
    growth: float
    """By how much the line rises over the second half."""
    error: float
    """The standard error of that."""

    @property
    def flat(self) -> bool:
        """Whether it rises by no more than matters, or by no more than chance does."""
        return self.growth <= max(ALLOWED[self.name], STANDARD_ERRORS * self.error)


def trend(name: str, values: Sequence[float]) -> Trend:
    """Fit a line to the second half of equidistant samples.

    Raises:
        ValueError: there are too few.
    """
    if len(values) < 10:
        raise ValueError(f"cannot fit a line: {name} has {len(values)} samples; run for longer")
    half = values[len(values) // 2 :]
    times = range(len(half))
    slope, intercept = linear_regression(times, half)
    squares = sum((value - intercept - slope * time) ** 2 for time, value in zip(times, half, strict=True))
    spread = sum((time - mean(times)) ** 2 for time in times)
    error = math.sqrt(squares / (len(half) - 2) / spread)
    fifth, duration = len(values) // 5, len(half) - 1
    return Trend(
        name,
        first=mean(values[:fifth]),
        middle=mean(values[2 * fifth : 3 * fifth]),
        last=mean(values[-fifth:]),
        growth=slope * duration,
        error=error * duration,
    )


# --- the load ---


async def singles(app: Recado, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Jobs one by one, each in a transaction of its own, some with a key that was used before."""
    for n in itertools.count():
        key = f"{n // 2}" if n % 10 < 2 else None
        async with pool.acquire() as conn, conn.transaction():
            await app.enqueue(conn, MIXTURE[n % len(MIXTURE)], {"n": n}, idempotency_key=key)
        await asyncio.sleep(SINGLE_INTERVAL * random.uniform(0.5, 1.5))


async def bulks(app: Recado, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Many jobs at once."""
    while True:
        async with pool.acquire() as conn:
            await app.enqueue_many(conn, [app.new(MIXTURE[n % len(MIXTURE)], {"n": n}) for n in range(BULK)])
        await asyncio.sleep(BULK_INTERVAL)


async def cancels(app: Recado, pool: asyncpg.Pool[asyncpg.Record]) -> None:
    """Jobs that would run for an hour, and are cancelled while they run."""
    while True:
        async with pool.acquire() as conn:
            job_id = await app.enqueue(conn, "soak.lingers", {})
        await asyncio.sleep(CANCEL_AFTER)
        async with pool.acquire() as conn:
            await cancel(conn, job_id, schema=app.schema)


async def operations(app: Recado, pool: asyncpg.Pool[asyncpg.Record], client: httpx.AsyncClient) -> None:
    """Long work that is watched: by a stream to its end, or by one that its browser leaves early."""
    for n in itertools.count():
        async with tenant(pool, ORGANIZATION) as conn:
            job_id = await app.start_operation(conn, "soak", {}, organization_id=ORGANIZATION)
        async with client.stream("GET", f"/api/jobs/{job_id}/events") as stream:
            stream.raise_for_status()
            async for line in stream.aiter_lines():
                if n % 3 == 0 and line.startswith("data"):
                    break
        await asyncio.sleep(OPERATION_INTERVAL)


async def metrics(client: httpx.AsyncClient) -> None:
    """A scraper."""
    while True:
        (await client.get("/metrics")).raise_for_status()
        await asyncio.sleep(METRICS_INTERVAL)


@asynccontextmanager
async def load(app: Recado, dsn: str, port: int) -> AsyncIterator[None]:
    """All of it at once, until the end of the block."""
    async with (
        asyncpg.create_pool(dsn, min_size=0, max_size=5, server_settings={"application_name": "soak"}) as pool,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
        asyncio.TaskGroup() as group,
    ):
        works = (singles(app, pool), bulks(app, pool), cancels(app, pool), operations(app, pool, client))
        tasks = [group.create_task(work) for work in (*works, metrics(client))]
        yield
        for task in tasks:
            task.cancel()


# --- the watch ---


async def soak(dsn: str, schema: str, seconds: float, *, restart_every: float | None = None) -> list[Sample]:
    """Put a worker under load, and sample what it holds.

    Args:
        dsn: of a database with the migrated schema and nothing else.
        seconds: for how long.
        restart_every: seconds after which the worker, but not its process, is stopped and started anew.

    Raises:
        RuntimeError: the process ended by itself, or nothing was done.
    """
    interval = min(MAX_INTERVAL, max(MIN_INTERVAL, seconds / SAMPLES))
    samples: list[Sample] = []
    conn = await asyncpg.connect(dsn)
    try:
        await conn.execute(CREATE_EFFECTS)
        async with _worker(dsn, schema, interval, restart_every) as output:
            port = (await _told(output))["port"]
            async with load(make_app(schema), dsn, port):
                for _ in range(max(1, int(seconds / interval))):
                    told = await _told(output)
                    samples.append({**told, "connections": await conn.fetchval(CONNECTIONS)})
    finally:
        await conn.close()
    return samples


@asynccontextmanager
async def _worker(
    dsn: str, schema: str, interval: float, restart_every: float | None
) -> AsyncIterator[asyncio.StreamReader]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.soak_worker"),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("RECADO_")}
        | {
            "RECADO_DSN": dsn,
            "RECADO_SCHEMA": schema,
            "SOAK_INTERVAL": str(interval),
            "SOAK_RESTART_EVERY": "" if restart_every is None else str(restart_every),
        },
    )
    if process.stdout is None:
        raise RuntimeError("cannot watch the worker: it has no output; report this")
    try:
        yield process.stdout
        process.terminate()
        # What it still says is nobody's business, but must not fill the pipe that it ends by.
        await process.stdout.read()
        if await process.wait():
            raise RuntimeError(f"cannot trust the run: the worker ended with exit code {process.returncode}; see above")
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _told(output: asyncio.StreamReader) -> dict[str, Any]:
    line = await output.readline()
    if not line:
        raise RuntimeError("cannot go on: the worker ended by itself; its last words stand above")
    told: dict[str, Any] = json.loads(line)
    return told


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """The trend of everything that must not grow."""
    return [trend(name, [sample[name] for sample in samples]) for name in ALLOWED]


def print_table(console: Console, found: Sequence[Trend], samples: Sequence[Sample]) -> None:
    """One line for each series."""
    table = Table("held", "first fifth", "third", "last", "rise in 2nd half", "allowed", "", box=None)
    for each in found:
        allowed = max(ALLOWED[each.name], STANDARD_ERRORS * each.error)
        table.add_row(
            "rss, MB" if each.name == "rss" else each.name,
            *(f"{value:.1f}" for value in (each.first, each.middle, each.last)),
            f"{each.growth:+.2f}",
            f"{allowed:.2f}",
            "flat" if each.flat else "GROWS",
        )
    console.print(table)
    console.print(f"{samples[-1]['ended']:,} jobs ended")


def main(
    minutes: Annotated[float, typer.Option(min=0.1, help="For how long.")] = 30.0,
    restart_every: Annotated[float | None, typer.Option(min=1.0, help="Seconds of a worker's life.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the samples there, too.")] = None,
) -> None:
    """Put a worker under mixed load, and fail unless what it holds stays flat."""
    with (
        tempfile.TemporaryDirectory(prefix="recado-soak-", ignore_cleanup_errors=True) as folder,
        embedded.start(Path(folder, "data")) as server,
    ):
        run(_migrate(server.dsn()))
        samples = run(soak(server.dsn(), DEFAULT_SCHEMA, minutes * 60, restart_every=restart_every))
    if json_file is not None:
        json_file.write_text(json.dumps(samples) + "\n")
    found = trends(samples)
    print_table(Console(), found, samples)
    if not all(each.flat for each in found):
        sys.exit(1)


async def _migrate(dsn: str) -> None:
    conn = await asyncpg.connect(dsn)
    try:
        await migrate.up(conn)
    finally:
        await conn.close()


if __name__ == "__main__":
    typer.run(main)
