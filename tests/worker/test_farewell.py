"""A connection that the server has given up and the driver still takes for open."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from recado import Recado
from recado.queue.connections import Connector
from recado.worker import EventKind
from tests.worker.support import working

FATAL = b"SFATAL\0VFATAL\0C57P01\0Mterminating connection due to administrator command\0\0"


@pytest.mark.parametrize("role", ["claims", "upkeep", "leases", "listener"])
async def test_a_worker_survives_a_farewell_of_the_server_that_comes_before_the_end_of_the_connection(
    dsn: str, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    """A backend that is terminated while it is idle says so and closes. Until the driver has seen the end it takes the
    connection for open, and refuses the next statement with an error of its own."""
    monkeypatch.setattr("recado.worker.listener.Listener.__init__.__kwdefaults__", {"probe_interval": 0.1})
    app = Recado()
    connections: dict[str, asyncpg.Connection] = {}
    connect = Connector.connect

    async def remember(self: Connector, role: str, **overrides: Any) -> asyncpg.Connection:
        connections[role] = await connect(self, role, **overrides)
        return connections[role]

    monkeypatch.setattr(Connector, "connect", remember)
    async with working(app, dsn, heartbeat=0.1, reclaim_interval=0.1) as (_, seen):
        await seen.seen(EventKind.COMPLETED, await app.enqueue(conn, "_smoke.echo", 1))
        # What it does at its start is done, so the connection is idle but for sweeps of a moment.
        await seen.seen(EventKind.PRUNED)
        await seen.seen(EventKind.EXPIRED)
        broken: Any = connections[role]
        broken._protocol.data_received(b"E" + (len(FATAL) + 4).to_bytes(4, "big") + FATAL)
        beats, sweeps = seen.count(EventKind.BEAT), seen.count(EventKind.SWEPT)
        await seen.seen(EventKind.BEAT, times=beats + 3)
        await seen.seen(EventKind.SWEPT, times=sweeps + 3)
        await seen.seen(EventKind.COMPLETED, await app.enqueue(conn, "_smoke.echo", 2))
        await seen.until(lambda: connections[role] is not broken)
