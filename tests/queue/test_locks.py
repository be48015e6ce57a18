"""Locks, and how long a client that fell silent can keep them."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from recado.queue import locks
from tests.worker.support import PATIENCE, Connect


@pytest.mark.parametrize("silent", ["between two statements", "between a statement's parse and its arguments"])
async def test_a_client_that_falls_silent_loses_the_lock(
    conn: asyncpg.Connection, connect: Connect, monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    """As a process does that is stopped there. The driver ends a Parse with Flush, so the server takes itself for
    active, and no idle timeout counts: that takes the transaction's own, which PostgreSQL has since 17."""
    prepared = silent != "between two statements"
    if prepared and conn.get_server_version().major < 17:
        pytest.skip("the server has no transaction_timeout")
    kept, shortened = ("'5s'", "'15s'") if prepared else ("'15s'", "'5s'")
    monkeypatch.setattr(locks, "TRY_LOCK", locks.TRY_LOCK.replace(kept, "'1h'").replace(shortened, "'100ms'"))
    async with asyncio.timeout(PATIENCE):
        holder, other = await connect(), await connect()
        closed = asyncio.Event()
        holder.add_termination_listener(lambda _: closed.set())
        await holder.execute("BEGIN")
        assert await locks.try_upkeep_lock(holder, "prune")
        if prepared:
            await holder.prepare("SELECT 1")
        async with other.transaction():
            await locks.wait_for_lock(other, "prune")
        await closed.wait()
