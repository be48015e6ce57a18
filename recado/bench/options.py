"""What a benchmark may be told."""

from __future__ import annotations

from dataclasses import dataclass

from recado.worker.worker import DEFAULT_SLOTS

SCHEMA = "recado_bench"
"""Made for the benchmark and dropped after it; the user's own queue is in another."""

DEFAULT_PAYLOAD_BYTES = 100
"""Of JSON: a few identifiers."""

DEFAULT_REPEAT = 3
"""The fewest runs whose median ignores one that was disturbed."""

DEFAULT_CONNECTIONS = 32
"""That enqueue at once: those of a few services' pools, enough for commits to share an fsync."""


@dataclass(frozen=True, slots=True)
class Options:
    """One scenario's parameters.

    Args:
        jobs: how many.
        workers: processes that run them, or run the bare statements instead.
        concurrency: slots of each worker for each queue.
        connections: that enqueue at once.
        payload_bytes: of each job's payload, as JSON.
        work_ms: milliseconds for which each handler sleeps.
        repeat: runs of recado and of the bare statements each.
    """

    jobs: int
    workers: int = 1
    concurrency: int = DEFAULT_SLOTS
    connections: int = DEFAULT_CONNECTIONS
    payload_bytes: int = DEFAULT_PAYLOAD_BYTES
    work_ms: float = 0.0
    repeat: int = DEFAULT_REPEAT
