"""Worker processes that can be killed, and a way to wait for what the database says of them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg

ROOT = Path(__file__).parents[2]

PATIENCE = 60.0
"""Seconds until what should have come is taken for missing; nothing waits for it where all is well."""


class Watch:
    """Looks at the database anew whenever a row of the queue has changed. The trigger is the test's own."""

    def __init__(self, conn: asyncpg.Connection, schema: str) -> None:
        self._conn = conn
        self._schema = schema
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Watch:
        await self._conn.execute(
            f"""
            CREATE FUNCTION public.tell() RETURNS trigger LANGUAGE plpgsql
            AS $$ BEGIN PERFORM pg_notify('changed', ''); RETURN NULL; END $$;
            CREATE TRIGGER tell AFTER INSERT OR UPDATE OR DELETE ON {self._schema}.jobs
                FOR EACH STATEMENT EXECUTE FUNCTION public.tell();
            CREATE TRIGGER tell AFTER INSERT OR UPDATE OR DELETE ON {self._schema}.workers
                FOR EACH STATEMENT EXECUTE FUNCTION public.tell();
            """
        )
        await self._conn.add_listener("changed", self._on_change)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._conn.remove_listener("changed", self._on_change)

    def _on_change(self, *_: object) -> None:
        self._changed.set()

    async def until(self, condition: str, *args: Any) -> None:
        """Wait until the SQL expression ``condition`` is true."""
        async with asyncio.timeout(PATIENCE):
            while True:
                self._changed.clear()
                if await self._conn.fetchval(f"SELECT {condition}", *args):
                    return
                await self._changed.wait()


class WorkerProcess:
    """One ``recado worker``, and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.log: list[str] = []
        self._logged = asyncio.Event()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        async with asyncio.timeout(PATIENCE):
            return await self.process.wait()

    async def logged(self, text: str, since: int = 0) -> None:
        """Wait until it has logged ``text``, not counting its first ``since`` lines."""
        async with asyncio.timeout(PATIENCE):
            while not any(text in line for line in self.log[since:]):
                self._logged.clear()
                await self._logged.wait()

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())
            self._logged.set()


@asynccontextmanager
async def worker_process(
    dsn: str, handled: Path, *options: str, app: str = "tests.chaos.apps:app", **environment: str
) -> AsyncIterator[WorkerProcess]:
    """A worker as a process of its own; killed at the end, if it has not ended before."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "recado", "worker", app, *options),
        cwd=ROOT,
        env={**os.environ, "RECADO_DSN": dsn, "HANDLED": str(handled), **environment},
        stderr=asyncio.subprocess.PIPE,
    )
    worker = WorkerProcess(process)
    async with asyncio.TaskGroup() as group:
        group.create_task(worker.read_log())
        try:
            yield worker
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            await process.wait()


def lines(handled: Path) -> list[list[str]]:
    """What the handlers noted: job id, what, pid."""
    return [line.split() for line in handled.read_text().splitlines()] if handled.exists() else []
