"""The process that is watched by :mod:`bench.soak`: a worker and the API in one event loop.

It prints lines of JSON: first the port of the API, then at each interval what it holds. SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg

from recado import ClaimedJob, Operation, Recado, Retry, Snooze, Worker
from recado.api import create_app
from recado.api.events import Hub
from recado.queue.models import JobStatus
from recado.serve import listening, make_server, run
from recado.worker.events import Event, EventKind

ORGANIZATION = "7"
"""Whose operations all of these are."""

SLOTS = 50

KEPT = timedelta(seconds=60)
"""Long enough to be read, short enough for the pruning, which goes every five minutes, to have something to do."""

CREATE_EFFECTS = "CREATE TABLE IF NOT EXISTS public.soak_effects (job uuid)"
WRITE_EFFECT = "INSERT INTO public.soak_effects VALUES ($1)"

STEPS = 10
"""Of an operation."""

GRACE = 1.0
"""Seconds for running jobs when the worker stops: what lingers is given back."""


def make_app(schema: str) -> Recado:
    """The application: each job type ends in a way of its own."""
    app = Recado("soak", schema=schema)

    @app.cron("* * * * *", payload={})
    @app.job("soak.ticks")
    async def ticks(payload: dict[str, Any]) -> None:
        pass

    @app.job("soak.plain")
    async def plain(payload: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.002)
        return {"seen": payload}

    @app.job("soak.thread")
    def in_thread(payload: dict[str, Any]) -> int:
        return sum(range(1_000))

    @app.job("soak.books")
    async def books(payload: dict[str, Any], job: ClaimedJob, conn: asyncpg.Connection) -> None:
        await conn.execute(WRITE_EFFECT, job.id)

    @app.job("soak.fails", max_attempts=2, backoff=(0.2,))
    async def fails(payload: dict[str, Any]) -> None:
        raise RuntimeError("always")

    @app.job("soak.rolls_back", max_attempts=2)
    async def rolls_back(payload: dict[str, Any], job: ClaimedJob, conn: asyncpg.Connection) -> None:
        await conn.execute(WRITE_EFFECT, job.id)
        if job.attempts == 0:
            raise Retry(after=0.2)

    @app.job("soak.snoozes")
    async def snoozes(payload: dict[str, Any], job: ClaimedJob) -> None:
        if job.fence == 1:
            raise Snooze(0.5)

    @app.job("soak.is_late", timeout=0.05, max_attempts=1)
    async def is_late(payload: dict[str, Any]) -> None:
        await asyncio.sleep(3600)

    @app.job("soak.lingers")
    async def lingers(payload: dict[str, Any]) -> None:
        await asyncio.sleep(3600)

    @app.operation("soak")
    async def operation(payload: dict[str, Any], operation: Operation) -> dict[str, Any]:
        for step in range(STEPS):
            await operation.progress(100 * step // STEPS)
            await asyncio.sleep(0.02)
        return {"steps": STEPS}

    return app


def held(loop: asyncio.AbstractEventLoop) -> Mapping[str, float]:
    """What this process holds now; RSS in megabytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "rss": pages * resource.getpagesize() / 2**20,
        "tasks": len(asyncio.all_tasks(loop)),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


async def main(dsn: str, schema: str, interval: float, restart_every: float | None, sock: socket.socket) -> None:
    """Serve until SIGTERM.

    Args:
        interval: seconds between two lines.
        restart_every: seconds after which the worker is stopped, and a new one started in its place.
        sock: for the API.
    """
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    ended = 0

    def observe(event: Event) -> None:
        nonlocal ended
        if event.kind in (EventKind.COMPLETED, EventKind.DIED):
            ended += len(event.jobs)

    async def sample() -> None:
        while True:
            await asyncio.sleep(interval)
            print(json.dumps({**held(loop), "ended": ended}), flush=True)

    app = make_app(schema)
    async with asyncpg.create_pool(dsn, min_size=0, server_settings={"application_name": "recado api"}) as pool:
        hub = Hub(app, pool)
        server = make_server(create_app(app, pool, organization=lambda _: ORGANIZATION, hub=hub), hub)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve([sock]))
            sampling = group.create_task(sample())
            print(json.dumps({"port": sock.getsockname()[1]}), flush=True)
            while not stop.is_set():
                async with Worker(
                    app,
                    dsn,
                    queues={"default": SLOTS},
                    grace=GRACE,
                    keep=dict.fromkeys((JobStatus.COMPLETED, JobStatus.CANCELLED, JobStatus.DEAD), KEPT),
                    observe=observe,
                ):
                    await _set_within(stop, restart_every)
            sampling.cancel()
            server.stop()


async def _set_within(event: asyncio.Event, seconds: float | None) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


if __name__ == "__main__":
    # What fails on purpose is an error, many times a second.
    logging.basicConfig(level=logging.CRITICAL)
    restart = os.environ.get("SOAK_RESTART_EVERY")
    with listening("127.0.0.1", 0) as bound:
        run(
            main(
                os.environ["RECADO_DSN"],
                os.environ["RECADO_SCHEMA"],
                float(os.environ["SOAK_INTERVAL"]),
                float(restart) if restart else None,
                bound,
            )
        )
