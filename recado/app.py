"""The registry an application fills: its job types, and what their handlers need to run."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
import typing
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from datetime import datetime
from functools import partial, update_wrapper
from types import MappingProxyType, SimpleNamespace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload
from uuid import UUID

from pydantic import BaseModel, TypeAdapter

from recado import cron, payloads
from recado.errors import (
    ConfigurationError,
    EnqueueError,
    InvalidPayload,
    InvalidSchedule,
    MissingIdempotencyKey,
    RegistrationError,
    UnknownJobType,
)
from recado.queue import limits
from recado.queue.backoff import BACKOFF, Backoff, bounded
from recado.queue.connections import Connection
from recado.queue.enqueue import insert_job, insert_jobs
from recado.queue.models import DEFAULT_MAX_ATTEMPTS, DEFAULT_PRIORITY, DEFAULT_QUEUE, NewJob
from recado.queue.operations import JOB_TYPE_PREFIX, OrganizationId, start
from recado.queue.schedules import Overlap, Schedule
from recado.queue.statements import resolve_schema

logger = logging.getLogger("recado")

P = TypeVar("P")
R = TypeVar("R")
A = ParamSpec("A")
H = TypeVar("H", bound="JobHandler[Any, Any, Any]")

DEFAULT_NAME = "recado"
"""Of an application that did not say its own; only schedules ask for it."""

INJECTED = frozenset({"conn", "job", "state"})
"""What a handler may ask for by the name of a parameter, after its payload."""

INJECTED_IN_OPERATIONS = frozenset({"job", "operation", "state"})
"""The same for an operation's handler. No ``conn``: an operation runs long, and a transaction that is open for all that
time keeps VACUUM from its work. Short ones it opens itself, on a pool from the state."""

_SCHEDULE_NAME = re.compile(r"[a-z0-9_][a-z0-9_.-]*")

SMOKE = "_smoke.echo"
"""Built in: does nothing but succeed, for trying out a deployment."""

JOB_DIED = "recado.job_died"
"""Enqueued in the transaction in which a job of a critical type dies."""


class JobDied(BaseModel):
    """The payload of ``recado.job_died``."""

    job_id: UUID
    job_type: str
    queue: str
    attempts: int
    error_class: str


class JobType(Generic[P]):
    """A kind of job: its name, the type of its payload, and how its jobs are treated unless a call says else."""

    def __init__(
        self,
        app: Recado,
        name: str,
        adapter: TypeAdapter[Any],
        *,
        queue: str,
        priority: int,
        max_attempts: int,
        critical: bool,
    ) -> None:
        self.app = app
        self.name = name
        self.adapter = adapter
        self.queue = limits.check_queue(queue)
        self.priority = limits.check_priority(priority)
        self.max_attempts = limits.check_max_attempts(max_attempts)
        self.critical = critical

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def new(
        self,
        payload: P,
        *,
        run_at: datetime | None = None,
        idempotency_key: str | None = None,
        max_attempts: int | None = None,
        queue: str | None = None,
        priority: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> NewJob:
        """A job for :meth:`Recado.enqueue_many`; the parameters are those of :meth:`enqueue`.

        Raises:
            EnqueueError: a parameter is wrong; a missing key or a bad payload is one of its subclasses.
        """
        if idempotency_key is not None:
            limits.check_idempotency_key(idempotency_key)
        elif self.critical:
            raise MissingIdempotencyKey(
                f"cannot enqueue {self.name!r}: the job type is critical, so each of its jobs needs an "
                "idempotency_key; pass the id of the event that it is about"
            )
        return NewJob(
            job_type=self.name,
            payload=payloads.encode_payload(self.adapter, payload, self.name),
            queue=self.queue if queue is None else limits.check_queue(queue),
            priority=self.priority if priority is None else limits.check_priority(priority),
            max_attempts=self.max_attempts if max_attempts is None else limits.check_max_attempts(max_attempts),
            run_at=None if run_at is None else limits.check_run_at(run_at),
            idempotency_key=idempotency_key,
            metadata="{}" if metadata is None else payloads.encode_metadata(metadata),
            critical=self.critical,
        )

    async def enqueue(
        self,
        conn: Connection,
        payload: P,
        *,
        run_at: datetime | None = None,
        idempotency_key: str | None = None,
        max_attempts: int | None = None,
        queue: str | None = None,
        priority: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Enqueue a job on the caller's connection, in the caller's transaction; see :meth:`Recado.enqueue`."""
        job = self.new(
            payload,
            run_at=run_at,
            idempotency_key=idempotency_key,
            max_attempts=max_attempts,
            queue=queue,
            priority=priority,
            metadata=metadata,
        )
        return await insert_job(conn, job, schema=self.app.schema)


class JobHandler(JobType[P], Generic[P, A, R]):
    """A job type with the function that runs its jobs; calling it calls that function."""

    def __init__(
        self,
        app: Recado,
        name: str,
        function: Callable[..., Any],
        adapter: TypeAdapter[Any],
        *,
        takes_payload: bool,
        wants: frozenset[str],
        timeout: float | None,
        backoff: Backoff,
        queue: str,
        priority: int,
        max_attempts: int,
        critical: bool,
    ) -> None:
        super().__init__(
            app, name, adapter, queue=queue, priority=priority, max_attempts=max_attempts, critical=critical
        )
        self.function = function
        self.is_async = _is_async(function)
        self.takes_payload = takes_payload
        self.wants = wants
        self.timeout = timeout
        self.backoff = backoff
        # Its name and docstring, but not its attributes: one called `queue` would be taken for the job type's.
        update_wrapper(self, function, updated=())

    @overload
    def __call__(self: JobHandler[None, [], R]) -> R: ...

    @overload
    def __call__(self, payload: P, *args: A.args, **kwargs: A.kwargs) -> R: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function itself: no queue, no retries."""
        return self.function(*args, **kwargs)


class OperationHandler(JobHandler[P, A, R], Generic[P, A, R]):
    """A kind of operation with the function that performs it."""

    @property
    def kind(self) -> str:
        """What clients know it by."""
        return self.name.removeprefix(JOB_TYPE_PREFIX)

    def new(self, payload: P, **options: Any) -> NewJob:
        """Refused: the job of an operation is nothing without its row.

        Raises:
            EnqueueError: always.
        """
        raise EnqueueError(
            f"cannot enqueue {self.name!r}: it is an operation, which clients watch; call its start(), or "
            "app.start_operation()"
        )

    async def start(
        self,
        conn: Connection,
        payload: P,
        *,
        organization_id: OrganizationId | None = None,
        created_by: str | UUID | int | None = None,
        idempotency_key: str | None = None,
        queue: str | None = None,
        priority: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Start an operation on the caller's connection, in the caller's transaction; see
        :meth:`Recado.start_operation`.

        Args:
            organization_id: ``None`` is the tenant of the caller's transaction.
        """
        job = super().new(payload, idempotency_key=idempotency_key, queue=queue, priority=priority, metadata=metadata)
        by = None if created_by is None else limits.check_created_by(created_by)
        return await start(conn, job, organization_id=organization_id, created_by=by, schema=self.app.schema)


Lifespan = Callable[[], AsyncIterator[Mapping[str, Any]]]


class Recado:
    """An application's job types and hooks, in one place that services and workers both import.

    Args:
        name: the application's; its schedules belong to it.
        schema: the PostgreSQL schema of its queue; ``None`` takes ``RECADO_SCHEMA``, else ``recado``.

    Raises:
        ConfigurationError: the schema's name is not a plain identifier, or the application's no printable text.
    """

    def __init__(self, name: str = DEFAULT_NAME, *, schema: str | None = None) -> None:
        self.name = _checked_name(name)
        self.schema = resolve_schema(schema)
        self._types: dict[str, JobType[Any]] = {}
        self._schedules: dict[str, Schedule] = {}
        self.job_types: Mapping[str, JobType[Any]] = MappingProxyType(self._types)
        """All that is registered, by name."""
        self.schedules: Mapping[str, Schedule] = MappingProxyType(self._schedules)
        """All cron entries, by name."""
        self._lifespan: Callable[[], AbstractAsyncContextManager[Any]] = lambda: nullcontext({})
        _add_built_ins(self)

    def job(
        self,
        name: str,
        *,
        queue: str = DEFAULT_QUEUE,
        priority: int = DEFAULT_PRIORITY,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        timeout: float | None = None,
        backoff: Backoff = BACKOFF,
        critical: bool = False,
    ) -> _Decorator:
        """Register the decorated function as the handler of a job type.

        The function may be ``async def``, or ``def``, which runs in a thread. Its first parameter receives the
        payload, validated by its annotation: a pydantic model, a dataclass, a TypedDict or ``dict``. Further
        parameters are filled by their names: ``conn`` (a connection in a transaction that commits together
        with the job's completion, or not at all; only for ``async def``), ``job`` (a
        :class:`~recado.queue.models.ClaimedJob`), ``state`` (what the lifespan yielded).

        Args:
            name: "domain.action", in lower case.
            queue: where its jobs wait; a worker serves queues.
            priority: 0, most urgent, to 3.
            max_attempts: how often a job may fail; with the last failure it is dead.
            timeout: seconds after which an attempt is cancelled and counted as failed; ``None`` is never.
            backoff: seconds to wait after the first, second, … failure, or a function from the number of
                failures to seconds.
            critical: its jobs must have an idempotency key, and the death of one raises an alert.

        Raises:
            RegistrationError: the name, an option or a parameter of the function is wrong, or the name is taken.
        """
        register = self._registering(
            JobHandler,
            name,
            INJECTED,
            sys._getframe(1).f_locals,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            timeout=timeout,
            backoff=backoff,
            critical=critical,
        )
        return typing.cast("_Decorator", register)

    def operation(
        self,
        kind: str,
        *,
        queue: str = DEFAULT_QUEUE,
        priority: int = DEFAULT_PRIORITY,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        timeout: float | None = None,
        backoff: Backoff = BACKOFF,
    ) -> _OperationDecorator:
        """Register the decorated function as what performs a kind of operation: long work that a person waits for.

        It is a job like any other, with a row beside it that clients poll. Its first parameter receives the input;
        further ones are filled by their names: ``operation`` (an :class:`~recado.worker.operations.Operation`, which
        tells the progress), ``job``, ``state``. What it returns is the operation's result; when it runs out of
        attempts, the operation ends with a neutral sentence.

        Args:
            kind: what clients know it by: lower-case letters, digits, '_' and '-'.
            queue, priority, max_attempts, timeout, backoff: as for :meth:`job`.

        Raises:
            RegistrationError: the kind, an option or a parameter of the function is wrong, or the kind is taken.
        """
        register = self._registering(
            OperationHandler,
            f"{JOB_TYPE_PREFIX}{kind}",
            INJECTED_IN_OPERATIONS,
            sys._getframe(1).f_locals,
            queue=queue,
            priority=priority,
            max_attempts=max_attempts,
            timeout=timeout,
            backoff=backoff,
            critical=False,
        )
        if "." in kind:
            raise RegistrationError(f"cannot register operation {kind!r}: a kind has no dot; call it what clients do")
        return typing.cast("_OperationDecorator", register)

    def cron(
        self,
        expression: str,
        *,
        timezone: str = "UTC",
        payload: Any = None,
        overlap: Overlap = "skip",
        name: str | None = None,
    ) -> Callable[[H], H]:
        """Enqueue a job of the decorated handler's type at the times of a cron expression; goes above :meth:`job`.

        Each tick is enqueued by one worker of the application, whichever is the first; it needs not serve the job's
        queue. After a time without workers the last tick is made up for, those before it are not. The job has the
        metadata ``schedule`` and ``tick``.

        Args:
            expression: minute, hour, day of the month, month, day of the week, as Debian's cron reads them;
                :mod:`recado.cron` says what happens where the clock is changed.
            timezone: of the expression, as ``Europe/Madrid``.
            payload: of each of its jobs; fits the handler's annotation.
            overlap: what to do at a tick while the last one's job is pending or running: ``skip`` it, or ``queue``
                another job.
            name: of the schedule; ``None`` is the job type's. Several over one handler need one each.

        Returns:
            A decorator that returns the handler as it is.

        Raises:
            RegistrationError: an option is wrong, the name is taken, or this is no handler of a job type.
        """
        try:
            cron.check(expression, timezone)
        except InvalidSchedule as error:
            raise RegistrationError(f"cannot register a schedule: {error}") from None
        if overlap not in ("skip", "queue"):
            raise RegistrationError(
                f"cannot register a schedule: overlap {limits.shortened(overlap)} is neither 'skip' nor 'queue'; "
                "choose one of these"
            )

        def register(handler: H) -> H:
            self._add_schedule(handler, name, expression, timezone, payload, overlap)
            return handler

        return register

    def _add_schedule(
        self, handler: Any, name: str | None, expression: str, timezone: str, payload: Any, overlap: Overlap
    ) -> None:
        if not isinstance(handler, JobHandler) or isinstance(handler, OperationHandler) or handler.app is not self:
            raise RegistrationError(
                f"cannot schedule {limits.shortened(handler)}: it is no job type's handler of this application; put "
                "@app.cron above @app.job"
            )
        name = _checked_schedule_name(handler.name if name is None else name)
        if name in self._schedules:
            raise RegistrationError(
                f"cannot schedule {handler.name!r}: there is a schedule {name!r} already; pass another name to one of "
                "them"
            )
        try:
            encoded = payloads.encode_payload(handler.adapter, payload, handler.name)
        except InvalidPayload as error:
            raise RegistrationError(f"cannot schedule {handler.name!r}: {error}") from None
        self._schedules[name] = Schedule(name, handler.name, expression, timezone, encoded, overlap)

    @overload
    def declare(
        self,
        name: str,
        payload: type[P],
        *,
        queue: str = ...,
        priority: int = ...,
        max_attempts: int = ...,
        critical: bool = ...,
    ) -> JobType[P]: ...

    @overload
    def declare(
        self,
        name: str,
        payload: None = None,
        *,
        queue: str = ...,
        priority: int = ...,
        max_attempts: int = ...,
        critical: bool = ...,
    ) -> JobType[Any]: ...

    def declare(
        self,
        name: str,
        payload: type[Any] | None = None,
        *,
        queue: str = DEFAULT_QUEUE,
        priority: int = DEFAULT_PRIORITY,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        critical: bool = False,
    ) -> JobType[Any]:
        """Register a job type that this application enqueues and another one handles.

        Args:
            payload: the type its payloads are validated against; ``None`` takes any JSON.

        Raises:
            RegistrationError: the name or an option is wrong, or the name is taken.
        """
        checked = _checked_options(name, queue=queue, priority=priority, max_attempts=max_attempts)
        try:
            adapter: TypeAdapter[Any] = payloads.ANY if payload is None else TypeAdapter(payload)
        except Exception as error:
            raise RegistrationError(
                f"cannot register {name!r}: its payload's type {_is_no_type(payload, error)}"
            ) from error
        job_type: JobType[Any] = JobType(self, name, adapter, critical=critical, **checked)
        self._add(job_type)
        return job_type

    def lifespan(self, function: Lifespan) -> Lifespan:
        """Decorate an async generator function that sets up what handlers share, yields it once as a mapping,
        and tears it down after the last handler; as in Starlette. Handlers get the mapping as ``state``.

        Raises:
            RegistrationError: it is no async generator function.
        """
        if not inspect.isasyncgenfunction(function):
            raise RegistrationError(
                f"cannot use {limits.shortened(function)} as the lifespan: it is not an async generator function; "
                "write an async def that yields once"
            )
        self._lifespan = asynccontextmanager(function)
        return function

    def run_lifespan(self) -> AbstractAsyncContextManager[Mapping[str, Any]]:
        """The lifespan as a context manager; each worker process enters it once."""
        return self._lifespan()

    def new(self, job_type: str, payload: Any, **options: Any) -> NewJob:
        """A job for :meth:`enqueue_many`, by the name of its type; see :meth:`JobType.new`."""
        return self._known(job_type).new(payload, **options)

    async def enqueue(
        self,
        conn: Connection,
        job_type: str,
        payload: Any,
        *,
        run_at: datetime | None = None,
        idempotency_key: str | None = None,
        max_attempts: int | None = None,
        queue: str | None = None,
        priority: int | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> UUID:
        """Enqueue a job on the caller's connection, in the caller's transaction.

        It never commits: the job is there when the caller's transaction commits, and gone with a rollback.

        Args:
            conn: an asyncpg connection, one of a pool, or the one beneath SQLAlchemy's.
            job_type: the name of a registered or declared type.
            payload: fits the type's annotation; identifiers rather than data, at most 256 KiB as JSON.
            run_at: not before this time (aware); ``None`` is at once.
            idempotency_key: at most one job of this type has it. It protects the enqueue, not the execution.
            max_attempts, queue, priority: ``None`` takes the type's.
            metadata: JSON that travels with the job: trace context, tags.

        Returns:
            The job's id; for a key that is taken, the id of the job that has it, which stays as it is.

        Raises:
            EnqueueError: a parameter is wrong (:class:`UnknownJobType`, :class:`InvalidPayload` and
                :class:`MissingIdempotencyKey` are its subclasses); raised before any SQL.
        """
        return await self._known(job_type).enqueue(
            conn,
            payload,
            run_at=run_at,
            idempotency_key=idempotency_key,
            max_attempts=max_attempts,
            queue=queue,
            priority=priority,
            metadata=metadata,
        )

    async def enqueue_many(self, conn: Connection, jobs: Sequence[NewJob]) -> list[UUID]:
        """Enqueue many jobs at once, made by ``new``; 1,000 rows a statement, in the caller's transaction.

        Returns:
            Their ids in the order of ``jobs``; for a key that is taken, the id of the job that has it.
        """
        return await insert_jobs(conn, jobs, schema=self.schema)

    async def start_operation(
        self,
        conn: Connection,
        kind: str,
        input: Any,
        *,
        organization_id: OrganizationId | None = None,
        created_by: str | UUID | int | None = None,
        idempotency_key: str | None = None,
    ) -> UUID:
        """Start an operation on the caller's connection, in the caller's transaction: its row and its job.

        Args:
            conn: as for :meth:`enqueue`.
            kind: the name of a registered operation.
            input: fits the annotation of its handler's first parameter.
            organization_id: whose it is; ``None`` is the tenant of the caller's transaction,
                see :func:`recado.queue.operations.tenant`.
            created_by: who asked for it, as the application calls its users.
            idempotency_key: at most one operation of this kind and organization has it.

        Returns:
            The operation's id, to be answered with :func:`recado.api.accepted`; for a key that is taken, the id of
            the operation that has it.

        Raises:
            UnknownJobType, InvalidPayload, EnqueueError: a parameter is wrong; raised before any SQL.
            TenantError: no organization is named, or another than the transaction's.
        """
        operation = self._types.get(f"{JOB_TYPE_PREFIX}{kind}")
        if not isinstance(operation, OperationHandler):
            raise UnknownJobType(
                f"cannot start {limits.shortened(kind)}: no operation of this kind is registered; decorate its handler "
                "with @app.operation"
            )
        return await operation.start(
            conn, input, organization_id=organization_id, created_by=created_by, idempotency_key=idempotency_key
        )

    def _registering(
        self,
        handler_class: type[JobHandler[Any, Any, Any]],
        name: str,
        injected: frozenset[str],
        local_names: Mapping[str, Any],
        *,
        queue: str,
        priority: int,
        max_attempts: int,
        timeout: float | None,
        backoff: Backoff,
        critical: bool,
    ) -> Callable[[Callable[..., Any]], JobHandler[Any, Any, Any]]:
        """The decorator that registers a function as a handler.

        The options are checked here and not in the decorator, so that the traceback points at the line with them.

        Args:
            injected: what the function may ask for by the names of its parameters.
            local_names: of the caller, which annotations may use.
        """
        checked = _checked_options(name, queue=queue, priority=priority, max_attempts=max_attempts)
        timeout = _checked_timeout(name, timeout)
        backoff = _checked_backoff(name, backoff)

        def register(function: Callable[..., Any]) -> JobHandler[Any, Any, Any]:
            adapter, takes_payload, wants = _read_signature(name, function, local_names, injected)
            handler = handler_class(
                self,
                name,
                function,
                adapter,
                takes_payload=takes_payload,
                wants=wants,
                timeout=timeout,
                backoff=backoff,
                critical=critical,
                **checked,
            )
            self._add(handler)
            return handler

        return register

    def _known(self, name: str) -> JobType[Any]:
        try:
            return self._types[name]
        except (KeyError, TypeError):
            raise UnknownJobType(
                f"cannot enqueue {limits.shortened(name)}: no job type of this name is registered; "
                "decorate its handler with @app.job, or app.declare it where another service handles it"
            ) from None

    def _add(self, job_type: JobType[Any]) -> None:
        if job_type.name.startswith(JOB_TYPE_PREFIX) and not isinstance(job_type, OperationHandler):
            raise RegistrationError(
                f"cannot register {_describe(job_type)} as {job_type.name!r}: names that begin with "
                f"{JOB_TYPE_PREFIX!r} belong to operations; use @app.operation, or choose another name"
            )
        present = self._types.get(job_type.name)
        if present is not None and not _is_built_in(present):
            raise RegistrationError(
                f"cannot register {_describe(job_type)} as {job_type.name!r}: the name is taken by "
                f"{_describe(present)}; choose another name for one of them"
            )
        self._types[job_type.name] = job_type


class _Decorator(typing.Protocol):
    """What :meth:`Recado.job` returns: it keeps the types of the payload, the parameters and the result."""

    @overload
    def __call__(self, function: Callable[Concatenate[P, A], R], /) -> JobHandler[P, A, R]: ...

    @overload
    def __call__(self, function: Callable[[], R], /) -> JobHandler[None, [], R]: ...


class _OperationDecorator(typing.Protocol):
    """What :meth:`Recado.operation` returns."""

    @overload
    def __call__(self, function: Callable[Concatenate[P, A], R], /) -> OperationHandler[P, A, R]: ...

    @overload
    def __call__(self, function: Callable[[], R], /) -> OperationHandler[None, [], R]: ...


def _add_built_ins(app: Recado) -> None:
    @app.job(SMOKE)
    async def echo(payload: Any) -> None:
        pass

    @app.job(JOB_DIED)
    async def job_died(payload: JobDied) -> None:
        logger.error(
            "critical job %s (%s) died and nobody was told: register a handler for %s to be alerted",
            payload.job_id,
            payload.job_type,
            JOB_DIED,
        )


def _is_built_in(job_type: JobType[Any]) -> bool:
    return isinstance(job_type, JobHandler) and job_type.function.__module__ == __name__


def _describe(job_type: JobType[Any]) -> str:
    if isinstance(job_type, JobHandler):
        return _where(job_type.function)
    return "a declaration"


def _implementation(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs when ``function`` is called: beneath a partial its function, of an object its ``__call__``."""
    if isinstance(function, partial):
        return _implementation(function.func)
    if isinstance(function, staticmethod):
        return _implementation(function.__func__)
    if inspect.isroutine(function):
        return function
    call: Callable[..., Any] = type(function).__call__
    return call


def _where(function: Callable[..., Any]) -> str:
    implementation = _implementation(function)
    return f"{implementation.__module__}.{implementation.__qualname__}"


def _checked_name(name: str) -> str:
    # '' is recado itself, see recado.queue.schedules.
    if not isinstance(name, str) or not 0 < len(name) <= limits.MAX_NAME_LENGTH or not name.isprintable():
        raise ConfigurationError(
            f"cannot use {limits.shortened(name)} as an application's name: it must be printable text of 1 to "
            f"{limits.MAX_NAME_LENGTH} characters; rename it"
        )
    return name


def _checked_schedule_name(name: str) -> str:
    if not isinstance(name, str) or len(name) > limits.MAX_NAME_LENGTH or not _SCHEDULE_NAME.fullmatch(name):
        raise RegistrationError(
            f"cannot use {limits.shortened(name)} as a schedule's name: it must consist of lower-case letters, digits, "
            f"'.', '_' and '-', with at most {limits.MAX_NAME_LENGTH} characters; rename it"
        )
    return name


def _checked_options(name: str, *, queue: str, priority: int, max_attempts: int) -> dict[str, Any]:
    try:
        limits.check_job_type(name)
        return {
            "queue": limits.check_queue(queue),
            "priority": limits.check_priority(priority),
            "max_attempts": limits.check_max_attempts(max_attempts),
        }
    except EnqueueError as error:
        raise RegistrationError(f"cannot register {limits.shortened(name)}: {error}") from None


def _checked_timeout(name: str, timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise RegistrationError(
            f"cannot register {name!r}: timeout {limits.shortened(timeout)} is no positive number of seconds; "
            "pass one, or None for no limit"
        )
    return float(timeout)


def _checked_backoff(name: str, backoff: Backoff) -> Backoff:
    if callable(backoff):
        return backoff
    try:
        table = tuple(bounded(seconds) for seconds in backoff)
    except (TypeError, ValueError) as error:
        raise RegistrationError(f"cannot register {name!r}: its backoff is no table of seconds: {error}") from None
    if not table:
        raise RegistrationError(
            f"cannot register {name!r}: its backoff is an empty table; give it at least one wait in seconds"
        )
    return table


def _read_signature(
    name: str, function: Callable[..., Any], local_names: Mapping[str, Any], injected: frozenset[str]
) -> tuple[TypeAdapter[Any], bool, frozenset[str]]:
    """The adapter of the payload's annotation, whether there is a payload, and the parameters to inject."""
    if not callable(function) or isinstance(function, type):
        raise RegistrationError(
            f"cannot register {limits.shortened(function)} as {name!r}: it is not a function; decorate a def"
        )
    where, implementation = _where(function), _implementation(function)
    if inspect.isgeneratorfunction(implementation) or inspect.isasyncgenfunction(implementation):
        raise RegistrationError(
            f"cannot register {where} as {name!r}: it is a generator, which would never run; return a value instead"
        )
    try:
        parameters = list(_signature(function).parameters.values())
    except ValueError as error:
        raise RegistrationError(
            f"cannot register {where} as {name!r}: its parameters are not known ({error}); wrap it in a def"
        ) from error
    takes_payload = bool(parameters) and parameters[0].name not in injected and _is_positional(parameters[0])
    adapter = payloads.ANY
    if takes_payload:
        adapter = _adapter(name, where, function, parameters[0].annotation, local_names)
    wants = set()
    for parameter in parameters[1 if takes_payload else 0 :]:
        if parameter.name in injected and parameter.kind is not parameter.POSITIONAL_ONLY:
            wants.add(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise RegistrationError(
                f"cannot register {where} as {name!r}: nobody can fill its parameter {parameter.name!r}; after the "
                f"payload there may be {', '.join(sorted(injected))}, and parameters with a default"
            )
    if "operation" in wants and not _is_async(function):
        raise RegistrationError(
            f"cannot register {where} as {name!r}: a plain function runs in a thread, where it cannot await its "
            "progress; make it an async def, or drop its parameter 'operation'"
        )
    if "conn" in wants and not _is_async(function):
        raise RegistrationError(
            f"cannot register {where} as {name!r}: a plain function runs in a thread, where an asyncpg connection "
            "cannot be used; make it an async def, or drop its parameter 'conn'"
        )
    return adapter, takes_payload, frozenset(wants)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        # Annotations are evaluated when asked for; those of injected parameters may name imports that exist
        # for the type checker only.
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(_implementation(function))


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)


def _adapter(
    name: str, where: str, function: Callable[..., Any], annotation: Any, local_names: Mapping[str, Any]
) -> TypeAdapter[Any]:
    if annotation is inspect.Parameter.empty:
        return payloads.ANY
    try:
        # Only the payload's annotation is resolved: the others may name what is imported for typing alone.
        holder = SimpleNamespace(__annotations__={"payload": annotation})
        hints = typing.get_type_hints(
            holder,
            getattr(inspect.unwrap(_implementation(function)), "__globals__", {}),
            dict(local_names),
            include_extras=True,
        )
        return TypeAdapter(hints["payload"])
    except Exception as error:
        raise RegistrationError(
            f"cannot register {where} as {name!r}: its payload's annotation {_is_no_type(annotation, error)}"
        ) from error


def _is_no_type(annotation: Any, error: Exception) -> str:
    """The rest of a sentence about an annotation that pydantic refused."""
    reason = str(error).partition("\n")[0]
    return (
        f"{limits.shortened(annotation)} is no type that pydantic can read ({type(error).__name__}: "
        f"{reason[:200]}); use a pydantic model, a dataclass, a TypedDict or dict, defined at the top level"
    )
