"""Sets the clock of a Python process wrong by ``CLOCK_OFFSET`` seconds.

Python imports this before anything else when its folder is on the path, so that whatever is imported later on reads
the wrong clock. Clocks that only measure spans, as ``time.monotonic``, are right on any machine and stay so.
"""

from __future__ import annotations

import datetime
import os
import time
from typing import TypeAlias

OFFSET = float(os.environ["CLOCK_OFFSET"])

right_time, right_time_ns = time.time, time.time_ns

RightDatetime: TypeAlias = datetime.datetime


def wrong_time() -> float:
    return right_time() + OFFSET


def wrong_time_ns() -> int:
    return right_time_ns() + int(OFFSET * 1_000_000_000)


class _Meta(type):
    """A datetime that somebody else made, such as the driver, is one as well."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, RightDatetime)


class WrongDatetime(RightDatetime, metaclass=_Meta):
    __slots__ = ()

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> WrongDatetime:
        return cls.fromtimestamp(wrong_time(), tz)

    @classmethod
    def utcnow(cls) -> WrongDatetime:
        return cls.now(datetime.UTC).replace(tzinfo=None)

    @classmethod
    def today(cls) -> WrongDatetime:
        return cls.now()


time.time = wrong_time
time.time_ns = wrong_time_ns
datetime.datetime = WrongDatetime  # type: ignore[misc]
