"""The world outside: customers who order, and a payment provider that tells the shop of it, over HTTP.

The provider behaves as real ones do: it delivers some events twice. And not every request is what it seems: some
webhooks are forged, and some are for orders that the shop has never seen.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from uuid import uuid4

import httpx

from examples.shop import webhooks

CUSTOMERS = 20
"""Who order at the same time, each waiting for the shop's answer: a slow shop is not overrun."""

REDELIVERED, FORGED, STRAY = 5, 10, 40
"""Of how many events one is delivered twice, one is forged, and one is for an order that does not exist."""

NAMES = ("Ada Lovelace", "Núria Puig", "Žofia Nowak", "Grace Hopper", "Jürgen Groß", "José Álvarez, hijo")


class UnexpectedAnswer(Exception):
    """The shop did not answer as it should."""


async def visit(url: str, secret: str, *, rate: float, closing: asyncio.Event) -> None:
    """Send requests to the shop until it is closing.

    Args:
        secret: what the payment provider signs with.
        rate: orders a second.
    """
    numbers = itertools.count()
    # Idle connections are dropped before the server does so, which takes 5 s: a request must not meet its goodbye.
    limits = httpx.Limits(keepalive_expiry=2)
    # And not through a proxy, whatever the environment says: the shop is on this machine.
    client = httpx.AsyncClient(base_url=url, limits=limits, timeout=30, trust_env=False)
    async with client as shop, asyncio.TaskGroup() as crowd:
        for _ in range(CUSTOMERS):
            crowd.create_task(_customer(shop, secret, numbers, rate / CUSTOMERS, closing))


async def _customer(
    shop: httpx.AsyncClient, secret: str, numbers: Iterator[int], rate: float, closing: asyncio.Event
) -> None:
    while not closing.is_set():
        with suppress(TimeoutError):
            async with asyncio.timeout(random.expovariate(rate)):
                await closing.wait()
                return
        await _buy(shop, secret, next(numbers))


async def _buy(shop: httpx.AsyncClient, secret: str, number: int) -> None:
    amount = random.randint(500, 50_000)
    order = {"customer": random.choice(NAMES), "email": f"customer{number}@example.com", "total_cents": amount}
    placed = await _post(shop, "/orders", order, expect=201)
    event = {"id": _event_id(), "order_id": placed["order_id"], "amount_cents": amount}
    await _deliver(shop, event, secret)
    if number % REDELIVERED == 0:
        await _deliver(shop, event, secret)
    if number % FORGED == 0:
        await _deliver(shop, event | {"id": _event_id()}, "not the provider's secret", expect=400)
    if number % STRAY == 0:
        await _deliver(shop, event | {"id": _event_id(), "order_id": str(uuid4())}, secret)


def _event_id() -> str:
    return f"evt_{uuid4().hex}"


async def _deliver(shop: httpx.AsyncClient, event: dict[str, Any], secret: str, *, expect: int = 200) -> None:
    await _post(shop, "/webhooks/payments", event, secret, expect=expect)


async def _post(
    shop: httpx.AsyncClient, path: str, body: dict[str, Any], secret: str | None = None, *, expect: int
) -> dict[str, Any]:
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if secret is not None:
        headers[webhooks.HEADER] = webhooks.sign(content, secret)
    answer = await shop.post(path, content=content, headers=headers)
    if answer.status_code != expect:
        raise UnexpectedAnswer(f"{path} answered {answer.status_code} instead of {expect}: {answer.text[:200]}")
    result: dict[str, Any] = answer.json()
    return result
