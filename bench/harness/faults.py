"""What the harness's cells do to servers and replicas; each lasts for so many seconds."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import asyncpg

from bench.harness.environment import ADAPTER
from bench.harness.scene import Scene

TERMINATION_INTERVAL = 0.5
"""Seconds between two rounds of terminated sessions."""

KILL_INTERVAL = 20.0
"""Seconds between two kills of a replica."""

IDLE_CONNECTIONS = 300

READERS = 4

BURST = 1.5
"""Times the rate."""

TERMINATE_ACTIVE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid()
"""

COUNT_HOT_TABLE = f"SELECT count(*) FROM {ADAPTER['event_tables'][0]}"

Fault: TypeAlias = Callable[[Scene, float], Awaitable[None]]


@asynccontextmanager
async def _connection(scene: Scene) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    conn = await asyncpg.connect(scene.server.dsn)
    try:
        yield conn
    finally:
        conn.terminate()


async def stop_server(scene: Scene, seconds: float) -> None:
    """The server is down."""
    await scene.server.stop()
    await asyncio.sleep(seconds)
    scene.server.start()


async def terminate_backends(scene: Scene, seconds: float) -> None:
    """Sessions that are at work are ended by an administrator, twice a second."""
    deadline = time.monotonic() + seconds
    async with _connection(scene) as conn:
        while time.monotonic() < deadline:
            await conn.fetchval(TERMINATE_ACTIVE)
            await asyncio.sleep(TERMINATION_INTERVAL)


async def hold_idle_connections(scene: Scene, seconds: float) -> None:
    """Sessions that do nothing take most of what the server has."""
    idle: list[asyncpg.Connection[asyncpg.Record]] = []
    try:
        for _ in range(IDLE_CONNECTIONS):
            idle.append(await asyncpg.connect(scene.server.dsn))  # noqa: PERF401 - those opened so far are closed
        await asyncio.sleep(seconds)
    finally:
        for conn in idle:
            conn.terminate()


async def kill_replica(scene: Scene, seconds: float) -> None:
    """One replica is killed, and started again at the end."""
    await scene.replicas[-1].end(signal.SIGKILL)
    await asyncio.sleep(seconds)
    await scene.replicas[-1].start()


async def kill_replicas(scene: Scene, seconds: float) -> None:
    """One replica after the other is killed, and started again at once."""
    began, kills = time.monotonic(), 0
    while time.monotonic() - began < seconds:
        replica = scene.replicas[kills % len(scene.replicas)]
        kills += 1
        await replica.end(signal.SIGKILL)
        await replica.start()
        await asyncio.sleep(max(0.0, began + min(seconds, kills * KILL_INTERVAL) - time.monotonic()))


async def hold_transaction(scene: Scene, seconds: float) -> None:
    """A snapshot stays open: VACUUM can remove nothing of what the jobs leave behind."""
    async with _connection(scene) as conn, conn.transaction(isolation="repeatable_read"):
        await conn.fetchval(COUNT_HOT_TABLE)
        await asyncio.sleep(seconds)


async def raise_rate(scene: Scene, seconds: float) -> None:
    """More comes in."""
    scene.set_rate(scene.rate * BURST)
    await asyncio.sleep(seconds)
    scene.set_rate(scene.rate)


async def read_hot_table(scene: Scene, seconds: float) -> None:
    """Reports that read all jobs over and over, each in a snapshot that stays open."""
    deadline = time.monotonic() + seconds

    async def read_on() -> None:
        async with _connection(scene) as conn, conn.transaction(isolation="repeatable_read"):
            while time.monotonic() < deadline:
                await conn.fetchval(COUNT_HOT_TABLE)

    async with asyncio.TaskGroup() as group:
        for _ in range(READERS):
            group.create_task(read_on())
