"""The database that is measured: a server of our own, or a schema of our own in somebody else's."""

from __future__ import annotations

import os
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from types import MappingProxyType

import asyncpg

from recado import queue
from recado.bench.jobs import COLUMNS, Row
from recado.bench.options import SCHEMA
from recado.errors import ConfigurationError, RecadoError
from recado.queue import benchmark, migrate
from recado.queue.connections import TRANSIENT, Connection, connector
from recado.queue.ids import new_id
from recado.queue.leases import DEFAULT_LEASE
from recado.queue.models import DEFAULT_QUEUE, JobStatus
from recado.queue.workers import WorkerInfo, beat
from recado.version import VERSION

SERVER_OPTIONS: Mapping[str, str] = MappingProxyType({"shared_buffers": "256MB", "max_wal_size": "4GB"})
"""Of our own server: what every guide tells its readers to raise first. All else, and above all what makes commits
durable, is PostgreSQL's default."""

ROWS_PER_COPY = 1_000
"""As many as recado inserts in one statement; each has its own ``run_at``, as jobs of many requests do."""

TOMORROW = timedelta(days=1)


@contextmanager
def own_server() -> Iterator[str]:
    """The URL of a server that is started for the block, on a new cluster in the folder for temporary files.

    Raises:
        EmbeddedServerError: it cannot be started.
    """
    # Only here: what it needs to run a server under another user does not exist on Windows.
    from recado import embedded

    with tempfile.TemporaryDirectory(prefix="recado-bench-", ignore_cleanup_errors=True) as folder:
        data = Path(folder, "data")
        with embedded.start(data, options=SERVER_OPTIONS) as server:
            yield server.dsn()
        embedded.remove(data)


class Database:
    """A schema that holds nothing but what the benchmark puts there."""

    def __init__(self, dsn: str, conn: Connection, *, ours: bool) -> None:
        self.dsn = dsn
        self.conn = conn
        self._ours = ours

    async def prepare(self, due: Iterable[Row], scheduled: Iterable[Row] = ()) -> None:
        """Empty the queue, and put these jobs in."""
        await benchmark.empty(self.conn, SCHEMA)
        await self._copy(due, COLUMNS)
        run_at = datetime.now(UTC) + TOMORROW
        await self._copy(((*row, run_at) for row in scheduled), (*COLUMNS, "run_at"))
        # On a server that is not ours, a checkpoint would be everybody's.
        await benchmark.settle(self.conn, SCHEMA, checkpoint=self._ours)

    async def _copy(self, records: Iterable[tuple[object, ...]], columns: tuple[str, ...]) -> None:
        records = iter(records)
        while chunk := list(islice(records, ROWS_PER_COPY)):
            await self.conn.copy_records_to_table("jobs", schema_name=SCHEMA, records=chunk, columns=columns)

    async def pause(self, names: Iterable[str]) -> None:
        """Let workers find nothing in these queues, so that they are connected and asleep when they are to begin."""
        for name in names:
            await queue.pause(self.conn, name, schema=SCHEMA)

    async def resume(self, names: Iterable[str]) -> None:
        """Let them begin."""
        for name in names:
            await queue.resume(self.conn, name, schema=SCHEMA)

    async def register_saturated(self) -> None:
        """Enter a worker that has so much to do that nobody needs to notify it."""
        worker = WorkerInfo(new_id(), "bench", os.getpid(), VERSION, (DEFAULT_QUEUE,), slots=1, lease=DEFAULT_LEASE)
        await beat(self.conn, worker, running=1, schema=SCHEMA)

    @asynccontextmanager
    async def snapshot(self) -> AsyncIterator[None]:
        """An open transaction that still sees everything as it is now, so that no dead row can be removed."""
        conn = await connector(self.dsn).connect("bench snapshot")
        try:
            async with conn.transaction(isolation="repeatable_read"):
                await benchmark.count_by_status(conn, SCHEMA)
                yield
        finally:
            await conn.close()

    async def check(self, expected: Mapping[JobStatus, int]) -> None:
        """Make sure that each job is where it should be.

        Raises:
            RecadoError: jobs are missing, left, or ended otherwise.
        """
        found = await benchmark.count_by_status(self.conn, SCHEMA)
        if found != expected:
            raise RecadoError(
                f"cannot trust the run: the table should hold {_told(expected)}, and it holds {_told(found)}; "
                "keep everybody else from the schema, and report this if it happens again"
            )


def _told(counts: Mapping[JobStatus, int]) -> str:
    return ", ".join(f"{count:,} {status} jobs" for status, count in sorted(counts.items())) or "no jobs"


@asynccontextmanager
async def open_database(dsn: str, *, ours: bool) -> AsyncIterator[Database]:
    """Make the schema, and drop it at the end of the block, however that comes.

    Args:
        ours: whether the whole server is, and not only the schema.

    Raises:
        ConfigurationError: the database does not let us in, or the schema exists.
        MigrationError: the role may not do what it takes.
    """
    async with _connection(dsn) as conn:
        await benchmark.create_schema(conn, SCHEMA)
    try:
        async with _connection(dsn) as conn:
            await migrate.up(conn, schema=SCHEMA)
            yield Database(dsn, conn, ours=ours)
    finally:
        # On a new connection: the other may be in the middle of something, or broken.
        async with _connection(dsn) as conn:
            await benchmark.drop_schema(conn, SCHEMA)


@asynccontextmanager
async def _connection(dsn: str) -> AsyncIterator[Connection]:
    try:
        # Filling and vacuuming a large table takes as long as it takes.
        conn = await connector(dsn).connect("bench", command_timeout=None)
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        # Of a URL that cannot be read, the message may quote the password.
        reason = "its URL cannot be read" if isinstance(error, ValueError) else str(error) or type(error).__name__
        raise ConfigurationError(f"cannot connect to the database: {reason}; check --dsn") from error
    try:
        try:
            yield conn
        finally:
            await conn.close()
    except (*TRANSIENT, asyncpg.InsufficientPrivilegeError) as error:
        raise RecadoError(
            f"cannot finish the benchmark: {str(error) or type(error).__name__}; see to that and try again"
        ) from error
