"""A short form of the kills; ``make chaos`` runs the full one."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.scenarios.kills import SHORT, kill_workers


async def test_workers_that_are_killed_lose_no_job_and_double_no_effect(dsn: str, schema: str, tmp_path: Path) -> None:
    outcome = await kill_workers(dsn, schema, tmp_path, SHORT)
    assert outcome.audit.faults == ()
    assert outcome.audit.acknowledged >= SHORT.jobs
    assert outcome.audit.reclaims > 0
