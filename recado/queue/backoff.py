"""How long a failed job waits before it is tried again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

BACKOFF: tuple[float, ...] = (10.0, 40.0, 180.0, 720.0, 3000.0)
"""Seconds to wait after the first failure, the second, and so on; beyond the table its last wait repeats.
10 s outlasts a restart, 50 min an outage; four times the wait each time keeps the table short."""

MAX_WAIT = 365 * 24 * 3600.0
"""Seconds; what a handler or a backoff of its own may ask for at most. A guess at what nobody means seriously."""

Backoff: TypeAlias = Sequence[float] | Callable[[int], float]
"""A table of waits in seconds, or a function from the number of failures so far (1, 2, …) to seconds."""


def wait_after(failures: int, backoff: Backoff = BACKOFF) -> float:
    """Seconds to wait after ``failures`` failures (at least 1).

    Raises:
        ValueError: a backoff function returned something that is no number of seconds, NaN for example.
    """
    if callable(backoff):
        return bounded(backoff(failures))
    return bounded(backoff[min(failures, len(backoff)) - 1])


def bounded(seconds: float) -> float:
    """``seconds`` between 0 and :data:`MAX_WAIT`.

    Raises:
        ValueError: ``seconds`` is not a number.
    """
    # Not math.isnan(): it has no room for 10 ** 400, which a backoff that grows by powers gets to.
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds != seconds:
        raise ValueError(f"cannot wait for {seconds!r}: it is no number of seconds; return an int or a float")
    return float(min(max(seconds, 0), MAX_WAIT))
