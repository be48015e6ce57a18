"""From what processes reported to figures, and from the figures of several runs to medians."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeAlias

from recado.bench.messages import Report

WARM_UP = 25
"""Jobs at the beginning of a latency run that do not count: connections are opened, statements prepared."""

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one run, of recado or of the bare statements."""

    rate: float
    """Jobs a second, from the start signal to the last job's durable end."""
    fifths: list[float]
    """The rate of each fifth of the jobs."""
    cpu_us: float
    """Microseconds of CPU time a job, of the processes whose jobs count."""
    memory_mb: list[float]
    """Megabytes that the largest of these processes had resident after each tenth of the jobs."""
    batch: float = 0.0
    """Jobs that a claim brought on average; 0 where nothing was claimed."""
    waits_ms: list[float] = field(default_factory=list)
    """For each job the milliseconds from before its enqueue to its handler; empty where nobody noted them."""


class Timeline:
    """How many jobs were done by when."""

    def __init__(self, began: float, reports: Sequence[Report]) -> None:
        self.began = began
        self._steps = sorted((at, jobs) for report in reports for at, jobs in report.timeline)
        self.jobs = sum(jobs for _, jobs in self._steps)

    def reached(self, share: float) -> float:
        """When this share of the jobs was done, as if each batch had been done bit by bit since the one before."""
        wanted = share * self.jobs
        before, done = self.began, 0
        for at, jobs in self._steps:
            if done + jobs >= wanted:
                return before + (at - before) * (wanted - done) / jobs
            before, done = at, done + jobs
        return before

    def rate(self, start: float, end: float) -> float:
        """Jobs a second between two shares of the jobs."""
        return self.jobs * (end - start) / max(self.reached(end) - self.reached(start), 1e-9)


def figures(began: float, crew: Sequence[Report], feeders: Sequence[Report]) -> Run:
    """What a run amounts to.

    Args:
        began: the time of the start signal.
        crew: of the processes whose jobs count.
        feeders: of those that enqueued meanwhile.
    """
    timeline = Timeline(began, crew)
    return Run(
        rate=timeline.rate(0, 1),
        fifths=[timeline.rate(i / 5, (i + 1) / 5) for i in range(5)],
        cpu_us=1e6 * sum(report.cpu_seconds for report in crew) / timeline.jobs,
        memory_mb=[_memory(crew, timeline.reached(i / 10)) for i in range(1, 11)],
        batch=_batch(crew),
        waits_ms=_waits(crew, feeders),
    )


def _memory(reports: Sequence[Report], time: float) -> float:
    """Of the largest process at ``time``, by the last sample before it or, failing that, the first one."""
    return max(
        next((mb for at, mb in reversed(report.memory_mb) if at <= time), report.memory_mb[0][1]) for report in reports
    )


def _batch(reports: Sequence[Report]) -> float:
    claims = sum(report.claims for report in reports)
    return sum(report.claimed for report in reports) / claims if claims else 0.0


def _waits(crew: Sequence[Report], feeders: Sequence[Report]) -> list[float]:
    begun = {n: at for report in crew for n, at in report.begun.items()}
    sent = {n: at for report in feeders for n, at in report.sent.items()}
    waits = [1000 * (begun[n] - sent[n]) for n in sorted(begun)]
    return waits[min(WARM_UP, len(waits) // 2) :]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


Ratio: TypeAlias = Callable[[Run, Run], float]
"""What a run of recado and the bare one beside it are judged by."""


def of_rates(ours: Run, bare: Run) -> float:
    """How much of the bare statements' rate is left: up to 1."""
    return ours.rate / bare.rate


def of_waits(ours: Run, bare: Run) -> float:
    """How many times as long the median job waits: from 1 on."""
    return percentile(ours.waits_ms, 0.5) / percentile(bare.waits_ms, 0.5)


def of_fifths(ours: Run, bare: Run) -> float:
    """How much of the first fifth's rate is left in the last fifth."""
    return ours.fifths[-1] / ours.fifths[0]


def summarised(pairs: Sequence[tuple[Run, Run]], ratio: Ratio) -> dict[str, Any]:
    """The medians of several runs of recado, each with the run of the bare statements beside it."""
    ratios = [ratio(ours, bare) for ours, bare in pairs]
    ours, bare = _medians([ours for ours, _ in pairs]), _medians([bare for _, bare in pairs])
    return {
        "rate": ours.pop("rate"),
        "bare_rate": bare.pop("rate"),
        "ratio": median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        **ours,
        **{f"bare_{name}": value for name, value in bare.items()},
    }


def _medians(runs: Sequence[Run]) -> dict[str, Any]:
    rates = [run.rate for run in runs]
    medians = {"rate": median(rates), "rate_range": [min(rates), max(rates)]}
    if all(run.waits_ms for run in runs):
        for name, share in PERCENTILES.items():
            medians[f"{name}_ms"] = median(percentile(run.waits_ms, share) for run in runs)
    medians["fifths"] = [median(fifth) for fifth in zip(*(run.fifths for run in runs), strict=True)]
    medians["client_cpu_us"] = median(run.cpu_us for run in runs)
    medians["claim_batch"] = median(run.batch for run in runs)
    # Of the run that took most: memory that grows only sometimes grows.
    worst = max(runs, key=lambda run: run.memory_mb[-1])
    medians["memory_mb"], medians["peak_rss_mb"] = worst.memory_mb, max(max(run.memory_mb) for run in runs)
    return medians
