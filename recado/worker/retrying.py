"""Waiting between tries of what depends on the server being there."""

from __future__ import annotations

import random

FIRST_WAIT = 0.1
"""Seconds: a connection that was cut is usually there again at once."""

LONGEST_WAIT = 5.0
"""Seconds: how late a worker may notice that the server is back."""


class Waits:
    """Growing waits, in seconds: 0.1 to 5, doubling, each with jitter so that a fleet does not come back at once."""

    def __init__(self) -> None:
        self._next = FIRST_WAIT

    def next(self) -> float:
        """The next wait."""
        wait = self._next
        self._next = min(wait * 2, LONGEST_WAIT)
        return wait * random.uniform(0.5, 1.0)  # noqa: S311 - spreads load, guards nothing

    def reset(self) -> None:
        """It worked: begin anew with the shortest."""
        self._next = FIRST_WAIT
