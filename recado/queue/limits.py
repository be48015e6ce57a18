"""What a job's columns may hold, and what may be asked for, checked before any SQL.

The table's own constraints stand behind the former; the checks here are for the sentence a person reads.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar
from uuid import UUID

from recado.errors import EnqueueError, InvalidArgument

Status = TypeVar("Status", bound=StrEnum)

MAX_NAME_LENGTH = 128
"""Of a job type or a queue; enough for any name a person gives, and far below a NOTIFY payload's 8,000 bytes."""

MAX_KEY_BYTES = 1024
"""Of an idempotency key, in UTF-8: with the job type it stays well below a btree entry's 2,704 bytes."""

MAX_PAYLOAD_BYTES = 256 * 1024
"""Of a payload as JSON: it holds identifiers, not snapshots."""

MAX_RESULT_BYTES = 256 * 1024
"""Of a result as JSON; the same size as a payload, since a result is often the next job's payload."""

MAX_CREATED_BY = 256
"""Characters of who started an operation: an id, or an e-mail address, which has 254."""

MAX_MAX_ATTEMPTS = 32_767
"""What a smallint holds."""

MAX_ROWS = 1_000_000
"""Of one list or one bulk change; a guess at what still fits into memory. Whoever wants more goes on from there."""

MIN_RUN_AT = datetime(1970, 1, 1, tzinfo=UTC)
MAX_RUN_AT = datetime(9999, 12, 31, tzinfo=UTC)
"""The table's own span for run_at: what any driver can read back in any time zone."""

_JOB_TYPE = re.compile(r"[a-z0-9_][a-z0-9_-]*(\.[a-z0-9_][a-z0-9_-]*)+")
_QUEUE = re.compile(r"[a-z0-9_][a-z0-9_.-]*")


def check_job_type(name: str) -> str:
    """``name`` if it is a job type's name, "domain.action" in lower case.

    Raises:
        EnqueueError: it is not.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not _JOB_TYPE.fullmatch(name):
        raise EnqueueError(
            f"cannot use {shortened(name)} as a job type: it must read like 'domain.action', in lower-case "
            f"letters, digits, '_' and '-', with at most {MAX_NAME_LENGTH} characters; rename it"
        )
    return name


def check_queue(name: str) -> str:
    """``name`` if it is a queue's name.

    Raises:
        EnqueueError: it is not.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or not _QUEUE.fullmatch(name):
        raise EnqueueError(
            f"cannot use {shortened(name)} as a queue: it must consist of lower-case letters, digits, '.', '_' "
            f"and '-', with at most {MAX_NAME_LENGTH} characters; rename it"
        )
    return name


def check_priority(priority: int) -> int:
    """``priority`` if it is 0 (most urgent) to 3.

    Raises:
        EnqueueError: it is not.
    """
    if type(priority) is not int or not 0 <= priority <= 3:
        raise EnqueueError(
            f"cannot use {shortened(priority)} as a priority: it must be an integer from 0, most urgent, to 3; "
            "choose one of these"
        )
    return priority


def check_max_attempts(max_attempts: int) -> int:
    """``max_attempts`` if a job can have so many.

    Raises:
        EnqueueError: it cannot.
    """
    if type(max_attempts) is not int or not 1 <= max_attempts <= MAX_MAX_ATTEMPTS:
        raise EnqueueError(
            f"cannot use {shortened(max_attempts)} as max_attempts: it must be an integer from 1 to "
            f"{MAX_MAX_ATTEMPTS}; choose one of these"
        )
    return max_attempts


def check_run_at(run_at: datetime) -> datetime:
    """``run_at`` if it is an aware datetime the table can hold.

    Raises:
        EnqueueError: it is naive, or outside of 1970 to 9999.
    """
    if not isinstance(run_at, datetime):
        raise EnqueueError(
            f"cannot schedule a job at {shortened(run_at)}: run_at must be a datetime; pass one with a time zone"
        )
    if run_at.utcoffset() is None:
        raise EnqueueError(
            f"cannot schedule a job at {run_at.isoformat()}: run_at has no time zone; pass an aware datetime, "
            "for example datetime.now(UTC) + timedelta(hours=1)"
        )
    if not MIN_RUN_AT <= run_at < MAX_RUN_AT:
        raise EnqueueError(
            f"cannot schedule a job at {run_at.isoformat()}: run_at must lie between 1970 and 9999; "
            "pass None to run the job now"
        )
    return run_at


def check_idempotency_key(key: str) -> str:
    """``key`` if it can be stored and indexed.

    Raises:
        EnqueueError: it is empty, too long, or no text PostgreSQL could store.
    """
    if not isinstance(key, str) or not key:
        raise EnqueueError(
            f"cannot use {shortened(key)} as an idempotency key: it must be a string that is not empty; "
            "pass the id of the event, or None"
        )
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise EnqueueError(
            "cannot use this idempotency key: it has a lone surrogate, which is no text; "
            "pass the key as it was received, decoded properly"
        ) from None
    if size > MAX_KEY_BYTES:
        raise EnqueueError(
            f"cannot use an idempotency key of {size:,} bytes: the limit is {MAX_KEY_BYTES:,}; "
            "pass a digest of it, for example its SHA-256"
        )
    if "\0" in key:
        raise EnqueueError(
            "cannot use this idempotency key: it has a NUL character, which PostgreSQL cannot store; remove it"
        )
    return key


def check_created_by(value: str | UUID | int) -> str:
    """Who started an operation, as text.

    Raises:
        EnqueueError: it is no id, longer than 256 characters, or no text PostgreSQL could store.
    """
    text = id_text(value)
    if text is None or len(text) > MAX_CREATED_BY or not text.isprintable():
        raise EnqueueError(
            f"cannot use {shortened(value)} as created_by: it must be printable text of at most {MAX_CREATED_BY} "
            "characters; pass the user's id"
        )
    return text


def id_text(value: object) -> str | None:
    """An id of the application's own, of a user or an organization, as text; ``None`` if ``value`` is none."""
    if not isinstance(value, str | int | UUID) or isinstance(value, bool):
        return None
    try:
        return str(value)
    except ValueError:  # an integer of more than 4,300 digits
        return None


def check_id(value: UUID) -> UUID:
    """``value`` if it is a UUID.

    Raises:
        InvalidArgument: it is not.
    """
    if not isinstance(value, UUID):
        raise InvalidArgument(
            f"cannot use {shortened(value)} as an id: it must be a UUID; pass one, as uuid.UUID() reads it from text"
        )
    return value


def check_limit(limit: int) -> int:
    """``limit`` if so many rows can be asked for.

    Raises:
        InvalidArgument: it is no integer from 1 to 1,000,000.
    """
    if type(limit) is not int or not 1 <= limit <= MAX_ROWS:
        raise InvalidArgument(
            f"cannot use {shortened(limit)} as a limit: it must be an integer from 1 to {MAX_ROWS:,}; "
            "pass one, and go on from the last row for more"
        )
    return limit


def check_before(moment: datetime) -> datetime:
    """``moment`` if it is a point in time that every driver can send.

    Raises:
        InvalidArgument: it is naive, or its year in UTC is none from 1 to 9999.
    """
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidArgument(
            f"cannot use {shortened(moment)} as before: it must be a datetime with a time zone; "
            "pass one, for example datetime.now(UTC)"
        )
    try:
        moment.astimezone(UTC)
    except OverflowError:
        raise InvalidArgument(
            f"cannot use {moment.isoformat()} as before: in UTC its year is none from 1 to 9999; pass a later or an "
            "earlier one"
        ) from None
    return moment


def check_name(name: str, what: str) -> str:
    """``name`` if something could be called so. Nothing needs to be: what matches nothing is found nowhere.

    Args:
        what: whose name it is, for the message.

    Raises:
        InvalidArgument: it is no text PostgreSQL could compare, or longer than any name.
    """
    if not isinstance(name, str) or len(name) > MAX_NAME_LENGTH or "\0" in name or not _is_unicode(name):
        raise InvalidArgument(
            f"cannot look for {what} {shortened(name)}: a name is text of at most {MAX_NAME_LENGTH} characters, "
            "without NUL and lone surrogates; pass it as it is listed"
        )
    return name


def check_status(status: Status, known: type[Status]) -> Status:
    """``status`` as a member of ``known``, which it may also name as text.

    Raises:
        InvalidArgument: there is none of this name; a list would be empty, and look as if all were well.
    """
    try:
        return known(status)
    except ValueError:
        raise InvalidArgument(
            f"cannot look for status {shortened(status)}: there is none of this name; choose one of {', '.join(known)}"
        ) from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def shortened(value: object, limit: int = 80) -> str:
    """``value`` as it is quoted in a message: its repr, cut to ``limit`` characters."""
    if isinstance(value, str):
        value = value[: limit + 1]
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = f"this {type(value).__name__}"
    return text if len(text) <= limit else f"{text[:limit]}…"
