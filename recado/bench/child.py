"""A process of the benchmark, started as ``python -m recado.bench.child``.

It talks to the process that started it in lines of JSON: it reads its task, says ``ready`` once it is connected
and idle, waits for ``go``, tells how many jobs are done while it works, and reports when it is asked. When nobody
is there any more to ask, it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, TypeAlias

from recado.bench import bare, ours
from recado.bench.messages import REPORT, TASK, Task
from recado.bench.meter import Meter
from recado.bench.roles import Work
from recado.serve import run

PROGRESS_INTERVAL = 0.05
"""Seconds between two times of telling how far it is; the end is measured here, and only noticed there."""

Role: TypeAlias = Callable[[Task, Meter], AbstractAsyncContextManager[Work]]

ROLES: Mapping[str, Role] = {
    "worker": ours.worker,
    "noting worker": ours.noting_worker,
    "enqueue": ours.enqueue,
    "enqueue many": ours.enqueue_many,
    "feed": ours.feed,
    "pace": ours.pace,
    "bare drain": bare.drain,
    "bare transactions": bare.transactions,
    "bare listen": bare.listen,
    "bare insert": bare.insert,
    "bare copy": bare.copy,
    "bare feed": bare.feed,
    "bare pace": bare.pace,
}
"""Each sets up, and yields what to do after ``go``; that may go on until it is cancelled."""


class Channel:
    """Lines on standard input and output."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def receive(self) -> str:
        """The next line; ends the process when there will be none."""
        line = await self._reader.readline()
        if not line:
            raise SystemExit("the benchmark is gone")
        return line.decode().strip()

    def send(self, kind: str, value: Any = None) -> None:
        """A message; the pipe takes it at once, or the other side is busy reading it."""
        sys.stdout.write(json.dumps([kind, value]) + "\n")
        sys.stdout.flush()


@asynccontextmanager
async def _channel() -> AsyncIterator[Channel]:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        yield Channel(reader)
    finally:
        transport.close()


async def main() -> None:
    """Do one task."""
    async with _channel() as channel:
        task = TASK.validate_json(await channel.receive())
        meter = Meter()
        async with ROLES[task.role](task, meter) as work:
            channel.send("ready")
            await channel.receive()
            meter.begin()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(work()), group.create_task(_tell_progress(channel, meter))]
                await channel.receive()
                meter.end()
                for running in tasks:
                    running.cancel()
        channel.send("report", REPORT.dump_python(meter.report, mode="json"))


async def _tell_progress(channel: Channel, meter: Meter) -> None:
    told = 0
    while True:
        await asyncio.sleep(PROGRESS_INTERVAL)
        if meter.done != told:
            told = meter.done
            meter.sample()
            channel.send("done", told)


def _first(error: BaseException) -> BaseException:
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        run(main())
    except BaseExceptionGroup as group:
        # The traceback's last line is what the user is told.
        raise _first(group) from group
