"""All chaos programs in full, and a table of what they counted: ``python -m tests.chaos [PART OF A NAME]``."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.table import Table

from recado.settings import DEFAULT_SCHEMA
from tests.chaos.cluster import cluster
from tests.chaos.scenarios import clocks, failover, kills, network, pooler, server, silence
from tests.chaos.stage import Impossible, Outcome

Program: TypeAlias = Callable[[Path], Awaitable[Outcome]]
"""Runs in a folder of its own."""

OnDatabase: TypeAlias = Callable[[str, str, Path], Awaitable[Outcome]]
"""Takes the URL of a database and its schema, too."""


def on_own_cluster(program: OnDatabase) -> Program:
    """Give ``program`` a durable server that nobody else uses."""

    async def run(folder: Path) -> Outcome:
        async with cluster(folder / "server", DEFAULT_SCHEMA) as made:
            return await program(made.dsn, DEFAULT_SCHEMA, folder)

    return run


def broken_server(*faults: server.Fault) -> Program:
    return lambda folder: server.break_server(folder, DEFAULT_SCHEMA, faults, server.FULL)


def spoiled_network(*faults: network.Fault) -> Program:
    return on_own_cluster(lambda dsn, schema, folder: network.spoil_network(dsn, schema, folder, faults, network.FULL))


WIDTH = 110
"""Columns, so that the table is whole in a log, too."""

PROGRAMS: dict[str, Program] = {
    "workers killed": on_own_cluster(lambda dsn, schema, folder: kills.kill_workers(dsn, schema, folder, kills.FULL)),
    "server stopped fast": broken_server(*[server.stop_fast] * 5),
    "server stopped immediately": broken_server(*[server.stop_immediately] * 5),
    "server away": broken_server(server.stay_away),
    "sessions terminated": broken_server(server.terminate_sessions),
    "no connection left": broken_server(server.use_up_connections),
    "no space left": lambda folder: server.fill_disk(folder, DEFAULT_SCHEMA, server.FULL),
    "network slow": spoiled_network(*network.SLOWNESS),
    "network silent": spoiled_network(network.stall),
    "network half-open": spoiled_network(network.half_open),
    "network cut": spoiled_network(network.cut),
    "loops blocked": on_own_cluster(lambda dsn, schema, folder: silence.block_loops(dsn, schema, folder, silence.FULL)),
    "workers frozen": on_own_cluster(
        lambda dsn, schema, folder: silence.freeze_workers(dsn, schema, folder, silence.FULL)
    ),
    "clocks an hour off": on_own_cluster(
        lambda dsn, schema, folder: clocks.set_clocks_wrong(dsn, schema, folder, clocks.FULL)
    ),
    "behind a pooler": on_own_cluster(
        lambda dsn, schema, folder: pooler.share_servers(dsn, schema, folder, pooler.FULL)
    ),
    "primary lost": lambda folder: failover.fail_over(folder, DEFAULT_SCHEMA, failover.FULL),
}


async def main(wanted: str) -> int:
    """Run the programs whose names contain ``wanted``; the exit code."""
    console = Console(width=WIDTH)
    table = Table("program", *("jobs", "runs", "reclaims", "poisoned", "seconds", "recovered", "faults"))
    failed = 0
    for name, program in PROGRAMS.items():
        if wanted not in name:
            continue
        console.print(f"{name} …")
        with tempfile.TemporaryDirectory(prefix="recado-chaos-") as folder:
            try:
                outcome = await program(Path(folder))
            except Impossible as reason:
                table.add_row(name, *[""] * 6, f"skipped: {reason}")
                continue
        for fault in outcome.audit.faults:
            console.print(f"  {fault}", style="red", markup=False)
        failed += bool(outcome.audit.faults)
        table.add_row(name, *_cells(outcome))
    console.print(table)
    return 1 if failed else 0


def _cells(outcome: Outcome) -> list[str]:
    found, recovered = outcome.audit, outcome.recovered
    return [
        *(f"{count:,}" for count in (found.acknowledged, found.runs, found.reclaims, found.poisoned)),
        f"{outcome.seconds:.0f}",
        "" if recovered is None else f"{recovered:.1f} s",
        f"{len(found.faults)}",
    ]


if __name__ == "__main__":
    sys.exit(asyncio.run(main(" ".join(sys.argv[1:]))))
