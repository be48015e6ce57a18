"""Python values to the JSON texts in the table, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import pydantic
import pydantic_core
from pydantic import TypeAdapter

from recado.errors import InvalidPayload
from recado.queue.limits import MAX_PAYLOAD_BYTES, MAX_RESULT_BYTES

T = TypeVar("T")

ANY: TypeAdapter[Any] = TypeAdapter(Any)
"""For payloads that no annotation describes."""

MAX_PROBLEMS = 5
"""Of a value that does not fit its type, told in one message: enough to see what kind of value was passed."""

MAX_LOCATION = 200
"""Characters of the path to a problem; its parts are the payload's own keys, of any length and any depth."""

_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""An escaped NUL in a JSON text: a backslash that is not itself escaped, and u0000."""


def encode_payload(adapter: TypeAdapter[T], value: T, job_type: str) -> str:
    """``value``, validated by ``adapter``, as the JSON text of a payload.

    The text is read back at once, so that nothing is enqueued which its handler could not read: a model that
    was changed after its validation, or one whose aliases for writing and reading differ.

    Raises:
        InvalidPayload: it does not fit its type, is not JSON, holds what jsonb cannot (NUL, NaN, infinity,
            lone surrogates), or is larger than 256 KiB.
    """
    what = f"a payload for {job_type!r}"
    try:
        valid = adapter.validate_python(value)
    except pydantic.ValidationError as error:
        # `from None`: the cause would print the values that the summary leaves out.
        raise InvalidPayload(f"cannot use {what}: {summary(error)}; pass what its type asks for") from None
    except RecursionError:
        raise InvalidPayload(f"cannot use {what}: it is nested too deeply; pass identifiers only") from None
    return _to_json(valid, partial(_dump, adapter), adapter.validator.validate_json, what, MAX_PAYLOAD_BYTES)


def encode_metadata(value: Any) -> str:
    """``value``, a mapping, as the JSON text of a job's metadata.

    Raises:
        InvalidPayload: as for :func:`encode_payload`.
    """
    if not isinstance(value, Mapping):
        raise InvalidPayload(
            f"cannot use {type(value).__name__} as a job's metadata: it must be a dict; pass tags by name"
        )
    return _to_json(dict(value), pydantic_core.to_json, pydantic_core.from_json, "metadata", MAX_PAYLOAD_BYTES)


def encode_result(value: Any) -> str | None:
    """What a handler returned, as the JSON text of a result; ``None`` for ``None``.

    Raises:
        InvalidPayload: it is not JSON, or larger than 256 KiB.
    """
    if value is None:
        return None
    return _to_json(value, pydantic_core.to_json, pydantic_core.from_json, "this result", MAX_RESULT_BYTES)


def decode_payload(adapter: TypeAdapter[T], payload: str) -> T:
    """The value that the JSON text ``payload`` stands for.

    Raises:
        InvalidPayload: it does not fit its type.
    """
    try:
        value: T = adapter.validator.validate_json(payload)  # as its own validate_json does, in 0.3 µs more
    except pydantic.ValidationError as error:
        raise InvalidPayload(
            f"cannot read the payload: {summary(error)}; enqueue what the handler's annotation asks for"
        ) from None
    return value


def _dump(adapter: TypeAdapter[T], valid: T) -> bytes:
    # Without warnings: they quote the value. What they warn of, reading back finds. By the adapter's serializer, as its
    # own dump_json does in 0.3 µs more.
    return adapter.serializer.to_json(valid, by_alias=True, round_trip=True, warnings=False)


def summary(error: pydantic.ValidationError) -> str:
    """What is wrong and where, without the values: they may be nobody's business in a log."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    shown = "; ".join(_problem(problem) for problem in problems[:MAX_PROBLEMS])
    more = len(problems) - MAX_PROBLEMS
    return shown if more <= 0 else f"{shown}; and {more} more"


def _problem(problem: pydantic_core.ErrorDetails) -> str:
    # The one message of pydantic's that quotes the input: the tag of a discriminated union.
    message = "Input has an unknown tag" if problem["type"] == "union_tag_invalid" else problem["msg"]
    if not problem["loc"]:
        return message
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where if len(where) <= MAX_LOCATION else where[:MAX_LOCATION] + '…'}: {message}"


def _to_json(value: T, dump: Callable[[T], bytes], read: Callable[[bytes], Any], what: str, limit: int) -> str:
    try:
        raw = dump(value)
        finite = _finite(value, raw)
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
    if not finite:
        raise InvalidPayload(f"cannot use {what}: it has a NaN or an infinity, which JSON cannot say; use null or text")
    try:
        read(raw)
    except ValueError as error:
        reason = summary(error) if isinstance(error, pydantic.ValidationError) else str(error)
        raise InvalidPayload(
            f"cannot use {what}: reading it back fails ({reason}); pass a value whose type reads the JSON it writes"
        ) from None
    return raw.decode()


def _finite(value: Any, raw: bytes) -> bool:
    """Whether no NaN or infinity is in ``value``, which was written as ``raw``.

    Pydantic writes them as ``null`` in a model and as bare words elsewhere, so only a text with one of these
    has to be looked at again: written once more with bare words, and read by a parser that objects to them.
    """
    if b"null" in raw:
        plain = ANY.dump_python(value, warnings=False)
        raw = pydantic_core.to_json(plain, bytes_mode="base64", serialize_unknown=True)
    if b"NaN" in raw or b"Infinity" in raw:
        try:
            json.loads(raw, parse_constant=_object_to)
        except ValueError:
            return False
    return True


def _object_to(constant: str) -> Any:
    raise ValueError(constant)
