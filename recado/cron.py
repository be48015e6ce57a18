"""Cron expressions: which times they name. Pure functions; the time is always a parameter.

Evaluated by `cronsim <https://github.com/cuu508/cronsim>`_, which follows Debian's cron. Where the clock is put forward
or back, an expression with a fixed minute and hour runs once: what falls into the hour that is skipped runs at its end,
what falls into the one that comes twice runs in the first of the two. Where the minute or the hour begins with ``*``,
real time goes on: ``*/15 * * * *`` runs every quarter of an hour that passes, and ``*/30 2 * * *`` not at all on the
day that has no such hour, and four times on the day that has it twice.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, tzinfo
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError

from recado.errors import InvalidSchedule

FIELDS = 5
"""Minute, hour, day of the month, month, day of the week. cronsim takes a sixth, for seconds; but what is due every few
seconds is a loop's business, and Debian's cron, whose rules for changes of the clock are kept, does not know it."""

MAX_LENGTH = 256
"""Characters of an expression or a time zone: more than anyone writes, and less than parsing would be slow with."""

ANY_TIME = datetime(2026, 1, 1, tzinfo=UTC)
"""From where on an expression is tried out: it must name some time within the next 50 years."""


def check(expression: str, timezone: str) -> None:
    """See that ``expression`` and ``timezone`` can be read, and that the expression names a time at all.

    Raises:
        InvalidSchedule: one of them cannot, or it does not.
    """
    if not isinstance(expression, str) or len(expression) > MAX_LENGTH or len(expression.split()) != FIELDS:
        raise InvalidSchedule(
            f"cannot use {expression!r:.80} as a cron expression: it must have five fields (minute, hour, day of the "
            "month, month, day of the week); write something like '*/15 * * * *'"
        )
    if following(expression, timezone, ANY_TIME) is None:
        raise InvalidSchedule(
            f"cannot use {expression!r} as a cron expression: it names no time within 50 years; correct its days and "
            "months"
        )


def following(expression: str, timezone: str, after: datetime) -> datetime | None:
    """The first time later than ``after`` that the expression names in the time zone.

    Returns:
        It in UTC; ``None`` if there is none within 50 years.

    Raises:
        InvalidSchedule: the expression or the time zone cannot be read.
    """
    for tick in _simulation(expression, after.astimezone(_zone(timezone)), reverse=False):
        # In the second of two hours with the same name cronsim may name a time of the first.
        if (utc := tick.astimezone(UTC)) > after:
            return utc
    return None


def latest(expression: str, timezone: str, until: datetime) -> datetime | None:
    """The last time up to ``until``, that one included, that the expression names in the time zone.

    However long the time before it was, this takes the same few steps.

    Returns:
        It in UTC; ``None`` if there is none within 50 years.

    Raises:
        InvalidSchedule: the expression or the time zone cannot be read.
    """
    # cronsim goes back from strictly before the time it is given, and by whole seconds.
    start = (until + timedelta(microseconds=1)).astimezone(_zone(timezone))
    found = next(_simulation(expression, start, reverse=True), None)
    if found is None:
        return None
    tick = found.astimezone(UTC)
    # In the second of two hours with the same name it passes over the rest of the first: catch up on that.
    while (later := following(expression, timezone, tick)) is not None and later <= until:
        tick = later
    return tick


def _simulation(expression: str, start: datetime, *, reverse: bool) -> CronSim:
    try:
        return CronSim(expression, start, reverse=reverse)
    except CronSimError as error:
        raise InvalidSchedule(
            f"cannot use {expression!r} as a cron expression: {str(error).lower()}; write something like '*/15 * * * *'"
        ) from None


def _zone(timezone: str) -> tzinfo:
    if timezone == "UTC":
        return UTC  # known even where no time zones are installed
    try:
        return ZoneInfo(timezone[:MAX_LENGTH])
    except (ZoneInfoNotFoundError, ValueError, OSError, TypeError):
        raise InvalidSchedule(
            f"cannot use {timezone!r:.80} as a time zone: this system does not know it; write one like "
            "'Europe/Madrid', or install tzdata"
        ) from None
