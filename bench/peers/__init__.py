"""An adapter for each system, a module with three functions::

    async def setup(dsn: str) -> None                         # install the schema
    def producer(dsn: str) -> AsyncContextManager[Producer]   # connect, and enqueue while the block lasts
    async def work(dsn: str, handle: Handle, concurrency: int | None) -> None

``work`` runs a worker, whose handlers call ``handle`` with the number of their job and do nothing else, until its
process is ended. ``concurrency`` is how many handlers may run at once; ``None`` leaves that to the system's own best
setting. Adapters use nothing but the public API. They run in an environment that holds the system and no more, so
nothing here may import what is not in the standard library.

``graphile_worker.cjs`` is a process of its own, which speaks what :mod:`bench.peers.__main__` speaks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

Handle = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Producer:
    """Two ways to enqueue; what they enqueued is committed when they return.

    Args:
        one: enqueues the job of this number, on a connection that is open already.
        many: enqueues the jobs of these numbers, in one call where the system has one for that.
    """

    one: Callable[[int], Awaitable[object]]
    many: Callable[[Sequence[int]], Awaitable[object]]
