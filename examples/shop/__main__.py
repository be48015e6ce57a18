"""``make run``: the shop on an embedded PostgreSQL, with its worker, a mail server and a stream of customers."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import asyncpg
import typer
from starlette.types import ASGIApp

from examples.shop import roles, tables
from examples.shop.application import app
from examples.shop.customers import plan, visit
from examples.shop.jobs import Day, reconcile
from examples.shop.mailbox import mail_server
from examples.shop.report import report, summarize
from examples.shop.web import create_service
from recado import RecadoError, Worker, embedded, serve
from recado.api import Hub
from recado.errors import ConfigurationError
from recado.queue import migrate
from recado.queue.connections import Pool
from recado.settings import settings

HOST = "127.0.0.1"

DEFAULT_PORT = 8700
"""A guess at a port that nothing else on a developer's machine uses; recado's own API is ten above."""

DEFAULT_RATE = 10.0
"""Orders a second: enough to see things move, and little for a laptop."""

QUEUES = {"default": 20, "mail": 10}

RECONCILE_INTERVAL = 5.0
"""Seconds: the days of this shop are short."""

SETTLE_INTERVAL = 0.1
"""Seconds between two looks at whether every job is over."""

GRACE = 5.0
"""Seconds that jobs get when the shop closes; all of them take less than one."""

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@cli.command()
def main(
    seconds: Annotated[float | None, typer.Option(min=0, help="Close by itself, once every job is over.")] = None,
    rate: Annotated[float, typer.Option(min=0.1, max=1000, help="Orders a second.")] = DEFAULT_RATE,
    port: Annotated[int, typer.Option(min=0, max=65535, envvar="SHOP_PORT", help="0 takes any.")] = DEFAULT_PORT,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the address and the summary only.")] = False,
) -> None:
    """Run the example shop under a stream of requests until Ctrl-C. What it did stays in .recado."""
    logging.basicConfig(level=logging.CRITICAL if quiet else logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        with listening(port) as sock, embedded.start(settings().data_dir) as server:
            mails = server.data_dir / "mail"
            serve.run(run(server.dsn(), sock, mails, seconds=seconds, rate=rate, quiet=quiet))
    except RecadoError as error:
        typer.echo(error, err=True)
        raise typer.Exit(1) from None


async def run(dsn: str, sock: socket.socket, mails: Path, *, seconds: float | None, rate: float, quiet: bool) -> None:
    """Run everything, from the bottom up; it ends from the top down."""
    secret = secrets.token_hex()
    await prepare(dsn)
    web_dsn, worker_dsn = roles.url(dsn, roles.WEB), roles.url(dsn, roles.WORKER)
    async with (
        mail_server(mails) as smtp_port,
        asyncpg.create_pool(web_dsn) as web_pool,
        asyncpg.create_pool(worker_dsn) as pool,
    ):
        # As a deployment would tell it to every worker.
        backups = mails.with_name("backups")
        os.environ.update(RECADO_DSN=worker_dsn, SHOP_SMTP_PORT=str(smtp_port), SHOP_BACKUP_DIR=str(backups))
        hub = Hub(app, web_pool)
        service = create_service(web_pool, webhook_secret=secret, session_secret=secrets.token_hex(), hub=hub)
        async with Worker(app, pool, queues=QUEUES, grace=GRACE), serving(service, sock, hub):
            url = f"http://{HOST}:{sock.getsockname()[1]}"
            print(f"the shop is open at {url}, with its e-mails in {mails}; Ctrl-C closes it", flush=True)
            print(f"plan and watch at {url}/blueprints; backups go to {backups}", flush=True)
            async with asyncio.TaskGroup() as group:
                reporting = None if quiet else group.create_task(report(pool, mails))
                await trade(url, pool, secret, seconds=seconds, rate=rate)
                if reporting is not None:
                    reporting.cancel()
        await summarize(pool, mails)


async def prepare(dsn: str) -> None:
    """As the administrator: make tables and roles. Everything else is done by these roles."""
    conn = await asyncpg.connect(dsn)
    try:
        await migrate.up(conn, schema=app.schema)
        await tables.create(conn)
        await roles.create(conn)
    finally:
        await conn.close()


async def trade(url: str, pool: Pool, secret: str, *, seconds: float | None, rate: float) -> None:
    """Keep the shop open until a signal; with ``seconds``, for that time and until every job is over."""
    closing, interrupted = asyncio.Event(), asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        closing.set()

    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, interrupt)
    if seconds is not None:
        loop.call_later(seconds, closing.set)
    async with asyncio.TaskGroup() as business:
        business.create_task(visit(url, secret, rate=rate, closing=closing))
        business.create_task(plan(url, closing))
        business.create_task(keep_books(pool, closing))
    while not await happened(interrupted, SETTLE_INTERVAL):
        async with pool.acquire() as conn:
            jobs = (await tables.status(conn))["jobs"]
        if jobs["pending"] == jobs["running"] == 0:
            return


async def keep_books(pool: Pool, closing: asyncio.Event) -> None:
    """Reconcile the day again and again."""
    while not await happened(closing, RECONCILE_INTERVAL):
        async with pool.acquire() as conn:
            await reconcile.enqueue(conn, Day(day=datetime.now(UTC).date()))


async def happened(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` was set within ``seconds``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


@contextmanager
def listening(port: int) -> Iterator[socket.socket]:
    """A socket on ``port``, taken before anything else is started.

    Raises:
        ConfigurationError: it cannot be had.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((HOST, port))
            sock.listen()
        except OSError as error:
            raise ConfigurationError(
                f"cannot open the shop on {HOST}:{port}: {error.strerror}; "
                "pass another --port, or set SHOP_PORT for `make run`"
            ) from error
        yield sock


@asynccontextmanager
async def serving(service: ASGIApp, sock: socket.socket, hub: Hub) -> AsyncIterator[None]:
    """Serve HTTP on ``sock`` until the block ends."""
    server = serve.make_server(service, hub)
    async with asyncio.TaskGroup() as group:
        group.create_task(server.serve([sock]))
        try:
            yield
        finally:
            server.stop()


if __name__ == "__main__":
    cli()
