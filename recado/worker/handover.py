"""Connections for transactional handlers, handed from one to the next while jobs wait for them.

A pool resets a connection when it takes it back, which is a round trip, as long as one of the three that a
transactional job itself takes. So a connection whose handler ended well goes straight to the next job that waits
for one; after a moment it goes back into the pool all the same, which may be the service's own and have others
waiting. What a handler changes for the session, with SET or LISTEN, it has to undo itself, or use SET LOCAL.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from recado.queue.connections import Pool, PoolConnection, answers

MAX_HOLD = 0.05
"""Seconds for which a connection is handed on before the pool gets it back: some twenty short jobs share a reset, and
whoever else wants a connection of the pool hardly waits."""

RELEASE_TIMEOUT = 10.0
"""Seconds that the pool may take for its reset, before it drops the connection."""


class Handover:
    """The worker's part of a pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._out = 0
        self._since: dict[PoolConnection, float] = {}
        self._waiting: deque[asyncio.Future[PoolConnection | None]] = deque()
        self._answering: set[int] | None = None
        """The backends that have answered since the last doubt; ``None`` as long as there was none."""

    def doubt(self) -> None:
        """Another connection of this worker has fallen silent: see first whether those still answer that the pool has
        kept. (A statement on one that does not would hold its job and its slot for all of its timeout.)"""
        self._answering = set()

    async def acquire(self) -> PoolConnection:
        """A connection outside any transaction.

        Raises:
            OSError, TimeoutError, asyncpg.PostgresError: it cannot be opened.
        """
        if self._out >= self._pool.get_max_size():
            handed = await self._next()
            if handed is not None:
                return handed
        self._out += 1
        try:
            conn = await self._acquire()
        except BaseException:
            self._out -= 1
            self._let_one_acquire()
            raise
        self._since[conn] = time.monotonic()
        return conn

    async def give_back(self, conn: PoolConnection, *, clean: bool) -> None:
        """Take a connection back.

        Args:
            clean: whether the handler ended well, its transaction committed.
        """
        if clean and time.monotonic() - self._since[conn] < MAX_HOLD:
            while self._waiting:
                waiter = self._waiting.popleft()
                if not waiter.done():
                    waiter.set_result(conn)
                    return
        del self._since[conn]
        self._out -= 1
        try:
            await self._pool.release(conn, timeout=RELEASE_TIMEOUT)
        finally:
            self._let_one_acquire()

    async def _acquire(self) -> PoolConnection:
        while True:
            conn = await self._pool.acquire()
            if self._answering is None:
                return conn
            pid = conn.get_server_pid()
            if pid in self._answering:
                return conn
            if await answers(conn):
                self._answering.add(pid)
                return conn

    async def _next(self) -> PoolConnection | None:
        """Wait for a connection, or for leave to acquire one (``None``)."""
        waiter: asyncio.Future[PoolConnection | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # Handed something in the very moment of the cancellation: it goes on to the next.
            if waiter.done() and not waiter.cancelled():
                conn = waiter.result()
                if conn is None:
                    self._let_one_acquire()
                else:
                    await self.give_back(conn, clean=True)
            raise

    def _let_one_acquire(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return
