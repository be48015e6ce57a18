"""Hostile input: each kind is refused by one clear sentence, before any SQL; what is let through, the table takes."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import asyncpg
import pytest

from recado import Recado
from recado.errors import EnqueueError
from recado.queue import get_job, limits
from recado.queue.limits import MAX_RUN_AT, MIN_RUN_AT, shortened

MINUTE = timedelta(minutes=1)


class NoZone(tzinfo):
    """A time zone that does not know its own offset, which makes a datetime naive."""

    def utcoffset(self, moment: datetime | None) -> timedelta | None:
        return None

    def dst(self, moment: datetime | None) -> timedelta | None:
        return None

    def tzname(self, moment: datetime | None) -> str | None:
        return None


EAST, WEST = timezone(timedelta(hours=14)), timezone(-timedelta(hours=12))

HOSTILE: dict[str, list[Any]] = {
    "run_at": [
        datetime(2030, 1, 1),
        datetime(2030, 1, 1, tzinfo=NoZone()),
        datetime.min.replace(tzinfo=UTC),
        datetime.min.replace(tzinfo=EAST),
        datetime.max.replace(tzinfo=UTC),
        datetime.max.replace(tzinfo=WEST),
        MIN_RUN_AT - timedelta(microseconds=1),
        MAX_RUN_AT,
        *("2030-01-01T00:00:00Z", 1_893_456_000, 0.0, MINUTE, True, [], datetime(2030, 1, 1).date()),
    ],
    "max_attempts": [0, -1, 40_000, 32_768, 10**30, 10**5_000, True, False, 1.0, "5", float("nan"), []],
    "priority": [-1, 4, 10**30, True, False, 1.0, "1", float("inf"), []],
    "queue": ["", "Mail", "a b", "a\0", "a\ud800", "a\n", "ä", "-a", "x" * 129, "x" * 3_000, b"a", 5, ["a"]],
    "idempotency_key": ["", "a\0b", "a\ud800", "x" * 1_025, "x" * 3_000, "ü" * 513, b"key", 5, True, ["key"]],
}

CASES = [(option, value) for option, values in HOSTILE.items() for value in values]


@pytest.mark.parametrize(("option", "value"), CASES, ids=lambda value: shortened(value, 30))
def test_a_hostile_option_is_refused_in_one_sentence(option: str, value: Any) -> None:
    word = {"run_at": "schedule", "idempotency_key": "idempotency key"}.get(option, option)

    with pytest.raises(EnqueueError, match=rf"^cannot .*{word}.*: .*; [a-z]+") as raised:
        Recado().new("_smoke.echo", None, **{option: value})

    message = str(raised.value)
    assert len(message) < 400
    assert message.isprintable()
    assert "\n" not in message


async def test_nothing_hostile_reaches_the_database(conn: asyncpg.Connection) -> None:
    app = Recado()
    payloads: list[Any] = [float("nan"), "\0", "\ud800", "x" * 300 * 1024, object()]
    hostile: list[tuple[str, Any, dict[str, Any]]] = [
        *(("_smoke.echo", None, {option: value}) for option, value in CASES),
        *(("_smoke.echo", payload, {}) for payload in payloads),
        *((name, None, {}) for name in ("x" * 10_000, "a.\0", "nobody.knows")),
        ("_smoke.echo", None, {"metadata": {"a": "\0"}}),
    ]
    await conn.close()  # any SQL is now an InterfaceError

    for job_type, payload, options in hostile:
        with pytest.raises(EnqueueError):
            await app.enqueue(conn, job_type, payload, **options)
        with pytest.raises(EnqueueError):
            await app.job_types["_smoke.echo"].enqueue(conn, payload, **options | {"priority": 9})
    with pytest.raises(asyncpg.InterfaceError):
        await app.enqueue(conn, "_smoke.echo", None)


FAR_EAST = timezone(timedelta(hours=23, minutes=59))

AT_THE_EDGE: dict[str, list[Any]] = {
    "run_at": [
        MIN_RUN_AT,
        MAX_RUN_AT - timedelta(microseconds=1),
        datetime(1970, 1, 1, 23, 59, tzinfo=FAR_EAST),
        datetime(9999, 12, 30, 12, 0, tzinfo=timezone(-timedelta(hours=11, minutes=59))),
        datetime(2030, 1, 1, tzinfo=EAST),
    ],
    "max_attempts": [1, 32_767],
    "priority": [0, 3],
    "queue": ["a", "x" * 128, "a.b-c_d", "0", "_"],
    "idempotency_key": ["x" * 1_024, "ü" * 512, "\x01", "\U0001f600" * 256, " ", "'; DROP TABLE jobs; --", "%s{}\\"],
}


async def test_what_is_let_through_the_table_takes_and_gives_back(conn: asyncpg.Connection) -> None:
    name = "a." + "x" * (limits.MAX_NAME_LENGTH - 2)
    app = Recado()
    app.declare(name)

    for option, values in AT_THE_EDGE.items():
        for value in values:
            job_id = await app.enqueue(conn, name, None, **{option: value})
            assert getattr(await get_job(conn, job_id), option) == value
            [job_id] = await app.enqueue_many(conn, [app.new(name, None, **{option: value})])
            assert getattr(await get_job(conn, job_id), option) == value


async def test_the_longest_keys_that_cannot_be_compressed_fit_the_index(conn: asyncpg.Connection) -> None:
    """A btree takes 2,704 bytes; compressible keys would prove nothing."""
    app = Recado()
    name = "a." + "x" * (limits.MAX_NAME_LENGTH - 2)
    app.declare(name)
    key = "".join(chr(0x4E00 + (n * 7919) % 20_000) for n in range(341))
    assert len(key.encode()) == 1_023

    job_id = await app.enqueue(conn, name, None, idempotency_key=key)

    assert await app.enqueue(conn, name, None, idempotency_key=key) == job_id


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (limits.check_job_type, "mail.send"),
        (limits.check_queue, "mail"),
        (limits.check_priority, 0),
        (limits.check_max_attempts, 1),
        (limits.check_run_at, MIN_RUN_AT),
        (limits.check_idempotency_key, "k"),
    ],
)
def test_what_is_good_comes_back_as_it_is(check: Any, value: Any) -> None:
    assert check(value) is value


def test_a_value_is_quoted_in_at_most_eighty_characters() -> None:
    assert shortened("short") == "'short'"
    assert shortened(None) == "None"
    assert shortened(10**5_000) == "this int"
    for value in ("x" * 10_000, ["x"] * 10_000, b"x" * 10_000, 10**1_000):
        assert re.fullmatch(r".{80}…", shortened(value))
