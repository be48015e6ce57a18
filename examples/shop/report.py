"""What ``make run`` shows of the shop: a line every second, and a summary at the end."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

from examples.shop import tables
from examples.shop.application import app
from examples.shop.jobs import reconcile
from recado.queue import JobStatus, dead_by_error, list_jobs
from recado.queue.connections import Pool

INTERVAL = 1.0
"""Seconds between two lines."""

LINES_PER_HEADER = 20
"""As ``vmstat`` does: it is always in sight."""

COLUMNS = [
    "orders",
    "payments",
    "ledger sum",
    "e-mails",
    "operations",
    "pending",
    "running",
    "completed",
    "failures",
    "dead",
]


async def report(pool: Pool, mails: Path) -> None:
    """Print a line every second, until cancelled."""
    for number in itertools.count():
        if number % LINES_PER_HEADER == 0:
            print(*(f"{name:>10}" for name in COLUMNS))
        async with pool.acquire() as conn:
            status = await tables.status(conn)
        jobs = status["jobs"]
        cells = (
            *(status["orders"], status["payments"], status["ledger_sum"], _count(mails)),
            sum(status["operations"].values()),
            *(jobs["pending"], jobs["running"], jobs["completed"], status["failures"], jobs["dead"]),
        )
        print(*(f"{cell:>10}" for cell in cells), flush=True)
        await asyncio.sleep(INTERVAL)


async def summarize(pool: Pool, mails: Path) -> None:
    """Print how things stand, and what died of what."""
    async with pool.acquire() as conn:
        status = await tables.status(conn)
        dead = await dead_by_error(conn, schema=app.schema)
        reconciled = await list_jobs(
            conn, job_type=reconcile.name, status=JobStatus.COMPLETED, limit=1, schema=app.schema
        )
    jobs = ", ".join(f"{count} {name}" for name, count in status["jobs"].items())
    operations = ", ".join(f"{count} {name}" for name, count in status["operations"].items())
    print(
        f"\n{status['orders']} orders, {_count(mails)} e-mails, {status['payments']} payments, "
        f"{status['ledger_lines']} ledger lines that sum to {status['ledger_sum']}\n"
        f"jobs: {jobs}; {status['failures']} failed attempts\n"
        f"operations: {operations}"
    )
    for group in dead:
        print(f"  {group.count} dead: {group.job_type}, {group.error}")
    for job in reconciled:
        print(f"last {job.job_type}: {job.result}")
    print("the data stay where they are; the next run goes on with them", flush=True)


def _count(mails: Path) -> int:
    return sum(1 for _ in mails.glob("*.eml"))
