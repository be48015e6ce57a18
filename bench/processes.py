"""Starts a system's processes and talks to them; :mod:`bench.peers.__main__` is the other side, and tells how."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import IO, Any

from bench.errors import PeerError
from bench.install import Installed

LONGEST_LINE = 2**28
"""Bytes of a report: it names each job."""

PATIENCE = 60.0
"""Seconds without a word until a process is taken for stuck."""


class Child:
    """A process that does one task."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, log: IO[bytes]) -> None:
        self._role = role
        self._process = process
        self._log = log

    def tell(self, word: object) -> None:
        """Send it a line: its task, then ``go``, then to a worker ``stop``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(word).encode() + b"\n")

    async def handled(self, jobs: int) -> None:
        """Wait until it, a worker, has handled so many jobs."""
        handled = 0
        while handled < jobs:
            handled = await self.receive("handled")

    async def receive(self, wanted: str) -> Any:
        """The next message of this kind; others are passed over.

        Raises:
            PeerError: it ended, or says nothing any more.
        """
        assert self._process.stdout is not None
        while True:
            try:
                async with asyncio.timeout(PATIENCE):
                    line = await self._process.stdout.readline()
            except TimeoutError:
                raise PeerError(
                    f"its process {self._role!r} said nothing for {PATIENCE:g} s: {self._last_words()}"
                ) from None
            if not line:
                code = await self._process.wait()
                raise PeerError(f"its process {self._role!r} ended with exit code {code}: {self._last_words()}")
            kind, value = json.loads(line)
            if kind == wanted:
                return value

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "no error was logged")


@asynccontextmanager
async def child(installed: Installed, role: str, **task: Any) -> AsyncIterator[Child]:
    """A process that is connected and waits for ``go``; it is killed at the end of the block.

    Raises:
        PeerError: it did not get that far.
    """
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            *installed.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            # Settings from outside are for other workers.
            env={name: value for name, value in os.environ.items() if not name.startswith("RECADO_")}
            | dict(installed.environment),
            limit=LONGEST_LINE,
        )
        started = Child(role, process, log)
        try:
            started.tell({"role": role, **task})
            await started.receive("ready")
            yield started
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def do(installed: Installed, role: str, **task: Any) -> Any:
    """Have a process do a task that ends by itself, and return its report.

    Raises:
        PeerError: it failed.
    """
    async with child(installed, role, **task) as started:
        started.tell("go")
        return await started.receive("report")
