"""What an adapter measures, in memory that does not grow with the number of jobs."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from uuid import UUID

WINDOW = 30
"""Seconds that percentiles are told of; the harness's own."""

STEP = math.log(1.02)
"""Durations are kept to 2 %: a window takes some hundred counters a second, whatever the rate."""

SHORTEST = 0.001
"""Milliseconds; clocks of several processes may even say that a job began before it was enqueued."""

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class Window:
    """Durations of the last :data:`WINDOW` seconds."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[int]]] = deque()

    def add(self, seconds: float, now: float) -> None:
        """Note a duration that ended ``now``."""
        if not self._seconds or self._seconds[-1][0] != int(now):
            self._seconds.append((int(now), Counter()))
            self._forget(now)
        self._seconds[-1][1][math.ceil(math.log(max(seconds * 1000, SHORTEST)) / STEP)] += 1

    def _forget(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW - 1:
            self._seconds.popleft()

    def quantiles(self, shares: Sequence[float], now: float) -> list[float]:
        """In milliseconds; nothing when nothing ended."""
        self._forget(now)
        total: Counter[int] = Counter()
        for _, counts in self._seconds:
            total.update(counts)
        ordered = sorted(total.items())
        return [_quantile(ordered, share * total.total()) for share in shares] if ordered else []


def _quantile(ordered: Sequence[tuple[int, int]], wanted: float) -> float:
    passed = 0
    for step, count in ordered:
        passed += count
        if passed >= wanted:
            return math.exp(step * STEP)
    return math.exp(ordered[-1][0] * STEP)


class Meter:
    """Counts jobs, and times them."""

    def __init__(self) -> None:
        self.enqueued = 0
        """Acknowledged by the server."""
        self.completed = 0
        """Durable in the table."""
        self._enqueued_at: dict[UUID, float] = {}
        self._claims = Window()
        self._ends = Window()

    def begin(self, job_id: UUID, enqueued_at: float) -> None:
        """A handler begins."""
        now = time.time()
        self._claims.add(now - enqueued_at, now)
        self._enqueued_at[job_id] = enqueued_at

    def complete(self, jobs: Sequence[UUID]) -> None:
        """The table shows these jobs as completed."""
        now = time.time()
        self.completed += len(jobs)
        for job_id in jobs:
            if (enqueued_at := self._enqueued_at.pop(job_id, None)) is not None:
                self._ends.add(now - enqueued_at, now)

    def drop(self, jobs: Sequence[UUID]) -> None:
        """These attempts ended otherwise."""
        for job_id in jobs:
            self._enqueued_at.pop(job_id, None)

    def percentiles(self) -> Iterator[tuple[str, float]]:
        """Each with its metric's name."""
        now = time.time()
        for name, window in (("claim", self._claims), ("end_to_end", self._ends)):
            quantiles = window.quantiles(list(PERCENTILES.values()), now)
            # No line is better than a zero, which would read as the best latency there is.
            for percentile, value in zip(PERCENTILES, quantiles, strict=False):
                yield f"{name}_{percentile}_ms", value
