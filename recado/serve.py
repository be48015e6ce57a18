"""The long-running commands: a worker, the API, or both with a server of their own.

Each runs in one event loop until a signal ends it. SIGTERM drains; a second one, or SIGINT, ends at once:
what runs is cancelled and given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import asyncpg
import uvicorn
from starlette.types import ASGIApp

from recado.api.app import create_app
from recado.api.auth import check_exposure
from recado.api.events import Hub
from recado.app import Recado
from recado.errors import ConfigurationError
from recado.queue.connections import CONNECT_TIMEOUT, STATEMENT_TIMEOUT, Pool, connect
from recado.queue.limits import check_queue
from recado.queue.models import DEFAULT_QUEUE
from recado.settings import settings
from recado.worker.processes import Supervisor, obey
from recado.worker.worker import DEFAULT_SLOTS, Worker

logger = logging.getLogger("recado")

T = TypeVar("T")

API_CONNECTIONS = 5
"""Of the API's pool at most: its requests are few and short."""

CLOSE_TIMEOUT = 2.0
"""Seconds for taking leave of the database; a server that hangs must not keep the process."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_QUEUE_OPTION = re.compile(r"(?P<queue>[^:]+)(?::(?P<slots>[1-9][0-9]{0,3}))?")
"""A queue's name, which is checked elsewhere, and up to 9,999 slots: far more than one process has use for."""


def load_app(path: str) -> Recado:
    """The application that ``path``, "package.module:name", leads to from the current folder.

    Raises:
        ConfigurationError: there is no such module or name, or it is no :class:`~recado.Recado`. What goes wrong
            inside the module comes out as it is.
    """
    module_name, _, name = path.partition(":")
    if not all(part.isidentifier() for part in [*module_name.split("."), name]):
        raise ConfigurationError(
            f"cannot load {path!r}: it must read like package.module:name; name the module and the Recado in it"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module itself imports
        raise ConfigurationError(
            f"cannot load {path!r}: there is no module {error.name!r}; call recado from the folder it is in, or "
            "install its package"
        ) from None
    app = getattr(module, name, None)
    if not isinstance(app, Recado):
        what = "there is no such name in the module" if app is None else f"it is a {type(app).__name__}"
        raise ConfigurationError(f"cannot load {path!r}: {what}; name the variable that holds the Recado()")
    return app


def read_queues(options: Sequence[str]) -> dict[str, int]:
    """Slots by queue, from options like "mail:20" or "mail".

    Raises:
        ConfigurationError: an option reads otherwise, or names a queue again.
    """
    queues: dict[str, int] = {}
    for option in options or [DEFAULT_QUEUE]:
        match = _QUEUE_OPTION.fullmatch(option)
        if match is None:
            raise ConfigurationError(
                f"cannot read queue {option!r}: it must read like mail or mail:20; give the queue's name and how many "
                "of its jobs may run at once, from 1 to 9999"
            )
        queue = check_queue(match["queue"])
        if queue in queues:
            raise ConfigurationError(f"cannot serve queue {queue!r} twice: it is named twice; name it once")
        queues[queue] = int(match["slots"] or DEFAULT_SLOTS)
    return queues


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens: a port that is taken is found out before anything else is started.

    Args:
        host: an address or a name.
        port: 0 takes any that is free.

    Raises:
        ConfigurationError: it cannot be had, or the host is open to others and no tokens are configured.
    """
    check_exposure(host, settings().tokens)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        if os.name == "posix":  # elsewhere it would let two processes listen on one port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            # At once: a port that is only bound, another process can bind as well.
            sock.listen()
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigurationError(
                f"cannot serve at {_address(host, port)}: {reason}; choose another --host or --port"
            ) from error
        yield sock


def serve_worker(app: Recado, dsn: str, queues: Mapping[str, int], *, supervised: bool = False, **options: Any) -> bool:
    """Run a worker until a signal ends it; see :class:`~recado.worker.worker.Worker` for ``options``.

    Args:
        supervised: it also obeys a supervisor, and ends with it.

    Returns:
        Whether every thread is idle; one that is not keeps the interpreter from exiting.

    Raises:
        ConfigurationError, SchemaMismatch: it cannot start.
    """
    return run(_serve_worker(Worker(app, dsn, queues=queues, **options), supervised))


async def _serve_worker(worker: Worker, supervised: bool) -> bool:
    with _on_signals(worker.stop, worker.stop_now):
        if supervised:
            obey(sys.stdin.buffer, worker.stop, worker.stop_now)
        return await worker.run()


def supervise(arguments: Sequence[str], dsn: str, count: int) -> None:
    """Run ``count`` worker processes until a signal ends them, and start those again that crash.

    Args:
        arguments: of ``recado worker`` in each of them.
        dsn: goes into their environment, since arguments are there for every user of the machine to see.
    """
    command = [sys.executable, "-m", "recado", "worker", "--supervised", *arguments]
    run(_supervise(Supervisor(command, count, {**os.environ, "RECADO_DSN": dsn})))


async def _supervise(supervisor: Supervisor) -> None:
    with _on_signals(supervisor.stop, supervisor.stop_now):
        await supervisor.run()


def serve_api(app: Recado, dsn: str, sock: socket.socket) -> None:
    """Serve the API on a socket that listens, until a signal ends it."""
    run(_serve_api(app, dsn, sock))


async def _serve_api(app: Recado, dsn: str, sock: socket.socket) -> None:
    async with _pool(dsn) as pool:
        hub = Hub(app, pool)
        server = make_server(create_app(app, pool, hub=hub), hub)
        with _on_signals(server.stop, server.stop_now):
            _announce(sock)
            await server.serve([sock])


def serve_dev(app: Recado, dsn: str, sock: socket.socket, queues: Mapping[str, int]) -> bool:
    """Run a worker and the API in one event loop, until a signal ends them or one of them fails.

    From here on ``RECADO_DSN`` is ``dsn`` in this process: handlers and the lifespan may connect by themselves, and
    must not meet another database than their worker's.

    Returns:
        As :func:`serve_worker`.
    """
    os.environ["RECADO_DSN"] = dsn
    os.environ.pop("RECADO_LISTEN_DSN", None)
    settings.cache_clear()
    return run(_serve_dev(app, dsn, sock, queues))


async def _serve_dev(app: Recado, dsn: str, sock: socket.socket, queues: Mapping[str, int]) -> bool:
    async with _pool(dsn) as pool:
        hub = Hub(app, pool)
        server = make_server(create_app(app, pool, hub=hub), hub)
        worker = Worker(app, dsn, queues=queues)

        def stop() -> None:
            server.stop()
            worker.stop()

        def stop_now() -> None:
            server.stop_now()
            worker.stop_now()

        # Around the end of both: the second signal has to find us while the worker drains.
        with _on_signals(stop, stop_now):
            _announce(sock)
            serving = asyncio.create_task(server.serve([sock]))
            serving.add_done_callback(lambda _: worker.stop())
            try:
                return await worker.run()
            finally:
                server.stop()
                await serving


class Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: whoever runs it beside other things decides when it ends.

    Args:
        hub: its streams end when the server is to end, which would otherwise wait for them.
    """

    def __init__(self, config: uvicorn.Config, hub: Hub | None = None) -> None:
        super().__init__(config)
        self._hub = hub

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Answer what has been asked, then end."""
        self.should_exit = True
        if self._hub is not None:
            self._hub.stop()

    def stop_now(self) -> None:
        """End without waiting for open requests."""
        self.force_exit = True
        self.stop()


def make_server(app: ASGIApp, hub: Hub | None = None) -> Server:
    """An HTTP server for ``app``, to be served on sockets that are bound already.

    Args:
        hub: the one of ``app``'s streams, if it has any.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level=logging.WARNING,  # what it tells of its own coming and going, its owner says better
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=5,
    )
    return Server(config, hub)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on the fastest event loop there is, for as long as the process lives.

    What has been imported by now lives as long, so the garbage collector need not look through it again: with 256 jobs
    asleep for a millisecond each, that was a fifth of a job's time, and the more, the larger the application.
    """
    gc.collect()
    gc.freeze()
    try:
        import uvloop
    except ImportError:  # Windows
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


@contextmanager
def _on_signals(stop: Callable[[], None], stop_now: Callable[[], None]) -> Iterator[None]:
    """SIGTERM calls ``stop``; a second one, and SIGINT, ``stop_now``."""
    loop = asyncio.get_running_loop()
    stopping = False

    def handle(number: signal.Signals) -> None:
        nonlocal stopping
        if stopping or number == signal.SIGINT:
            logger.info("%s: stopping at once", number.name)
            stop_now()
        else:
            logger.info("%s: stopping; once more to stop at once", number.name)
            stop()
        stopping = True

    # Not loop.add_signal_handler, which Windows does not have. A handler of this kind runs between two steps of
    # the interpreter, in the main thread, so it only leaves word with the loop.
    before = {
        number: signal.signal(number, lambda n, _: loop.call_soon_threadsafe(handle, signal.Signals(n)))
        for number in SIGNALS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ended_by_sigterm() -> Iterator[Callable[[], None]]:
    """Have SIGTERM unwind the stack, as Ctrl-C does, until :func:`run` takes the signals over: what was started by
    then is stopped on the way out.

    Until the function it yields is called, a SIGTERM waits: in the middle of its start a process is nobody's yet, and
    would be left behind.
    """
    told, may_leave = False, False

    def tell(*_: object) -> None:
        nonlocal told
        told = True
        if may_leave:
            sys.exit(0)

    def leave_if_told() -> None:
        nonlocal may_leave
        may_leave = True
        if told:
            sys.exit(0)

    before = signal.signal(signal.SIGTERM, tell)
    try:
        yield leave_if_told
    finally:
        signal.signal(signal.SIGTERM, before)


@asynccontextmanager
async def _pool(dsn: str) -> AsyncIterator[Pool]:
    pool = asyncpg.create_pool(
        dsn,
        min_size=0,
        max_size=API_CONNECTIONS,
        connect=connect,
        timeout=CONNECT_TIMEOUT,
        command_timeout=STATEMENT_TIMEOUT,
        # A transaction-mode pooler may stand in between.
        statement_cache_size=0,
        server_settings={"application_name": "recado api"},
    )
    await pool
    try:
        yield pool
    finally:
        with contextlib.suppress(TimeoutError):
            # The pool drops the connections when it is cancelled.
            await asyncio.wait_for(pool.close(), CLOSE_TIMEOUT)


def _announce(sock: socket.socket) -> None:
    openness = "" if settings().tokens else ", for this machine only: no tokens are configured"
    logger.info("the API is at http://%s%s", _address(*sock.getsockname()[:2]), openness)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
