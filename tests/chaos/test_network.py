"""Short forms of what networks do; ``make chaos`` runs the full ones."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.scenarios.network import ABSENCE, SHORT, SLOWNESS, spoil_network


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
