"""A network between workers and server that is slow, silent, half-open or cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tests.chaos.proxy import Proxy, proxy
from tests.chaos.stage import HASTY, Outcome, Stage, stage

SLOW = 0.05
"""Seconds in each direction: to the other side of an ocean and back."""

NARROW = 20_000
"""Bytes a second for each connection: a line on which a claim of ten jobs takes a fifth of a second."""

MAX_BUSY = 0.5
"""The part of a core that a worker without a server may use. Waits between its tries grow to seconds, so that it is
next to nothing; one that spins takes all of it."""

MAX_LINES = 40
"""Lines a second that a worker may log meanwhile: one for each try, and one for each job that it has to give back."""

TIMEOUTS = ("--timeout", "10")
"""Of handlers: one that waits for a row on a connection that is half-open has nothing else to end it."""


@dataclass(frozen=True)
class Size:
    jobs: int
    lasting: float
    """Seconds of each fault."""
    statement_timeout: float | None
    """Seconds until workers take a silent connection for dead, where it is not to be recado's own 30."""
    recovery: float
    """Seconds from the return of the network until a job that comes in then is done. Where the faults outlast a
    statement's timeout and the moment that other connections get after it, what is left are a try to connect that
    began before, the wait until the next, and the backlog; else that timeout comes first."""


SHORT = Size(jobs=90, lasting=1.0, statement_timeout=1.5, recovery=8.0)
FULL = Size(jobs=10_000, lasting=40.0, statement_timeout=None, recovery=16.0)

Fault: TypeAlias = Callable[[Proxy], None]


def delay(network: Proxy) -> None:
    network.delay(SLOW)


def throttle(network: Proxy) -> None:
    network.throttle(NARROW)


def stall(network: Proxy) -> None:
    network.stall()


def half_open(network: Proxy) -> None:
    network.half_open()


def cut(network: Proxy) -> None:
    network.cut()


SLOWNESS: tuple[Fault, ...] = (delay, throttle)
ABSENCE: tuple[Fault, ...] = (stall, half_open, cut)


async def spoil_network(dsn: str, schema: str, folder: Path, faults: tuple[Fault, ...], size: Size) -> Outcome:
    """Let jobs come in by a way of their own, and one fault after another come between workers and server."""
    async with (
        proxy(dsn) as network,
        stage(dsn, schema, folder, options=(*HASTY, *TIMEOUTS), worker_dsn=network.dsn) as stand,
    ):
        environment = {} if size.statement_timeout is None else {"STATEMENT_TIMEOUT": f"{size.statement_timeout}"}
        await stand.start_workers(2, **environment)
        spins: list[str] = []
        async with asyncio.TaskGroup() as group:
            group.create_task(stand.produce(size.jobs))
            for n, fault in enumerate(faults, 1):
                await stand.produced(n * size.jobs // (len(faults) + 1))
                fault(network)
                if fault in SLOWNESS:
                    await stand.healed()  # as slow as it is, it goes on
                spins += await _spinning(stand, size.lasting, idle=fault in ABSENCE)
                network.heal()
                await stand.healed()
            stand.calm.set()
        outcome = await stand.close(connections_broke=True)
    return outcome.with_faults([*spins, *_late(outcome, faults, size)])


async def _spinning(stand: Stage, seconds: float, *, idle: bool) -> list[str]:
    """Let the fault last; whether a worker is busy with it."""
    began, cpu, lines = time.monotonic(), stand.cpu_seconds(), stand.lines_logged()
    await asyncio.sleep(seconds)
    rounds = (time.monotonic() - began) * len(stand.workers)
    busy, logged = (stand.cpu_seconds() - cpu) / rounds, (stand.lines_logged() - lines) / rounds
    if idle and (busy > MAX_BUSY or logged > MAX_LINES):
        return [f"workers without a server use {busy:.0%} of a core each and log {logged:.0f} lines a second"]
    return []


def _late(outcome: Outcome, faults: tuple[Fault, ...], size: Size) -> list[str]:
    """Whether work went on soon behind each fault; a slow network is slow while it lasts."""
    if set(faults) <= set(ABSENCE) and (outcome.recovered is None or outcome.recovered > size.recovery):
        return [f"work went on {outcome.recovered} s after the network was back"]
    return []
