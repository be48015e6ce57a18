"""What a process of the benchmark notes about itself."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

from recado.bench.messages import Report

MEMORY = Path("/proc/self/statm")


class Meter:
    """Counts jobs as they are done, and measures the memory and the CPU time of the process."""

    def __init__(self) -> None:
        self.done = 0
        self.report = Report()

    def count(self, jobs: int) -> None:
        """So many more jobs are done now."""
        self.done += jobs
        self.report.timeline.append((time.monotonic(), jobs))

    def count_claim(self, jobs: int) -> None:
        """A claim brought so many jobs."""
        self.report.claims += 1
        self.report.claimed += jobs

    def sample(self) -> None:
        """Note how much memory the process has."""
        self.report.memory_mb.append((time.monotonic(), _memory_mb()))

    def begin(self) -> None:
        """What is measured begins."""
        self.report.cpu_seconds = -_cpu_seconds()
        self.sample()

    def end(self) -> None:
        """It is over."""
        self.report.cpu_seconds += _cpu_seconds()
        self.sample()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory_mb() -> float:
    """What is resident now; where the system does not say, what was at most so far."""
    if MEMORY.exists():
        return int(MEMORY.read_text().split()[1]) * resource.getpagesize() / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
