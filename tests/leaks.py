"""What a test may have left behind, and how to tell."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

GRACE = 2.0
"""Seconds for what ends on its own but not at once, such as a backend whose client has just closed."""

POLL_INTERVAL = 0.01
"""Seconds between two looks at what gives no signal."""

CONNECTIONS = """
SELECT format('%s (%s, %s): %s', pid, nullif(application_name, ''), state, query)
FROM pg_stat_activity WHERE datname = $1 AND backend_type = 'client backend'
"""


def fail_on_new(what: str, found: Collection[object]) -> None:
    """Fail the test when there is anything in ``found``."""
    if found:
        pytest.fail(f"the test leaves {what} behind:\n" + "\n".join(f"  {item}" for item in found), pytrace=False)


def threads() -> set[threading.Thread]:
    """The threads that are alive."""
    return set(threading.enumerate())


def lasting(threads: Collection[threading.Thread]) -> set[threading.Thread]:
    """Those of ``threads`` that do not end within the moment of grace."""
    deadline = time.monotonic() + GRACE
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {thread for thread in threads if thread.is_alive()}


def children() -> set[str]:
    """The child processes, zombies included, each with its command; none where there is no ``/proc``."""
    if sys.platform != "linux":
        return set()
    pids = {pid for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()}
    return {f"{pid}: {_command(pid)}" for pid in pids}


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return "(gone)"


def tasks() -> set[asyncio.Task[Any]]:
    """The running loop's unfinished tasks but for the one that asks."""
    current = asyncio.current_task()
    return {task for task in asyncio.all_tasks() if task is not current}


@contextlib.contextmanager
def recorded_loop_errors() -> Iterator[list[str]]:
    """Collects what reaches the running loop's exception handler until the block ends."""
    errors: list[str] = []
    loop = asyncio.get_running_loop()

    def record(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        errors.append(f"{context['message']}: {context.get('exception')!r}")

    loop.set_exception_handler(record)
    try:
        yield errors
        # A task's exception that nobody retrieved is reported when the task is collected.
        gc.collect()
    finally:
        loop.set_exception_handler(None)


def connections(server: str, dsn: str) -> list[str]:
    """The clients of a database that are still there after a moment of grace: a backend's exit takes one."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(_connections(server, urlsplit(dsn).path.removeprefix("/")))


async def _connections(server: str, database: str) -> list[str]:
    observer = await asyncpg.connect(server)
    try:
        deadline = time.monotonic() + GRACE
        while True:
            found = [row[0] for row in await observer.fetch(CONNECTIONS, database)]
            if not found or time.monotonic() > deadline:
                return found
            await asyncio.sleep(POLL_INTERVAL)
    finally:
        await observer.close()
