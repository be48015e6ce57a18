"""Calling a handler, and what its ending means for the job."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from recado.app import JobHandler, Recado
from recado.errors import Discard, InvalidPayload, JobTimeout, RecadoError, Retry, Snooze
from recado.payloads import decode_payload, encode_result
from recado.queue.backoff import BACKOFF, bounded, wait_after
from recado.queue.connections import Connection
from recado.queue.finishes import Failure
from recado.queue.models import ClaimedJob
from recado.worker.failures import describe
from recado.worker.operations import Operation

logger = logging.getLogger("recado.worker")

InThread: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs a plain function in a thread."""


def handler_of(app: Recado, job: ClaimedJob) -> JobHandler[Any, Any, Any]:
    """The handler of ``job``.

    Raises:
        RecadoError: the application has none. The job then fails like any other: it is never completed in
            silence, and a worker of the right release may still come along between two attempts.
    """
    handler = app.job_types.get(job.job_type)
    if isinstance(handler, JobHandler):
        return handler
    raise RecadoError(
        f"cannot run a job of type {job.job_type!r}: no handler is registered in this worker's application; "
        "register one, or let another worker serve its queue"
    )


async def call(
    handler: JobHandler[Any, Any, Any],
    job: ClaimedJob,
    *,
    conn: Connection | None,
    operation: Operation | None = None,
    state: Mapping[str, Any],
    timeout: float | None,
    in_thread: InThread,
) -> Any:
    """Call ``handler`` with what it asks for.

    Args:
        conn: for a transactional handler, in its transaction.
        operation: for the handler of one.
        timeout: seconds, for a handler that has no timeout of its own.

    Returns:
        What the handler returns.

    Raises:
        InvalidPayload: the payload does not fit the handler's annotation.
        JobTimeout: the time was over; the handler was cancelled.
        BaseException: whatever the handler raises.
    """
    arguments = (decode_payload(handler.adapter, job.payload),) if handler.takes_payload else ()
    named: dict[str, Any] = {}
    if handler.wants:
        available = {"conn": conn, "job": job, "operation": operation, "state": state}
        named = {name: available[name] for name in handler.wants}
    if handler.timeout is not None:
        timeout = handler.timeout
    function = partial(handler.function, *arguments, **named)
    if not handler.is_async:
        function = partial(_in_thread, function, in_thread)
    # Without a timeout nothing is paid for one: it costs more than all the rest of this function.
    if timeout is None:
        return await function()
    limit = asyncio.timeout(timeout)
    try:
        async with limit:
            return await function()
    except TimeoutError as error:
        if not limit.expired():
            raise  # the handler's own
        raise JobTimeout(
            f"cannot finish within {timeout:g} s: the attempt was cancelled; raise the job type's timeout, or "
            "split the work"
        ) from error


async def _in_thread(function: Callable[[], Any], in_thread: InThread) -> Any:
    value = await in_thread(function)
    if inspect.iscoroutine(value):
        value.close()
        raise RecadoError(
            "cannot run the handler: it is a plain function that returned a coroutine; make it an async def"
        )
    return value


def result_of(job: ClaimedJob, value: Any) -> str | None:
    """What a handler returned, as JSON text; ``None`` where it is none."""
    try:
        return encode_result(value)
    except InvalidPayload as error:
        # The work is done, and must not be done again for the sake of a value nobody asked for.
        logger.warning("job %s (%s) is completed without its result: %s", job.id, job.job_type, error)
        return None


def snooze_of(error: BaseException) -> float | None:
    """Seconds to snooze, if that is what the handler asked for; a time that is none makes it a failure."""
    # A class of the user's own may have left out its parent's __init__.
    return _seconds(getattr(error, "seconds", None)) if isinstance(error, Snooze) else None


def failure_of(app: Recado, job: ClaimedJob, error: BaseException, run_time: float) -> Failure:
    """What is written down of an attempt that raised ``error`` after ``run_time`` seconds."""
    text = describe(error)
    return Failure(
        id=job.id,
        fence=job.fence,
        wait=_wait(app, job, error),
        discard=isinstance(error, Discard),
        run_time=run_time,
        error_class=text.error_class,
        message=text.message,
        traceback=text.traceback,
    )


def _wait(app: Recado, job: ClaimedJob, error: BaseException) -> float:
    """Seconds until the next attempt, should there be one."""
    if isinstance(error, Retry) and (wait := _seconds(getattr(error, "after", None))) is not None:
        return wait
    handler = app.job_types.get(job.job_type)
    backoff = handler.backoff if isinstance(handler, JobHandler) else BACKOFF
    try:
        return wait_after(job.attempt, backoff)
    except BaseException as inner:
        # The job type's own function, which is the user's code: it may raise anything, SystemExit too.
        logger.warning("the backoff of %s failed (%s); the built-in one is used", job.job_type, type(inner).__name__)
        return wait_after(job.attempt)


def _seconds(value: Any) -> float | None:
    try:
        return bounded(value)
    except ValueError:
        return None
