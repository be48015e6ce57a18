"""How long a failed job waits: the table, then its last wait again; nothing else than seconds, and not for ever."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from recado.queue.backoff import BACKOFF, MAX_WAIT, bounded, wait_after


def test_failures_wait_for_ten_seconds_to_fifty_minutes_and_then_as_long_again() -> None:
    waits = [wait_after(failures) for failures in range(1, 9)]

    assert waits == [10, 40, 3 * 60, 12 * 60, 50 * 60, 50 * 60, 50 * 60, 50 * 60]
    assert wait_after(10**6) == BACKOFF[-1]


def test_a_table_of_ones_own_repeats_its_last_wait_too() -> None:
    assert [wait_after(failures, [1, 2.5]) for failures in (1, 2, 3, 4)] == [1.0, 2.5, 2.5, 2.5]
    assert [wait_after(failures, (7,)) for failures in (1, 2)] == [7.0, 7.0]


def test_a_function_is_asked_with_the_number_of_failures() -> None:
    assert [wait_after(failures, lambda failures: failures**2) for failures in (1, 2, 3)] == [1.0, 4.0, 9.0]


@pytest.mark.parametrize("asked", [MAX_WAIT, MAX_WAIT + 1, math.inf, 10**400], ids=["all", "more", "inf", "power"])
def test_no_wait_is_longer_than_a_year(asked: float) -> None:
    assert bounded(asked) == wait_after(1, lambda failures: asked) == wait_after(1, [asked]) == MAX_WAIT


@pytest.mark.parametrize("asked", [0, -5, -math.inf, -(10**400)], ids=["none", "less", "-inf", "power"])
def test_no_wait_is_negative(asked: float) -> None:
    assert bounded(asked) == wait_after(1, lambda failures: asked) == wait_after(1, [asked]) == 0


def test_a_backoff_that_grows_by_powers_never_overflows() -> None:
    assert wait_after(32_767, lambda failures: 2**failures) == MAX_WAIT


@pytest.mark.parametrize("asked", [math.nan, None, "10", True, [10], 10j])
def test_what_is_no_number_of_seconds_is_refused_and_quoted(asked: Any) -> None:
    waits: list[Callable[[], float]] = [lambda: bounded(asked), lambda: wait_after(1, lambda failures: asked)]
    for wait in waits:
        with pytest.raises(ValueError, match="it is no number of seconds; return an int or a float") as raised:
            wait()
        assert repr(asked) in str(raised.value)


def test_what_a_backoff_function_raises_is_its_own() -> None:
    def broken(failures: int) -> float:
        raise LookupError(failures)

    with pytest.raises(LookupError):
        wait_after(1, broken)
