"""A server of a program's own, which the program may break."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import asyncpg

from recado import embedded
from recado.queue import migrate

NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


class Cluster:
    """A durable server that can be stopped, each way there is, and started again on its data."""

    def __init__(self, folder: Path, options: Mapping[str, str]) -> None:
        self._folder = folder
        self._options = options
        self._server = embedded.start(folder, options=options)

    @property
    def dsn(self) -> str:
        return self._server.dsn()

    async def stop(self, how: signal.Signals) -> None:
        """Shut the server down: ``SIGINT`` is fast, ``SIGQUIT`` is immediate and leaves a crash to recover from."""
        os.kill(self._server.pid, how)
        await self.ended()

    async def ended(self) -> None:
        """Wait for the end of a server that is on its way down."""
        # In a thread: connections of this very process have to see the end meanwhile.
        await asyncio.to_thread(self._server.stop)

    async def crashed(self) -> None:
        """Wait until the server has ended by itself."""
        loop, crash = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self._server.pid)
        loop.add_reader(descriptor, crash.set)
        try:
            await crash.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        await self.ended()

    def start(self) -> None:
        """Start it again. (It blocks: a server must be started from the main thread, whose end it does not outlive.)"""
        self._server = embedded.start(self._folder, options=self._options)


@asynccontextmanager
async def cluster(folder: Path, schema: str, options: Mapping[str, str] = NO_OPTIONS) -> AsyncIterator[Cluster]:
    """A new server with the migrated schema."""
    made = Cluster(folder, options)
    try:
        conn = await asyncpg.connect(made.dsn)
        try:
            await migrate.up(conn, schema=schema)
        finally:
            await conn.close()
        yield made
    finally:
        await made.ended()
