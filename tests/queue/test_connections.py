"""Connections whose network is gone: the kernel is told to notice, and one that has noticed tells the others."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

from recado import Recado, serve
from recado.queue import connections
from recado.queue.connections import KEEPALIVE, PROBE, Connection, Connector, Link, Pool, connect
from recado.worker import EventKind
from recado.worker.handover import Handover
from tests.chaos.proxy import Proxy, proxy
from tests.queue.support import PATIENCE
from tests.worker.support import logged, working

SOON = 0.2
"""Seconds for what is silent for good; nothing waits for it where all is well."""

lists_sockets = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists a process's sockets")

NAMES = "SELECT array_agg(DISTINCT application_name) FROM pg_stat_activity WHERE datname = current_database()"


@pytest_asyncio.fixture
async def network(dsn: str) -> AsyncIterator[Proxy]:
    """TCP to the test's database, and whatever may happen to it."""
    async with proxy(dsn) as network:
        yield network


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for an answer in vain does so only for a moment."""
    monkeypatch.setattr(connections, "ANSWER_TIMEOUT", SOON)


def application() -> Recado:
    app = Recado()

    @app.job("pay.plainly")
    async def plainly(payload: object) -> None:
        pass

    @app.job("pay.booked")
    async def booked(payload: object, conn: asyncpg.Connection) -> None:
        await conn.execute("SELECT 1")

    return app


async def run_both(app: Recado, conn: asyncpg.Connection) -> list[UUID]:
    """Enqueue a job for the finisher and one for the pool."""
    return [await app.enqueue(conn, job_type, {}) for job_type in ("pay.plainly", "pay.booked")]


def kept_alive(sock: socket.socket) -> bool:
    return sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def options_of(sock: socket.socket) -> dict[str, int]:
    return {name: sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in KEEPALIVE if known(name)}


def known(name: str) -> bool:
    return hasattr(socket, name)


def sockets_to(network: Proxy) -> Iterator[socket.socket]:
    """This process's ends of its connections to the server."""
    port = urlsplit(network.dsn).port
    for fd in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:  # no socket, or the folder's own descriptor
            continue
        with sock:
            if sock.family == socket.AF_INET and _peer(sock) == ("127.0.0.1", port):
                yield sock


def _peer(sock: socket.socket) -> object:
    try:
        return sock.getpeername()
    except OSError:  # it listens
        return None


def test_keep_alives_give_a_silent_network_up_in_the_time_of_a_statement() -> None:
    idle, interval, count = (KEEPALIVE[name] for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"))
    assert idle + interval * count == connections.STATEMENT_TIMEOUT
    assert KEEPALIVE["TCP_USER_TIMEOUT"] == 1000 * connections.STATEMENT_TIMEOUT


@lists_sockets
async def test_every_connection_of_a_worker_and_of_the_api_is_kept_alive(
    network: Proxy, conn: asyncpg.Connection
) -> None:
    app = application()
    async with working(app, network.dsn, heartbeat=0.1) as (_, observed), serve._pool(network.dsn) as pool:
        ids = await run_both(app, conn)
        await pool.fetchval("SELECT 1")
        for job_id in ids:
            await observed.seen(EventKind.COMPLETED, job_id)
        for kind in (EventKind.BEAT, EventKind.SYNCED):  # behind these nobody connects any more
            await observed.seen(kind)
        names = await conn.fetchval(NAMES)
        roles = {"claims", "finisher", "handlers", "leases", "listener", "upkeep", "api"}
        assert {f"recado {role}" for role in roles} <= set(names)
        found = [(kept_alive(sock), options_of(sock)) for sock in sockets_to(network)]
    assert len(found) >= len(roles)
    wanted = {name: value for name, value in KEEPALIVE.items() if known(name)}
    assert wanted
    assert [options for kept, options in found if not kept or options != wanted] == []


@lists_sockets
async def test_a_services_own_pool_is_kept_alive_by_the_same_function(network: Proxy) -> None:
    async with asyncpg.create_pool(network.dsn, min_size=0, connect=connect) as pool, pool.acquire():
        assert [kept_alive(sock) for sock in sockets_to(network)] == [True]


@pytest.mark.usefixtures("hasty")
async def test_a_worker_whose_claims_fell_silent_waits_for_none_of_its_other_connections(
    network: Proxy, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connections, "STATEMENT_TIMEOUT", 1.0)
    app = application()
    async with working(app, network.dsn, poll_interval=0.1) as (_, observed):
        for job_id in await run_both(app, conn):  # finisher and pool are connected, and idle
            await observed.seen(EventKind.COMPLETED, job_id)
        await observed.idle()
        network.half_open()
        network.heal()  # new connections fare well, the old ones have nobody at their other ends
        async with logged("cannot claim"):
            pass
        for job_id in await run_both(app, conn):
            # The pool's would hold its job for the handlers' own timeout, which is longer than our patience.
            await observed.seen(EventKind.COMPLETED, job_id)
    assert not any("cannot write down" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("error", "silent"),
    [
        (TimeoutError(), True),
        (TimeoutError(errno.ETIMEDOUT, "the kernel's"), True),
        (ConnectionResetError(), False),
        (asyncpg.AdminShutdownError(), False),
        (asyncpg.ConnectionDoesNotExistError(), False),
    ],
)
async def test_others_are_told_of_a_connection_that_fell_silent_and_of_no_other_loss(
    dsn: str, error: Exception, silent: bool
) -> None:
    told: list[None] = []
    link = Link(Connector((dsn,), {}), "test", lambda: told.append(None))
    with pytest.raises(type(error)):
        async with link.connection():
            raise error
    assert len(told) == silent


async def test_what_the_kernel_found_out_the_driver_names_as_its_cause(dsn: str) -> None:
    told: list[None] = []
    link = Link(Connector((dsn,), {}), "test", lambda: told.append(None))
    with pytest.raises(asyncpg.ConnectionDoesNotExistError):
        async with link.connection():
            raise asyncpg.ConnectionDoesNotExistError from TimeoutError(errno.ETIMEDOUT, "timed out")
    assert len(told) == 1


async def test_an_idle_connection_in_doubt_is_replaced(dsn: str) -> None:
    link = Link(Connector((dsn,), {}), "test")
    async with link.connection() as first:
        pass
    link.doubt()
    assert first.is_closed()
    async with link.connection() as second:
        assert await second.fetchval("SELECT 1") == 1
    assert link.connects == 2
    await link.close()


@pytest.mark.usefixtures("hasty")
async def test_a_connection_in_doubt_that_does_not_answer_is_given_up(network: Proxy) -> None:
    link = Link(Connector((network.dsn,), {}), "test")
    sent = asyncio.Event()

    async def ask() -> None:
        async with link.connection() as conn:
            network.stall()
            sent.set()
            await conn.execute("SELECT 1")

    asking = asyncio.create_task(ask())
    await sent.wait()
    link.doubt()
    with pytest.raises(asyncpg.ConnectionDoesNotExistError):
        async with asyncio.timeout(PATIENCE):
            await asking


async def test_a_connection_in_doubt_that_answers_in_time_is_kept(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "ANSWER_TIMEOUT", 0.0)  # over with the next turn of the loop
    link = Link(Connector((dsn,), {}), "test")
    async with link.connection():
        link.doubt()
        link.doubt()
    async with link.connection() as conn:
        assert await conn.fetchval("SELECT 1") == 1
    assert link.connects == 1
    await link.close()


# --- the handlers' pool ---


@pytest_asyncio.fixture
async def pool(network: Proxy) -> AsyncIterator[Pool]:
    async with asyncpg.create_pool(network.dsn, min_size=2, max_size=2) as pool:
        yield pool


@pytest.mark.usefixtures("hasty")
async def test_of_a_pool_in_doubt_only_connections_that_answer_are_handed_out(network: Proxy, pool: Pool) -> None:
    handover = Handover(pool)
    network.half_open()
    network.heal()
    handover.doubt()
    async with asyncio.timeout(PATIENCE):
        conns = [await handover.acquire() for _ in range(2)]
        assert [await conn.fetchval("SELECT 1") for conn in conns] == [1, 1]
    for conn in conns:
        await handover.give_back(conn, clean=True)


async def test_a_connection_that_answers_is_kept_and_asked_once(dsn: str) -> None:
    sent: list[str] = []

    async def overhear(conn: Connection) -> None:
        conn.add_query_logger(lambda logged: sent.append(logged.query))

    async with asyncpg.create_pool(dsn, min_size=1, max_size=1, init=overhear) as pool:
        handover = Handover(pool)
        handover.doubt()
        pids = []
        for _ in range(3):
            conn = await handover.acquire()
            pids.append(conn.get_server_pid())
            await handover.give_back(conn, clean=False)
    assert sent.count(PROBE) == 1
    assert len(set(pids)) == 1


async def test_whoever_is_cancelled_while_the_pool_is_in_doubt_takes_no_connection_along(
    network: Proxy, pool: Pool
) -> None:
    handover = Handover(pool)
    network.half_open()
    network.heal()
    handover.doubt()
    acquiring = [asyncio.create_task(handover.acquire()) for _ in range(2)]
    async with asyncio.timeout(PATIENCE):
        while pool.get_idle_size():  # noqa: ASYNC110 - until both ask; a pool has no signal for it
            await asyncio.sleep(0)
        for task in acquiring:
            task.cancel()
        await asyncio.wait(acquiring)
        conns = [await handover.acquire() for _ in range(2)]
    for conn in conns:
        await handover.give_back(conn, clean=True)
