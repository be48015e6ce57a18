"""The shop's jobs. Its web service and its workers both import this module.

With it come the operations, long jobs that a user watches: :mod:`~examples.shop.blueprints`,
:mod:`~examples.shop.analysis` and :mod:`~examples.shop.backups`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any
from uuid import UUID

import aiosmtplib
import asyncpg
from pydantic import BaseModel

from examples.shop import analysis, backups, blueprints, emails
from examples.shop.application import app
from recado import ClaimedJob, Discard, JobDied

OPERATIONS = (blueprints.import_blueprint, analysis.analyze_blueprint, backups.back_up, backups.restore)
"""Importing them has registered them."""

# --- receipts ---

SELECT_ORDER = "SELECT id, customer, email, total_cents, created_at FROM shop.orders WHERE id = $1"


class Order(BaseModel):
    """Names an order. Its data stay in the table, where the handler finds them as they are by then."""

    order_id: UUID


@app.job("email.send_receipt", queue="mail", timeout=30)
async def send_receipt(payload: Order, job: ClaimedJob, state: Mapping[str, Any]) -> None:
    """Send the customer a receipt; the job's id is the message's, so an attempt that is repeated sends no other."""
    order = await state["pool"].fetchrow(SELECT_ORDER, payload.order_id)
    if order is None:
        raise Discard("the order was deleted")
    await aiosmtplib.send(emails.receipt(order, message_id=job.id), **state["smtp"])


# --- payments ---

SELECT_ORDER_OF_EVENT = """
SELECT o.id FROM shop.payment_events e JOIN shop.orders o ON o.id = e.order_id WHERE e.id = $1
"""

INSERT_LEDGER_LINES = """
INSERT INTO shop.ledger (event_id, account, order_id, amount_cents)
SELECT e.id, side.account, e.order_id, side.sign * e.amount_cents
FROM shop.payment_events e, (VALUES ('bank', 1), ('sales', -1)) AS side (account, sign)
WHERE e.id = $1
ON CONFLICT (event_id, account) DO NOTHING
"""
"""The job commits together with its lines, so it books once. ON CONFLICT is for an operator who requeues it."""


class PaymentEvent(BaseModel):
    """Names a payment that the provider told us of."""

    event_id: str


@app.job("stripe.process_event", critical=True)
async def process_event(payload: PaymentEvent, conn: asyncpg.Connection) -> None:
    """Book a payment in the ledger. ``conn`` makes it one transaction with the job's completion."""
    if await conn.fetchval(SELECT_ORDER_OF_EVENT, payload.event_id) is None:
        raise Discard("a payment for an order that does not exist")
    await conn.execute(INSERT_LEDGER_LINES, payload.event_id)


@app.job("recado.job_died", queue="mail")
async def alert(payload: JobDied, job: ClaimedJob, state: Mapping[str, Any]) -> None:
    """Tell the staff that a critical job died; recado enqueues this in the transaction in which it dies."""
    await aiosmtplib.send(emails.alert(payload, message_id=job.id), **state["smtp"])


RECONCILE = """
SELECT count(*) AS orders,
       count(*) FILTER (WHERE paid.cents IS NULL) AS unpaid,
       coalesce((array_agg(o.id ORDER BY o.id) FILTER (WHERE paid.cents <> o.total_cents))[:100], '{}') AS mismatched,
       (SELECT coalesce(sum(amount_cents), 0)::bigint FROM shop.ledger) AS balance_cents
FROM shop.orders o
LEFT JOIN (
    SELECT order_id, sum(amount_cents) AS cents FROM shop.ledger WHERE account = 'bank' GROUP BY order_id
) AS paid ON paid.order_id = o.id
WHERE (o.created_at AT TIME ZONE 'UTC')::date = $1
"""


class Day(BaseModel):
    """A day in UTC."""

    day: date


@app.job("reconcile.daily")
async def reconcile(payload: Day, conn: asyncpg.Connection) -> dict[str, Any]:
    """Compare a day's orders with the ledger; what comes of it is kept as the job's result."""
    row = await conn.fetchrow(RECONCILE, payload.day)
    assert row is not None
    return dict(row)


# --- stock ---

WAREHOUSE_ATTEMPTS = 3


class WarehouseDown(Exception):
    """The warehouse does not answer."""


@app.job("inventory.sync", max_attempts=WAREHOUSE_ATTEMPTS, backoff=(0.5, 1.0))
def sync_inventory(payload: Order, job: ClaimedJob) -> dict[str, Any]:
    """Reserve an order's goods in a warehouse that fails now and then; a plain function, so it runs in a thread."""
    if job.attempt <= outages(payload.order_id):
        raise WarehouseDown("the warehouse does not answer")
    return {"warehouse": "Madrid", "attempt": job.attempt}


def outages(order_id: UUID) -> int:
    """How many attempts at an order find the warehouse down: it hangs on the id, so that tests know it, too."""
    match order_id.int % 20:
        case 0:
            return WAREHOUSE_ATTEMPTS
        case 1 | 2:
            return 1
        case _:
            return 0
