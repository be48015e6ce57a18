"""UUIDv7 as RFC 9562 has it, in order, and by the clock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from uuid import RFC_4122, UUID

import pytest

from recado.queue import ids
from recado.queue.ids import new_id, new_ids


def milliseconds(job_id: UUID) -> int:
    return job_id.int >> 80


def test_ids_are_uuid7_of_the_time_they_were_made() -> None:
    before = time.time_ns() // 1_000_000
    made = [new_id(), *new_ids(100)]
    after = time.time_ns() // 1_000_000
    assert {job_id.version for job_id in made} == {7}
    assert {job_id.variant for job_id in made} == {RFC_4122}
    assert all(before <= milliseconds(job_id) <= after + 1 for job_id in made)


def test_ids_are_in_the_order_they_were_made() -> None:
    made = [*new_ids(5000), *(new_id() for _ in range(1000)), *new_ids(10)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_a_burst_does_not_run_ahead_of_the_clock() -> None:
    made = new_ids(100_000)
    assert milliseconds(made[-1]) - milliseconds(made[0]) <= 100_000 // 4096 + 1


def test_a_clock_that_is_set_back_does_not_break_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    first = new_id()
    monkeypatch.setattr("recado.queue.ids.time.time_ns", lambda: 0)
    assert new_id() > first


def test_threads_never_make_the_same_tick_twice() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = [job_id for batch in pool.map(lambda _: new_ids(500), range(40)) for job_id in batch]
    assert len({job_id.int >> 64 for job_id in made}) == len(made)


def test_ids_of_one_tick_differ_in_what_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids, "_last", 0)
    monkeypatch.setattr("recado.queue.ids.time.time_ns", lambda: 1_700_000_000_000_000_000)
    first = new_id()
    monkeypatch.setattr(ids, "_last", 0)
    second = new_id()
    assert first.int >> 64 == second.int >> 64
    assert first != second
