"""The soak tells what grows from what only jumps, and its short form holds."""

from __future__ import annotations

import random

import pytest

from bench.soak import ALLOWED, soak, trend, trends

SECONDS = 20.0
"""The first half is for the caches to fill; less of it, and they are taken for a leak."""


async def test_what_a_worker_holds_stays_flat_under_mixed_load(dsn: str, schema: str) -> None:
    samples = await soak(dsn, schema, SECONDS)
    assert samples[-1]["ended"] > 100
    assert [each for each in trends(samples) if not each.flat] == []


async def test_nothing_stays_behind_when_workers_come_and_go(dsn: str, schema: str) -> None:
    samples = await soak(dsn, schema, SECONDS / 2, restart_every=1.5)
    held = {each.name: each for each in trends(samples)}
    assert held["descriptors"].flat
    assert held["connections"].flat
    assert held["threads"].flat


def test_a_leak_is_seen_through_the_noise() -> None:
    noise = random.Random(1)
    jumping = [20 + noise.gauss(0, 5) for _ in range(240)]
    assert trend("tasks", jumping).flat
    assert not trend("tasks", [value + n / 20 for n, value in enumerate(jumping)]).flat


def test_growth_in_the_first_half_and_growth_too_small_to_matter_are_allowed() -> None:
    filling = [float(min(n, 120)) for n in range(240)]
    assert trend("rss", filling).flat
    creeping = [50 + ALLOWED["rss"] * n / 240 for n in range(240)]
    assert trend("rss", creeping).flat
    assert not trend("rss", [50 + ALLOWED["rss"] * 3 * n / 240 for n in range(240)]).flat


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="run for longer"):
        trend("rss", [1.0] * 9)
