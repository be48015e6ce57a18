"""The adapter: ``python -m bench.harness``, configured by the harness's environment variables.

One process enqueues jobs, runs them, and tells how that goes in lines of JSON on standard output. Whatever happens to
the server, it goes on; SIGTERM ends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from bench.harness.environment import ADAPTER, Environment, read
from bench.harness.metrics import WINDOW, Meter
from bench.harness.producer import JOB_TYPE, Demand, Depth, Gauge, Pace, Payload, produce
from recado import ClaimedJob, Recado, Worker
from recado.queue import migrate
from recado.queue.connections import TRANSIENT, connector
from recado.queue.models import DEFAULT_QUEUE
from recado.serve import run
from recado.version import VERSION
from recado.worker.events import Event, EventKind
from recado.worker.retrying import Waits

logger = logging.getLogger("bench.harness")

GRACE = 1.0
"""Seconds for running jobs after SIGTERM; they take milliseconds."""

STOP_TIMEOUT = 4.0
"""Seconds until the process ends in any case: the harness gives it five."""

ENDED_OTHERWISE = {EventKind.FAILED, EventKind.DIED, EventKind.RELEASED, EventKind.LOST}

READ_SIZE = 65_536
"""Bytes; what a pipe holds."""


def say(line: dict[str, Any]) -> None:
    """A line for the harness, which reads all the time."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def read_input(demand: Demand) -> None:
    """Read standard input to its end, whoever sends what: a pipe that fills up blocks the harness itself.

    In a thread that ends with the process, and past Python's buffer, whose lock it would hold at the exit: no event
    loop can wait for every kind of input.
    """
    loop = asyncio.get_running_loop()

    def follow() -> None:
        rest = b""
        while data := os.read(sys.stdin.fileno(), READ_SIZE):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                word, _, number = line.strip().partition(b" ")
                if word == b"ENQUEUE" and number.isdigit():
                    with suppress(RuntimeError):  # the loop is closed: the process is about to end
                        loop.call_soon_threadsafe(demand.ask, int(number))

    threading.Thread(target=follow, name="input", daemon=True).start()


def make_app(environment: Environment, meter: Meter) -> Recado:
    """The application under test."""
    app = Recado("bench")

    @app.job(JOB_TYPE)
    async def work(payload: Payload, job: ClaimedJob) -> None:
        meter.begin(job.id, payload.at)
        await asyncio.sleep(environment.work)

    return app


async def prepare(environment: Environment) -> None:
    """Bring the schema up to date, as soon as the server lets us."""
    waits = Waits()
    while True:
        try:
            conn = await connector(environment.dsn).connect("setup")
            try:
                await migrate.up(conn)
            finally:
                await conn.close()
        except TRANSIENT as error:
            logger.warning("cannot set up: %s; trying again", type(error).__name__)
            await asyncio.sleep(waits.next())
        else:
            return


async def work(app: Recado, environment: Environment, meter: Meter, stop: asyncio.Event) -> None:
    """Run jobs until ``stop``; a worker that cannot start for want of a server is started again."""

    def observe(event: Event) -> None:
        if event.kind is EventKind.COMPLETED:
            meter.complete(event.jobs)
        elif event.kind in ENDED_OTHERWISE:
            meter.drop(event.jobs)

    waits = Waits()
    while not stop.is_set():
        try:
            async with Worker(
                app, environment.dsn, queues={DEFAULT_QUEUE: environment.workers}, grace=GRACE, observe=observe
            ):
                await stop.wait()
        except TRANSIENT as error:
            logger.warning("cannot start the worker: %s; trying again", type(error).__name__)
            await asyncio.sleep(waits.next())


async def next_tick(interval: float) -> float:
    """Wait for the next multiple of ``interval`` of the wall clock, and return it."""
    tick = (time.time() // interval + 1) * interval
    await asyncio.sleep(tick - time.time())
    return tick


async def sample(environment: Environment, meter: Meter) -> None:
    """Tell rates and latencies at each tick until cancelled."""
    enqueued, completed, before = meter.enqueued, meter.completed, time.time()
    while True:
        tick = await next_tick(environment.interval)
        now = time.time()
        window = now - before
        values = [(name, value, float(WINDOW)) for name, value in meter.percentiles()]
        values.append(("enqueue_rate", (meter.enqueued - enqueued) / window, window))
        values.append(("completion_rate", (meter.completed - completed) / window, window))
        enqueued, completed, before = meter.enqueued, meter.completed, now
        tell(environment, tick, values)


async def sample_depth(environment: Environment, gauge: Gauge) -> None:
    """Tell the queue's depth at each tick until cancelled."""
    # Not with the others: a server that hangs would keep them back.
    while True:
        tick = await next_tick(environment.interval)
        if (depth := await gauge.depth()) is not None:
            tell(environment, tick, [("queue_depth", float(depth), 0.0)])


def tell(environment: Environment, tick: float, values: list[tuple[str, float, float]]) -> None:
    """Lines of one tick: metric, value, window in seconds."""
    for metric, value, window in values:
        say(
            {
                "t": datetime.fromtimestamp(tick, UTC).isoformat(),
                "system": ADAPTER["system"],
                "instance_id": environment.instance,
                "kind": "adapter",
                "subject_kind": "adapter",
                "subject": "",
                "metric": metric,
                "value": value,
                "window_s": window,
            }
        )


def describe() -> None:
    """The first line, once the schema stands."""
    say(
        {
            "kind": "descriptor",
            **{name: ADAPTER[name] for name in ("system", "event_tables", "extensions", "db_name")},
            "version": VERSION,
            "schema_version": str(migrate.shipped()[-1].number),
            "started_at": datetime.now(UTC).isoformat(),
        }
    )


@asynccontextmanager
async def background(*works: Any) -> AsyncIterator[None]:
    """Run these beside the block, and cancel them at its end."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
        yield
        for task in tasks:
            task.cancel()


async def main(environment: Environment) -> None:
    """Do what the harness asks for until SIGTERM."""
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    preparing = asyncio.create_task(prepare(environment))

    def end() -> None:
        stop.set()
        preparing.cancel()
        # A server that hangs must not keep the process beyond the harness's patience.
        loop.call_later(STOP_TIMEOUT, os._exit, 0)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    meter, demand = Meter(), Demand()
    read_input(demand)
    app = make_app(environment, meter)
    await asyncio.wait({preparing})
    if stop.is_set():
        return
    await preparing  # raises what no waiting helps against
    describe()
    gauge = Gauge(app, environment.dsn)
    pace, depth = Pace(environment.rate), Depth(environment.depth, meter)
    source = demand if environment.on_demand else depth if environment.by_depth else pace
    beside = [produce(app, environment, source, meter), sample(environment, meter)]
    if environment.instance == 0:
        beside.append(sample_depth(environment, gauge))
    if source is pace and environment.control_file is not None:
        beside.append(pace.follow(environment.control_file))
    if source is depth:
        beside.append(depth.count(gauge.depth))
    async with background(*beside):
        await work(app, environment, meter, stop)
    await gauge.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(main(read(os.environ)))
