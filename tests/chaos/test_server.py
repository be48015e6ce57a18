"""Short forms of what happens to servers; ``make chaos`` runs the full ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.scenarios.server import (
    SHORT,
    break_server,
    fill_disk,
    stay_away,
    stop_fast,
    stop_immediately,
    terminate_sessions,
    use_up_connections,
)
from tests.chaos.stage import Impossible

RECOVERY = 8.0
"""Seconds; the longest wait between two tries is five."""


async def test_nothing_is_lost_whatever_happens_to_the_server(schema: str, tmp_path: Path) -> None:
    faults = (stop_fast, stop_immediately, stay_away, terminate_sessions, use_up_connections)
    outcome = await break_server(tmp_path, schema, faults, SHORT)
    assert outcome.audit.faults == ()
    assert outcome.audit.acknowledged >= SHORT.jobs
    assert outcome.recovered is not None
    assert outcome.recovered < RECOVERY


async def test_nothing_acknowledged_is_lost_on_a_full_disk(schema: str, tmp_path: Path) -> None:
    try:
        outcome = await fill_disk(tmp_path, schema, SHORT)
    except Impossible as reason:
        pytest.skip(str(reason))
    assert outcome.audit.faults == ()
    assert outcome.audit.acknowledged >= SHORT.jobs
    assert outcome.recovered is not None
    assert outcome.recovered < RECOVERY
