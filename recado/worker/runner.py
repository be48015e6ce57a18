"""Runs claimed jobs, as many at once as their queue has slots.

A job that waits for something has a task to itself. One that does not leaves its task as it came, and the next one
begins in it at once: for short jobs the task, its context and its way through the loop were a third of the work.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum, auto
from functools import partial
from types import TracebackType
from typing import Any, cast
from uuid import UUID

import asyncpg
from asyncpg.transaction import Transaction

from recado.app import JobHandler, OperationHandler, Recado
from recado.errors import LeaseLost, RecadoError
from recado.queue import finishes
from recado.queue.connections import STATEMENT_TIMEOUT, TRANSIENT, Connection, Pool
from recado.queue.finishes import Completion
from recado.queue.models import ClaimedJob
from recado.queue.operations import OperationStatus
from recado.worker.calls import call, failure_of, handler_of, result_of, snooze_of
from recado.worker.events import Event, EventKind, Observer
from recado.worker.finisher import Finisher
from recado.worker.handover import Handover
from recado.worker.operations import Connect, Operation, begin
from recado.worker.operations import result_of as result_of_operation

logger = logging.getLogger("recado.worker")

PREFETCH_WINDOW = 0.02
"""Seconds of work that may wait in the process: a claim's round trip and some more, so that short jobs stream
and long jobs are never hoarded."""

MAX_PREFETCH = 1_000
"""Jobs that may wait in the process at most, for each queue; what a stop has to give back. Half of them are claimed
while the other half runs: 55,000 no-op jobs/s; with 500 jobs 49,000, with 2,000 as with 1,000."""

MAX_CLAIM = MAX_PREFETCH // 2
"""Jobs of one claim at most, so that the next is under way while they run."""

RUN_TIME_WEIGHT = 0.05
"""Of the newest run time in the moving average: it follows a change of the mix within some twenty jobs."""

MAX_WAITING = 0.5
"""Seconds that a prefetched job may wait for a slot here before it is given back: the slots have met long jobs, and
another worker may be idle."""

MAX_TURN = 0.001
"""Seconds for which jobs that wait for nothing follow each other in one turn of the event loop, which then looks after
claims, timers and everybody else: some 80 no-op jobs."""

CANCEL_GRACE = 5.0
"""Seconds a cancelled handler gets to clean up before its job is given back without it."""

ROLLBACK_TIMEOUT = 10.0
"""Seconds; a rollback takes a round trip."""

INFRASTRUCTURE_WAIT = 1.0
"""Seconds until an attempt is made again that the database, not the handler, brought to an end."""


class Ending(Enum):
    """Why the worker itself cancels an attempt."""

    LOST = auto()
    STOPPED = auto()


class Attempt:
    """A claimed job in this process: waiting for a slot, or running."""

    __slots__ = ("ending", "job", "settling", "started", "task", "thread")

    def __init__(self, job: ClaimedJob, started: float) -> None:
        self.job = job
        self.task: asyncio.Task[None] | None = None
        self.thread: asyncio.Future[Any] | None = None
        self.ending: Ending | None = None
        self.settling = False
        """The handler is through and its transaction is being committed: too late to cancel, the fence decides."""
        self.started = started
        """When it came in; once it has begun, when that was. Seconds of the monotonic clock."""


class _Queue:
    """One queue's slots."""

    def __init__(self, name: str, slots: int) -> None:
        self.name = name
        self.slots = slots
        self.running = 0
        self.waiting: deque[Attempt] = deque()
        self.beginning = 0
        """Tasks that will take an attempt off the line, if there is one by then."""
        self.streaming = False
        """The last attempt waited for nothing. The next task may do for all, and only one is made at a time."""
        self.run_time = PREFETCH_WINDOW
        """The moving average, in seconds; at first so long that nothing is prefetched."""
        self.room = asyncio.Event()
        self.room.set()
        self.impatient: asyncio.TimerHandle | None = None

    def prefetch(self) -> int:
        """How many jobs these slots will begin within the window. Those that wait for nothing follow each other,
        whatever the number of slots."""
        if self.run_time >= PREFETCH_WINDOW:
            return 0
        at_once = 1 if self.streaming else self.slots
        return min(MAX_PREFETCH, int(at_once * PREFETCH_WINDOW / max(self.run_time, 1e-6)))


class Runner:
    """Owns the tasks of the jobs that run."""

    def __init__(
        self,
        app: Recado,
        pool: Pool,
        connect: Connect,
        finisher: Finisher,
        worker_id: UUID,
        queues: Mapping[str, int],
        *,
        timeout: float | None,
        observe: Observer,
    ) -> None:
        self._app = app
        self._connections = Handover(pool)
        self._connect = connect
        self._finisher = finisher
        self._worker_id = worker_id
        self._timeout = timeout
        self._observe = observe
        self._queues = {name: _Queue(name, slots) for name, slots in queues.items()}
        self._attempts: dict[UUID, Attempt] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy_threads: set[asyncio.Future[Any]] = set()
        self._threads = ThreadPoolExecutor(sum(queues.values()), thread_name_prefix="recado-job")
        self._context = contextvars.copy_context()
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        self._stopping = False
        self._turn = 0
        """Counts the turns of the loop in which attempts began: one that sees it change has waited for something."""
        self._turn_ends: float | None = None
        self.state: Mapping[str, Any] = {}

    # -- what the claimer asks

    async def room(self, queue: str) -> int:
        """Wait until ``queue`` has room; how many jobs may be claimed for it, or 0 once the worker stops."""
        slots = self._queues[queue]
        while True:
            await slots.room.wait()
            if self._stopping:
                return 0
            if (room := self._room(slots)) > 0:
                return room
            slots.room.clear()

    def submit(self, queue: str, jobs: Sequence[ClaimedJob]) -> None:
        """Take jobs over from the claimer; they begin as slots are free."""
        slots = self._queues[queue]
        now = time.monotonic()
        overtaking = jobs and slots.waiting and jobs[0].priority < slots.waiting[-1].job.priority
        for job in jobs:
            present = self._attempts.get(job.id)
            if present is not None and present.job.fence == job.fence:
                # A crash of the server undid the claim of the attempt that is under way here, and the job was
                # claimed again by us: the same fence, so that attempt may go on and end it.
                continue
            if present is not None:
                self._end(present, Ending.LOST)
            attempt = Attempt(job, now)
            self._attempts[job.id] = attempt
            slots.waiting.append(attempt)
        if overtaking:
            slots.waiting = deque(sorted(slots.waiting, key=lambda attempt: attempt.job.priority))
        if self._attempts:
            self._idle.clear()
        self._fill(slots)
        self._signal_room(slots)

    # -- what leases and listener ask

    def leases(self) -> list[tuple[UUID, int]]:
        """All jobs this process holds, each with its fence. Called from the lease thread: a copy of the dict's
        values is one step under the interpreter's lock."""
        held = [(attempt.job.id, attempt.job.fence) for attempt in list(self._attempts.values())]
        # Where handlers block the loop one after the other, the end of the first is written after that of the last.
        # Asked behind the attempts, for that is how they move on.
        return held + self._finisher.leases()

    def held(self) -> set[UUID]:
        """The ids of all jobs in this process."""
        return set(self._attempts)

    def has(self, job_id: UUID) -> bool:
        """Whether a job is in this process."""
        return job_id in self._attempts

    def running(self) -> int:
        """How many jobs have begun."""
        return sum(slots.running for slots in self._queues.values())

    def lose(self, job_id: UUID, fence: int) -> None:
        """The lease of an attempt is lost: its job was taken over, or cancelled. A later attempt goes on."""
        attempt = self._attempts.get(job_id)
        if attempt is not None and attempt.job.fence == fence:
            self._end(attempt, Ending.LOST)

    def doubt(self) -> None:
        """One of the worker's connections has fallen silent: those of the pool may have, too."""
        self._connections.doubt()

    # -- stopping

    def stop(self) -> None:
        """Let nothing more be claimed, and give back what has not begun. A claim that is under way may still come in;
        call it again after that."""
        self._stopping = True
        for slots in self._queues.values():
            slots.room.set()
            if slots.impatient is not None:
                slots.impatient.cancel()
            while slots.waiting:
                attempt = slots.waiting.popleft()
                self._forget(attempt)
                self._finisher.release(attempt.job)

    async def drain(self, grace: float, hurry: asyncio.Event) -> None:
        """Wait ``grace`` seconds, or until ``hurry`` is set, for what is running; then cancel it and give it back."""
        waiting = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(hurry.wait())]
        await asyncio.wait(waiting, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        for future in waiting:
            future.cancel()
        if not self._idle.is_set():
            logger.warning("stopping: %d jobs still run and are given back", len(self._attempts))
            await self.abandon()

    async def abandon(self) -> None:
        """Cancel what is running and give it back; a second call has nothing left to do."""
        if not self._attempts:
            return
        for attempt in list(self._attempts.values()):
            self._end(attempt, Ending.STOPPED)
        try:
            async with asyncio.timeout(CANCEL_GRACE):
                await self._idle.wait()
        except TimeoutError:
            for attempt in list(self._attempts.values()):
                logger.error("job %s (%s) ignores its cancellation: given back", attempt.job.id, attempt.job.job_type)  # noqa: TRY400 - the timeout's traceback says nothing
                self._forget(attempt)
                self._finisher.release(attempt.job)

    def close(self) -> bool:
        """Let the threads go.

        Returns:
            Whether all of them are idle; one that is not keeps the interpreter from exiting.
        """
        self._threads.shutdown(wait=False, cancel_futures=True)
        return not self._busy_threads

    # -- slots

    def _room(self, slots: _Queue) -> int:
        prefetch = slots.prefetch()
        prefetched = len(slots.waiting) + slots.running - slots.slots
        # Short jobs: not before half of the prefetched ones have begun, or each claim would fetch a handful.
        return 0 if prefetched > prefetch // 2 else max(0, min(prefetch - prefetched, MAX_CLAIM))

    def _signal_room(self, slots: _Queue) -> None:
        if self._stopping or self._room(slots) > 0:
            slots.room.set()
        else:
            slots.room.clear()

    def _fill(self, slots: _Queue) -> None:
        """Make tasks for what waits, as far as there are free slots."""
        wanted = min(len(slots.waiting), slots.slots - slots.running)
        for _ in range(min(wanted, 1 if slots.streaming else wanted) - slots.beginning):
            slots.beginning += 1
            # In a context of its own: what one handler sets, the next does not see.
            self._tasks.add(self._loop.create_task(self._work(slots), name="recado job", context=self._context.copy()))
        if slots.waiting and slots.impatient is None and not self._stopping:
            slots.impatient = self._loop.call_later(MAX_WAITING, self._give_back_stale, slots, context=self._context)

    def _give_back_stale(self, slots: _Queue) -> None:
        """Give back what has waited too long. What is left, or comes in later, is looked at anew."""
        slots.impatient = None
        now = time.monotonic()
        for attempt in [attempt for attempt in slots.waiting if now - attempt.started >= MAX_WAITING]:
            slots.waiting.remove(attempt)
            self._forget(attempt)
            self._finisher.release(attempt.job)
            # The jobs that hold the slots are long, and the average has yet to learn it: prefetch nothing meanwhile.
            slots.run_time = PREFETCH_WINDOW
        self._fill(slots)
        self._signal_room(slots)

    async def _work(self, slots: _Queue) -> None:
        """Run the next attempt; and the one after it, as long as each leaves this task as it found it."""
        slots.beginning -= 1
        task = cast("asyncio.Task[None]", asyncio.current_task(self._loop))
        try:
            while slots.waiting and slots.running < slots.slots:
                attempt = slots.waiting.popleft()
                attempt.task = task
                turn, ends = self._begin(slots, attempt)
                try:
                    await self._run(attempt)
                except GeneratorExit:
                    # What a handler waited for raised it, and Python closes all that wait on each other for that. The
                    # attempt is settled; unless it is the loop that is gone.
                    if not self._loop.is_running():
                        raise
                    break
                except Exception:
                    logger.critical("job %s ended in a way it should not have", attempt.job.id, exc_info=True)
                finally:
                    self._end_of(slots, attempt)
                slots.streaming = self._turn == turn and self._is_fresh(task)
                if not slots.streaming or time.monotonic() >= ends:
                    break
            self._go_on(slots)
        finally:
            self._tasks.discard(task)  # here, and not in a callback, which would take a turn of the loop for each job
            self._look_idle()

    def _begin(self, slots: _Queue, attempt: Attempt) -> tuple[int, float]:
        """Give an attempt its slot.

        Returns:
            The number of the loop's turn, and when it should be over, by the monotonic clock.
        """
        slots.running += 1
        attempt.started = time.monotonic()
        if self._turn_ends is None:
            self._turn_ends = attempt.started + MAX_TURN
            self._loop.call_soon(self._next_turn, context=self._context)
        return self._turn, self._turn_ends

    def _next_turn(self) -> None:
        """Called before anything goes on that waited in the last turn."""
        self._turn += 1
        self._turn_ends = None
        for slots in self._queues.values():
            if slots.waiting and not slots.beginning:
                slots.streaming = False  # the task that was to do for all has been left waiting by its attempt
                self._go_on(slots)

    def _is_fresh(self, task: asyncio.Task[None]) -> bool:
        """Whether the task that runs is as good as a new one: nobody cancels it, and its context is what it was."""
        try:
            return not task.cancelling() and contextvars.copy_context() == self._context
        except Exception:  # a value that the handler has set cannot be compared
            return False

    def _go_on(self, slots: _Queue) -> None:
        if not self._stopping:
            self._fill(slots)
        self._signal_room(slots)

    def _end_of(self, slots: _Queue, attempt: Attempt) -> None:
        """Take an attempt's slot back."""
        self._forget(attempt)
        if attempt.thread is None or attempt.thread.done():
            slots.running -= 1
        else:
            # Its function cannot be interrupted: the slot is taken until the thread is free again.
            attempt.thread.add_done_callback(partial(self._end_of_thread, slots), context=self._context)

    def _end_of_thread(self, slots: _Queue, _: asyncio.Future[Any]) -> None:
        slots.running -= 1
        self._go_on(slots)

    def _forget(self, attempt: Attempt) -> None:
        if self._attempts.get(attempt.job.id) is attempt:
            del self._attempts[attempt.job.id]
        self._look_idle()

    def _look_idle(self) -> None:
        if not self._attempts and not self._tasks:
            self._idle.set()

    def _end(self, attempt: Attempt, ending: Ending) -> None:
        """Cancel an attempt that is running, or take it off the line."""
        if attempt.ending is not None or attempt.settling:
            return
        attempt.ending = ending
        if attempt.task is not None:
            attempt.task.cancel()
            return
        slots = self._queues[attempt.job.queue]
        slots.waiting.remove(attempt)
        self._forget(attempt)
        self._signal_room(slots)
        if ending is Ending.LOST:
            self._lost(attempt)
        else:
            self._finisher.release(attempt.job)

    # -- one attempt

    async def _run(self, attempt: Attempt) -> None:
        """Run one attempt to its end, whatever that is; raises only for a fault of our own."""
        job = attempt.job
        try:
            handler = handler_of(self._app, job)
            if isinstance(handler, OperationHandler):
                await self._run_operation(attempt, handler)
            elif "conn" in handler.wants:
                await self._run_in_transaction(attempt, handler)
            else:
                value = await self._call(attempt, handler, None)
                self._finisher.complete(job, result_of(job, value), self._elapsed(attempt))
        except BaseException as error:
            if isinstance(error, GeneratorExit) and not self._loop.is_running():
                raise  # the loop is gone, and with it everything that could write the end down
            # All of it: a handler may raise SystemExit, or cancel itself, and must not take the worker along.
            self._settle(attempt, error)

    def _call(
        self,
        attempt: Attempt,
        handler: JobHandler[Any, Any, Any],
        conn: Connection | None,
        operation: Operation | None = None,
    ) -> Awaitable[Any]:
        return call(
            handler,
            attempt.job,
            conn=conn,
            operation=operation,
            state=self.state,
            timeout=self._timeout,
            in_thread=partial(self._in_thread, attempt),
        )

    def _in_thread(self, attempt: Attempt, function: Callable[[], Any]) -> Awaitable[Any]:
        attempt.thread = self._loop.run_in_executor(
            self._threads, contextvars.copy_context().run, _without_stop_iteration, function
        )
        self._busy_threads.add(attempt.thread)
        attempt.thread.add_done_callback(self._busy_threads.discard)
        # Shielded: a thread cannot be cancelled, and its future must keep telling when it is free again.
        return asyncio.shield(attempt.thread)

    async def _run_in_transaction(self, attempt: Attempt, handler: JobHandler[Any, Any, Any]) -> None:
        """Run a handler that asks for ``conn``: its writes and the completion commit together or not at all."""
        job = attempt.job
        try:
            conn = await self._connections.acquire()
        except (*TRANSIENT, asyncpg.PostgresError) as error:  # whatever the server has against connecting
            raise _Infrastructure from error
        clean = False
        try:
            transaction = conn.transaction(isolation="read_committed")
            with _infrastructure(conn):
                await transaction.start()
            try:
                value = await self._call(attempt, handler, conn)
                _check_transaction(conn)
                completion = Completion(job.id, job.fence, result_of(job, value))
                attempt.settling = True
                with _infrastructure(conn):
                    if not await finishes.complete_one(conn, self._worker_id, completion, schema=self._app.schema):
                        raise LeaseLost(f"job {job.id} was taken over or cancelled: its writes are rolled back")
            except BaseException:
                await _roll_back(conn, transaction)
                raise
            with _infrastructure(conn):
                await transaction.commit()
            clean = True
        finally:
            # What happened on it is over by now: should the reset fail, only the connection is lost.
            with suppress(*TRANSIENT):
                await self._connections.give_back(conn, clean=clean)
        self._finisher.count_completed(job, self._elapsed(attempt))
        self._observe(Event(EventKind.COMPLETED, jobs=(job.id,)))

    async def _run_operation(self, attempt: Attempt, handler: OperationHandler[Any, Any, Any]) -> None:
        """Run a handler whose progress clients watch; its operation ends in the transaction that ends the job."""
        job = attempt.job

        def settle() -> None:
            attempt.settling = True  # the lease is gone by the handler's own will: that must not cancel it

        try:
            operation = await begin(job, self._worker_id, self._connect, schema=self._app.schema, on_end=settle)
        except (*TRANSIENT, asyncpg.PostgresError) as error:
            raise _Infrastructure from error
        try:
            async with operation:
                value = await self._call(attempt, handler, None, operation)
            if not operation.ended:
                self._finisher.complete(job, result_of_operation(value), self._elapsed(attempt))
                return
        except BaseException as error:
            if not operation.ended:
                raise
            logger.warning("operation %s had ended when its handler raised %s", job.id, type(error).__name__)
        elapsed = self._elapsed(attempt)
        if operation.status is OperationStatus.DONE:
            self._finisher.count_completed(job, elapsed)
            self._observe(Event(EventKind.COMPLETED, jobs=(job.id,)))
        else:
            self._finisher.count_failed(job, elapsed, dead=1)
            self._observe(Event(EventKind.DIED, jobs=(job.id,)))

    def _elapsed(self, attempt: Attempt) -> float:
        elapsed = time.monotonic() - attempt.started
        slots = self._queues[attempt.job.queue]
        slots.run_time += (elapsed - slots.run_time) * RUN_TIME_WEIGHT
        return elapsed

    def _settle(self, attempt: Attempt, error: BaseException) -> None:
        """The attempt did not end well: whose fault it was decides what becomes of the job."""
        job = attempt.job
        elapsed = self._elapsed(attempt)
        if attempt.ending is Ending.LOST:
            self._lost(attempt)
        elif attempt.ending is Ending.STOPPED:
            self._finisher.release(job)
        elif isinstance(error, _Infrastructure):
            cause = type(error.__cause__).__name__
            logger.warning("job %s (%s) goes back, its attempt not counted: %s", job.id, job.job_type, cause)
            self._finisher.release(job, INFRASTRUCTURE_WAIT)
        elif (wait := snooze_of(error)) is not None:
            self._finisher.release(job, wait)
        else:
            # LeaseLost, too: whether it is lost, the fence decides. The handler may have raised it itself, or cancelled
            # its own job in the transaction that was rolled back.
            self._finisher.fail(job, failure_of(self._app, job, error, elapsed))

    def _lost(self, attempt: Attempt) -> None:
        job = attempt.job
        logger.warning("job %s (%s) was taken over or cancelled: this attempt is dropped", job.id, job.job_type)
        self._observe(Event(EventKind.LOST, job.queue, (job.id,)))


class _Infrastructure(Exception):
    """The database failed around a transactional handler, not in it; its cause says how."""


class _infrastructure:
    """Around recado's own statements on a handler's connection: they fail for the database's reasons, and a half-open
    socket must not keep the slot, so that a connection that does not answer is closed. (A class and a timer:
    asyncio.timeout in a generator's context manager, three times a job, took an eighth of the client's time.)"""

    __slots__ = ("_conn", "_timer")

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def __enter__(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(STATEMENT_TIMEOUT, _close, self._conn)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._timer.cancel()
        # Where the driver refuses a connection that is open, the handler has left a statement running on it.
        left_busy = isinstance(error, asyncpg.InterfaceError) and not _is_closed(self._conn)
        if isinstance(error, TRANSIENT) and not left_busy:
            raise _Infrastructure from error


def _without_stop_iteration(function: Callable[[], Any]) -> Any:
    """Call a plain function. No future carries a StopIteration: before Python 3.12 the job would run for ever."""
    try:
        return function()
    except StopIteration as error:
        raise RuntimeError("the handler raised StopIteration") from error


def _check_transaction(conn: Connection) -> None:
    """After the handler: its transaction must still be open.

    A closed connection counts as the handler's failure whoever closed it: one that brings its backend down each
    time must run out of attempts.
    """
    if _is_closed(conn):
        raise RecadoError(
            "cannot complete the job with its handler's writes: its connection was closed while it ran; "
            "leave closing it to recado"
        )
    if not conn.is_in_transaction():
        raise RecadoError(
            "cannot complete the job with its handler's writes: the handler ended the transaction it was given; "
            "leave COMMIT and ROLLBACK to recado"
        )


async def _roll_back(conn: Connection, transaction: Transaction) -> None:
    """Roll back, or give the connection up: a half-open socket must not keep the slot."""
    if _is_closed(conn):
        return
    try:
        async with asyncio.timeout(ROLLBACK_TIMEOUT):
            await transaction.rollback()
    except TRANSIENT:
        _close(conn)


def _close(conn: Connection) -> None:
    if not _is_closed(conn):
        conn.terminate()


def _is_closed(conn: Connection) -> bool:
    try:
        return conn.is_closed()
    except asyncpg.InterfaceError:  # the pool took it back when it broke, and answers no question about it
        return True
