"""What an operation's handler tells its clients while it works, and how operations end with their jobs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Any, Self, TypeAlias
from uuid import UUID

import asyncpg

from recado.app import Recado
from recado.errors import Discard, IllegalTransition, InvalidPayload, LeaseLost, OperationNotFound
from recado.payloads import encode_result
from recado.queue import finishes, operations
from recado.queue.connections import TRANSIENT, Connection
from recado.queue.finishes import Completion, Failed, Failure
from recado.queue.leases import Reclaimed
from recado.queue.models import ClaimedJob, JobStatus
from recado.queue.operations import JOB_TYPE_PREFIX, MAX_ERROR, OperationStatus, Started, system
from recado.worker.failures import clean

logger = logging.getLogger("recado.worker")

PROGRESS_INTERVAL = 0.1
"""Seconds between two writes of one operation's progress: what an eye can tell apart, and ten commits a second."""

MARKED_ERROR = "OperationError"
"""The error class in ``job_errors`` of an attempt whose handler ended the operation itself."""

Connect: TypeAlias = Callable[[], AbstractAsyncContextManager[Connection]]
"""Hands out a connection outside of the handler's own transactions."""


def is_operation(job_type: str) -> bool:
    """Whether jobs of this type have an operation beside them."""
    return job_type.startswith(JOB_TYPE_PREFIX)


class Operation:
    """One attempt at an operation; what a handler's ``operation`` parameter receives.

    Each move is written in a transaction of its own, at once visible to whoever watches, and only while this attempt
    is the one that holds the job.
    """

    def __init__(
        self,
        job: ClaimedJob,
        started: Started,
        worker_id: UUID,
        connect: Connect,
        *,
        schema: str,
        on_end: Callable[[], None],
    ) -> None:
        self._on_end = on_end
        self._job = job
        self._started = started
        self._worker_id = worker_id
        self._connect = connect
        self._schema = schema
        self._percent = 0
        self._unwritten = False
        self._next_write = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._refusal: IllegalTransition | None = None
        self.status = OperationStatus.PROCESSING
        """Another one once the handler has ended it by :meth:`mark_done` or :meth:`mark_error`, and its job with it."""

    @property
    def job_id(self) -> UUID:
        """The id that clients know, which is the job's."""
        return self._job.id

    @property
    def kind(self) -> str:
        """What clients know it by."""
        return self._job.job_type.removeprefix(JOB_TYPE_PREFIX)

    @property
    def ended(self) -> bool:
        """Whether the handler has ended it."""
        return self.status.ended

    @property
    def organization_id(self) -> str:
        """Whose operation it is; for :func:`recado.tenant`."""
        return self._started.organization_id

    @property
    def created_by(self) -> str | None:
        """Who started it."""
        return self._started.created_by

    async def mark_processing(self, progress: int = 0) -> None:
        """Say that the work has begun. The worker has said so already when the handler is called; this tells the
        progress at once.

        Raises:
            IllegalTransition: the operation has ended, or another attempt has begun.
        """
        await self.progress(progress)

    async def progress(self, percent: int) -> None:
        """Tell how far the work is.

        At most ten times a second it is written, in between only remembered; the last one is always written. What
        is less than was told before changes nothing: a bar does not go back, unless a new attempt starts over.

        Args:
            percent: 0 to 100.

        Raises:
            ValueError: it is no such number.
            IllegalTransition: the operation has ended (it was cancelled, or expired), or another attempt has begun:
                stop working.
        """
        if type(percent) is not int or not 0 <= percent <= 100:
            raise ValueError(f"cannot set the progress to {percent!r}: it must be an integer from 0 to 100; pass one")
        self._check_open("tell the progress of")
        self._percent = max(self._percent, percent)
        self._unwritten = True
        if self._writing is not None:
            return
        if time.monotonic() >= self._next_write:
            await self._write()
        else:
            self._writing = asyncio.create_task(self._write_later(), name=f"recado progress {self.job_id}")

    async def mark_done(self, result: Any = None) -> None:
        """End the operation well, and its job with it; what the handler returns afterwards is dropped.

        Args:
            result: JSON of at most 256 KiB, for clients to read: no secrets.

        Raises:
            InvalidPayload: the result is none of that; nothing was changed.
            IllegalTransition: the operation has ended already.
            LeaseLost: the job was taken over or cancelled.
        """
        text = encode_result(result)
        self._check_open("end")
        async with self._connect() as conn, system(conn):
            done = Completion(self.job_id, self._job.fence)
            if not await finishes.complete_one(conn, self._worker_id, done, schema=self._schema):
                raise self._lost()
            if not await operations.mark_done(conn, [(self.job_id, self._job.fence, text)], schema=self._schema):
                raise self._lost()
        self._end(OperationStatus.DONE)

    async def mark_error(self, text: str) -> None:
        """End the operation badly, and its job with it, without another attempt: for what the user has to put right.

        Args:
            text: what the user is told; cut at 2,000 characters.

        Raises:
            IllegalTransition: the operation has ended already.
            LeaseLost: the job was taken over or cancelled.
        """
        self._check_open("end")
        text = clean(text, MAX_ERROR)
        failure = Failure(self.job_id, self._job.fence, 0.0, True, 0.0, MARKED_ERROR, text, None)
        async with self._connect() as conn, system(conn):
            if not await finishes.fail(conn, self._worker_id, [failure], schema=self._schema):
                raise self._lost()
            if not await operations.mark_error(conn, [self.job_id], text, schema=self._schema):
                raise self._lost()
        self._end(OperationStatus.ERROR)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Write the last progress, unless the attempt ended well, which is written as 100."""
        if self._writing is not None:
            self._writing.cancel()
            with suppress(asyncio.CancelledError):
                await self._writing
        if isinstance(error, Exception) and self._unwritten and not self.ended and self._refusal is None:
            await self._try_to_write()

    def _check_open(self, what: str) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self.ended:
            raise IllegalTransition(
                f"cannot {what} operation {self.job_id}: this attempt has ended it already; return from the handler"
            )

    def _end(self, status: OperationStatus) -> None:
        self.status = status
        self._on_end()

    async def _write_later(self) -> None:
        try:
            while self._unwritten and self._refusal is None:  # again, for what came in during a write
                await asyncio.sleep(self._next_write - time.monotonic())
                await self._try_to_write()
        finally:
            self._writing = None

    async def _try_to_write(self) -> None:
        try:
            await self._write()
        except IllegalTransition as error:
            self._refusal = error  # for the next call; the lease thread will cancel the handler, too
        except (*TRANSIENT, OperationNotFound, asyncpg.PostgresError) as error:
            logger.warning("cannot write the progress of operation %s: %s", self.job_id, type(error).__name__)

    async def _write(self) -> None:
        self._unwritten = False
        self._next_write = time.monotonic() + PROGRESS_INTERVAL
        async with self._connect() as conn, system(conn):
            await operations.set_progress(conn, self.job_id, self._job.fence, self._percent, schema=self._schema)

    def _lost(self) -> LeaseLost:
        return LeaseLost(f"operation {self.job_id} was cancelled, or its job was taken over: this attempt is dropped")


async def begin(
    job: ClaimedJob, worker_id: UUID, connect: Connect, *, schema: str, on_end: Callable[[], None] = lambda: None
) -> Operation:
    """Mark the operation of a claimed job as processing.

    Args:
        on_end: called when the handler has ended the operation, and with it the job, itself.

    Raises:
        LeaseLost: it was cancelled, or a later attempt has begun.
        Discard: the job has no operation: somebody inserted it by hand.
    """
    async with connect() as conn, system(conn):
        try:
            started = await operations.mark_processing(conn, job.id, job.fence, schema=schema)
        except IllegalTransition as error:
            raise LeaseLost(str(error)) from error
        except OperationNotFound as error:
            raise Discard(f"cannot run job {job.id}: it has no operation; start it with start_operation()") from error
    return Operation(job, started, worker_id, connect, schema=schema, on_end=on_end)


def result_of(value: Any) -> str | None:
    """What an operation's handler returned, as the JSON text of its result.

    Raises:
        Discard: it cannot be stored. The work is done and must not be done again, but its client must not take an
            empty result for it either.
    """
    try:
        return encode_result(value)
    except InvalidPayload as error:
        raise Discard(str(error)) from error


async def end_done(
    conn: Connection, entries: Sequence[tuple[ClaimedJob, Completion]], done: set[UUID], *, schema: str
) -> None:
    """Mark the operations as done whose jobs have just been completed in this transaction, the system's."""
    results = [(job.id, job.fence, end.result) for job, end in entries if job.id in done and is_operation(job.job_type)]
    if results:
        await operations.mark_done(conn, results, schema=schema)


async def end_dead(conn: Connection, app: Recado, jobs: Iterable[Failed | Reclaimed], text: str) -> None:
    """Mark the operations as failed whose jobs have just died in this transaction."""
    ids = [job.id for job in jobs if job.status is JobStatus.DEAD and is_operation(job.job_type)]
    if ids:
        async with system(conn):
            await operations.mark_error(conn, ids, text, schema=app.schema)
