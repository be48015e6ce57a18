"""The shop's web service: every endpoint does its own work and enqueues the rest in one transaction."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

from pydantic import BaseModel, Field, StringConstraints, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from uuid6 import uuid7

from examples.shop import tables, webhooks
from examples.shop.application import app
from examples.shop.jobs import Order, PaymentEvent, process_event, send_receipt, sync_inventory
from examples.shop.planner import planner
from recado.api import Hub, create_app
from recado.queue.connections import Pool

INSERT_ORDER = "INSERT INTO shop.orders (id, customer, email, total_cents) VALUES ($1, $2, $3, $4)"

INSERT_EVENT = """
INSERT INTO shop.payment_events (id, order_id, amount_cents) VALUES ($1, $2, $3) ON CONFLICT (id) DO NOTHING
"""

Cents = Annotated[int, Field(gt=0, le=10_000_000)]


class NewOrder(BaseModel):
    """The body of ``POST /orders``."""

    # No control characters: PostgreSQL cannot store NUL, and no mail header may hold a line break.
    customer: Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
    email: Annotated[
        str,
        StringConstraints(
            max_length=254, pattern=r"^[A-Za-z0-9_%+-]+(\.[A-Za-z0-9_%+-]+)*@([A-Za-z0-9-]+\.)+[A-Za-z]+$"
        ),
    ]
    total_cents: Cents


class NewEvent(BaseModel):
    """The body of ``POST /webhooks/payments``: a payment went through."""

    id: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_]{1,100}$")]
    order_id: UUID
    amount_cents: Cents


def create_service(pool: Pool, *, webhook_secret: str, session_secret: str, hub: Hub | None = None) -> Starlette:
    """The shop, with the planner at ``/blueprints`` and recado's API at ``/queue``.

    Args:
        pool: connections to the database with both the shop's tables and the queue, as a role that row-level
            security holds for.
        webhook_secret: what the payment provider signs its events with.
        session_secret: what the shop signs its users' cookies with.
        hub: tells open streams of changes; whoever serves the shop stops it at the end.
    """
    hub = hub or Hub(app, pool)
    service = Starlette(
        routes=[
            Route("/", status),
            Route("/orders", place_order, methods=["POST"]),
            Route("/webhooks/payments", receive_event, methods=["POST"]),
            Mount("/queue", create_app(app, pool, hub=hub)),
            planner(pool, session_secret=session_secret, hub=hub),
        ]
    )
    service.state.pool = pool
    service.state.webhook_secret = webhook_secret
    service.state.session_secret = session_secret
    return service


async def status(request: Request) -> JSONResponse:
    """How the shop is doing."""
    async with request.app.state.pool.acquire() as conn:
        return JSONResponse(await tables.status(conn))


async def place_order(request: Request) -> JSONResponse:
    """Take an order. Its jobs are enqueued in its own transaction: there is no order without a receipt to come,
    and no receipt for an order that was rolled back."""
    try:
        new = NewOrder.model_validate_json(await request.body())
    except ValidationError as error:
        return _bad_request(f"cannot take the order: {_reason(error)}; correct it and send it again")
    order = Order(order_id=uuid7())
    async with request.app.state.pool.acquire() as conn, conn.transaction():
        await conn.execute(INSERT_ORDER, order.order_id, new.customer, new.email, new.total_cents)
        await send_receipt.enqueue(conn, order)
        await sync_inventory.enqueue(conn, order)
    return JSONResponse({"order_id": str(order.order_id)}, 201)


async def receive_event(request: Request) -> JSONResponse:
    """Take note of a payment. The provider delivers an event until it is answered 200, so the same one may come
    twice, and even at once; its id is the job's idempotency key, and the answer names the same job each time."""
    body = await request.body()
    try:
        webhooks.verify(body, request.headers.get(webhooks.HEADER, ""), request.app.state.webhook_secret)
    except webhooks.InvalidSignature as error:
        return _bad_request(str(error))
    try:
        event = NewEvent.model_validate_json(body)
    except ValidationError as error:
        return _bad_request(f"cannot accept the event: {_reason(error)}; correct it and send it again")
    async with request.app.state.pool.acquire() as conn, conn.transaction():
        await conn.execute(INSERT_EVENT, event.id, event.order_id, event.amount_cents)
        job_id = await process_event.enqueue(conn, PaymentEvent(event_id=event.id), idempotency_key=event.id)
    return JSONResponse({"job_id": str(job_id)})


def _bad_request(sentence: str) -> JSONResponse:
    return JSONResponse({"error": sentence}, 400)


def _reason(error: ValidationError) -> str:
    """The first thing that is wrong, without what was sent."""
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in problem["loc"]) or "the body"
    return f"{where}: {problem['msg']}"
