"""Runs recado beside its peers, in turns on one server, and prints how many times faster it is; see README.md."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import rich.console
import typer

from bench.catalog import PEERS, RECADO
from bench.errors import PeerError
from bench.install import Installed, install
from bench.report import Results, as_json, print_table
from bench.rows import ROWS, connection, fresh
from recado.bench.database import own_server
from recado.bench.machine import machine
from recado.queue.benchmark import server_settings

DEFAULT_JOBS = 50_000
"""Enough for the fastest to work for more than a second."""

DEFAULT_REPEAT = 3
"""The fewest that have a median."""

DEFAULT_VENVS = Path(".recado/bench-venvs")
"""Beside the data of ``recado dev``, which git ignores."""

T = TypeVar("T")

progress = rich.console.Console(stderr=True, highlight=False, markup=False, soft_wrap=True)


def main(
    jobs: Annotated[int, typer.Option(min=100, help="The most in a run; slow peers get fewer.")] = DEFAULT_JOBS,
    repeat: Annotated[int, typer.Option(min=1, help="Rounds; medians are told.")] = DEFAULT_REPEAT,
    peers: Annotated[str, typer.Option(metavar="NAMES", help="Which, with commas.")] = ",".join(PEERS),
    rows: Annotated[str, typer.Option(metavar="NAMES", help="What to measure, with commas.")] = ",".join(ROWS),
    venvs: Annotated[Path, typer.Option(help="A folder to install the peers into.")] = DEFAULT_VENVS,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures there, too.")] = None,
) -> None:
    """Run recado beside its peers, in turns on one server, and print how they compare."""
    chosen_peers, chosen_rows = _chosen(peers, PEERS, "--peers"), _chosen(rows, ROWS, "--rows")
    results = Results()
    systems = [install(RECADO, venvs)]
    for peer in chosen_peers.values():
        progress.print(f"installing {peer.name}")
        try:
            systems.append(install(peer, venvs))
        except PeerError as error:
            results.skip(peer.name, chosen_rows, str(error))
    with own_server() as server:
        try:
            settings = asyncio.run(_compare(server, systems, chosen_rows, jobs, repeat, results))
        except PeerError as error:
            raise SystemExit(f"cannot measure recado: {error}") from error
    facts = {"machine": machine(), "server": settings}
    print_table(rich.console.Console(), results, facts)
    if json_file is not None:
        json_file.write_text(json.dumps(as_json(results, facts), indent=2) + "\n")


def _chosen(names: str, known: Mapping[str, T], option: str) -> dict[str, T]:
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in known:
            raise typer.BadParameter(f"there is no {name!r}, but {', '.join(known)}", param_hint=option)
    return {name: known[name] for name in chosen}


async def _compare(
    server: str, systems: Iterable[Installed], rows: Iterable[str], jobs: int, repeat: int, results: Results
) -> Mapping[str, str]:
    """Each round runs each row of all systems, one right after the other.

    Returns:
        The server's settings.

    Raises:
        PeerError: recado itself failed. A peer that fails is left out of that row from then on.
    """
    for i in range(1, repeat + 1):
        for row in rows:
            for installed in systems:
                name = installed.system.name
                if results.skipped(row, name):
                    continue
                try:
                    async with fresh(server, installed, jobs) as run:
                        figures = await ROWS[row](run)
                except PeerError as error:
                    if installed.system is RECADO:
                        raise
                    results.skip(name, [row], str(error))
                    progress.print(f"{i}/{repeat} {row} {name}: {error}")
                    continue
                results.add(row, name, figures)
                told = ", ".join(f"{value:,.1f} {unit}" for unit, value in figures.items())
                progress.print(f"{i}/{repeat} {row} {name}: {told}")
    async with connection(server) as conn:
        return await server_settings(conn)


if __name__ == "__main__":
    typer.run(main)
