"""Starts the processes that are measured, and talks to them; see :mod:`recado.bench.child` for the other side."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import IO, Any

from recado.bench.messages import REPORT, TASK, Report, Task
from recado.errors import RecadoError

LONGEST_LINE = 2**28
"""Bytes of a report: it names each batch and, at the longest, each job."""

PATIENCE = 60.0
"""Seconds without any progress until something is taken for broken; a start on a busy machine takes a few."""


class Child:
    """A process that does one task."""

    def __init__(
        self, task: Task, process: asyncio.subprocess.Process, log: IO[bytes], on_progress: Callable[[], None]
    ) -> None:
        self.task = task
        self.done = 0
        self._process = process
        self._log = log
        self._on_progress = on_progress
        self._said: dict[str, asyncio.Future[Any]] = {}

    def _future(self, kind: str) -> asyncio.Future[Any]:
        return self._said.setdefault(kind, asyncio.get_running_loop().create_future())

    async def read(self) -> None:
        """Take in what it says, to its end.

        Raises:
            RecadoError: it ended before it was asked to report.
        """
        stdout = self._process.stdout
        while stdout is not None and (line := await stdout.readline()):
            kind, value = json.loads(line)
            if kind == "done":
                self.done = value
                self._on_progress()
            else:
                self._future(kind).set_result(value)
        code = await self._process.wait()
        if not self._future("report").done():
            raise RecadoError(
                f"cannot finish the benchmark: its process {self.task.role!r} ended with exit code {code}: "
                f"{self._last_words()}"
            )

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

    async def ready(self) -> None:
        """Wait until it is set up."""
        async with patience(f"its process {self.task.role!r} does not get ready"):
            await self._future("ready")

    def tell(self, line: str) -> None:
        """Send it a line: its task, then ``go``, then ``report``."""
        if self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())

    async def report(self) -> Report:
        """End its work, and ask what it measured."""
        self.tell("report")
        async with patience(f"its process {self.task.role!r} does not stop"):
            return REPORT.validate_python(await self._future("report"))

    async def end(self) -> None:
        """Kill it, if it has not ended by itself."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def patience(what: str) -> AsyncIterator[None]:
    """Wait in this block no longer than :data:`PATIENCE`.

    Raises:
        RecadoError: it took longer; the message says ``what``.
    """
    try:
        async with asyncio.timeout(PATIENCE):
            yield
    except TimeoutError:
        raise RecadoError(
            f"cannot finish the benchmark: {what} for {PATIENCE:g} s; look for what blocks the database or the machine"
        ) from None


@asynccontextmanager
async def children(tasks: Sequence[Task], on_progress: Callable[[], None]) -> AsyncIterator[list[Child]]:
    """A process for each task, set up and waiting for ``go``; none outlives the block.

    Raises:
        RecadoError: one ended early, or did not get ready.
    """
    try:
        async with AsyncExitStack() as stack:
            started = [await _start(task, on_progress, stack) for task in tasks]
            reading = await stack.enter_async_context(asyncio.TaskGroup())
            for child in started:
                reading.create_task(child.read())
            for child in started:
                await child.ready()
            yield started
    except BaseExceptionGroup as group:
        # The first to end early; the others are killed on its account.
        raise group.exceptions[0] from None


async def _start(task: Task, on_progress: Callable[[], None], stack: AsyncExitStack) -> Child:
    log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recado.bench.child"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=log,
        # RECADO_LISTEN_DSN would send the worker's ears to another server.
        env={name: value for name, value in os.environ.items() if not name.startswith("RECADO_")},
        limit=LONGEST_LINE,
        # Out of reach of a terminal's Ctrl-C, which would have it end with words of its own.
        start_new_session=True,
    )
    child = Child(task, process, log, on_progress)
    stack.push_async_callback(child.end)
    child.tell(TASK.dump_json(task).decode())
    return child
