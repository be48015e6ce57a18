"""Short forms of workers that do not answer; ``make chaos`` runs the full ones."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.scenarios.silence import SHORT, block_loops, freeze_workers


async def test_handlers_that_block_the_loop_for_longer_than_the_lease_run_once_and_are_named(
    dsn: str, schema: str, tmp_path: Path
) -> None:
    outcome = await block_loops(dsn, schema, tmp_path, SHORT)
    assert outcome.audit.faults == ()


async def test_what_frozen_workers_finish_after_their_jobs_were_taken_over_changes_nothing(
    dsn: str, schema: str, tmp_path: Path
) -> None:
    outcome = await freeze_workers(dsn, schema, tmp_path, SHORT)
    assert outcome.audit.faults == ()
    assert outcome.audit.reclaims > 0
