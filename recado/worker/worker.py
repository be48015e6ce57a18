"""The life of a worker: start, serve, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping
from contextlib import AsyncExitStack
from datetime import timedelta
from types import MappingProxyType, TracebackType
from typing import Self
from uuid import UUID

import asyncpg
from uuid6 import uuid7

from recado import cron
from recado.app import Recado
from recado.errors import ConfigurationError, InvalidSchedule
from recado.queue import leases, poolers, retention, workers
from recado.queue.connections import CONNECT_TIMEOUT, TRANSIENT, Connector, Link, Pool, connect, connector
from recado.queue.limits import check_queue
from recado.queue.migrate import check_schema
from recado.queue.models import DEFAULT_QUEUE, JobStatus
from recado.queue.poolers import Sharing
from recado.queue.workers import WorkerInfo
from recado.settings import settings
from recado.version import VERSION
from recado.worker.claimer import POLL_INTERVAL, Claimer
from recado.worker.events import Event, EventKind, Observer, ignore
from recado.worker.finisher import Finisher
from recado.worker.hunger import Hunger
from recado.worker.leases import Leases
from recado.worker.listener import Listener
from recado.worker.runner import Runner
from recado.worker.scheduler import Scheduler
from recado.worker.upkeep import RECLAIM_INTERVAL, Upkeep

logger = logging.getLogger("recado.worker")

DEFAULT_SLOTS = 50
"""Jobs of one queue at once in one process: enough to wait on a network side by side, few enough for a pool."""

DEFAULT_QUEUES: Mapping[str, int] = MappingProxyType({DEFAULT_QUEUE: DEFAULT_SLOTS})

GRACE = 30.0
"""Seconds that running jobs get at a stop. Whoever sends SIGKILL afterwards has to wait for some seconds longer, in
which the rest is given back: Kubernetes' terminationGracePeriodSeconds, 30 by default, should be 45."""

MAX_HANDLER_CONNECTIONS = 10
"""Of the pool a worker makes for its transactional handlers when it was given a URL: asyncpg's own default."""

MAX_POLL_INTERVAL = 2.5
"""Seconds: enqueue notifies of jobs that are due within 3 s, and leaves later ones to the next look."""

MAX_SPAN = 366 * 86_400.0
"""Seconds of a lease, and of a silence: a year, which nobody waits for, and far from where an interval overflows."""

FLUSH_TIMEOUT = 10.0
"""Seconds at a stop for writing down what has ended; beyond it the jobs are left to the reclaim."""


class Worker:
    """Claims jobs and runs them, until it is stopped.

    As a context manager, inside another service::

        async with Worker(app, pool, queues={"mail": 20}):
            ...

    starts it, and drains it when the block ends. ``recado worker`` calls :meth:`run`.

    Args:
        app: the application whose handlers run.
        database: a ``postgresql://`` URL, or a pool: transactional handlers get its connections, and claims,
            finishing, leases and the listener connect as it does; ``None`` takes ``RECADO_DSN``.
        queues: how many jobs of which queue run at once.
        listen: the URL of a direct connection for LISTEN, where ``database`` leads through a pooler in
            transaction mode; ``None`` takes ``RECADO_LISTEN_DSN``, else ``database``. Without one, behind such a
            pooler, the worker hears nothing and polls.
        timeout: seconds for the attempts of job types without a timeout of their own; ``None`` is no limit.
        grace: seconds that running jobs get at a stop before they are cancelled and given back.
        lease: seconds after which a job may be taken over from a worker that renews it no more.
        heartbeat: seconds between two signs of life.
        silence: seconds without one after which this worker is taken for dead by others.
        poll_interval: seconds between two looks at an empty queue when nobody notifies; at most 2.5.
        reclaim_interval: seconds between two sweeps for jobs whose worker is gone.
        keep: how long jobs are kept after their end, by status.
        observe: called with an :class:`~recado.worker.events.Event` for each thing that happens.

    Raises:
        ConfigurationError: the settings do not fit each other, or no database is named.
    """

    def __init__(
        self,
        app: Recado,
        database: Pool | str | None = None,
        *,
        queues: Mapping[str, int] = DEFAULT_QUEUES,
        listen: str | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        lease: float = leases.DEFAULT_LEASE,
        heartbeat: float = leases.HEARTBEAT_INTERVAL,
        silence: float = leases.MAX_SILENCE,
        poll_interval: float = POLL_INTERVAL,
        reclaim_interval: float = RECLAIM_INTERVAL,
        keep: Mapping[JobStatus, timedelta] = retention.RETENTION,
        observe: Observer = ignore,
    ) -> None:
        _check(queues, lease=lease, heartbeat=heartbeat, silence=silence, poll_interval=poll_interval)
        _check_expiry()
        self.id: UUID = uuid7()
        self.app = app
        self._connector: Connector = connector(database)
        self._direct: Connector | None = direct_connector(listen)
        self._pool: Pool | None = None if database is None or isinstance(database, str) else database
        self._queues = dict(queues)
        self._timeout = timeout
        self._grace = grace
        self._lease = lease
        self._heartbeat = heartbeat
        self._silence = silence
        self._poll_interval = poll_interval
        self._reclaim_interval = reclaim_interval
        self._keep = keep
        self._observe = observe
        self._started = asyncio.Event()
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._task: asyncio.Task[bool] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self.run(), name="recado worker")
        self._task.add_done_callback(_log_crash)
        started = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait({self._task, started}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                await self._task  # raises what kept it from starting
        except BaseException:
            self.stop_now()
            raise
        finally:
            started.cancel()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.stop()
        if self._task is not None:
            await self._task

    def stop(self) -> None:
        """Claim nothing more, wait for what is running, then end; :meth:`run` returns when it is done. May be
        called before the start, and twice."""
        self._stop.set()

    def stop_now(self) -> None:
        """Stop without waiting: what is running is cancelled and given back."""
        self._stop_now.set()
        self._stop.set()

    async def run(self) -> bool:
        """Serve until :meth:`stop` is called.

        Returns:
            Whether every thread is idle; one that is not keeps the interpreter from exiting.

        Raises:
            SchemaMismatch: the schema in the database is too old or too new for this version of recado.
            ConfigurationError: a pooler in transaction mode stands where it must not.
            OSError, asyncpg.PostgresError: the database cannot be reached at the start; later on the worker
                waits for it.
        """
        listens_at = await self._fit_to_poolers()
        async with AsyncExitStack() as stack:

            def doubt() -> None:
                """What has silenced one connection may have silenced all."""
                for link in links.values():
                    link.doubt()
                runner.doubt()

            links = {
                role: Link(self._connector, role, doubt)
                for role in ("claims", "sweeps", "finisher", "operations", "upkeep")
            }
            for link in links.values():
                stack.push_async_callback(link.close)
            pool = self._pool
            if pool is None:
                pool = self._make_pool()
                await stack.enter_async_context(pool)
            finisher = Finisher(self.app, links["finisher"], self.id, self._observe)
            runner = Runner(
                self.app,
                pool,
                links["operations"].connection,
                finisher,
                self.id,
                self._queues,
                timeout=self._timeout,
                observe=self._observe,
            )
            async with links["claims"].connection() as conn:
                await check_schema(conn, schema=self.app.schema)
            runner.state = await stack.enter_async_context(self.app.run_lifespan())
            await self._serve(links, finisher, runner, listens_at)
            return runner.close()

    async def _fit_to_poolers(self) -> Connector | None:
        """Make our own connections fit a pooler that stands in between.

        Returns:
            Where to listen; ``None`` where nothing would be heard.
        """
        if self._direct is not None:
            await check_direct(self._direct)
        match await poolers.sharing(self._connector):
            case Sharing.NONE:
                return self._direct or self._connector
            case Sharing.STATEMENTS if self._pool is not None and poolers.caches_statements(self._connector):
                raise ConfigurationError(
                    "cannot start a worker: its pool leads through a pooler in transaction mode, which mixes up "
                    "prepared statements; create the pool with statement_cache_size=0"
                )
            case Sharing.STATEMENTS:
                self._connector = poolers.without_cache(self._connector)
        if self._direct is None:
            logger.warning(
                "the database is behind a pooler in transaction mode, where LISTEN hears nothing: looking for jobs "
                "every %g s; let RECADO_LISTEN_DSN name the server itself",
                self._poll_interval,
            )
        return self._direct

    async def _serve(
        self, links: Mapping[str, Link], finisher: Finisher, runner: Runner, listens_at: Connector | None
    ) -> None:
        info = self._info()
        async with links["claims"].connection() as conn:
            # Registered and hungry before the first claim: what is enqueued from here on notifies us.
            await workers.beat(conn, info, 0, schema=self.app.schema)
        lease_thread = Leases(
            self._connector,
            runner,
            info,
            heartbeat=min(self._heartbeat, self._lease / leases.RENEWALS_PER_LEASE),
            schema=self.app.schema,
            observe=self._observe,
        )
        hunger = Hunger(links["claims"], info, schema=self.app.schema, observe=self._observe)
        claimers = {
            queue: Claimer(
                queue,
                links["claims"],
                links["sweeps"],
                runner,
                finisher,
                hunger,
                self.id,
                poll_interval=self._poll_interval,
                schema=self.app.schema,
                observe=self._observe,
            )
            for queue in self._queues
        }
        upkeep = Upkeep(
            self.app,
            links["upkeep"],
            reclaim_interval=self._reclaim_interval,
            keep=self._keep,
            observe=self._observe,
        )
        # On the connection of the sweeps: a tick is a few short statements, and one more connection is dear.
        scheduler = Scheduler(self.app, links["upkeep"], self.id, upkeep.system_tasks(), observe=self._observe)
        endless = [upkeep.run, scheduler.run, lease_thread.watch]
        if listens_at is not None:
            endless.append(self._listener(listens_at, claimers, runner, lease_thread).run)
        lease_thread.start()
        try:
            async with asyncio.TaskGroup() as background:
                ending = [background.create_task(run()) for run in endless]
                finishing = background.create_task(finisher.run())
                await self._claim(claimers, runner)
                # The order of the end: nothing is claimed any more, so wait for what runs; then write down
                # how it ended; the leases and the registry go last, so that nobody takes a draining job over.
                await runner.drain(self._grace, self._stop_now)
                finisher.close()
                await asyncio.wait({finishing}, timeout=FLUSH_TIMEOUT)
                if not finishing.done():
                    logger.error(
                        "cannot write down how %d jobs ended: another worker will take them over",
                        len(finisher.unwritten()),
                    )
                    finishing.cancel()
                for task in ending:
                    task.cancel()
        finally:
            # Nothing to do after a stop in good order. When this task was cancelled, or a part of the worker
            # failed: end what still runs, before its leases are let go.
            await runner.abandon()
            await lease_thread.stop()
            self._observe(Event(EventKind.STOPPED))
            logger.info("worker %s stopped", self.id)

    async def _claim(self, claimers: Mapping[str, Claimer], runner: Runner) -> None:
        """Claim until the worker is to stop."""
        async with asyncio.TaskGroup() as claiming:
            for claimer in claimers.values():
                claiming.create_task(claimer.run())
            self._started.set()
            self._observe(Event(EventKind.STARTED))
            logger.info("worker %s serves %s", self.id, ", ".join(f"{q}:{n}" for q, n in self._queues.items()))
            await self._stop.wait()
            self._observe(Event(EventKind.STOPPING))
            for claimer in claimers.values():
                claimer.stop()
            runner.stop()
        # A claim that was under way has come in meanwhile.
        runner.stop()

    def _listener(
        self, direct: Connector, claimers: Mapping[str, Claimer], runner: Runner, lease_thread: Leases
    ) -> Listener:
        def wake(queue: str) -> None:
            if (claimer := claimers.get(queue)) is not None:
                claimer.wake()

        def cancelled(job_id: UUID) -> None:
            # Not taken at its word: anyone may notify, and the job may have been requeued and claimed since.
            if runner.has(job_id):
                lease_thread.check_soon()

        def connected() -> None:
            for claimer in claimers.values():
                claimer.wake()
            lease_thread.check_soon()
            self._observe(Event(EventKind.LISTENING))

        return Listener(
            direct,
            schema=self.app.schema,
            on_wake=wake,
            on_cancel=cancelled,
            on_connect=connected,
        )

    def _info(self) -> WorkerInfo:
        return WorkerInfo(
            id=self.id,
            host=socket.gethostname(),
            pid=os.getpid(),
            version=VERSION,
            queues=tuple(self._queues),
            slots=sum(self._queues.values()),
            lease=self._lease,
            silence=self._silence,
            hungry=set(self._queues),
        )

    def _make_pool(self) -> Pool:
        # A job waits in its slot for its connection: behind a half-open socket it must not be for asyncpg's 60 s.
        kwargs = {"timeout": CONNECT_TIMEOUT, **self._connector.kwargs}
        kwargs["server_settings"] = {"application_name": "recado handlers"}
        size = min(sum(self._queues.values()), MAX_HANDLER_CONNECTIONS)
        return asyncpg.create_pool(*self._connector.args, min_size=0, max_size=size, connect=connect, **kwargs)


def _log_crash(task: asyncio.Task[bool]) -> None:
    # The block that the worker lives in may go on for days; it raises only at its end.
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.critical("the worker ended: no job is run any more", exc_info=error)


def direct_connector(listen: str | None = None) -> Connector | None:
    """How to connect for LISTEN where that is another way: by the URL ``listen``, else ``RECADO_LISTEN_DSN``."""
    if listen is None and (dsn := settings().listen_dsn) is not None:
        listen = dsn.get_secret_value()
    return None if listen is None else connector(listen)


async def check_direct(direct: Connector) -> None:
    """Refuse to listen where nothing is heard.

    Raises:
        ConfigurationError: a pooler in transaction mode stands in between.
    """
    try:
        shared = await poolers.sharing(direct)
    except TRANSIENT:
        return  # the listener goes on trying, and polls do without it
    if shared is not Sharing.NONE:
        raise ConfigurationError(
            "cannot start a worker: its URL for LISTEN leads through a pooler in transaction mode, where nothing is "
            "heard; let RECADO_LISTEN_DSN name the server itself, or leave it out and poll"
        )


def _check_expiry() -> None:
    try:
        cron.check(settings().expiry_schedule, "UTC")
    except InvalidSchedule as error:
        raise ConfigurationError(f"cannot start a worker: RECADO_EXPIRY_SCHEDULE is wrong: {error}") from None


def _check(queues: Mapping[str, int], *, lease: float, heartbeat: float, silence: float, poll_interval: float) -> None:
    if not queues:
        raise ConfigurationError("cannot start a worker: it serves no queue; name at least one")
    for queue, slots in queues.items():
        check_queue(queue)
        if type(slots) is not int or slots < 1:
            raise ConfigurationError(
                f"cannot start a worker: queue {queue!r} has {slots!r} slots; give it a whole number from 1 on"
            )
    if lease <= 0 or heartbeat <= 0:
        raise ConfigurationError("cannot start a worker: lease and heartbeat must be positive numbers of seconds")
    if max(lease, silence) > MAX_SPAN:
        raise ConfigurationError(
            f"cannot start a worker: lease and silence must be at most {MAX_SPAN:,.0f}, a year, so that a job is ever "
            "taken over; choose a shorter time"
        )
    if silence < 3 * heartbeat:
        raise ConfigurationError(
            f"cannot start a worker: {silence:g} s of silence with a heartbeat every {heartbeat:g} s would take "
            "living workers for dead; let silence be at least three heartbeats"
        )
    if not 0 < poll_interval <= MAX_POLL_INTERVAL:
        raise ConfigurationError(
            f"cannot start a worker: it would look at its queues every {poll_interval:g} s, and enqueue counts on "
            f"{MAX_POLL_INTERVAL:g} s at most; choose a shorter interval"
        )
