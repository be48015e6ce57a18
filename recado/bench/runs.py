"""Carries plans out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from typing import Any, TypeAlias

from recado.bench.database import Database
from recado.bench.figures import Run, figures, summarised
from recado.bench.messages import Report
from recado.bench.options import Options
from recado.bench.processes import Child, children, patience
from recado.bench.scenarios import Plan, Scenario
from recado.errors import RecadoError

Tell: TypeAlias = Callable[[str, int, int], None]
"""Called with what runs, how many of its jobs are done, and how many there are."""


async def measure(database: Database, scenario: Scenario, options: Options, tell: Tell) -> dict[str, Any]:
    """Run a scenario as often as it is to be repeated, and the bare statements after each time.

    Returns:
        Its figures, as they are printed as JSON.

    Raises:
        RecadoError: a run could not be finished, or its jobs are not where they should be after it.
    """
    pairs: list[tuple[Run, Run]] = []
    for i in range(1, options.repeat + 1):
        name = f"{scenario.name} {i}/{options.repeat}"
        ours = await _run(database, scenario.plan(options, database.dsn, None), partial(tell, name))
        # In batches of the size that the worker had just now.
        batch = max(1, round(ours.batch))
        bare = await _run(database, scenario.plan(options, database.dsn, batch), partial(tell, f"{name} bare"))
        pairs.append((ours, bare))
    return {"scenario": scenario.name, **asdict(options), **summarised(pairs, scenario.ratio)}


async def _run(database: Database, plan: Plan, tell: Callable[[int, int], None]) -> Run:
    await database.prepare(plan.due, plan.scheduled)
    if plan.saturated:
        await database.register_saturated()
    changed = asyncio.Event()
    async with AsyncExitStack() as stack:
        if plan.pinned:
            await stack.enter_async_context(database.snapshot())
        await database.pause(plan.paused)
        started = await stack.enter_async_context(children([*plan.crew, *plan.feeders], changed.set))
        crew, feeders = started[: len(plan.crew)], started[len(plan.crew) :]
        began = time.monotonic()
        for child in started:
            child.tell("go")
        await database.resume(plan.paused)
        await _finished(crew, plan.jobs, changed, tell)
        reports = [await child.report() for child in crew]
        fed = [await child.report() for child in feeders]
    await database.check(plan.expected)
    _check_count(reports, plan.jobs)
    return figures(began, reports, fed)


async def _finished(crew: Sequence[Child], jobs: int, changed: asyncio.Event, tell: Callable[[int, int], None]) -> None:
    """Wait until the crew has done all its jobs."""
    while (done := sum(child.done for child in crew)) < jobs:
        tell(done, jobs)
        changed.clear()
        async with patience("no more jobs have been done"):
            await changed.wait()
    tell(done, jobs)


def _check_count(reports: Sequence[Report], jobs: int) -> None:
    done = sum(count for report in reports for _, count in report.timeline)
    if done != jobs:
        raise RecadoError(
            f"cannot trust the run: {done:,} ends of {jobs:,} jobs were seen, so some ended twice; please report this"
        )
