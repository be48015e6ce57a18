"""A server that stops, crashes, ends sessions, has no connection left, or no space."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import asyncpg

from recado.queue.connections import TRANSIENT
from tests.chaos.cluster import Cluster, cluster
from tests.chaos.stage import LOOK_INTERVAL, PATIENCE, Impossible, Outcome, Stage, stage

TERMINATION_INTERVAL = 0.5
"""Seconds between two rounds of terminated sessions."""

TERMINATE_ONE = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE backend_type = 'client backend' AND state <> 'idle' AND pid <> pg_backend_pid()
ORDER BY random() LIMIT 1
"""

TERMINATE_WORKERS = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name LIKE 'recado %'
"""

DISK = 144 * 2**20
"""Bytes for a whole cluster: a new one takes about 40 MB, of which one segment of WAL is 16."""

PIECE = 4096
"""Bytes; one page of a tmpfs."""


@dataclass(frozen=True)
class Size:
    jobs: int
    away: float
    """Seconds for which the server is stopped, or out of connections or space."""
    terminations: int
    max_connections: int


SHORT = Size(jobs=600, away=1.0, terminations=3, max_connections=40)
FULL = Size(jobs=20_000, away=30.0, terminations=120, max_connections=340)

Fault: TypeAlias = Callable[[Cluster, Stage, Size], Awaitable[None]]


async def stop_fast(server: Cluster, stand: Stage, size: Size) -> None:
    """What a restart for a new setting or a minor release does."""
    await server.stop(signal.SIGINT)
    server.start()


async def stop_immediately(server: Cluster, stand: Stage, size: Size) -> None:
    """As a crash: what was not in the WAL is gone, such as claims of the last moment."""
    await server.stop(signal.SIGQUIT)
    server.start()


async def stay_away(server: Cluster, stand: Stage, size: Size) -> None:
    await server.stop(signal.SIGINT)
    await asyncio.sleep(size.away)
    server.start()


async def terminate_sessions(server: Cluster, stand: Stage, size: Size) -> None:
    """Sessions that are at work, of workers and enqueuers alike, ended by an administrator twice a second."""
    conn = await asyncpg.connect(server.dsn)
    try:
        for _ in range(size.terminations):
            await conn.fetchval(TERMINATE_ONE)
            await asyncio.sleep(TERMINATION_INTERVAL)
    finally:
        await conn.close()


async def use_up_connections(server: Cluster, stand: Stage, size: Size) -> None:
    """Idle sessions take the place of the workers', and leave none."""
    hog = [await asyncpg.connect(server.dsn)]
    deadline = time.monotonic() + size.away
    try:
        while time.monotonic() < deadline:
            await hog[0].fetchval(TERMINATE_WORKERS)
            await _connect_till_refused(server.dsn, hog)
            await asyncio.sleep(LOOK_INTERVAL)
    finally:
        for conn in hog:
            conn.terminate()
    assert len(hog) > size.max_connections // 2


async def _connect_till_refused(dsn: str, connections: list[asyncpg.Connection]) -> None:
    while True:
        try:
            connections.append(await asyncpg.connect(dsn))
        except asyncpg.TooManyConnectionsError:
            return


async def break_server(folder: Path, schema: str, faults: tuple[Fault, ...], size: Size) -> Outcome:
    """Let jobs come in and be run, and let one fault after another happen meanwhile."""
    options = {"max_connections": str(size.max_connections)}
    async with cluster(folder / "server", schema, options) as server, stage(server.dsn, schema, folder) as stand:
        await stand.start_workers(2)
        async with asyncio.TaskGroup() as group:
            group.create_task(stand.produce(size.jobs))
            for n, fault in enumerate(faults, 1):
                await stand.produced(n * size.jobs // (len(faults) + 1))
                await fault(server, stand, size)
                await stand.healed()
            stand.calm.set()
        return await stand.close(connections_broke=True)


async def fill_disk(folder: Path, schema: str, size: Size) -> Outcome:
    """No space for data or WAL: first statements fail, then the server gives up altogether and cannot even recover.
    When there is space again, somebody starts it.

    Raises:
        Impossible: this machine does not let us make a small disk.
    """
    with _small_disk(folder / "disk") as disk:
        async with cluster(disk / "server", schema) as server, stage(server.dsn, schema, folder) as stand:
            await stand.start_workers(2)
            async with asyncio.TaskGroup() as group:
                group.create_task(stand.produce(size.jobs))
                await stand.produced(size.jobs // 3)
                with _no_space(disk):
                    await asyncio.sleep(size.away)
                    await _use_up_wal(server)
                    await asyncio.sleep(size.away)
                server.start()
                await stand.healed()
                stand.calm.set()
            return await stand.close(connections_broke=True)


@contextmanager
def _small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=755", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise Impossible("cannot fill a disk: there is no mount command") from error
    if mounted.returncode:
        raise Impossible(f"cannot fill a disk: {mounted.stderr.strip()}; run as root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def _no_space(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    try:
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:  # what is free changes meanwhile: the server writes, too
                file.write(bytes(PIECE))
        yield
    finally:
        ballast.unlink()


async def _use_up_wal(server: Cluster) -> None:
    """Make the server want a new segment of WAL, until that is its end."""
    async with asyncio.timeout(PATIENCE):
        crash = asyncio.create_task(server.crashed())
        while not crash.done():
            with suppress(*TRANSIENT):
                conn = await asyncpg.connect(server.dsn)
                try:
                    await conn.fetchval("SELECT pg_switch_wal()")
                finally:
                    conn.terminate()
            await asyncio.wait({crash}, timeout=LOOK_INTERVAL)
        await crash
