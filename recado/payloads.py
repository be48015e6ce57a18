"""Python values to the JSON texts in the table, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import pydantic
import pydantic_core
from pydantic import TypeAdapter

from recado.errors import InvalidPayload
from recado.queue.limits import MAX_PAYLOAD_BYTES, MAX_RESULT_BYTES

T = TypeVar("T")

ANY: TypeAdapter[Any] = TypeAdapter(Any)
"""For payloads that no annotation describes."""

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""An escaped NUL in a JSON text: a backslash that is not itself escaped, and u0000."""


def encode_payload(adapter: TypeAdapter[T], value: T, job_type: str) -> str:
    """``value``, validated by ``adapter``, as the JSON text of a payload.

    Raises:
        InvalidPayload: it does not fit its type, is not JSON, holds what jsonb cannot (NUL, NaN, infinity,
            lone surrogates), or is larger than 256 KiB.
    """
    what = f"a payload for {job_type!r}"
    try:
        valid = adapter.validate_python(value)
    except pydantic.ValidationError as error:
        raise InvalidPayload(f"cannot use {what}: {summary(error)}; pass what its type asks for") from error
    except RecursionError:
        raise InvalidPayload(f"cannot use {what}: it is nested too deeply; pass identifiers only") from None
    return _to_json(valid, lambda v: adapter.dump_json(v, by_alias=True, round_trip=True), what, MAX_PAYLOAD_BYTES)


def encode_metadata(value: Any) -> str:
    """``value``, a mapping, as the JSON text of a job's metadata.

    Raises:
        InvalidPayload: as for :func:`encode_payload`.
    """
    if not isinstance(value, dict):
        raise InvalidPayload(
            f"cannot use {type(value).__name__} as a job's metadata: it must be a dict; pass tags by name"
        )
    return _to_json(value, pydantic_core.to_json, "metadata", MAX_PAYLOAD_BYTES)


def encode_result(value: Any) -> str | None:
    """What a handler returned, as the JSON text of a result; ``None`` for ``None``.

    Raises:
        InvalidPayload: it is not JSON, or larger than 256 KiB.
    """
    if value is None:
        return None
    return _to_json(value, pydantic_core.to_json, "this result", MAX_RESULT_BYTES)


def decode_payload(adapter: TypeAdapter[T], payload: str) -> T:
    """The value that the JSON text ``payload`` stands for.

    Raises:
        InvalidPayload: it does not fit its type.
    """
    try:
        return adapter.validate_json(payload)
    except pydantic.ValidationError as error:
        raise InvalidPayload(
            f"cannot read the payload: {summary(error)}; enqueue what the handler's annotation asks for"
        ) from error


def summary(error: pydantic.ValidationError) -> str:
    """What is wrong and where, without the values: they may be nobody's business in a log."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    shown = "; ".join(
        f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" if problem["loc"] else problem["msg"]
        for problem in problems[:5]
    )
    return shown if len(problems) <= 5 else f"{shown}; and {len(problems) - 5} more"


def _to_json(value: Any, dump: Callable[[Any], bytes], what: str, limit: int) -> str:
    try:
        raw = dump(value)
    except (pydantic_core.PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise InvalidPayload(
            f"cannot use {what}: it is not JSON ({type(error).__name__}: {str(error)[:200]}); "
            "use text, numbers, booleans, lists, dicts and what pydantic can write as these"
        ) from error
    if len(raw) > limit:
        raise InvalidPayload(
            f"cannot use {what}: it has {len(raw):,} bytes as JSON and the limit is {limit:,}; "
            "store the data elsewhere and pass its id"
        )
    if b"\\u0000" in raw and _NUL.search(raw):
        raise InvalidPayload(
            f"cannot use {what}: it has a NUL character, which PostgreSQL cannot store; remove it before"
        )
    if not _finite(value, raw):
        raise InvalidPayload(f"cannot use {what}: it has a NaN or an infinity, which JSON cannot say; use null or text")
    return raw.decode()


def _finite(value: Any, raw: bytes) -> bool:
    """Whether no NaN or infinity is in ``value``, which was written as ``raw``.

    Pydantic writes them as ``null`` in a model and as bare words elsewhere, so only a text with one of these
    has to be looked at again: written once more with bare words, and read by a parser that objects to them.
    """
    if b"null" in raw:
        raw = pydantic_core.to_json(ANY.dump_python(value), serialize_unknown=True)
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            json.loads(raw, parse_constant=_object_to)
        except ValueError:
            return False
    return True


def _object_to(constant: str) -> Any:
    raise ValueError(constant)
