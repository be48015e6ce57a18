"""Connections with one owner each, and what it means to lose one."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg

from recado.errors import ConfigurationError, DatabaseUnavailable
from recado.settings import settings

if TYPE_CHECKING:
    from asyncpg.pool import PoolConnectionProxy

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record] | PoolConnectionProxy[asyncpg.Record]
    PoolConnection: TypeAlias = PoolConnectionProxy[asyncpg.Record]
    Pool: TypeAlias = asyncpg.Pool[asyncpg.Record]
else:
    Connection = asyncpg.Connection
    PoolConnection = asyncpg.Connection
    Pool = asyncpg.Pool

CONNECT_TIMEOUT = 10.0
"""Seconds for one connect, TLS and authentication included; asyncpg's own default of 60 outlasts a lease."""

STATEMENT_TIMEOUT = 30.0
"""Seconds after which a statement's connection is taken for half-open; recado's own take milliseconds."""

ANSWER_TIMEOUT = 5.0
"""Seconds that a connection gets to answer once another one of the same worker has fallen silent, as long as a probe of
the listener's."""

KEEPALIVE: Mapping[str, int] = MappingProxyType(
    {
        "TCP_KEEPIDLE": 10,  # seconds of silence before the first probe: the listener's interval
        "TCP_KEEPALIVE": 10,  # the same on macOS
        "TCP_KEEPINTVL": 5,  # seconds between two probes: as long as the listener waits for an answer
        "TCP_KEEPCNT": 4,  # probes without an answer: 10 + 4 * 5 s make a STATEMENT_TIMEOUT
        "TCP_USER_TIMEOUT": 30_000,  # milliseconds for what was sent to be acknowledged: as many; Linux only
    }
)
"""Options of a socket by their names, of which each platform has its own; libpq's ``keepalives_idle``,
``keepalives_interval``, ``keepalives_count`` and ``tcp_user_timeout``. The peer's kernel answers, so neither a lock nor
a server under load brings a connection down, and a statement may take days: only a network that is gone does."""

PROBE = "SELECT 1"
"""Any statement will do that waits for nothing; sent without preparing it, for the sake of poolers."""

TRANSIENT = (
    asyncpg.PostgresConnectionError,  # 08: the connection broke
    asyncpg.OperatorInterventionError,  # 57: shut down, crashed, starting up, cancelled
    asyncpg.InsufficientResourcesError,  # 53: disk full, too many connections
    asyncpg.TransactionRollbackError,  # 40: serialization failure, deadlock
    asyncpg.ReadOnlySQLTransactionError,  # 25006: the primary became a standby under our feet
    asyncpg.IdleInTransactionSessionTimeoutError,  # 25P03: this process was silent for too long
    asyncpg.InvalidCachedStatementError,  # a migration changed the table under a prepared statement
    asyncpg.InterfaceError,  # the driver knows that the connection is closed
    asyncpg.InternalClientError,  # the server said farewell, and the driver has yet to see the connection's end
    OSError,
    TimeoutError,
)
"""What passes by itself, or with a new connection. All else is a fault of ours or of the configuration."""


NEXT_HOST = (
    OSError,
    TimeoutError,
    asyncpg.CannotConnectNowError,  # starting up or shutting down
    asyncpg.TargetServerAttributeNotMatched,  # a standby, where a primary is wanted
)
"""What says of one host that another one should be tried."""


async def connect(*args: Any, **kwargs: Any) -> asyncpg.Connection[asyncpg.Record]:
    """``asyncpg.connect``, host by host, and with TCP's keep-alive.

    Of several hosts in the URL, each gets its share of the timeout. asyncpg's is for the whole list: a first host that
    is silent, as after the loss of a machine, would use it up each time; and one that is only starting up would end the
    search. :data:`KEEPALIVE` ends a connection whose network is gone, where asyncpg would wait for ever.

    A service's own pool has it from here, too::

        pool = await asyncpg.create_pool(dsn, connect=recado.queue.connect)

    Raises:
        OSError, TimeoutError, asyncpg.PostgresError: as ``asyncpg.connect`` does; of several hosts, the last one's.
    """
    conn = await _connect_to_one(*args, **kwargs)
    _keep_alive(conn)
    return conn


async def _connect_to_one(*args: Any, **kwargs: Any) -> asyncpg.Connection[asyncpg.Record]:
    hosts = _hosts(args[0]) if args and args[0] and not kwargs.get("host") else []
    if len(hosts) < 2:
        return await asyncpg.connect(*args, **kwargs)
    timeout = kwargs.get("timeout", CONNECT_TIMEOUT)
    share = timeout and timeout / len(hosts)
    for host, port in hosts[:-1]:
        with suppress(*NEXT_HOST):
            return await asyncpg.connect(*args, **{**kwargs, "host": host, "port": port, "timeout": share})
    host, port = hosts[-1]
    return await asyncpg.connect(*args, **{**kwargs, "host": host, "port": port, "timeout": share})


def _keep_alive(conn: Any) -> None:
    # asyncpg has no public way to its socket, nor an option for this one; event loops have one to a transport's.
    sock = conn._transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return  # closed already, or within the machine
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


_HOST = re.compile(r"(?P<name>/.*|[^:\[\]]*|\[(?P<address>.*)\])(?::(?P<port>\d+))?")
"""A socket's folder, a name, or an IPv6 address in brackets; and its port."""


def _hosts(url: str) -> list[tuple[str, int]]:
    """The hosts that a URL lists, as asyncpg reads it; none where it leaves that to the environment."""
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    listed = unquote(parts.netloc.rpartition("@")[2]) or query.get("host", [""])[-1]
    matches = [match for item in listed.split(",") if item and (match := _HOST.fullmatch(item))]
    ports = query.get("port", ["5432"])[-1].split(",")
    if len(ports) == 1:
        ports *= len(matches)
    if len(matches) != listed.count(",") + 1 or len(ports) != len(matches):
        return []  # asyncpg says what is wrong
    return [(m["address"] or m["name"], int(m["port"] or port)) for m, port in zip(matches, ports, strict=True)]


@dataclass(frozen=True)
class Connector:
    """Knows how to connect: the arguments of ``asyncpg.connect``."""

    args: tuple[Any, ...] = field(repr=False)
    kwargs: Mapping[str, Any] = field(repr=False)

    async def connect(self, role: str, **overrides: Any) -> asyncpg.Connection[asyncpg.Record]:
        """Open a connection for ``role``, which shows as its application_name.

        Raises:
            OSError, TimeoutError, asyncpg.PostgresError: as ``asyncpg.connect`` does.
        """
        kwargs: dict[str, Any] = {"timeout": CONNECT_TIMEOUT, "command_timeout": STATEMENT_TIMEOUT}
        kwargs.update(self.kwargs)
        kwargs.update(overrides)
        kwargs["server_settings"] = {
            **(kwargs.get("server_settings") or {}),
            "application_name": f"recado {role}",
        }
        conn = await connect(*self.args, **kwargs)
        try:
            await _read_committed(conn)
        except BaseException:
            conn.terminate()
            raise
        return conn


SELECT_ISOLATION = "SELECT current_setting('default_transaction_isolation')"
SET_ISOLATION = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL READ COMMITTED"
"""For roles whose default is REPEATABLE READ: a claim would fail on each row that another worker changed
after the snapshot, where READ COMMITTED looks at the row anew. Set only where it is needed, since a session's
state means nothing behind a transaction-mode pooler."""


async def _read_committed(conn: asyncpg.Connection[asyncpg.Record]) -> None:
    if await conn.fetchval(SELECT_ISOLATION) != "read committed":
        await conn.execute(SET_ISOLATION)


def connector(database: Pool | str | None = None) -> Connector:
    """How to connect to ``database``: a ``postgresql://`` URL, or the pool whose arguments to use.

    Raises:
        ConfigurationError: ``None`` was passed and ``RECADO_DSN`` is not set.
    """
    if database is None:
        if (dsn := settings().dsn) is None:
            raise ConfigurationError(
                "cannot connect: no database is named; pass its postgresql:// URL, or set RECADO_DSN"
            )
        database = dsn.get_secret_value()
    if isinstance(database, str):
        return Connector((database,), {})
    # asyncpg has no public way to ask a pool where it connects to; tests run workers on pools. Its codecs
    # (init, setup) stay behind on purpose: recado's own connections read rows in asyncpg's default types.
    pool: Any = database
    kwargs = {k: v for k, v in pool._connect_kwargs.items() if k != "loop"}
    return Connector(tuple(pool._connect_args), kwargs)


async def asyncpg_connection(connection: Any) -> Connection:
    """The asyncpg connection beneath SQLAlchemy's, inside the transaction that SQLAlchemy commits or rolls back.

    SQLAlchemy begins a transaction only with the first statement that it executes itself. A job enqueued on the
    bare ``driver_connection`` before that would be committed at once, whatever becomes of the transaction; so here
    SQLAlchemy is made to begin first, unless it has::

        async with engine.begin() as connection:
            await app.enqueue(await asyncpg_connection(connection), "email.send_receipt", {...})

    Args:
        connection: an ``AsyncConnection`` or an ``AsyncSession``.

    Raises:
        ConfigurationError: its driver is not asyncpg.
    """
    if not hasattr(connection, "get_raw_connection"):
        connection = await connection.connection()  # a session's
    driver = (await connection.get_raw_connection()).driver_connection
    if not isinstance(driver, asyncpg.Connection):
        raise ConfigurationError(
            f"cannot use SQLAlchemy's connection: its driver is {type(driver).__module__.partition('.')[0]}; "
            "create the engine with a postgresql+asyncpg:// URL"
        )
    if not driver.is_in_transaction():
        await connection.exec_driver_sql(PROBE)  # any statement does: SQLAlchemy puts its BEGIN before the first one
    return driver


async def answers(conn: Connection) -> bool:
    """Whether the server answers within :data:`ANSWER_TIMEOUT`; a connection on which it does not is closed."""
    try:
        await conn.execute(PROBE, timeout=ANSWER_TIMEOUT)
    except (*TRANSIENT, asyncio.CancelledError) as error:  # cancelled: its answer is still to come
        with suppress(asyncpg.InterfaceError):  # the pool took it back when it broke
            conn.terminate()
        if isinstance(error, asyncio.CancelledError):
            raise
        return False
    return True


def _fell_silent(error: BaseException) -> bool:
    """Whether nothing came in time, or nothing was acknowledged: the kernel's words for that are the driver's cause."""
    return isinstance(error, TimeoutError) or isinstance(error.__cause__, TimeoutError)


class Link:
    """One role's own connection: opened when it is first needed, and again after it was lost.

    Claims, finishing, leases and upkeep each have one, so that handlers which hold every connection of the pool
    cannot keep a job from being claimed or finished.

    Args:
        on_silence: called when the connection was given up because nothing came on it any more.
    """

    def __init__(self, connector: Connector, role: str, on_silence: Callable[[], None] = lambda: None) -> None:
        self._connector = connector
        self._role = role
        self._on_silence = on_silence
        self._conn: asyncpg.Connection[asyncpg.Record] | None = None
        self._lock = asyncio.Lock()
        self._ultimatum: asyncio.TimerHandle | None = None
        self.connects = 0
        """How often it was opened; a change says that the answer to an earlier statement may have been lost."""

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
        """The connection, to its user alone. An error that is :data:`TRANSIENT` drops it on the way out."""
        async with self._lock:
            if self._conn is None or self._conn.is_closed():
                self._drop()
                self._conn = await self._connect()
                self.connects += 1
            try:
                yield self._conn
            except (*TRANSIENT, asyncio.CancelledError) as error:
                # Cancelled in the middle of a statement: asyncpg would first have to cancel it on the
                # server, and a half-open socket never answers. A new connection is the certain way.
                self._drop()
                if _fell_silent(error):
                    self._on_silence()
                raise
            finally:
                if self._ultimatum is not None:
                    self._ultimatum.cancel()
                    self._ultimatum = None

    def doubt(self) -> None:
        """Another connection has fallen silent, and this one may have met the same fate.

        Where each found out by itself, one would after the other: an idle one begins to wait for its timeout only
        when it is used. So that is dropped at once. What is in use has a moment to come to its end.
        """
        if self._conn is None:
            return
        if not self._lock.locked():
            self._drop()
        elif self._ultimatum is None:
            self._ultimatum = asyncio.get_running_loop().call_later(ANSWER_TIMEOUT, self._drop)

    async def _connect(self) -> asyncpg.Connection[asyncpg.Record]:
        try:
            return await self._connector.connect(self._role)
        except asyncpg.PostgresError as error:
            # A password that was changed, a role or a database that is gone for the moment: said of the
            # connection, and nothing about the statement that was to run on it.
            raise DatabaseUnavailable(
                f"cannot connect as {self._role}: {error}; see to the server and its roles"
            ) from error

    def _drop(self) -> None:
        if self._conn is not None:
            self._conn.terminate()
            self._conn = None

    async def close(self) -> None:
        """Close the connection, if there is one; the server is told when it still listens."""
        async with self._lock:
            conn, self._conn = self._conn, None
            if conn is not None:
                try:
                    await conn.close(timeout=CONNECT_TIMEOUT)
                except TRANSIENT:
                    conn.terminate()
