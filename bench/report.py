"""Collects the figures, and shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bench.catalog import RECADO
from bench.rows import Figures

COLUMNS = ("", "median", "min to max", "recado/peer", "min to max")


@dataclass(slots=True)
class Results:
    """What each system did in each row, round by round, or why it did not."""

    figures: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, row: str, system: str, figures: Figures) -> None:
        """Note the figures of one round."""
        self.figures.setdefault(row, {}).setdefault(system, []).append(figures)

    def skip(self, system: str, rows: Iterable[str], reason: str) -> None:
        """Leave a system out of these rows; what it did there before is not to be trusted either."""
        for row in rows:
            self.figures.get(row, {}).pop(system, None)
            self.reasons.setdefault(row, {})[system] = reason

    def skipped(self, row: str, system: str) -> bool:
        return system in self.reasons.get(row, {})


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of one system in one row: its runs, and recado's divided by them, round by round."""

    row: str
    unit: str
    system: str
    runs: list[float]
    ratios: list[float]


def lines(results: Results) -> Iterator[Line]:
    """All of them, recado first in each row."""
    for row, systems in results.figures.items():
        ours = systems[RECADO.name]
        for unit in ours[0]:
            for system, rounds in systems.items():
                runs = [figures[unit] for figures in rounds]
                ratios = [mine[unit] / its for mine, its in zip(ours, runs, strict=True)]
                yield Line(row, unit, system, runs, ratios)


def print_table(console: Console, results: Results, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """A table of the figures, why some are missing, and what they were measured on."""
    table = Table(*COLUMNS, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for (row, unit), group in groupby(lines(results), lambda line: (line.row, line.unit)):
        table.add_row(Text(f"{row}, {unit}", "bold"))
        for line in group:
            table.add_row(*_cells(line))
    console.print(table)
    console.print("\nOf jobs/s more is better, of ms less.")
    for row, reasons in results.reasons.items():
        for system, reason in reasons.items():
            console.print(Text(f"{row}, {system}: {reason}."), soft_wrap=True)
    for title, named in facts.items():
        told = ", ".join(f"{name} {value}" for name, value in named.items())
        console.print(Text(f"{title}: ", "bold").append(told, "none"), soft_wrap=True)


def _cells(line: Line) -> list[str]:
    digits = 1 if line.unit.endswith("ms") else 0
    low, high = min(line.runs), max(line.runs)
    cells = [f"  {line.system}", f"{median(line.runs):,.{digits}f}", f"{low:,.{digits}f} to {high:,.{digits}f}"]
    if line.system != RECADO.name:
        cells += [f"{median(line.ratios):.2f}", f"{min(line.ratios):.2f} to {max(line.ratios):.2f}"]
    return cells


def as_json(results: Results, facts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "figures": [
            {
                "row": line.row,
                "unit": line.unit,
                "system": line.system,
                "median": round(median(line.runs), 3),
                "runs": [round(run, 3) for run in line.runs],
                "ratio": round(median(line.ratios), 4),
                "ratios": [round(ratio, 4) for ratio in line.ratios],
            }
            for line in lines(results)
        ],
        "skipped": results.reasons,
        **facts,
    }
