"""What the harness tells an adapter: a fixed part in ``adapter.json``, and the environment."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTER: Mapping[str, Any] = json.loads(Path(__file__).with_name("adapter.json").read_text())
"""The static description; the first table is the hot one, which the harness's readers scan."""

SCENARIO = "long_horizon"
"""The only one there is an adapter for."""


@dataclass(frozen=True, slots=True)
class Environment:
    """How much of what; the defaults are the harness's own."""

    dsn: str
    by_depth: bool
    """Whether to keep so many jobs in the queue, instead of enqueuing at a rate."""
    rate: float
    """Jobs a second."""
    depth: int
    batch: int
    """Jobs of one enqueue at most."""
    batch_interval: float
    """Seconds between two enqueues."""
    on_demand: bool
    """Whether the harness itself says on standard input how many jobs to enqueue."""
    control_file: Path | None
    """The number in it replaces the rate."""
    workers: int
    """Jobs at once."""
    payload_bytes: int
    work: float
    """Seconds that a handler sleeps."""
    interval: float
    """Seconds between two samples."""
    instance: int
    """Number 0 tells the depth of the queue."""


def read(variables: Mapping[str, str]) -> Environment:
    """The environment of this adapter.

    Raises:
        SystemExit: a variable is missing, or has a value that this adapter cannot do anything with.
    """
    scenario, dsn = variables.get("SCENARIO", SCENARIO), variables.get("DATABASE_URL")
    if scenario != SCENARIO:
        raise SystemExit(f"cannot run SCENARIO={scenario}: this adapter knows {SCENARIO} only")
    if not dsn:
        raise SystemExit("cannot run: no database is named; set DATABASE_URL")
    control_file = variables.get("PRODUCER_RATE_CONTROL_FILE")
    try:
        return Environment(
            dsn=dsn,
            by_depth=variables.get("PRODUCER_MODE", "fixed") == "depth-target",
            rate=float(variables.get("PRODUCER_RATE", "800")),
            depth=int(variables.get("TARGET_DEPTH", "4000")),
            batch=int(variables.get("PRODUCER_BATCH_MAX", "128")),
            batch_interval=float(variables.get("PRODUCER_BATCH_MS", "10")) / 1000,
            on_demand=variables.get("PRODUCER_PACING", "adapter") == "harness",
            control_file=Path(control_file) if control_file else None,
            workers=int(variables.get("WORKER_COUNT", "32")),
            payload_bytes=int(variables.get("JOB_PAYLOAD_BYTES", "256")),
            work=float(variables.get("JOB_WORK_MS", "1")) / 1000,
            interval=float(variables.get("SAMPLE_EVERY_S", "5")),
            instance=int(variables.get("BENCH_INSTANCE_ID", "0")),
        )
    except ValueError as error:
        raise SystemExit(f"cannot run: a variable is not a number: {error}; see the harness's list") from None
