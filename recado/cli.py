"""The command line, and the composition root: the one module that may know every other.

What goes wrong is one sentence on stderr and exit code 1; a command that was called wrongly exits with 2.
Anything else that reaches the user as a traceback is a fault of recado's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Annotated, NoReturn, TypeVar

import asyncpg
import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError

from recado.errors import ConfigurationError, RecadoError
from recado.queue import migrate
from recado.queue.connections import CONNECT_TIMEOUT, TRANSIENT, Connection, connector
from recado.queue.migrate import MigrationStatus
from recado.queue.statements import resolve_schema
from recado.settings import Settings, settings
from recado.version import VERSION

T = TypeVar("T")

TOKEN_BYTES = 32
"""Random bytes in a token's secret: as many as its SHA-256 keeps, far beyond guessing."""

app = typer.Typer(
    name="recado",
    help="A job queue that lives in the PostgreSQL you already run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
migrations = typer.Typer(help="Bring the database up to this version of recado, and back.", no_args_is_help=True)
app.add_typer(migrations, name="migrate")

Dsn = Annotated[
    str | None, typer.Option("--dsn", metavar="URL", help="The database, as postgresql://…; else RECADO_DSN.")
]
Schema = Annotated[
    str | None, typer.Option("--schema", metavar="NAME", help="The queue's schema; else RECADO_SCHEMA, else recado.")
]
Number = Annotated[int | None, typer.Option("--to", metavar="N", help="The last migration to apply; else all.")]


def main() -> None:
    """Run the command that ``sys.argv`` names."""
    try:
        app(prog_name="recado")
    except RecadoError as error:
        _fail(str(error))
    except SettingsError as error:
        _fail(f"cannot read the environment: {error}; correct it")
    except ValidationError as error:
        if error.title != Settings.__name__:
            raise
        _fail(f"cannot read the environment: {_variables(error)}; correct it")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"recado {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# --- recado migrate ---


@migrations.command("up")
def migrate_up(to: Number = None, dsn: Dsn = None, schema: Schema = None) -> None:
    """Apply the migrations that are pending; any number of processes may do so at once."""
    done = _run(dsn, lambda conn: migrate.up(conn, to=to, schema=schema))
    for migration in done:
        typer.echo(f"applied {migration}")
    if not done:
        typer.echo("nothing to apply")


@migrations.command("down")
def migrate_down(
    to: Annotated[int, typer.Option("--to", metavar="N", help="The last migration that stays; 0 keeps none.")] = 0,
    dsn: Dsn = None,
    schema: Schema = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Revert migrations, the newest first; without --to all of them, and all jobs are gone."""
    if not yes:
        loss = "deletes all its jobs" if to == 0 else f"reverts all after migration {to}, with what they hold"
        typer.confirm(f"In schema {resolve_schema(schema)} this {loss}. Go on?", abort=True)
    done = _run(dsn, lambda conn: migrate.down(conn, to=to, schema=schema))
    for migration in done:
        typer.echo(f"reverted {migration}")
    if not done:
        typer.echo("nothing to revert")


@migrations.command("status")
def migrate_status(dsn: Dsn = None, schema: Schema = None) -> None:
    """List the migrations, and when each was applied."""

    async def read(conn: Connection) -> list[MigrationStatus]:
        # One transaction: behind a transaction-mode pooler the statements would reach different servers.
        async with conn.transaction():
            return await migrate.status(conn, schema=schema)

    statuses = _run(dsn, read)
    width = max(len(str(status)) for status in statuses)
    for status in statuses:
        typer.echo(f"{status!s:{width}}  {_described(status)}")


@migrations.command("sql")
def migrate_sql(
    to: Number = None,
    since: Annotated[int, typer.Option("--since", metavar="N", help="Leave out migrations up to this one.")] = 0,
    schema: Schema = None,
) -> None:
    """Print what `up` does as SQL for psql; needs no database."""
    typer.echo(migrate.sql(since=since, to=to, schema=schema), nl=False)


def _described(status: MigrationStatus) -> str:
    if status.applied_at is None:
        return "pending"
    applied = f"applied {status.applied_at:%Y-%m-%d %H:%M:%S %Z}"
    if status.unknown:
        return f"{applied}, unknown to this version of recado"
    return f"{applied}, edited since" if status.edited else applied


# --- recado token ---


@app.command()
def token(
    name: Annotated[str, typer.Argument(help="Whom the token is for; shows in logs.")],
    scope: Annotated[
        list[str] | None, typer.Option("--scope", metavar="SCOPE", help="Such as jobs:admin; may be repeated.")
    ] = None,
    organization: Annotated[
        str | None, typer.Option("--organization", metavar="ID", help="The only organization it can see.")
    ] = None,
) -> None:
    """Make a bearer token for the API: a secret to hand out, and an entry for RECADO_TOKENS."""
    if not name.strip():
        raise typer.BadParameter("must not be empty", param_hint="NAME")
    secret = secrets.token_urlsafe(TOKEN_BYTES)
    entry = {
        "name": name,
        "sha256": hashlib.sha256(secret.encode()).hexdigest(),
        "scopes": sorted(set(scope or ())),
        "organization": organization,
    }
    typer.echo("The secret, which is shown only this once:")
    typer.echo(f"  {secret}")
    typer.echo("The entry for the JSON list in RECADO_TOKENS:")
    typer.echo(f"  {json.dumps(entry, ensure_ascii=False)}")


# --- behind them ---


def _run(dsn: str | None, action: Callable[[Connection], Awaitable[T]]) -> T:
    """What ``action`` returns, in an event loop and with a connection of its own."""

    async def run() -> T:
        async with _connected(dsn) as conn:
            return await action(conn)

    return asyncio.run(run())


@asynccontextmanager
async def _connected(dsn: str | None) -> AsyncIterator[Connection]:
    """A connection to ``dsn`` or ``RECADO_DSN``, whose trouble comes out as one sentence.

    Raises:
        ConfigurationError: no database is named, or it does not let us in.
        RecadoError: the connection was lost, or its role may not do what was asked.
    """
    configured = settings().dsn
    url = dsn or (configured.get_secret_value() if configured else "")
    if not url:
        raise ConfigurationError("cannot connect: no database is named; give --dsn, or set RECADO_DSN")
    try:
        # No timeout for a statement: a migration takes as long as it takes. And no cache of statements, because
        # a transaction-mode pooler may stand in between.
        conn = await connector(url).connect("cli", command_timeout=None, statement_cache_size=0)
    except ValueError as error:
        # Whatever asyncpg says about a URL may quote a piece of the password, if that was not escaped.
        raise ConfigurationError(
            "cannot connect: the database's URL cannot be read; write postgresql://user:password@host:port/database, "
            "with special characters in the password %-encoded and only options that libpq knows"
        ) from error
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise ConfigurationError(f"cannot connect: {_reason(error)}; check --dsn or RECADO_DSN") from error
    try:
        try:
            yield conn
        finally:
            await conn.close(timeout=CONNECT_TIMEOUT)
    except (*TRANSIENT, asyncpg.InsufficientPrivilegeError) as error:
        raise RecadoError(f"cannot finish: {_reason(error)}; see to that and try again") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncpg.InterfaceError) and error.__context__ is not None:
        # The rollback on a connection that is gone, on the way out of a block: what came before says why.
        error = error.__context__
    if isinstance(error, TimeoutError) and not str(error):
        return "the server did not answer in time"
    return str(error) or type(error).__name__


def _variables(error: ValidationError) -> str:
    """Which variables are wrong and why, without their values: a token's or a password might be among them."""
    reasons = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        first, *within = map(str, item["loc"])
        variable = first if first.startswith("RECADO_") else f"RECADO_{first.upper()}"
        reasons.append(f"{'.'.join([variable, *within])}: {item['msg']}")
    return ", ".join(reasons)


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"recado: {' '.join(sentence.split())}", err=True)
    sys.exit(1)
