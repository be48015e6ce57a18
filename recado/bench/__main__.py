"""``python -m recado.bench`` is ``recado bench``."""

from __future__ import annotations

import sys

import typer

from recado.bench.command import bench
from recado.errors import RecadoError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(bench)

if __name__ == "__main__":
    try:
        app(prog_name="recado bench")
    except RecadoError as error:
        typer.echo(f"recado: {error}", err=True)
        sys.exit(1)
