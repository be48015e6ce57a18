"""Minutes of steady load while another connection's transaction stays open, drawn as a picture.

    python bench/long_run.py --minutes 10 --rate 800 --svg docs/long-run.svg

VACUUM can remove nothing of what the jobs leave behind while that transaction is open. A queue whose claims walk over
it gets slower by the minute; here rate and latency have to hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import asyncpg

from recado import Recado, Worker, embedded
from recado.queue import migrate
from recado.serve import run

BUCKET = 5.0
"""Seconds of one point of the curve."""

TICK = 0.01
"""Seconds between two calls of the producer; it credits the time that has really passed, not one period a call."""

CONNECTIONS = 8
"""That enqueue: one alone is held up by the disk at each of its commits."""

app = Recado()
steady = app.declare("bench.steady")


async def produce(dsn: str, rate: float, seconds: float) -> int:
    """Enqueue ``rate`` jobs a second on several connections; how many there were."""
    return sum(await asyncio.gather(*(_produce(dsn, rate / CONNECTIONS, seconds) for _ in range(CONNECTIONS))))


async def _produce(dsn: str, rate: float, seconds: float) -> int:
    """Each job goes in by a transaction of its own, and carries the moment before its enqueue call."""
    conn = await asyncpg.connect(dsn)
    began = time.monotonic()
    sent = 0
    while (elapsed := time.monotonic() - began) < seconds:
        due = int(elapsed * rate) - sent
        for _ in range(due):
            await steady.enqueue(conn, time.monotonic())
        sent += due
        await asyncio.sleep(TICK)
    await conn.close()
    return sent


def work(dsn: str, pipe: Pipe) -> None:
    """A worker process: sends what it measured in each bucket, until it is told to end."""
    run(_work(dsn, pipe))


async def _work(dsn: str, pipe: Pipe) -> None:
    own = Recado()
    waits: list[float] = []

    @own.job("bench.steady")
    async def handle(payload: float) -> None:
        waits.append(time.monotonic() - payload)

    async with Worker(own, dsn):
        pipe.send("ready")
        due = time.monotonic() + BUCKET
        while not pipe.poll():
            await asyncio.sleep(max(0.0, min(0.5, due - time.monotonic())))
            if time.monotonic() >= due:
                taken, waits[:] = sorted(waits), []
                pipe.send((len(taken) / BUCKET, _quantile(taken, 0.5), _quantile(taken, 0.99)))
                due += BUCKET
    pipe.send("end")


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0


async def measure(dsn: str, rate: float, seconds: float) -> list[tuple[float, float, float]]:
    """Rate, p50 and p99 of each bucket."""
    admin = await asyncpg.connect(dsn)
    await migrate.up(admin)
    pinned = await asyncpg.connect(dsn)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=work, args=(dsn, theirs))
    worker.start()
    try:
        await asyncio.to_thread(ours.recv)
        async with pinned.transaction(isolation="repeatable_read", readonly=True):
            await pinned.execute("SELECT count(*) FROM recado.jobs")
            sent = await produce(dsn, rate, seconds)
        left = await admin.fetchval("SELECT count(*) FROM recado.jobs WHERE status <> 'completed'")
        while left:
            await asyncio.sleep(TICK)
            left = await admin.fetchval("SELECT count(*) FROM recado.jobs WHERE status <> 'completed'")
        done = await admin.fetchval("SELECT count(*) FROM recado.jobs")
        if done != sent:
            sys.exit(f"cannot trust this run: {sent} jobs were enqueued and {done} are in the table")
        ours.send("stop")
        buckets = []
        while (message := await asyncio.to_thread(ours.recv)) != "end":
            buckets.append(message)
        return buckets[: int(seconds // BUCKET)]
    finally:
        worker.join(10)
        worker.kill()
        await pinned.close()
        await admin.close()


def draw(buckets: Sequence[tuple[float, float, float]], rate: float) -> str:
    """The curves as SVG: jobs a second above, milliseconds from enqueue to handler below."""
    width, height, left = 860, 170, 60
    top_rate = rate * 1.5
    top_wait = max(0.01, max(p99 for _, _, p99 in buckets) * 1.2)
    step = (width - left - 20) / max(1, len(buckets) - 1)

    def line(values: Iterable[float], top: float, below: int, colour: str) -> str:
        points = " ".join(
            f"{left + i * step:.1f},{below + height - min(value / top, 1) * height:.1f}"
            for i, value in enumerate(values)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    def frame(below: int, title: str, top: float, unit: str) -> str:
        labels = "".join(
            f'<text x="{left - 6}" y="{below + height - share * height + 4:.0f}" text-anchor="end">'
            f"{top * share:.{0 if top > 10 else 1}f}{unit}</text>"
            f'<line x1="{left}" x2="{width - 20}" y1="{below + height - share * height:.0f}" '
            f'y2="{below + height - share * height:.0f}" stroke="#ddd"/>'
            for share in (0, 0.5, 1)
        )
        return f'<text x="{left}" y="{below - 8}" font-weight="bold">{title}</text>{labels}'

    minutes = len(buckets) * BUCKET / 60
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 460" font-family="sans-serif" font-size="12">'
        f'<rect width="{width}" height="460" fill="white"/>'
        + frame(40, f"completed a second, {rate:g} offered", top_rate, "")
        + line((each for each, _, _ in buckets), top_rate, 40, "#1f6f43")
        + frame(260, "from before the enqueue to the handler: p50 (blue), p99 (red)", top_wait * 1000, " ms")
        + line((p50 for _, p50, _ in buckets), top_wait, 260, "#2454a4")
        + line((p99 for _, _, p99 in buckets), top_wait, 260, "#b3261e")
        + f'<text x="{width - 20}" y="450" text-anchor="end">{minutes:g} minutes, a point every {BUCKET:g} s</text>'
        + "</svg>\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rate", type=float, default=800.0)
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, embedded.start(Path(folder) / "data") as server:
        buckets = run(measure(server.dsn(), options.rate, options.minutes * 60))
    if options.svg:
        options.svg.write_text(draw(buckets, options.rate))
    fifth = max(1, len(buckets) // 5)
    rates = [each for each, _, _ in buckets]
    p99s = sorted(p99 for _, _, p99 in buckets[:fifth]), sorted(p99 for _, _, p99 in buckets[-fifth:])
    print(
        json.dumps(
            {
                "rate": round(sum(rates) / len(rates), 1),
                "lowest_rate": min(rates),
                "p50_ms": round(_quantile(sorted(p50 for _, p50, _ in buckets), 0.5) * 1000, 2),
                "p99_ms_first_fifth": round(_quantile(p99s[0], 0.5) * 1000, 2),
                "p99_ms_last_fifth": round(_quantile(p99s[1], 0.5) * 1000, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
