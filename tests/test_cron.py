"""Which times a cron expression names, above all where the clock is changed; and what is no expression."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from recado import Recado, cron
from recado.errors import ConfigurationError, InvalidSchedule, RegistrationError

MADRID = "Europe/Madrid"
"""Put forward on 2026-03-29 from 2:00 to 3:00 (1:00 UTC), back on 2026-10-25 from 3:00 to 2:00 (1:00 UTC)."""

SPRING = datetime(2026, 3, 29, tzinfo=UTC)
AUTUMN = datetime(2026, 10, 25, tzinfo=UTC)


def ticks(expression: str, timezone: str, after: datetime, until: datetime) -> list[datetime]:
    """All times in ``(after, until]``."""
    found = []
    tick = cron.following(expression, timezone, after)
    while tick is not None and tick <= until:
        found.append(tick)
        tick = cron.following(expression, timezone, tick)
    return found


def on_the_day(expression: str, day: datetime) -> list[str]:
    """The times, in UTC, that the expression names on a day in Madrid: it begins one or two hours before UTC's."""
    begin = day.replace(hour=12) - timedelta(days=1)
    return [f"{tick:%d %H:%M}" for tick in ticks(expression, MADRID, begin, day.replace(hour=12))]


@pytest.mark.parametrize(
    ("expression", "times"),
    [
        ("30 2 * * *", ["29 01:00"]),  # 2:30 does not exist: at 3:00, once
        ("0,30 2 * * *", ["29 01:00"]),  # both at 3:00: one tick
        ("30 2,3 * * *", ["29 01:00", "29 01:30"]),
        ("0 3 * * *", ["29 01:00"]),
        ("59 1 * * *", ["29 00:59"]),
        ("*/30 2 * * *", []),
    ],
)
def test_on_the_day_with_an_hour_skipped(expression: str, times: list[str]) -> None:
    assert on_the_day(expression, SPRING) == times


@pytest.mark.parametrize(
    ("expression", "times"),
    [
        ("30 2 * * *", ["25 00:30"]),  # 2:30 comes twice: the first time only
        ("0,30 2 * * *", ["25 00:00", "25 00:30"]),
        ("30 2,3 * * *", ["25 00:30", "25 02:30"]),
        ("0 3 * * *", ["25 02:00"]),
        ("59 1 * * *", ["24 23:59"]),
        ("*/30 2 * * *", ["25 00:00", "25 00:30", "25 01:00", "25 01:30"]),
    ],
)
def test_on_the_day_with_an_hour_doubled(expression: str, times: list[str]) -> None:
    assert on_the_day(expression, AUTUMN) == times


@pytest.mark.parametrize("day", [SPRING, AUTUMN])
@pytest.mark.parametrize(("expression", "minutes"), [("*/15 * * * *", 15), ("0 * * * *", 60)])
def test_what_runs_all_day_keeps_to_real_time(expression: str, minutes: int, day: datetime) -> None:
    found = ticks(expression, MADRID, day - timedelta(days=1), day + timedelta(days=1))
    assert len(found) == 48 * 60 // minutes
    assert {later - earlier for earlier, later in pairwise(found)} == {timedelta(minutes=minutes)}


def test_a_schedule_that_counts_from_within_the_second_of_the_doubled_hours_does_not_go_back() -> None:
    """cronsim alone would name 2:30 of the first one, 45 minutes before."""
    now = AUTUMN.replace(hour=1, minute=15)
    assert cron.following("30 2 * * *", MADRID, now) == AUTUMN.replace(hour=1, minute=30) + timedelta(days=1)


def test_what_was_missed_in_the_first_of_the_doubled_hours_is_found_in_the_second() -> None:
    """cronsim alone, going back, would name the day before."""
    now = AUTUMN.replace(hour=1, minute=15)
    assert cron.latest("30 2 * * *", MADRID, now) == AUTUMN.replace(hour=0, minute=30)


EXPRESSIONS = [
    "* * * * *",
    "*/15 * * * *",
    "7 * * * *",
    "30 2 * * *",
    "0,30 2 * * *",
    "*/20 2,3 * * *",
    "5-50/5 1-3 * * *",
    "0 0 * * *",
]


@hypothesis_settings(deadline=None)
@given(
    st.sampled_from(EXPRESSIONS),
    st.sampled_from([MADRID, "America/New_York", "Australia/Sydney", "UTC"]),
    st.sampled_from([SPRING, AUTUMN, datetime(2026, 3, 8, 7, tzinfo=UTC), datetime(2026, 4, 4, 15, tzinfo=UTC)]),
    st.timedeltas(-timedelta(hours=4), timedelta(hours=4)),
)
def test_going_back_finds_what_going_forward_finds_last(
    expression: str, timezone: str, change: datetime, offset: timedelta
) -> None:
    """(Not so on Lord Howe Island, where the clock is changed by half an hour: going forward, cronsim steps by whole
    hours there and may pass over the first ticks after it, once. They are made all the same, only up to a round late,
    since what is due is found by going back.)"""
    until = change + offset
    assert cron.latest(expression, timezone, until) == ticks(expression, timezone, until - timedelta(days=2), until)[-1]


def test_a_time_that_is_named_is_itself_the_latest_but_not_the_following() -> None:
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    before, behind = noon - timedelta(microseconds=1), noon + timedelta(microseconds=1)
    hour = timedelta(hours=1)
    assert [cron.latest("0 * * * *", "UTC", t) for t in (before, noon, behind)] == [noon - hour, noon, noon]
    assert [cron.following("0 * * * *", "UTC", t) for t in (before, noon, behind)] == [noon, noon + hour, noon + hour]


@pytest.mark.parametrize(
    "expression",
    ["", "* * * *", "61 * * * *", "0 25 * * *", "* * 31 2 *", "0 0 */31 2 MON#5", "*/0 * * * *", "a b c d e",
     "9" * 5000, f"{'9' * 200} * * * *", "0 * * * * *", "@daily", "* * * * \0", 5, None],
)  # fmt: skip
def test_what_is_no_expression_is_refused(expression: str) -> None:
    with pytest.raises(InvalidSchedule, match=r"cannot use .* as a cron expression: .*; (write|correct) "):
        cron.check(expression, "UTC")


@pytest.mark.parametrize(
    "timezone", ["", "Mars/Olympus", "../etc/passwd", "/etc/localtime", "Europe", "a" * 500, None, 5]
)
def test_what_is_no_time_zone_is_refused(timezone: str) -> None:
    with pytest.raises(InvalidSchedule, match=r"cannot use .* as a time zone: .*; write one like"):
        cron.check("* * * * *", timezone)


# --- app.cron ---


def test_a_handler_is_returned_as_it_is_and_its_schedule_is_named_after_it() -> None:
    app = Recado("shop")

    @app.cron("0 6 * * *", timezone=MADRID)
    @app.cron("0 18 * * *", name="report.evening", payload={"kind": "short"}, overlap="queue")
    @app.job("report.daily", critical=True)
    async def daily(payload: dict[str, str] | None) -> str:
        return "done"

    assert daily is app.job_types["report.daily"]
    morning, evening = app.schedules["report.daily"], app.schedules["report.evening"]
    assert (morning.job_type, morning.timezone, morning.payload, morning.overlap) == (
        "report.daily", MADRID, "null", "skip",
    )  # fmt: skip
    assert (evening.job_type, evening.timezone, evening.payload, evening.overlap) == (
        "report.daily", "UTC", '{"kind":"short"}', "queue",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"expression": "61 * * * *"}, "bad minute"),
        ({"timezone": "Mars/Olympus"}, "this system does not know it"),
        ({"overlap": "wait"}, "neither 'skip' nor 'queue'"),
        ({"payload": {"n": "many"}}, "n: Input should be a valid integer"),
        ({"payload": None}, "Input should be a valid dictionary"),
        ({"name": ""}, "as a schedule's name"),
        ({"name": "Nightly"}, "as a schedule's name"),
        ({"name": "x" * 129}, "as a schedule's name"),
    ],
)
def test_what_is_wrong_with_a_schedule_is_said_at_its_registration(options: dict[str, object], says: str) -> None:
    app = Recado("shop")

    @app.job("report.daily")
    async def daily(payload: dict[str, int]) -> None: ...

    arguments: dict[str, object] = {"expression": "* * * * *", "payload": {}, **options}
    with pytest.raises(RegistrationError, match=r"cannot .*; .*") as caught:
        app.cron(**arguments)(daily)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert not app.schedules


def test_only_a_handler_of_the_application_can_be_scheduled() -> None:
    app, other = Recado("shop"), Recado("blog")

    @app.operation("import")
    async def operation(payload: None) -> None: ...

    declared = app.declare("mail.send")

    @other.job("report.daily")
    async def foreign(payload: None) -> None: ...

    async def function() -> None: ...

    for thing in (operation, declared, foreign, function):
        with pytest.raises(RegistrationError, match=r"put @app\.cron above @app\.job"):
            app.cron("* * * * *")(thing)  # type: ignore[type-var]
    assert not app.schedules


def test_two_schedules_need_two_names() -> None:
    app = Recado("shop")

    @app.cron("0 6 * * *")
    @app.job("report.daily")
    async def daily(payload: None) -> None: ...

    with pytest.raises(RegistrationError, match=r"there is a schedule 'report\.daily' already; pass another name"):
        app.cron("0 18 * * *")(daily)
    assert app.schedules["report.daily"].expression == "0 6 * * *"


@pytest.mark.parametrize("name", ["", "a\0b", "x" * 129, None])
def test_an_application_needs_a_name_that_can_be_stored_and_is_not_recados_own(name: str) -> None:
    with pytest.raises(ConfigurationError, match="as an application's name"):
        Recado(name)
