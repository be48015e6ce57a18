"""What the chaos programs share: jobs that come in, workers that are broken, and the wait until all is done.

The programs ask the database again and again instead of listening for its changes: a trigger's notifications would
be one more thing in every transaction under test, and its connection breaks with all others.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg

from recado import Recado
from recado.errors import IllegalTransition
from recado.queue import NewJob, cancel
from recado.queue.connections import TRANSIENT
from tests.chaos.audit import Audit, Ledger, audit
from tests.chaos.mixture import BESIDE, CREATE_EFFECTS, KINDS, SHARES
from tests.chaos.support import WorkerProcess, worker_process

HASTY = ("--lease", "3", "--silence", "2", "--queue", "default:10")
"""A worker that is missed soon. Ten slots: with fifty, a worker that is killed takes so many jobs with it that some
lose five workers in a row."""

LOOK_INTERVAL = 0.05
"""Seconds between two looks at the database."""

PATIENCE = 90.0
"""Seconds until what should have come is taken for missing; nothing waits for it where all is well."""

PER_TRANSACTION = 10
"""Jobs enqueued at once."""

MAX_BACKLOG = 300
"""Pending jobs beyond which the enqueuer waits: the load lasts as long as the faults do."""

HOLDERS = """
SELECT array_agg(w.pid) FROM {schema}.workers w
WHERE w.pid = ANY ($1) AND EXISTS (SELECT FROM {schema}.jobs j WHERE j.status = 'running' AND j.locked_by = w.id)
"""


class Impossible(Exception):
    """A program cannot run on this machine; says why."""


class Asker:
    """A connection to ask the database over, whatever happens to it meanwhile."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._conn: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[asyncpg.Connection]:
        """The connection, to its user alone; one of :data:`TRANSIENT` errors drops it on the way out."""
        async with self._lock:
            try:
                if self._conn is None or self._conn.is_closed():
                    self._conn = await asyncpg.connect(self._dsn, timeout=5, command_timeout=30)
                yield self._conn
            except (*TRANSIENT, asyncio.CancelledError):
                self.close()
                raise

    async def ask(self, statement: str, *args: Any) -> Any:
        """The first value of a statement; repeated until it is answered."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    async with self.connection() as conn:
                        return await conn.fetchval(statement, *args)
                except TRANSIENT:
                    await asyncio.sleep(LOOK_INTERVAL)

    def close(self) -> None:
        if self._conn is not None:
            self._conn.terminate()
            self._conn = None


@dataclass(frozen=True)
class Outcome:
    """A line of the table at the end."""

    audit: Audit
    seconds: float
    recovered: float | None
    """Seconds from the end of a fault until a job that came in then was completed; the longest."""

    def with_faults(self, faults: Iterable[str]) -> Outcome:
        """The same with what a program has found besides."""
        return replace(self, audit=replace(self.audit, faults=(*self.audit.faults, *faults)))


class Stage:
    """One program's database, jobs and workers."""

    def __init__(
        self, dsn: str, schema: str, folder: Path, stack: AsyncExitStack, options: tuple[str, ...], worker_dsn: str
    ) -> None:
        self.schema = schema
        self.ledger = Ledger()
        self.workers: list[WorkerProcess] = []
        self.handled = folder / "handled"
        self._dsn = dsn
        self._worker_dsn = worker_dsn
        self._stack = stack
        self._options = options
        self._asker = Asker(dsn)
        self.service = Recado(schema=schema)
        for name, kind in KINDS.items():
            self.service.declare(name, max_attempts=kind.max_attempts, critical=kind.critical)
        for name in BESIDE:
            self.service.declare(name)
        self._progress = asyncio.Condition()
        self._began = time.monotonic()
        self._recovered: float | None = None
        self.calm = asyncio.Event()
        """Set when no fault will come any more."""

    # -- workers

    async def start_worker(self, *options: str, **environment: str) -> WorkerProcess:
        worker = await self._stack.enter_async_context(
            worker_process(
                self._worker_dsn,
                self.handled,
                *self._options,
                *options,
                app="tests.chaos.mixture:app",
                **{"RECADO_SCHEMA": self.schema, **environment},
            )
        )
        self.workers.append(worker)
        return worker

    async def start_workers(self, count: int, **environment: str) -> None:
        """Start workers, and wait until all of them serve."""
        for _ in range(count):
            await self.start_worker(**environment)
        pids = [worker.pid for worker in self.workers]
        await self.until(f"count(*) = $2 FROM {self.schema}.workers WHERE pid = ANY ($1)", pids, len(pids))

    async def busy_worker(self) -> WorkerProcess:
        """Wait for a worker that holds jobs; any one of them."""
        by_pid = {worker.pid: worker for worker in self.workers}
        async with asyncio.timeout(PATIENCE):
            while True:
                holders = await self._asker.ask(HOLDERS.format(schema=self.schema), list(by_pid))
                if holders:
                    return by_pid[random.choice(holders)]
                await asyncio.sleep(LOOK_INTERVAL)

    async def kill(self, worker: WorkerProcess) -> None:
        worker.send(signal.SIGKILL)
        await worker.ended()
        self.workers.remove(worker)

    def lines_logged(self) -> int:
        return sum(len(worker.log) for worker in self.workers)

    def cpu_seconds(self) -> float:
        """What the workers have used of the processor so far."""
        ticks = 0
        for worker in self.workers:
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    # -- jobs

    async def enqueue(self, job_type: str, payload: Any, *, after: timedelta | None = None) -> UUID:
        """Enqueue one job by itself, to run after a while by the server's clock; repeated until it is acknowledged."""
        run_at = None if after is None else await self._asker.ask("SELECT clock_timestamp() + $1::interval", after)
        return (await self.enqueue_all([self.service.new(job_type, payload, run_at=run_at)]))[0]

    async def enqueue_all(self, jobs: Sequence[NewJob]) -> list[UUID]:
        """Enqueue jobs in one transaction; repeated until it is acknowledged."""
        async with asyncio.timeout(PATIENCE):
            return await self._enqueue_surely(self._asker, jobs)

    async def produce(self, count: int) -> None:
        """Enqueue the mixture, and cancel some of it: at least ``count`` jobs, and until :attr:`calm`."""
        asker = Asker(self._dsn)
        try:
            for first in itertools.count(step=PER_TRANSACTION):
                if first >= count and self.calm.is_set():
                    return
                await self.until(
                    f"count(*) < {MAX_BACKLOG} FROM {self.schema}.jobs WHERE status = 'pending' AND run_at <= now()"
                )
                jobs = [self._new(n) for n in range(first, first + PER_TRANSACTION)]
                ids = await self._enqueue_surely(asker, jobs)
                lingering = [job_id for job_id, job in zip(ids, jobs, strict=True) if job.job_type == "mix.lingers"]
                for job_id in lingering[::2]:
                    await self._cancel(asker, job_id)
                async with self._progress:
                    self._progress.notify_all()
        finally:
            asker.close()

    async def produced(self, count: int) -> None:
        """Wait until at least ``count`` jobs are acknowledged."""
        async with asyncio.timeout(PATIENCE), self._progress:
            await self._progress.wait_for(lambda: len(self.ledger.acknowledged) >= count)

    async def _enqueue_surely(self, asker: Asker, jobs: Sequence[NewJob]) -> list[UUID]:
        while True:
            ids: list[UUID] = []
            try:
                async with asker.connection() as conn, conn.transaction():
                    ids = await self.service.enqueue_many(conn, jobs)
            except TRANSIENT:
                self.ledger.in_doubt.update(ids)
                await asyncio.sleep(LOOK_INTERVAL)
            else:
                self.ledger.acknowledged |= dict(zip(ids, [job.job_type for job in jobs], strict=True))
                return ids

    def _new(self, n: int) -> NewJob:
        job_type = SHARES[n % len(SHARES)]
        key = f"{n}" if n % 3 == 0 or KINDS[job_type].critical else None
        return self.service.new(job_type, {"n": n}, idempotency_key=key)

    async def _cancel(self, asker: Asker, job_id: UUID) -> None:
        self.ledger.perhaps_cancelled.add(job_id)
        try:
            async with asker.connection() as conn:
                await cancel(conn, job_id, schema=self.schema)
        except TRANSIENT:
            pass  # done or not, both are right
        except IllegalTransition:
            self.ledger.perhaps_cancelled.remove(job_id)  # it had ended
        else:
            self.ledger.cancelled.add(job_id)

    # -- waiting and counting

    async def until(self, condition: str, *args: Any) -> None:
        """Wait until the SQL expression ``condition`` is true."""
        async with asyncio.timeout(PATIENCE):
            while not await self._asker.ask(f"SELECT {condition}", *args):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_INTERVAL)

    async def logged(self, text: str) -> None:
        """Wait until any of the workers has logged ``text``."""
        async with asyncio.timeout(PATIENCE):
            while not any(text in line for worker in self.workers for line in worker.log):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_INTERVAL)

    async def noted(self, job_id: UUID) -> int:
        """Wait until a handler has noted that it runs a job; the pid of its worker."""
        async with asyncio.timeout(PATIENCE):
            while True:
                # Looked for in the text: of some 100,000 runs it takes a job's time to make lines and words.
                noted = self.handled.read_text() if self.handled.exists() else ""
                _, found, behind = noted.rpartition(f"{job_id} ")
                line, complete, _ = behind.partition("\n")
                if found and complete:
                    return int(line.split()[-1])
                await asyncio.sleep(LOOK_INTERVAL)

    async def fetch(self, statement: str, *args: Any) -> list[asyncpg.Record]:
        """The rows of a statement; ``{schema}`` in it is filled in."""
        async with self._asker.connection() as conn:
            return await conn.fetch(statement.format(schema=self.schema), *args)

    async def healed(self) -> None:
        """The fault is over: enqueue a job, and note how long it takes until it is completed."""
        began = time.monotonic()
        job_id = await self.enqueue("mix.plain", {"n": 0})
        await self.until(f"status = 'completed' FROM {self.schema}.jobs WHERE id = $1", job_id)
        self._recovered = max(self._recovered or 0.0, time.monotonic() - began)

    async def close(self, *, connections_broke: bool = False) -> Outcome:
        """Wait until every job has ended, let the workers stop in good order, and count."""
        await self.until(f"NOT EXISTS (SELECT FROM {self.schema}.jobs WHERE status IN ('pending', 'running'))")
        # Those that were killed are taken off the registry by the others.
        pids = [worker.pid for worker in self.workers]
        # Those that were started last must be there to obey.
        await self.until(f"count(*) = $2 AND bool_and(pid = ANY ($1)) FROM {self.schema}.workers", pids, len(pids))
        for worker in self.workers:
            worker.send(signal.SIGTERM)
        codes = [await worker.ended() for worker in self.workers]
        async with self._asker.connection() as conn:
            found = await audit(conn, self.schema, self.ledger, self.handled, connections_broke=connections_broke)
        outcome = Outcome(found, time.monotonic() - self._began, self._recovered)
        return outcome.with_faults(f"a worker ended with exit code {code}" for code in codes if code)

    def disconnect(self) -> None:
        self._asker.close()


@asynccontextmanager
async def stage(
    dsn: str, schema: str, folder: Path, *, options: tuple[str, ...] = HASTY, worker_dsn: str | None = None
) -> AsyncIterator[Stage]:
    """A program's stage on the database ``dsn``, which holds the migrated schema and nothing else.

    Args:
        worker_dsn: how the workers reach it, where something stands in between.
    """
    async with AsyncExitStack() as stack:
        made = Stage(dsn, schema, folder, stack, options, worker_dsn or dsn)
        stack.callback(made.disconnect)
        await made._asker.ask(CREATE_EFFECTS)
        yield made
