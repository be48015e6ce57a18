"""What the roles of both sides share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TypeAlias

import asyncpg

from recado.bench.messages import Task
from recado.queue.connections import connector

Work: TypeAlias = Callable[[], Coroutine[Any, Any, None]]

FEED_CALL = 1_000
"""Jobs of one call while workers work: enough to keep them busy, although each call waits for its commit."""

PACE = 50
"""Jobs a second that an idle worker waits for."""


@asynccontextmanager
async def connections(task: Task, count: int = 1) -> AsyncIterator[list[asyncpg.Connection[asyncpg.Record]]]:
    """So many connections to the database, as recado itself connects."""
    async with AsyncExitStack() as stack:
        opened = []
        for _ in range(count):
            conn = await connector(task.dsn).connect("bench")
            stack.push_async_callback(conn.close)
            opened.append(conn)
        yield opened


async def side_by_side(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them at once, until the last one ends."""
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)
