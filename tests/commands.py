"""Calling ``recado`` as a shell does, within the process of the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest

from recado import cli
from recado.settings import settings


class Result(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Result]


def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: object) -> Result:
    """``recado`` with ``args``, on a thread of its own, which has no event loop yet; its stdout is no terminal."""
    monkeypatch.setattr(sys, "argv", ["recado", *map(str, args)])
    code = 0
    with ThreadPoolExecutor(1) as thread:
        try:
            thread.submit(cli.main).result()
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return Result(code, *capsys.readouterr())


@contextmanager
def calling(
    *command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str
) -> Iterator[Call]:
    """``recado`` with ``command`` and further arguments on the database ``dsn``."""
    monkeypatch.setenv("RECADO_DSN", dsn)
    settings.cache_clear()

    yield partial(run_command, monkeypatch, capsys, *command)
    monkeypatch.undo()
    settings.cache_clear()
