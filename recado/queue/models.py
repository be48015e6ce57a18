"""The rows of the queue, as Python sees them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, NamedTuple
from uuid import UUID

DEFAULT_QUEUE = "default"
DEFAULT_PRIORITY = 1
"""Of 0 (most urgent) to 3: one step is left above what nobody thought about, and two below."""
DEFAULT_MAX_ATTEMPTS = 5
"""With the built-in backoff the fifth failure comes some 16 minutes after the first."""


class JobStatus(StrEnum):
    """Where a job is on its way. ``completed``, ``dead`` and ``cancelled`` are final until it is requeued."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    DEAD = "dead"
    CANCELLED = "cancelled"


class NewJob(NamedTuple):
    """A job that is ready to be inserted; made by ``JobType.new`` and ``Recado.new``.

    ``payload`` and ``metadata`` are JSON texts. ``run_at`` is aware; ``None`` is the server's now.

    (A named tuple for the producer's sake: a frozen dataclass takes 1.3 µs to make, this 0.4.)
    """

    job_type: str
    payload: str
    queue: str = DEFAULT_QUEUE
    priority: int = DEFAULT_PRIORITY
    max_attempts: int = DEFAULT_MAX_ATTEMPTS
    run_at: datetime | None = None
    idempotency_key: str | None = None
    metadata: str = "{}"
    critical: bool = False
    """Its death raises an alert, whichever worker it dies on."""

    def __repr__(self) -> str:
        """Without payload and metadata, which have no business in a log."""
        return f"NewJob(job_type={self.job_type!r}, queue={self.queue!r}, run_at={self.run_at})"


class ClaimedJob(NamedTuple):
    """One attempt at a job, held under a lease; what a handler's ``job`` parameter receives.

    ``payload`` and ``metadata_json`` are JSON texts as they stand in the table. ``fence`` is the fencing
    token: whoever ends the attempt must show it, and it moves at every claim.

    (A named tuple, made straight from the row: a frozen dataclass took 2.5 µs longer for each job.)
    """

    id: UUID
    job_type: str
    queue: str
    priority: int
    payload: str
    attempts: int
    max_attempts: int
    reclaims: int
    fence: int
    run_at: datetime
    created_at: datetime
    metadata_json: str
    waited: float
    """Seconds between the moment the job could run and its claim, by the server's clock."""

    def __repr__(self) -> str:
        """Without payload and metadata, which have no business in a log."""
        return f"ClaimedJob(id={self.id}, job_type={self.job_type!r}, fence={self.fence}, attempt={self.attempt})"

    @property
    def attempt(self) -> int:
        """Which attempt this is, from 1. Snoozes and lost leases do not count."""
        return self.attempts + 1

    @property
    def metadata(self) -> dict[str, Any]:
        """What the enqueuer sent along: trace context, tags."""
        value: dict[str, Any] = json.loads(self.metadata_json)
        return value


@dataclass(frozen=True, slots=True)
class Job:
    """A job's whole row."""

    id: UUID
    job_type: str
    queue: str
    priority: int
    payload: Any = field(repr=False)
    status: JobStatus
    attempts: int
    max_attempts: int
    reclaims: int
    critical: bool
    fence: int
    run_at: datetime
    locked_at: datetime | None
    locked_by: UUID | None
    last_error: str | None = field(repr=False)
    idempotency_key: str | None = field(repr=False)
    result: Any = field(repr=False)
    metadata: dict[str, Any] = field(repr=False)
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class JobError:
    """One attempt that failed."""

    job_id: UUID
    fence: int
    attempt: int
    worker_id: UUID | None
    started_at: datetime | None
    ended_at: datetime
    error_class: str
    message: str = field(repr=False)
    traceback: str | None = field(repr=False)


def read_json(text: str) -> Any:
    """The value of a JSON text from the table.

    Somebody may have inserted by hand what Python does not read: it comes as text then, a number of more than 4,300
    digits or all of what is nested too deeply. No list may fail for one row of it.
    """
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        return text


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits
