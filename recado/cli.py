"""The command line, and the composition root: the one module that may know every other.

What goes wrong is one sentence on stderr and exit code 1; a command that was called wrongly exits with 2.
Anything else that reaches the user as a traceback is a fault of recado's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import json
import logging
import os
import secrets
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal, NoReturn, TypeVar
from uuid import UUID

import asyncpg
import typer
from pydantic import ValidationError
from pydantic_settings import SettingsError
from rich.cells import cell_len, set_cell_size

from recado import serve
from recado.app import DEFAULT_NAME
from recado.bench.command import bench
from recado.errors import ConfigurationError, RecadoError
from recado.queue import (
    Job,
    JobError,
    JobStatus,
    cancel,
    checks,
    dead_by_error,
    get_job,
    list_errors,
    list_jobs,
    list_schedules,
    migrate,
    pause_schedule,
    requeue,
    requeue_dead,
    resume_schedule,
    server_time,
)
from recado.queue.admin import PAGE_SIZE
from recado.queue.checks import Finding, Level
from recado.queue.connections import CONNECT_TIMEOUT, TRANSIENT, Connection, connector
from recado.queue.grants import Role
from recado.queue.grants import grants as grant_statements
from recado.queue.leases import DEFAULT_LEASE, HEARTBEAT_INTERVAL, MAX_SILENCE
from recado.queue.migrate import MigrationStatus
from recado.queue.statements import resolve_schema
from recado.settings import settings
from recado.version import VERSION
from recado.worker.upkeep import RECLAIM_INTERVAL
from recado.worker.worker import GRACE, check_direct, direct_connector

T = TypeVar("T")

logger = logging.getLogger("recado")

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
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A pipe has the locale's encoding, on Windows seldom UTF-8: escape what is not in it, as stderr does.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="recado")
    except RecadoError as error:
        _fail(str(error))
    except (SettingsError, ValidationError):
        trouble = _environment_trouble()
        if trouble is None:
            raise  # the application's own settings or models
        _fail(f"cannot read the environment: {trouble}; correct it")


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


# --- recado check ---


@app.command()
def check(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
    dsn: Dsn = None,
    schema: Schema = None,
) -> None:
    """Say what is wrong with the database, and what to do; exits with 1 when something must be mended."""

    async def read(conn: Connection) -> list[Finding]:
        # One transaction: behind a transaction-mode pooler the statements would reach different servers.
        async with conn.transaction():
            findings = await checks.check(conn, schema=schema)
        return findings + await checks.check_poolers(connector(_database(dsn)), direct_connector())

    findings = _run(dsn, read)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], ensure_ascii=False, indent=2))
    else:
        for finding in findings:
            typer.echo(f"{finding.level}: {_printable(finding.sentence)}")
        if not findings:
            typer.echo("nothing to mend")
    if any(finding.level is Level.ERROR for finding in findings):
        raise typer.Exit(1)


# --- recado grants ---


@app.command()
def grants(
    role: Annotated[str, typer.Argument(help="The role that a service connects as; it must exist.")],
    purpose: Annotated[list[Role], typer.Option("--as", help="What the role is for; may be repeated.")],
    schema: Schema = None,
) -> None:
    """Print the rights a role needs, and no more, as SQL for psql; needs no database."""
    typer.echo(grant_statements(role, purpose, schema=schema), nl=False)


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


# --- recado worker, api, dev ---

MAX_PROCESSES = 256
"""Of one supervisor; a guess at more than any machine has cores for."""

MAX_SECONDS = 1e9
"""Of an option: 31 years, far more than anybody waits, and far less than an interval of PostgreSQL's holds."""


def _seconds(value: float | None) -> float | None:
    if value is not None and not 0 < value <= MAX_SECONDS:
        raise typer.BadParameter(f"{value:g} is not a number of seconds above 0 and up to {MAX_SECONDS:,.0f}")
    return value


AppPath = Annotated[str, typer.Argument(metavar="APP", help="Where the Recado() is, such as shop.jobs:app.")]
Queues = Annotated[
    list[str] | None,
    typer.Option("--queue", "-q", metavar="QUEUE[:SLOTS]", help="A queue to serve, and how many of its jobs at once."),
]
Host = Annotated[str | None, typer.Option("--host", help="Where to listen; else RECADO_API_HOST, else 127.0.0.1.")]
Port = Annotated[
    int | None,
    typer.Option("--port", min=0, max=65535, help="Where to listen, 0 for any; else RECADO_API_PORT, else 8710."),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option("--log-level", help="The least that is logged.")
]


@app.command()
def worker(
    path: AppPath,
    queue: Queues = None,
    dsn: Dsn = None,
    lease: Annotated[
        float, typer.Option(callback=_seconds, help="Seconds until a job of a worker that is gone is taken over.")
    ] = DEFAULT_LEASE,
    silence: Annotated[
        float, typer.Option(callback=_seconds, help="Seconds without a heartbeat until a worker counts as gone.")
    ] = MAX_SILENCE,
    timeout: Annotated[
        float | None,
        typer.Option(callback=_seconds, help="Seconds for an attempt of a type without its own; else no limit."),
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, max=MAX_SECONDS, help="Seconds that running jobs get at a stop.")
    ] = GRACE,
    processes: Annotated[
        int, typer.Option(min=1, max=MAX_PROCESSES, help="Worker processes under one supervisor; one uses one core.")
    ] = 1,
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True)] = False,
    log_level: LogLevel = "info",
) -> None:
    """Run jobs until SIGTERM; a second one, or SIGINT, stops at once."""
    _log_to_stderr(log_level)
    queues = serve.read_queues(queue or ())
    application = serve.load_app(path)
    url = _database(dsn)
    _run(url, lambda conn: migrate.check_schema(conn, schema=application.schema))
    if processes > 1:
        if (direct := direct_connector()) is not None:
            asyncio.run(check_direct(direct))  # each process does; but those that end, the supervisor starts again
        arguments = [path, *(f"--queue={name}:{slots}" for name, slots in queues.items())]
        arguments += [f"--lease={lease}", f"--silence={silence}", f"--grace={grace}", f"--log-level={log_level}"]
        arguments += [] if timeout is None else [f"--timeout={timeout}"]
        serve.supervise(arguments, url, processes)
        return
    idle = serve.serve_worker(
        application,
        url,
        queues,
        lease=lease,
        heartbeat=min(HEARTBEAT_INTERVAL, silence / 3),
        silence=silence,
        reclaim_interval=min(RECLAIM_INTERVAL, silence / 4, lease / 4),
        timeout=timeout,
        grace=grace,
        supervised=supervised,
    )
    _leave(idle)


@app.command()
def api(path: AppPath, dsn: Dsn = None, host: Host = None, port: Port = None, log_level: LogLevel = "info") -> None:
    """Serve metrics and status over HTTP; without tokens in RECADO_TOKENS to this machine only."""
    _log_to_stderr(log_level)
    application = serve.load_app(path)
    url = _database(dsn)
    with _listening(host, port) as listening:
        _run(url, lambda conn: migrate.check_schema(conn, schema=application.schema))
        serve.serve_api(application, url, listening)


@app.command()
def dev(
    path: AppPath,
    queue: Queues = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data", help="Where the server keeps its data; else RECADO_DATA_DIR, else .recado.")
    ] = None,
    host: Host = None,
    port: Port = None,
    log_level: LogLevel = "info",
) -> None:
    """Run all that an application needs, in one process tree: PostgreSQL, migrations, worker and API."""
    if sys.platform == "win32":
        raise ConfigurationError(
            "cannot start PostgreSQL: on Windows recado runs no server of its own; use WSL, or start one and call "
            "`recado worker` and `recado api`"
        )
    # Only here: it needs fcntl and pwd, which Windows does not have.
    from recado import embedded

    _log_to_stderr(log_level)
    queues = serve.read_queues(queue or ())
    application = serve.load_app(path)
    folder = data_dir or settings().data_dir
    # The port first: when it is taken, no server is started.
    with _listening(host, port) as listening, serve.ended_by_sigterm() as leave_if_told:
        logger.info("PostgreSQL starts in %s", folder)
        with embedded.start(folder) as server:
            leave_if_told()
            _run(server.dsn(), lambda conn: migrate.up(conn, schema=application.schema))
            logger.info("the database is at %s", server.dsn())
            idle = serve.serve_dev(application, server.dsn(), listening, queues)
    _leave(idle)


def _listening(host: str | None, port: int | None) -> AbstractContextManager[socket.socket]:
    return serve.listening(host or settings().api_host, settings().api_port if port is None else port)


def _leave(idle: bool) -> None:
    if not idle:
        # A plain function ignores that its job was given back, and its thread would keep the interpreter from
        # ending, for as long as it likes. Its job is already somebody else's.
        logger.warning("a handler's thread does not end: exiting without it")
        logging.shutdown()
        os._exit(0)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)-8s %(name)s: %(message)s")


app.command()(bench)


# --- recado jobs, dead ---

jobs = typer.Typer(help="Look at jobs, and steer them.", no_args_is_help=True)
app.add_typer(jobs, name="jobs")

JobId = Annotated[UUID, typer.Argument(metavar="ID", help="The job's id.")]
JobTypeName = Annotated[str | None, typer.Option("--type", metavar="TYPE", help="Only jobs of this type.")]
QueueName = Annotated[str | None, typer.Option("--queue", "-q", metavar="QUEUE", help="Only jobs of this queue.")]


@jobs.command("list")
def jobs_list(
    status: Annotated[JobStatus | None, typer.Option(help="Only jobs in this state.")] = None,
    job_type: JobTypeName = None,
    queue: QueueName = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = PAGE_SIZE,
    dsn: Dsn = None,
    schema: Schema = None,
) -> None:
    """List jobs, newest first."""
    found = _run_on_queue(
        dsn,
        schema,
        lambda conn: list_jobs(conn, status=status, queue=queue, job_type=job_type, limit=limit, schema=schema),
    )
    _print_table(
        ["ID", "TYPE", "QUEUE", "STATUS", "ATTEMPTS", "RUN AT (UTC)", "LAST ERROR"],
        [
            [
                str(job.id),
                job.job_type,
                job.queue,
                job.status,
                f"{job.attempts}/{job.max_attempts}",
                _moment(job.run_at),
                (job.last_error or "").partition("\n")[0],
            ]
            for job in found
        ],
    )


JSON_FIELDS = frozenset({"payload", "result", "metadata"})


@jobs.command("show")
def jobs_show(job_id: JobId, dsn: Dsn = None, schema: Schema = None) -> None:
    """Show one job, and what went wrong with it."""

    async def read(conn: Connection) -> tuple[Job, list[JobError]]:
        return await get_job(conn, job_id, schema=schema), await list_errors(conn, job_id, schema=schema)

    job, errors = _run_on_queue(dsn, schema, read)
    names = [field.name for field in dataclasses.fields(job)]
    width = max(map(len, names)) + 2
    for name in names:
        value = getattr(job, name)
        if name in JSON_FIELDS:
            value = json.dumps(value, ensure_ascii=False)
        text = "" if value is None else _printable_lines(str(value)).replace("\n", "\n" + " " * width)
        typer.echo(f"{name:{width}}{text}".rstrip())
    for error in errors:
        where = "" if error.worker_id is None else f" on worker {error.worker_id}"
        typer.echo(f"\nattempt {error.attempt} ended {_moment(error.ended_at)} UTC{where}:")
        typer.echo(_printable_lines(error.traceback or f"{error.error_class}: {error.message}").rstrip())


@jobs.command("cancel")
def jobs_cancel(job_id: JobId, dsn: Dsn = None, schema: Schema = None) -> None:
    """Cancel a job that is pending or running."""
    _run_on_queue(dsn, schema, lambda conn: cancel(conn, job_id, schema=schema))
    typer.echo(f"cancelled {job_id}")


@jobs.command("retry")
def jobs_retry(
    job_id: Annotated[UUID | None, typer.Argument(metavar="ID", help="One job, whatever its end.")] = None,
    job_type: JobTypeName = None,
    queue: QueueName = None,
    everything: Annotated[bool, typer.Option("--all", help="All dead jobs.")] = False,
    dsn: Dsn = None,
    schema: Schema = None,
) -> None:
    """Run a job once more, or the dead ones of a type or a queue."""
    if (job_id is not None) + (job_type is not None or queue is not None) + everything != 1:
        raise typer.BadParameter("name one job, or --type and --queue, or --all")

    async def retry(conn: Connection) -> int:
        if job_id is not None:
            await requeue(conn, job_id, schema=schema)
            return 1
        count = 0
        before = await server_time(conn)
        while done := await requeue_dead(conn, job_type=job_type, queue=queue, before=before, schema=schema):
            count += len(done)
        return count

    count = _run_on_queue(dsn, schema, retry)
    typer.echo(f"requeued {count} job{'' if count == 1 else 's'}")


@app.command()
def dead(
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many groups at most.")] = PAGE_SIZE,
    dsn: Dsn = None,
    schema: Schema = None,
) -> None:
    """Show what died, grouped by error; `recado jobs retry` gives it another chance."""
    groups = _run_on_queue(dsn, schema, lambda conn: dead_by_error(conn, limit=limit, schema=schema))
    _print_table(
        ["JOBS", "TYPE", "NEWEST (UTC)", "ERROR"],
        [[str(g.count), g.job_type, _moment(g.newest), g.error] for g in groups],
    )


# --- recado schedules ---

schedules = typer.Typer(help="Look at cron schedules, and pause them.", no_args_is_help=True)
app.add_typer(schedules, name="schedules")

ScheduleName = Annotated[str, typer.Argument(metavar="NAME", help="The schedule's name.")]
AppName = Annotated[
    str | None, typer.Option("--app-name", metavar="NAME", help="The application's name, as in Recado(NAME).")
]


@schedules.command("list")
def schedules_list(app_name: AppName = None, dsn: Dsn = None, schema: Schema = None) -> None:
    """List schedules; those without an application are recado's own."""
    found = _run_on_queue(dsn, schema, lambda conn: list_schedules(conn, application=app_name, schema=schema))
    _print_table(
        ["NAME", "APPLICATION", "EXPRESSION", "TIME ZONE", "LAST (UTC)", "NEXT (UTC)", "LAST JOB"],
        [
            [
                s.name,
                s.application or "-",
                s.expression,
                s.timezone,
                _moment(s.last_tick),
                "paused" if s.paused_at is not None else _moment(s.next_tick),
                s.last_job_status or "-",
            ]
            for s in found
        ],
    )


@schedules.command("pause")
def schedules_pause(name: ScheduleName, app_name: AppName = None, dsn: Dsn = None, schema: Schema = None) -> None:
    """Let a schedule enqueue nothing until it is resumed."""

    async def pause(conn: Connection) -> None:
        await pause_schedule(conn, await _application(conn, name, app_name, schema), name, schema=schema)

    _run_on_queue(dsn, schema, pause)
    typer.echo(f"paused {name}")


@schedules.command("resume")
def schedules_resume(name: ScheduleName, app_name: AppName = None, dsn: Dsn = None, schema: Schema = None) -> None:
    """Let a paused schedule go on with its next tick; what it missed is not caught up."""

    async def resume(conn: Connection) -> None:
        await resume_schedule(conn, await _application(conn, name, app_name, schema), name, schema=schema)

    _run_on_queue(dsn, schema, resume)
    typer.echo(f"resumed {name}")


async def _application(conn: Connection, name: str, app_name: str | None, schema: str | None) -> str:
    """Whose the schedule is: ``app_name``, or the only application that has one of this name."""
    if app_name is not None:
        return app_name
    owners = [s.application for s in await list_schedules(conn, schema=schema) if s.name == name]
    if len(owners) > 1:
        raise typer.BadParameter(f"{name} is there in {', '.join(map(repr, owners))}; name one with --app-name")
    return owners[0] if owners else DEFAULT_NAME


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    """Columns side by side. In a pipe the lines are whole; a terminal's edge cuts them, as wrapped they could not
    be read as a table."""
    lines = [header, *([_printable(cell) for cell in row] for row in rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]
    edge = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for line in lines:
        text = "  ".join(map(set_cell_size, line, widths)).rstrip()
        if edge is not None and cell_len(text) > edge:
            text = f"{set_cell_size(text, edge - 1)}…"
        typer.echo(text)


def _moment(when: datetime | None) -> str:
    """asyncpg reads every timestamptz as UTC."""
    return "" if when is None else f"{when:%Y-%m-%d %H:%M:%S}"


def _printable(text: str) -> str:
    """``text`` with what does not print escaped as in a literal of Python's: an error's text or a payload comes
    from who knows where, and must not steer the operator's terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _printable_lines(text: str) -> str:
    return "\n".join(_printable(line.expandtabs()) for line in text.split("\n"))


# --- behind them ---


def _database(dsn: str | None) -> str:
    """``dsn``, or ``RECADO_DSN``.

    Raises:
        ConfigurationError: no database is named.
    """
    configured = settings().dsn
    url = dsn or (configured.get_secret_value() if configured else "")
    if not url:
        raise ConfigurationError("cannot connect: no database is named; give --dsn, or set RECADO_DSN")
    return url


def _run(dsn: str | None, action: Callable[[Connection], Awaitable[T]]) -> T:
    """What ``action`` returns, in an event loop and with a connection of its own."""
    url = _database(dsn)

    async def run() -> T:
        async with _connected(url) as conn:
            return await action(conn)

    return asyncio.run(run())


def _run_on_queue(dsn: str | None, schema: str | None, action: Callable[[Connection], Awaitable[T]]) -> T:
    """As :func:`_run`, on a database whose schema is known to be there and of this version."""

    async def checked(conn: Connection) -> T:
        await migrate.check_schema(conn, schema=schema)
        return await action(conn)

    return _run(dsn, checked)


@asynccontextmanager
async def _connected(url: str) -> AsyncIterator[Connection]:
    """A connection to ``url``, whose trouble comes out as one sentence.

    Raises:
        ConfigurationError: the database does not let us in.
        RecadoError: the connection was lost, its role may not do what was asked, or an argument is no text.
    """
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
    except (*TRANSIENT, asyncpg.InsufficientPrivilegeError, asyncpg.DataError) as error:
        raise RecadoError(f"cannot finish: {_reason(error)}; see to that and try again") from error


def _reason(error: BaseException) -> str:
    if isinstance(error, asyncpg.InterfaceError) and error.__context__ is not None:
        # The rollback on a connection that is gone, on the way out of a block: what came before says why.
        error = error.__context__
    if isinstance(error, TimeoutError) and not str(error):
        return "the server did not answer in time"
    return str(error) or type(error).__name__


def _environment_trouble() -> str | None:
    """What is wrong with the ``RECADO_*`` variables, if anything is."""
    try:
        settings()
    except SettingsError as error:
        return str(error)
    except ValidationError as error:
        return _variables(error)
    return None


def _variables(error: ValidationError) -> str:
    """Which variables are wrong and why, without their values: a token's or a password might be among them."""
    reasons = []
    for item in error.errors(include_input=False, include_url=False, include_context=False):
        first, *within = map(str, item["loc"])
        variable = first if first.startswith("RECADO_") else f"RECADO_{first.upper()}"
        reasons.append(f"{'.'.join([variable, *within])}: {item['msg']}")
    return ", ".join(reasons)


def _fail(sentence: str) -> NoReturn:
    typer.echo(f"recado: {_printable(' '.join(sentence.split()))}", err=True)
    sys.exit(1)
