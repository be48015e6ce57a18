"""Several worker processes under one supervisor: one asyncio process uses one core.

The supervisor claims and runs nothing. It starts the processes, starts those again that crash, and tells all of them
to stop. It tells them through their standard input rather than by a signal: a service manager or a terminal sends
its signal to every process of the group anyway, and a worker that got it twice would not drain but stop at once.
The same pipe ends when the supervisor is gone, however it went, and its workers then drain and end.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO

logger = logging.getLogger("recado.worker")

FIRST_RESTART = 0.5
"""Seconds before a process that crashed is started again: long enough for whoever reads the log."""

LONGEST_RESTART = 30.0
"""Seconds between two starts of one that crashes again and again, doubling up to here."""

STABLE_AFTER = 60.0
"""Seconds after which a process counts as sound: its next crash begins with the shortest wait again."""

STOP = b"stop\n"
STOP_NOW = b"now\n"


class Supervisor:
    """Keeps ``count`` processes of ``command`` running until it is stopped.

    Args:
        command: a worker that calls :func:`obey` on its standard input.
        count: how many.
        environment: of the processes.
    """

    def __init__(self, command: Sequence[str], count: int, environment: Mapping[str, str]) -> None:
        self._command = command
        self._count = count
        self._environment = environment
        self._processes: set[Process] = set()
        self._stopping = asyncio.Event()
        self._order = STOP

    def stop(self) -> None:
        """Let all processes drain, and start none again."""
        self._tell(STOP)

    def stop_now(self) -> None:
        """Let all processes end at once."""
        self._tell(STOP_NOW)

    async def run(self) -> None:
        """Supervise until :meth:`stop` was called and every process has ended."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._keep(number))

    def _tell(self, order: bytes) -> None:
        self._stopping.set()
        self._order = order
        for process in self._processes:
            if process.stdin is not None and not process.stdin.is_closing():
                process.stdin.write(order)

    async def _keep(self, number: int) -> None:
        """Keep one process running."""
        wait = FIRST_RESTART
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                if code != 0:
                    logger.error("worker process %d ended with exit code %d at its stop", number, code)
                return
            if time.monotonic() - began >= STABLE_AFTER:
                wait = FIRST_RESTART
            logger.error("worker process %d ended with exit code %d; starting it again in %g s", number, code, wait)
            try:
                async with asyncio.timeout(wait):
                    await self._stopping.wait()
            except TimeoutError:
                wait = min(2 * wait, LONGEST_RESTART)

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(*self._command, stdin=PIPE, env=self._environment)
        self._processes.add(process)
        try:
            if self._stopping.is_set():  # told while this one was being started
                self._tell(self._order)
            return await process.wait()
        except asyncio.CancelledError:
            process.terminate()
            await process.wait()
            raise
        finally:
            self._processes.discard(process)


def obey(orders: BinaryIO, stop: Callable[[], None], stop_now: Callable[[], None]) -> None:
    """In a worker process: do what its supervisor says on ``orders``, and ``stop`` when that ends.

    It reads in a thread that ends with the process, since there is no way to wait for a pipe that works in every
    event loop on every platform.

    Args:
        orders: the standard input.
        stop, stop_now: called on the running event loop.
    """
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            for order in orders:
                loop.call_soon_threadsafe(stop_now if order == STOP_NOW else stop)
            loop.call_soon_threadsafe(stop)
        except RuntimeError:  # the loop is closed: the worker has ended before
            return

    threading.Thread(target=read, name="recado-orders", daemon=True).start()
