"""The long-running commands: a worker, the API, or both with a server of their own.

Each runs in one event loop until a signal ends it. SIGTERM drains; a second one, or SIGINT, ends at once:
what runs is cancelled and given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import uvicorn
from starlette.types import ASGIApp

from recado.api.app import create_app
from recado.api.auth import check_exposure
from recado.app import Recado
from recado.errors import ConfigurationError
from recado.queue import migrate
from recado.queue.connections import Pool, connector
from recado.settings import settings
from recado.worker.worker import DEFAULT_SLOTS, Worker

logger = logging.getLogger("recado")

T = TypeVar("T")

API_CONNECTIONS = 5
"""Of the API's pool at most: its requests are few and short."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def load_app(path: str) -> Recado:
    """The application that ``path``, "package.module:name", leads to from the current folder.

    Raises:
        ConfigurationError: there is no such module or name, or it is no :class:`~recado.Recado`. What goes wrong
            inside the module comes out as it is.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name:
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
    for option in options or ["default"]:
        queue, colon, slots = option.partition(":")
        if not queue or (colon and not slots.isdecimal()):
            raise ConfigurationError(
                f"cannot read queue {option!r}: it must read like mail or mail:20; give the queue's name and how many "
                "of its jobs may run at once"
            )
        if queue in queues:
            raise ConfigurationError(f"cannot serve queue {queue!r} twice: it is named twice; name it once")
        queues[queue] = int(slots) if colon else DEFAULT_SLOTS
    return queues


def serve_worker(app: Recado, dsn: str | None, queues: Mapping[str, int], **options: Any) -> None:
    """Run a worker until a signal ends it; see :class:`~recado.worker.worker.Worker` for ``options``.

    Raises:
        ConfigurationError, SchemaMismatch: it cannot start.
    """
    idle = run(_serve_worker(Worker(app, dsn, queues=queues, **options)))
    if not idle:
        # A plain function ignores that its job was given back, and its thread would keep the interpreter from
        # ending, for as long as it likes. Its job is already somebody else's.
        logger.warning("a handler's thread does not end: exiting without it")
        logging.shutdown()
        os._exit(0)


async def _serve_worker(worker: Worker) -> bool:
    with _on_signals(worker.stop, worker.stop_now):
        return await worker.run()


def serve_api(app: Recado, dsn: str | None, host: str, port: int) -> None:
    """Serve the API until a signal ends it.

    Raises:
        ConfigurationError: the port is taken, or the host is open to others and no tokens are configured.
        SchemaMismatch: the database's schema is another version's.
    """
    check_exposure(host, settings().tokens)
    run(_serve_api(app, dsn, host, port))


async def _serve_api(app: Recado, dsn: str | None, host: str, port: int) -> None:
    with _bound(host, port) as listening:
        async with _pool(app, dsn) as pool:
            server = make_server(create_app(app, pool))
            with _on_signals(server.stop, server.stop_now):
                logger.info("the API is at http://%s:%d%s", host, port, _openness())
                await server.serve([listening])


def serve_dev(app: Recado, data_dir: Path, host: str, port: int, queues: Mapping[str, int]) -> None:
    """A whole installation in one process tree: PostgreSQL, migrations, worker and API.

    Raises:
        EmbeddedServerError: PostgreSQL cannot be started.
        ConfigurationError, SchemaMismatch: as for worker and API.
    """
    # Only here: what it needs to run a server under another user does not exist on Windows.
    from recado import embedded

    check_exposure(host, settings().tokens)
    with embedded.start(data_dir) as server:
        run(_serve_dev(app, server.dsn(), host, port, queues))


async def _serve_dev(app: Recado, dsn: str, host: str, port: int, queues: Mapping[str, int]) -> None:
    with _bound(host, port) as listening:
        conn = await connector(dsn).connect("migrations")
        try:
            await migrate.up(conn, schema=app.schema)
        finally:
            await conn.close()
        async with _pool(app, dsn) as pool:
            server = make_server(create_app(app, pool))
            async with Worker(app, pool, queues=queues) as worker:

                def stop_now() -> None:
                    server.stop_now()
                    worker.stop_now()

                with _on_signals(server.stop, stop_now):
                    logger.info("the API is at http://%s:%d%s", host, port, _openness())
                    logger.info("the database is at %s", dsn)
                    await server.serve([listening])


class Server(uvicorn.Server):
    """uvicorn without signal handlers of its own: whoever runs it beside other things decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        """Answer what has been asked, then end."""
        self.should_exit = True

    def stop_now(self) -> None:
        """End without waiting for open requests."""
        self.should_exit = self.force_exit = True


def make_server(app: ASGIApp) -> Server:
    """An HTTP server for ``app``, to be served on sockets that are bound already."""
    return Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5))


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on the fastest event loop there is."""
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
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket that listens: bound before anything else is started, so that a taken port starts nothing."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot serve at {host}:{port}: {error.strerror or error}; choose another --host or --port"
            ) from None
        yield listening


@asynccontextmanager
async def _pool(app: Recado, dsn: str | None) -> AsyncIterator[Pool]:
    source = connector(dsn)
    conn = await source.connect("api")
    try:
        await migrate.check_schema(conn, schema=app.schema)
    finally:
        await conn.close()
    async with asyncpg.create_pool(
        *source.args, min_size=1, max_size=API_CONNECTIONS, server_settings={"application_name": "recado api"}
    ) as pool:
        yield pool


def _openness() -> str:
    return "" if settings().tokens else ", for this machine only: no tokens are configured"
