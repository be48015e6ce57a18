"""Short forms of what networks do; ``make chaos`` runs the full ones."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.scenarios.network import ABSENCE, SHORT, SLOWNESS, spoil_network

RECOVERY = 8.0
"""Seconds; the longest wait between two tries is five, and a silent connection is given two here."""


async def test_workers_go_on_over_a_slow_network(dsn: str, schema: str, tmp_path: Path) -> None:
    outcome = await spoil_network(dsn, schema, tmp_path, SLOWNESS, SHORT)
    assert outcome.audit.faults == ()
    assert outcome.audit.acknowledged >= SHORT.jobs


async def test_workers_neither_hang_nor_spin_nor_lose_anything_while_the_network_is_away(
    dsn: str, schema: str, tmp_path: Path
) -> None:
    outcome = await spoil_network(dsn, schema, tmp_path, ABSENCE, SHORT)
    assert outcome.audit.faults == ()
    assert outcome.audit.acknowledged >= SHORT.jobs
    assert outcome.recovered is not None
    assert outcome.recovered < RECOVERY
