"""The shop's tables: making them, and counting what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from examples.shop.application import app
from recado.queue import JobStatus, OperationStatus, system
from recado.queue.connections import Connection
from recado.queue.statements import fill

SCHEMA = Path(__file__).with_name("schema.sql").read_text("utf-8")

SELECT_STATUS = """
SELECT (SELECT count(*) FROM shop.orders) AS orders,
       (SELECT count(*) FROM shop.payment_events) AS payments,
       (SELECT count(*) FROM shop.ledger) AS ledger_lines,
       (SELECT coalesce(sum(amount_cents), 0)::bigint FROM shop.ledger) AS ledger_sum
"""

SELECT_JOBS = "SELECT status, count(*) FROM {schema}.jobs WHERE job_type = ANY ($1) GROUP BY status"
"""The queue is a table like others. In a development database other applications may have jobs, too."""

SELECT_OPERATIONS = "SELECT status, count(*) FROM {schema}.operations GROUP BY status"
"""Of all organizations: the system asks."""

SELECT_FAILURES = "SELECT count(*) FROM {schema}.job_errors"


class Status(TypedDict):
    """How the shop is doing."""

    orders: int
    payments: int
    ledger_lines: int
    ledger_sum: int
    """In cents; anything but 0 is a fault."""
    jobs: dict[str, int]
    """How many of the shop's jobs have which status."""
    operations: dict[str, int]
    """How many operations have which status."""
    failures: int
    """Attempts that ended badly."""


async def create(conn: Connection) -> None:
    """Create what is missing."""
    await conn.execute(SCHEMA)


async def status(conn: Connection) -> Status:
    """Count everything, at one moment."""
    async with conn.transaction(isolation="repeatable_read", readonly=True):
        shop = await conn.fetchrow(SELECT_STATUS)
        assert shop is not None
        rows = await conn.fetch(fill(SELECT_JOBS, app.schema), list(app.job_types))
        async with system(conn):
            operations = await conn.fetch(fill(SELECT_OPERATIONS, app.schema))
        failures = await conn.fetchval(fill(SELECT_FAILURES, app.schema))
    of_jobs = {row["status"]: row["count"] for row in rows}
    of_operations = {row["status"]: row["count"] for row in operations}
    return Status(
        orders=shop["orders"],
        payments=shop["payments"],
        ledger_lines=shop["ledger_lines"],
        ledger_sum=shop["ledger_sum"],
        jobs={status.value: of_jobs.get(status, 0) for status in JobStatus},
        operations={status.value: of_operations.get(status, 0) for status in OperationStatus},
        failures=failures,
    )
