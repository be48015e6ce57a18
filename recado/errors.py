"""Every exception recado raises, and the three a handler may raise to steer its job.

One hierarchy, with :class:`RecadoError` at its root. Where a built-in exception says what went wrong
(``ValueError`` for bad input, ``LookupError`` for a missing row), the class is also one of those, so that
callers may catch either. A message reads "cannot X: reason; do Y".
"""

from __future__ import annotations


class RecadoError(Exception):
    """The root of the hierarchy."""


class ConfigurationError(RecadoError):
    """A setting, an argument or the environment is wrong; nothing was started."""


class RegistrationError(RecadoError, ValueError):
    """A job type cannot be registered: its name, its options or its handler's parameters."""


class EnqueueError(RecadoError, ValueError):
    """A job cannot be enqueued as asked; raised before any SQL."""


class InvalidPayload(EnqueueError):
    """The payload does not fit the job type's model, is not JSON, or is too large."""


class UnknownJobType(EnqueueError):
    """The job type is neither handled nor declared by this application."""


class MissingIdempotencyKey(EnqueueError):
    """A job type declared ``critical`` was enqueued without an idempotency key."""


class InvalidArgument(RecadoError, ValueError):
    """An id, a filter or a limit that nothing can have; raised before any SQL."""


class JobNotFound(RecadoError, LookupError):
    """No job has this id."""


class OperationNotFound(RecadoError, LookupError):
    """No operation has this id, or none that this tenant may see."""


class TenantError(RecadoError, ValueError):
    """No organization is named, or one that nobody can be; nothing was read or written."""


class ScheduleNotFound(RecadoError, LookupError):
    """No schedule of this application has this name."""


class InvalidSchedule(RecadoError, ValueError):
    """A cron expression or a time zone cannot be read."""


class IllegalTransition(RecadoError, ValueError):
    """The state of the job or operation does not allow what was asked; nothing was changed."""


class LeaseLost(RecadoError):
    """The job was taken over by another worker, or cancelled; this attempt changes nothing any more."""


class JobTimeout(RecadoError, TimeoutError):
    """An attempt ran for longer than its job type's timeout."""


class DatabaseUnavailable(RecadoError, ConnectionError):
    """A connection cannot be opened, whatever the server's reason; it passes, or a person has to act."""


class MigrationError(RecadoError):
    """A migration cannot be applied or reverted; the schema is as it was before."""


class SchemaMismatch(MigrationError):
    """The schema in the database is not the one this version of recado works with."""


class EmbeddedServerError(RecadoError):
    """The embedded PostgreSQL cannot be started."""


class Signal(RecadoError):
    """Raised by a handler to say how its attempt ends; not a fault."""


class Retry(Signal):
    """Count this attempt as failed and try again after a wait of the handler's choice.

    Args:
        after: seconds until the next attempt; ``None`` takes the job type's backoff.
        reason: kept as the attempt's error.

    The attempt counts like any other failure: at ``max_attempts`` the job is dead, whatever ``after`` says.
    """

    def __init__(self, after: float | None = None, reason: str = "the handler asked for a retry") -> None:
        super().__init__(reason)
        self.after = after


class Discard(Signal):
    """Give the job up at once: it is dead, with ``reason`` as its error, and is not tried again."""

    def __init__(self, reason: str = "the handler discarded the job") -> None:
        super().__init__(reason)


class Snooze(Signal):
    """Put the job back for ``seconds`` without counting an attempt, as often as the handler likes."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"snoozed for {seconds} s")
        self.seconds = seconds
