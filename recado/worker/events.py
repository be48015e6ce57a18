"""What a worker tells whoever observes it: telemetry for its users, and the signals its tests wait for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias
from uuid import UUID


class EventKind(StrEnum):
    """What happened. Events about jobs name them; the others name a queue, or nothing."""

    STARTED = "started"
    LISTENING = "listening"
    """The LISTEN connection stands, again or for the first time."""
    CLAIMED = "claimed"
    LOOKED = "looked"
    """A sleeping queue was looked at, and nothing was due."""
    HUNGRY = "hungry"
    SATED = "sated"
    """Claims come back full: enqueuers need not notify any more."""
    COMPLETED = "completed"
    FAILED = "failed"
    """An attempt failed and the job waits for the next one."""
    DIED = "died"
    RELEASED = "released"
    """Given back without counting an attempt: a snooze, a stop, a failure of the database, or a claim whose answer was
    lost."""
    LOST = "lost"
    """An attempt's lease was taken over, or its job was cancelled."""
    RECLAIMED = "reclaimed"
    """Jobs of a worker that disappeared are pending again, or dead."""
    SWEPT = "swept"
    """A sweep for such jobs is over, or another worker is at it."""
    SYNCED = "synced"
    """The schedules' rows were brought in line with the code of the live workers."""
    TICKED = "ticked"
    """A schedule's tick is settled; names the job, if one was enqueued."""
    PRUNED = "pruned"
    """A pruning is over, or another worker is at it."""
    EXPIRED = "expired"
    """Operations without news were looked for; names the jobs of those that were ended."""
    BEAT = "beat"
    BLOCKED = "blocked"
    """A handler blocks the event loop."""
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened in a worker."""

    kind: EventKind
    queue: str | None = None
    jobs: tuple[UUID, ...] = ()


Observer: TypeAlias = Callable[[Event], None]
"""Called on the worker's event loop, between its steps: it must return at once and must not raise."""


def ignore(event: Event) -> None:
    """The observer of a worker that nobody observes."""
