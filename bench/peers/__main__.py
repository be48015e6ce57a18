"""A process of a system, started as ``python -m bench.peers MODULE``; :mod:`bench.processes` is the other side.

It talks in lines of JSON. It reads its task, says ``ready``, waits for ``go``, and in the end reports:

- ``setup`` installs the schema and reports nothing.
- ``one`` and ``many`` enqueue ``jobs`` jobs as fast as they can, singly or in calls of ``call`` jobs, and report when
  they began and when they ended.
- ``pace`` enqueues ``pace`` jobs a second, singly, and reports when each call began.
- ``work`` runs a worker, says how many jobs it has ``handled``, and after ``stop`` reports the number of each and when
  its handler began.

All times are of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from types import ModuleType
from typing import Any

PROGRESS_INTERVAL = 0.01
"""Seconds between two times of telling how many jobs were handled."""


class Channel:
    """Lines to and from the benchmark."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        # What else the process prints, a library's chatter, goes where errors go.
        self._output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    async def receive(self) -> Any:
        line = await self._reader.readline()
        if not line:
            raise SystemExit("the benchmark is gone")
        return json.loads(line)

    def send(self, kind: str, value: Any = None) -> None:
        self._output.write(json.dumps([kind, value]) + "\n")
        self._output.flush()

    async def ready(self) -> None:
        """Say so, and wait for the start."""
        self.send("ready")
        await self.receive()


async def setup(system: ModuleType, task: dict[str, Any], channel: Channel) -> None:
    await channel.ready()
    await system.setup(task["dsn"])
    channel.send("report")


async def one(system: ModuleType, task: dict[str, Any], channel: Channel) -> None:
    async with system.producer(task["dsn"]) as producer:
        await channel.ready()
        began = time.monotonic()
        for n in range(task["jobs"]):
            await producer.one(n)
        channel.send("report", [began, time.monotonic()])


async def many(system: ModuleType, task: dict[str, Any], channel: Channel) -> None:
    jobs, call = task["jobs"], task["call"]
    async with system.producer(task["dsn"]) as producer:
        await channel.ready()
        began = time.monotonic()
        for first in range(0, jobs, call):
            await producer.many(range(first, min(first + call, jobs)))
        channel.send("report", [began, time.monotonic()])


async def pace(system: ModuleType, task: dict[str, Any], channel: Channel) -> None:
    async with system.producer(task["dsn"]) as producer:
        await channel.ready()
        sent = []
        began = time.monotonic()
        for n in range(task["jobs"]):
            await asyncio.sleep(began + n / task["pace"] - time.monotonic())
            sent.append(time.monotonic())
            await producer.one(n)
        channel.send("report", sent)


async def work(system: ModuleType, task: dict[str, Any], channel: Channel) -> None:
    begun: list[tuple[int, float]] = []

    def handle(n: int) -> None:
        begun.append((n, time.monotonic()))

    async def tell() -> None:
        told = 0
        while True:
            await asyncio.sleep(PROGRESS_INTERVAL)
            if told != len(begun):
                told = len(begun)
                channel.send("handled", told)

    await channel.ready()
    async with asyncio.TaskGroup() as group:
        group.create_task(system.work(task["dsn"], handle, task["concurrency"]))
        group.create_task(tell())
        await channel.receive()
        channel.send("report", begun)
        # How a worker stops is not measured, and some take seconds over it.
        os._exit(0)


ROLES = {role.__name__: role for role in (setup, one, many, pace, work)}


async def main(module: str) -> None:
    """Do one task."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    channel = Channel(reader)
    task = await channel.receive()
    await ROLES[task["role"]](importlib.import_module(f"bench.peers.{module}"), task, channel)


if __name__ == "__main__":
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(main(sys.argv[1]))
        except BaseExceptionGroup as group:
            # The traceback's last line is what the benchmark tells.
            raise group.exceptions[0] from None
