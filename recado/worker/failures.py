"""What is kept of an exception: clean, bounded text."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

MAX_MESSAGE = 2_000
"""Characters of an error's message: what a person reads in a list."""

MAX_TRACEBACK = 20_000
"""Characters of a traceback; its end is kept, where the error was raised."""

_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""What PostgreSQL cannot store in a text: NUL, and surrogates that stand alone."""

_OWN_CODE = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class ErrorText:
    """An exception in words."""

    error_class: str
    message: str
    traceback: str


def describe(error: BaseException) -> ErrorText:
    """``error`` as it goes into the table."""
    name = _said("name", lambda: _name(type(error)))
    message = _said("str()", lambda: str(error))
    lines = _said("traceback", lambda: _traceback(error))
    return ErrorText(
        clean(name)[:MAX_MESSAGE], clean(message[: MAX_MESSAGE + 1], MAX_MESSAGE), clean(lines[-MAX_TRACEBACK:])
    )


def clean(text: str, limit: int | None = None) -> str:
    """``text`` without what PostgreSQL cannot store, cut to ``limit`` characters."""
    text = _UNSTORABLE.sub("\N{REPLACEMENT CHARACTER}", text)
    return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"


def _said(what: str, say: Callable[[], str]) -> str:
    """What an exception says of itself. It is the user's code that says it, and may raise anything, SystemExit too: the
    job fails all the same, and its error says why it is mute."""
    try:
        return say()
    except BaseException as inner:
        return f"<its {what} raised {type(inner).__name__}>"


def _name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _traceback(error: BaseException) -> str:
    frames = error.__traceback__
    while frames is not None and _is_own(frames):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__, limit=-50))


def _is_own(frames: TracebackType) -> bool:
    return frames.tb_frame.f_code.co_filename.startswith(_OWN_CODE)
