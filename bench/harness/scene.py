"""A server, adapter processes on it, and what these tell; the faults are in :mod:`bench.harness.faults`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

import asyncpg

from recado import embedded
from recado.queue.benchmark import count_by_status
from recado.queue.models import JobStatus
from recado.settings import DEFAULT_SCHEMA

ROOT = Path(__file__).resolve().parents[2]

SERVER_OPTIONS: Mapping[str, str] = MappingProxyType({"shared_buffers": "256MB", "max_connections": "400"})
"""The harness's own; all else is PostgreSQL's default there, too."""

START_TIMEOUT = 60.0
"""Seconds for an adapter's first line; the harness's own."""

DRAIN_TIMEOUT = 180.0
"""Seconds for what is left when nothing comes in any more: killed workers are missed after 60, and then swept."""

LOOK_INTERVAL = 0.1
"""Seconds between two looks at what is left."""


class Sample(NamedTuple):
    """A line of an adapter."""

    at: float
    """The tick, in seconds of the wall clock."""
    instance: int
    value: float
    window: float


class Server:
    """A durable server that can be stopped, and started again on its data."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = embedded.start(folder, options=SERVER_OPTIONS)

    @property
    def dsn(self) -> str:
        return self._running.dsn()

    async def stop(self) -> None:
        """As a container's stop does it: a fast shutdown."""
        await asyncio.to_thread(self._running.stop)

    def start(self) -> None:
        """Start it again. (It blocks: a server must be started from the main thread, whose end it does not outlive.)"""
        self._running = embedded.start(self._folder, options=SERVER_OPTIONS)


class Replica:
    """An adapter process, and the next one after it was killed."""

    def __init__(self, instance: int, variables: Mapping[str, str], log: IO[bytes]) -> None:
        self._instance = instance
        self._variables = {**variables, "BENCH_INSTANCE_ID": str(instance)}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self.samples: defaultdict[str, list[Sample]] = defaultdict(list)
        """By metric."""

    @property
    def exit_code(self) -> int | None:
        """Of a process that has ended by itself."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        """Start it, and wait for its descriptor."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.harness"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=self._log,
            # Settings from outside are for other workers.
            env={name: value for name, value in os.environ.items() if not name.startswith("RECADO_")} | self._variables,
            cwd=ROOT,
            start_new_session=True,
        )
        if process.stdout is None:
            raise RuntimeError("cannot read an adapter: it has no output; report this")
        self._process = process
        described = asyncio.Event()
        self._reading = asyncio.create_task(self._read(process.stdout, described))
        waiting = asyncio.create_task(described.wait())
        await asyncio.wait({self._reading, waiting}, timeout=START_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not described.is_set():
            raise RuntimeError(f"cannot run the cell: adapter {self._instance} does not start; its log says why")

    async def _read(self, output: asyncio.StreamReader, described: asyncio.Event) -> None:
        async for line in output:
            told = json.loads(line)
            if told["kind"] == "descriptor":
                described.set()
                continue
            at = datetime.fromisoformat(told["t"]).timestamp()
            self.samples[told["metric"]].append(Sample(at, told["instance_id"], told["value"], told["window_s"]))

    async def end(self, number: signal.Signals) -> int | None:
        """Send it a signal, and wait for its end; its exit code, or ``None`` if it does not run."""
        process, reading = self._process, self._reading
        if process is None or reading is None:
            return None
        if process.returncode is None:
            process.send_signal(number)
        code = await process.wait()
        await reading
        self._process = None
        return code


class Scene:
    """What a fault may break, and who watches."""

    def __init__(self, server: Server, replicas: list[Replica], control_file: Path, rate: float, log: Path) -> None:
        self._log = log
        self.server = server
        self.replicas = replicas
        self.rate = rate
        self._control_file = control_file
        self.set_rate(rate)

    def set_rate(self, rate: float) -> None:
        """Jobs a second that each replica is to enqueue from now on."""
        # Renamed into place: a reader never sees half a number.
        written = self._control_file.with_suffix(".new")
        written.write_text(f"{rate}\n")
        written.replace(self._control_file)

    def samples(self, metric: str) -> Iterable[Sample]:
        """Of all replicas."""
        return (sample for replica in self.replicas for sample in replica.samples[metric])

    def check_alive(self) -> None:
        """See whether all replicas run.

        Raises:
            RuntimeError: one has ended by itself.
        """
        for replica in self.replicas:
            if (code := replica.exit_code) is not None:
                raise RuntimeError(f"cannot run the cell: an adapter ended with exit code {code}: {self._last_words()}")

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip(" |+-")), "it said nothing")

    async def drain(self) -> Mapping[JobStatus, int]:
        """Let nothing come in any more, and wait until nothing is left; jobs by how they ended."""
        self.set_rate(0)
        conn = await asyncpg.connect(self.server.dsn)
        try:
            deadline = time.monotonic() + DRAIN_TIMEOUT
            while True:
                told = sum(sample.value for sample in self._latest("enqueue_rate"))
                counts = await count_by_status(conn, DEFAULT_SCHEMA)
                left = counts.keys() & {JobStatus.PENDING, JobStatus.RUNNING}
                if (not left and not told) or time.monotonic() > deadline:
                    return counts
                await asyncio.sleep(LOOK_INTERVAL)
        finally:
            await conn.close()

    def _latest(self, metric: str) -> Iterable[Sample]:
        return (replica.samples[metric][-1] for replica in self.replicas if replica.samples[metric])


@asynccontextmanager
async def scene(folder: Path, *, replicas: int, workers: int, rate: float) -> AsyncIterator[Scene]:
    """A new server with so many adapters at work on it.

    Args:
        workers: jobs at once of each replica.
        rate: jobs a second that each enqueues.
    """
    server = Server(folder / "server")
    started: list[Replica] = []
    control_file, log = folder / "rate", folder / "adapters.log"
    variables = {
        "DATABASE_URL": server.dsn,
        "SCENARIO": "long_horizon",
        "PRODUCER_MODE": "fixed",
        "PRODUCER_RATE": str(rate),
        "PRODUCER_RATE_CONTROL_FILE": str(control_file),
        "WORKER_COUNT": str(workers),
        "SAMPLE_EVERY_S": "1",
    }
    try:
        with log.open("wb") as output:
            made = Scene(server, started, control_file, rate, log)
            for instance in range(replicas):
                replica = Replica(instance, variables, output)
                started.append(replica)
                await replica.start()
            yield made
    finally:
        for replica in started:
            await replica.end(signal.SIGKILL)
        await server.stop()
