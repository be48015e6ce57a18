"""The world outside: customers who order, a payment provider that tells the shop of it, and a planner, over HTTP.

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

PLANNER = "robot"
"""Of :data:`examples.shop.accounts.USERS`."""

HALLS = 5
"""Blueprints that are imported, one after the other and again; the next import of a name replaces the one before."""

BAD, BACKED_UP = 4, 3
"""Of how many rounds one has a file with a fault in it, and one a backup, which is restored at once."""

ROUND_INTERVAL = 1.0
"""Seconds between two rounds: what is planned here is still there when somebody looks at it."""

POLL_INTERVAL = 0.2
"""Seconds between two looks at an operation: most take less than the second that the answer's Retry-After asks for."""


class UnexpectedAnswer(Exception):
    """The shop did not answer as it should."""


async def visit(url: str, secret: str, *, rate: float, closing: asyncio.Event) -> None:
    """Send requests to the shop until it is closing.

    Args:
        secret: what the payment provider signs with.
        rate: orders a second.
    """
    numbers = itertools.count()
    async with _client(url) as shop, asyncio.TaskGroup() as crowd:
        for _ in range(CUSTOMERS):
            crowd.create_task(_customer(shop, secret, numbers, rate / CUSTOMERS, closing))


def _client(url: str) -> httpx.AsyncClient:
    # Idle connections are dropped before the server does so, which takes 5 s: a request must not meet its goodbye.
    limits = httpx.Limits(keepalive_expiry=2)
    # And not through a proxy, whatever the environment says: the shop is on this machine.
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=30, trust_env=False)


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
    _check(answer, expect)
    result: dict[str, Any] = answer.json()
    return result


def _check(answer: httpx.Response, expect: int) -> None:
    if answer.status_code != expect:
        raise UnexpectedAnswer(
            f"{answer.url.path} answered {answer.status_code} instead of {expect}: {answer.text[:200]}"
        )


async def plan(url: str, closing: asyncio.Event) -> None:
    """Import racks, have them analyzed, back them up and restore them, again and again until the shop is closing."""
    async with _client(url) as shop:
        _check(await shop.post("/login", data={"user": PLANNER}), 303)
        for number in itertools.count():
            await _plan_hall(shop, number)
            with suppress(TimeoutError):
                async with asyncio.timeout(ROUND_INTERVAL):
                    await closing.wait()
                    return


async def _plan_hall(shop: httpx.AsyncClient, number: int) -> None:
    racks, hall = _racks(), {"name": f"Hall {number % HALLS}"}
    imported = await _operate(shop, "/blueprints/import", params=hall, content=racks)
    await _operate(shop, f"/blueprints/{imported['blueprint_id']}/analysis")
    if number % BAD == 0:
        racks += "Rack 0,Z1,no number,0,0\n"
        await _operate(shop, "/blueprints/import", params=hall, content=racks, bad=True)
    if number % BACKED_UP == 0:
        backup = await _operate(shop, "/backups")
        await _operate(shop, f"/backups/{backup['backup_id']}/restore")


def _racks() -> str:
    lines = ["name,position,height_units,used_units,weight_kg"]
    for column in range(1, random.randint(20, 100)):
        used = random.randint(0, 42)
        lines.append(f"Rack {column},{random.choice('ABC')}{column},42,{used},{80 + used * random.randint(10, 30)}")
    return "\n".join(lines) + "\n"


async def _operate(shop: httpx.AsyncClient, path: str, *, bad: bool = False, **request: Any) -> dict[str, Any]:
    """Start an operation, and watch it to its end as a script does; its result."""
    answer = await shop.post(path, headers={"Content-Type": "text/csv"}, **request)
    _check(answer, 202)
    while True:
        polled = await shop.get(answer.headers["Location"])
        _check(polled, 200)
        operation: dict[str, Any] = polled.json()
        if operation["status"] == ("error" if bad else "done"):
            return operation["result"] or {}
        if operation["status"] in ("done", "error"):
            raise UnexpectedAnswer(f"{operation['kind']} ended otherwise than it should: {operation}")
        await asyncio.sleep(POLL_INTERVAL)
