"""What the benchmark and its processes tell each other, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import TypeAdapter

from recado.bench.options import Options
from recado.queue.models import DEFAULT_QUEUE


@dataclass(frozen=True, slots=True)
class Task:
    """What one process is to do.

    Args:
        role: a name in :data:`recado.bench.child.ROLES`.
        jobs: the number of jobs that it makes, or that are its share.
        queues: those that it works on.
        batch: jobs that a bare claim asks for.
    """

    role: str
    dsn: str = field(repr=False)
    options: Options
    jobs: int = 0
    queues: tuple[str, ...] = (DEFAULT_QUEUE,)
    batch: int = 0


@dataclass(slots=True)
class Report:
    """What one process did. All times are of the monotonic clock, which all processes of a machine share."""

    timeline: list[tuple[float, int]] = field(default_factory=list)
    """When how many more jobs were done."""
    memory_mb: list[tuple[float, float]] = field(default_factory=list)
    """When how many megabytes were resident."""
    cpu_seconds: float = 0.0
    claims: int = 0
    """Claims that brought something,"""
    claimed: int = 0
    """and how many jobs they brought."""
    sent: dict[int, float] = field(default_factory=dict)
    """When the enqueue of a job began, by its number; where that is asked for."""
    begun: dict[int, float] = field(default_factory=dict)
    """When its handler began, likewise."""


TASK: TypeAdapter[Task] = TypeAdapter(Task)
REPORT: TypeAdapter[Report] = TypeAdapter(Report)
