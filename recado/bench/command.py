"""``recado bench``."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Annotated, Any

import rich.console
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from recado.bench.database import open_database, own_server
from recado.bench.machine import machine
from recado.bench.options import DEFAULT_CONNECTIONS, DEFAULT_PAYLOAD_BYTES, DEFAULT_REPEAT, SCHEMA, Options
from recado.bench.report import print_report
from recado.bench.runs import Tell, measure
from recado.bench.scenarios import SCENARIOS, Scenario
from recado.queue.benchmark import server_settings
from recado.worker.worker import DEFAULT_SLOTS

ALL = "all"

_ABOUT = ",\n\n".join(f"{each.name} ({each.about})" for each in SCENARIOS.values())


def bench(
    scenario: Annotated[str, typer.Argument(metavar="SCENARIO", help=f"{_ABOUT}, or {ALL} of them.")],
    jobs: Annotated[int | None, typer.Option(min=1, help="How many; else what takes a few seconds.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Slots of each worker for each queue.")] = DEFAULT_SLOTS,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes.")] = 1,
    payload_bytes: Annotated[int, typer.Option(min=0, help="Of each job's payload.")] = DEFAULT_PAYLOAD_BYTES,
    work_ms: Annotated[float, typer.Option(min=0, help="Milliseconds for which each handler sleeps.")] = 0.0,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each side; medians are told.")] = DEFAULT_REPEAT,
    connections: Annotated[int, typer.Option(min=1, help="That enqueue at once.")] = DEFAULT_CONNECTIONS,
    dsn: Annotated[
        str | None,
        typer.Option(metavar="URL", help=f"A database for a schema {SCHEMA}; else a server is started for it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one line of JSON.")] = False,
) -> None:
    """Measure the queue here, beside the bare statements that it is made of.

    Each scenario is run in turns with the same SQL statements alone, without workers and handlers: that is the limit.
    Nothing stays behind.
    """
    chosen = _chosen(scenario)
    options = {
        each.name: Options(
            jobs=each.jobs if jobs is None else jobs,
            workers=workers,
            concurrency=concurrency,
            connections=connections,
            payload_bytes=payload_bytes,
            work_ms=work_ms,
            repeat=repeat,
        )
        for each in chosen
    }
    with (
        _on_sigterm(signal.default_int_handler),
        nullcontext(dsn) if dsn else own_server() as url,
        _progress() as tell,
    ):
        try:
            results, server = asyncio.run(_measure_all(url, chosen, options, tell, ours=dsn is None))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    facts = {"machine": machine(), "server": server}
    print_report(rich.console.Console(stderr=as_json), results, **facts)
    if as_json:
        figures = {"scenario": ALL, "scenarios": results} if scenario == ALL else results[0]
        typer.echo(json.dumps(_rounded({**figures, **facts})))


def _chosen(name: str) -> list[Scenario]:
    if name == ALL:
        return list(SCENARIOS.values())
    if name not in SCENARIOS:
        raise typer.BadParameter(f"must be one of {', '.join([*SCENARIOS, ALL])}", param_hint="SCENARIO")
    return [SCENARIOS[name]]


async def _measure_all(
    dsn: str, scenarios: list[Scenario], options: Mapping[str, Options], tell: Tell, *, ours: bool
) -> tuple[list[dict[str, Any]], Mapping[str, str]]:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    if task is None:  # pragma: no cover - a coroutine always runs in one
        raise RuntimeError("cannot run the benchmark outside a task")
    # Within the loop an exception from a signal handler may be raised anywhere, and be lost there.
    with _on_sigterm(lambda *_: loop.call_soon_threadsafe(task.cancel)):
        async with open_database(dsn, ours=ours) as database:
            results = [await measure(database, each, options[each.name], tell) for each in scenarios]
            return results, await server_settings(database.conn)


@contextmanager
def _on_sigterm(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """SIGTERM ends us as Ctrl-C does: everything is cleaned up on the way out."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[Tell]:
    """A bar on a terminal, and nothing elsewhere."""
    console = rich.console.Console(stderr=True)
    columns = TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("starting", total=None)
        yield lambda what, done, jobs: progress.update(bar, description=what, completed=done, total=jobs)


def _rounded(value: Any) -> Any:
    """Four digits after the point: more would only pretend."""
    match value:
        case float():
            return round(value, 4)
        case dict():
            return {key: _rounded(item) for key, item in value.items()}
        case list():
            return [_rounded(item) for item in value]
    return value
