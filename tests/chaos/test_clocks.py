"""A short form of the wrong clocks; ``make chaos`` runs the full one."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.scenarios.clocks import SHORT, set_clocks_wrong


async def test_workers_whose_clocks_are_an_hour_off_do_everything_in_time(
    dsn: str, schema: str, tmp_path: Path
) -> None:
    outcome = await set_clocks_wrong(dsn, schema, tmp_path, SHORT)
    assert outcome.audit.faults == ()
    assert outcome.audit.acknowledged >= SHORT.jobs
