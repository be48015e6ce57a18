"""Several worker processes under one supervisor."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import asyncpg

from recado import JobStatus, Recado
from recado.queue import get_job
from tests.chaos.support import Watch, worker_process
from tests.worker.support import Connect

PIDS = "array_agg(pid ORDER BY pid)"


async def test_a_supervisor_starts_crashed_workers_again_and_drains_them_all(
    dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str, tmp_path: Path
) -> None:
    service = Recado()
    hangs = service.declare("chaos.hangs")
    async with (
        Watch(await connect(), schema) as watch,
        worker_process(dsn, tmp_path / "handled", "--processes", "2", "--silence", "1.2") as supervisor,
    ):
        await watch.until(f"count(*) = 2 FROM {schema}.workers")
        first, second = await conn.fetchval(f"SELECT {PIDS} FROM {schema}.workers")
        assert supervisor.pid not in (first, second)
        os.kill(first, signal.SIGKILL)
        await supervisor.logged("ended with exit code -9; starting it again in 0.5 s")
        await watch.until(f"count(*) = 2 FROM {schema}.workers WHERE pid <> {first}")
        job_id = await hangs.enqueue(conn, {})
        await watch.until(f"status = 'running' FROM {schema}.jobs")
        supervisor.send(signal.SIGTERM)
        await supervisor.logged("SIGTERM: stopping")
        supervisor.send(signal.SIGINT)  # the job would take an hour
        assert await supervisor.ended() == 0
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.workers WHERE pid <> {first}") == 0
    job = await get_job(conn, job_id)
    assert (job.status, job.attempts) == (JobStatus.PENDING, 0)


async def test_workers_end_with_their_supervisor_however_it_goes(
    dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str, tmp_path: Path
) -> None:
    async with (
        Watch(await connect(), schema) as watch,
        worker_process(dsn, tmp_path / "handled", "--processes", "2") as supervisor,
    ):
        await watch.until(f"count(*) = 2 FROM {schema}.workers")
        supervisor.send(signal.SIGKILL)
        await watch.until(f"count(*) = 0 FROM {schema}.workers")  # drained: they signed off themselves
