"""Shows figures to people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

Figures: TypeAlias = Mapping[str, Any]

LEGEND = (
    "Medians; bare: the same statements alone. The ratio is recado's figure to the bare one, "
    "for pinned the last fifth's rate to the first's."
)

CELLS = ("scenario", "recado", "bare", "ratio", "min to max", "CPU a job", "memory")


def print_report(console: Console, results: Sequence[Figures], machine: Figures, server: Figures) -> None:
    """A table of the figures, and what they were measured on."""
    table = Table(*CELLS, box=None, pad_edge=False, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for figures in results:
        for row in _rows(figures):
            table.add_row(*row)
    console.print(table)
    console.print(LEGEND, style="dim")
    console.print()
    for title, facts in (("machine", machine), ("server", server)):
        line = Text(f"{title}: ", "bold").append(", ".join(f"{name} {value}" for name, value in facts.items()), "none")
        console.print(line, soft_wrap=True)


def _rows(figures: Figures) -> Iterator[tuple[str, ...]]:
    """One line, or for waits one for each percentile."""
    name = figures["scenario"]
    used = f"{figures['client_cpu_us']:.1f} µs", f"{figures['peak_rss_mb']:.0f} MB"
    low, high = figures["ratio_range"]
    ratio = f"{figures['ratio']:.2f}", f"{low:.2f} to {high:.2f}"
    if "p50_ms" not in figures:
        yield name, f"{figures['rate']:,.0f}/s", f"{figures['bare_rate']:,.0f}/s", *ratio, *used
        return
    yield f"{name} p50", f"{figures['p50_ms']:.2f} ms", f"{figures['bare_p50_ms']:.2f} ms", *ratio, *used
    for percentile in ("p95", "p99", "max"):
        ours, bare = figures[f"{percentile}_ms"], figures[f"bare_{percentile}_ms"]
        yield f"{name} {percentile}", f"{ours:.2f} ms", f"{bare:.2f} ms", f"{ours / bare:.2f}", "", "", ""
