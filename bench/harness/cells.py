"""The harness's chaos and pressure cells against our adapter, without its containers.

    python -m bench.harness.cells                      # everything: half an hour
    python -m bench.harness.cells --only pressure --scale 0.25 --json cells.json

After each chaos cell 90 % of the clean rate has to be back within 5 s of the fault's end; each pressure cell has to
complete at the offered rate with a claim p99 that does not grow; and no job that the server acknowledged may be lost.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.harness import faults
from bench.harness.faults import BURST, Fault
from bench.harness.metrics import WINDOW
from bench.harness.scene import Sample, Scene, scene
from recado.queue.models import JobStatus
from recado.serve import run

WARM_UP = 5.0
"""Seconds at the beginning that are not counted: connections are opened, caches filled, workers started."""

CLEAN = 30.0
"""Seconds without a fault, before and after it; the harness's own."""

RECOVERED = 0.9
"""Of the clean rate."""

MAX_RECOVERY = 5.0
"""Seconds from the end of a fault until that is there again: the longest wait between two tries to connect."""

STEADY = 3
"""Ticks, of which the first and most have to show the rate, for one alone is a burst, or a hiccup."""

OFFERED = 0.99
"""Of the offered rate has to be completed: at both edges of a phase jobs of the other one are counted."""

GROWTH = 1.5
"""Times the p99 of the first third of a phase that the last third may show: more than the noise of a shared machine in
medians of minutes, and far less than what a queue shows that walks over its dead rows."""

NOISE = 20.0
"""Milliseconds that a p99 may grow by in any case: a checkpoint's fsync."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A fault, and the load it happens under."""

    fault: Fault
    seconds: float
    kind: str = "chaos"
    replicas: int = 1
    workers: int = 32
    rate: float = 600.0
    """Of each replica, in jobs a second."""
    factor: float = 1.0
    """How much more is offered meanwhile."""


CHAOS_RATE_OF_TWO = 300.0
PRESSURE_RATE = 800.0

CELLS: Mapping[str, Cell] = {
    "server down": Cell(faults.stop_server, 30),
    "backends terminated": Cell(faults.terminate_backends, 60),
    "300 idle connections": Cell(faults.hold_idle_connections, 60),
    "replica killed": Cell(faults.kill_replica, 60, replicas=2, rate=CHAOS_RATE_OF_TWO),
    "replica killed every 20 s": Cell(faults.kill_replicas, 120, replicas=2, rate=CHAOS_RATE_OF_TWO),
    "transaction held": Cell(faults.hold_transaction, 240, "pressure", rate=PRESSURE_RATE),
    "1.5 x the rate": Cell(faults.raise_rate, 240, "pressure", rate=PRESSURE_RATE, factor=BURST),
    "readers": Cell(faults.read_hot_table, 240, "pressure", rate=PRESSURE_RATE),
    "burst": Cell(faults.raise_rate, 300, "pressure", rate=1_200.0, factor=BURST, workers=64),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a cell showed."""

    clean_rate: float
    """Completed a second before the fault, by all replicas."""
    fault_rate: float
    """The same during it."""
    offered: float
    """Asked for a second during it."""
    recovery: float | None
    """Seconds from the fault's end until the clean rate is back; ``None`` if it never was."""
    p99_first: float
    """Milliseconds from enqueue to handler: the worst replica's p99, the median of the fault's first third, but for the
    window at its beginning,"""
    p99_last: float
    """and of its last."""
    acknowledged: int
    """Jobs that adapters told of; what they did not live to tell comes on top in the table."""
    found: int
    """Rows in the table."""
    completed: int
    misses: tuple[str, ...] = ()
    """What falls short of what is demanded."""


async def run_cell(cell: Cell, folder: Path, *, clean: float = CLEAN, warm_up: float = WARM_UP) -> Outcome:
    """Run a cell on a server of its own below ``folder``."""
    async with scene(folder, replicas=cell.replicas, workers=cell.workers, rate=cell.rate) as stand:
        await asyncio.sleep(warm_up)
        clean_from = time.time()
        await asyncio.sleep(clean)
        stand.check_alive()
        began = time.time()
        await cell.fault(stand, cell.seconds)
        ended = time.time()
        await asyncio.sleep(clean)
        closed = time.time()
        counts = await stand.drain()
        codes = [await replica.end(signal.SIGTERM) for replica in stand.replicas]
        outcome = measured(cell, stand, counts, clean_from, began, ended, closed)
    misses = [*judged(cell, outcome), *(f"an adapter ended with exit code {code}" for code in codes if code)]
    return replace(outcome, misses=tuple(misses))


def measured(
    cell: Cell,
    stand: Scene,
    counts: Mapping[JobStatus, int],
    clean_from: float,
    began: float,
    ended: float,
    closed: float,
) -> Outcome:
    """The figures, from what the adapters told."""
    rates = added(stand.samples("completion_rate"))
    # The median: a worker that starts late on a busy machine first makes up for it.
    clean_rate = median(within(rates, clean_from + 1, began) or [0.0])
    # A percentile reaches back over its window: at first it still tells of the time before the fault, or of the start.
    settled = began + min(WINDOW, (ended - began) / 2)
    p99s = within(highest(stand.samples("claim_p99_ms")), settled, ended) or [0.0]
    third = max(1, len(p99s) // 3)
    return Outcome(
        clean_rate=clean_rate,
        # Only whole ticks: that of the beginning reaches back before it.
        fault_rate=mean(within(rates, began + 1, ended) or [0.0]),
        offered=cell.rate * cell.replicas * cell.factor,
        recovery=recovery(rates, clean_rate, ended, closed),
        p99_first=median(p99s[:third]),
        p99_last=median(p99s[-third:]),
        acknowledged=round(sum(sample.value * sample.window for sample in stand.samples("enqueue_rate"))),
        found=sum(counts.values()),
        completed=counts.get(JobStatus.COMPLETED, 0),
    )


def added(samples: Iterable[Sample]) -> dict[float, float]:
    """All replicas' values by tick."""
    by_tick: defaultdict[float, float] = defaultdict(float)
    for sample in samples:
        by_tick[sample.at] += sample.value
    return dict(by_tick)


def highest(samples: Iterable[Sample]) -> dict[float, float]:
    """The worst replica's value by tick."""
    by_tick: dict[float, float] = {}
    for sample in samples:
        by_tick[sample.at] = max(sample.value, by_tick.get(sample.at, 0.0))
    return by_tick


def within(by_tick: Mapping[float, float], after: float, until: float) -> list[float]:
    """The values of a time, in order."""
    return [value for tick, value in sorted(by_tick.items()) if after <= tick <= until]


def recovery(rates: Mapping[float, float], clean_rate: float, ended: float, closed: float) -> float | None:
    """Seconds from ``ended`` until the clean rate is back to stay."""
    ticks = sorted(tick for tick in rates if ended <= tick <= closed)
    for i in range(len(ticks) - STEADY + 1):
        following = [rates[tick] for tick in ticks[i : i + STEADY]]
        if min(following[0], median(following)) >= RECOVERED * clean_rate:
            return ticks[i] - ended
    return None


def judged(cell: Cell, outcome: Outcome) -> Iterable[str]:
    """What falls short of what is demanded."""
    if outcome.found < outcome.acknowledged or outcome.completed < outcome.found:
        yield (
            f"{outcome.acknowledged:,} jobs were acknowledged, {outcome.found:,} are in the table, "
            f"{outcome.completed:,} of them completed"
        )
    if cell.kind == "chaos":
        if outcome.recovery is None:
            yield f"{RECOVERED:.0%} of {outcome.clean_rate:.0f}/s did not come back"
        elif outcome.recovery > MAX_RECOVERY:
            yield f"{RECOVERED:.0%} of {outcome.clean_rate:.0f}/s took {outcome.recovery:.1f} s to come back"
        return
    if outcome.fault_rate < OFFERED * outcome.offered:
        yield f"{outcome.fault_rate:.0f}/s of {outcome.offered:.0f}/s offered"
    if outcome.p99_last > max(GROWTH * outcome.p99_first, outcome.p99_first + NOISE):
        yield f"the claim p99 grew from {outcome.p99_first:.1f} to {outcome.p99_last:.1f} ms"


def print_table(console: Console, outcomes: Mapping[str, Outcome]) -> None:
    """One line for each cell, and what each misses."""
    table = Table("cell", "clean/s", "meanwhile/s", "offered/s", "back after", "claim p99", "jobs", "misses", box=None)
    for name, outcome in outcomes.items():
        table.add_row(
            name,
            *(f"{rate:,.0f}" for rate in (outcome.clean_rate, outcome.fault_rate, outcome.offered)),
            "never" if outcome.recovery is None else f"{max(0.0, outcome.recovery):.1f} s",
            f"{outcome.p99_first:.1f} → {outcome.p99_last:.1f} ms",
            f"{outcome.found:,}",
            "; ".join(outcome.misses) or "nothing",
        )
    console.print(table)


def chosen(only: Sequence[str]) -> dict[str, Cell]:
    """The cells whose name or kind contains one of ``only``; all of them without any."""
    wanted = {
        name: cell
        for name, cell in CELLS.items()
        if not only or any(part in name or part == cell.kind for part in only)
    }
    if not wanted:
        raise typer.BadParameter(f"there is no such cell, but {', '.join(CELLS)}", param_hint="--only")
    return wanted


def main(
    only: Annotated[list[str] | None, typer.Option(help="A kind, or a part of a name; may be repeated.")] = None,
    scale: Annotated[float, typer.Option(min=0.01, help="Of the faults' durations.")] = 1.0,
    clean: Annotated[float, typer.Option(min=3.0, help="Seconds without a fault before and after.")] = CLEAN,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there, too.")] = None,
) -> None:
    """Run the harness's chaos and pressure cells, and judge them."""
    console, progress = Console(), Console(stderr=True)
    outcomes: dict[str, Outcome] = {}
    for name, cell in chosen(only or []).items():
        progress.print(f"{name} …")
        with tempfile.TemporaryDirectory(prefix="recado-cells-", ignore_cleanup_errors=True) as folder:
            shortened = replace(cell, seconds=cell.seconds * scale)
            outcomes[name] = run(run_cell(shortened, Path(folder), clean=clean))
        progress.print(f"  {'; '.join(outcomes[name].misses) or 'held'}", markup=False)
    print_table(console, outcomes)
    if json_file is not None:
        json_file.write_text(json.dumps({name: asdict(each) for name, each in outcomes.items()}, indent=2) + "\n")
    if any(outcome.misses for outcome in outcomes.values()):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
