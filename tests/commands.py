"""Calling ``recado`` as a shell does, within the process of the test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from recado import cli
from recado.settings import settings


class Result(NamedTuple):
    code: int
    out: str
    err: str


Call = Callable[..., Result]


@contextmanager
def calling(
    *command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dsn: str
) -> Iterator[Call]:
    """``recado`` with ``command`` and further arguments on the database ``dsn``, on a thread of its own; its stdout is
    no terminal."""
    monkeypatch.setenv("RECADO_DSN", dsn)
    settings.cache_clear()

    def call(*args: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["recado", *command, *map(str, args)])
        code = 0
        with ThreadPoolExecutor(1) as thread:
            try:
                thread.submit(cli.main).result()
            except SystemExit as exit_:
                code = int(exit_.code or 0)
        return Result(code, *capsys.readouterr())

    yield call
    monkeypatch.undo()
    settings.cache_clear()
