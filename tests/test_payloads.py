"""Payloads: what is written is what is read, and what cannot be is refused in one sentence that keeps it secret."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings, strategies
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from recado import Recado
from recado.errors import InvalidPayload
from recado.payloads import ANY, decode_payload, encode_metadata, encode_payload, encode_result
from recado.queue.limits import MAX_PAYLOAD_BYTES

NAN, INF = math.nan, math.inf

SECRET = "hunter2"
"""What no message may give away."""


class Model(BaseModel):
    number: float | None = None
    text: str | None = None


class Tree(BaseModel):
    below: Tree | None = None


@dataclass
class Point:
    x: float
    y: float | None = None


class Cat(BaseModel):
    kind: Literal["cat"]


class Dog(BaseModel):
    kind: Literal["dog"]


class Colour(Enum):
    RED = "red"


def encode(value: Any, of: Any = Any) -> str:
    return encode_payload(TypeAdapter(of), value, "mail.send")


def circle() -> list[Any]:
    value: list[Any] = [SECRET]
    value.append(value)
    return value


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


# --- refused ---

NO_JSON_NUMBER: dict[str, tuple[Any, Any]] = {
    "bare": (NAN, Any),
    "in a list": ([1, [INF]], Any),
    "in a dict": ({"a": {"b": -INF}}, Any),
    "beside null": ({"a": None, "b": NAN}, Any),
    "typed": ({"a": NAN}, dict[str, float]),
    "in a model": (Model(number=NAN), Model),
    "in what becomes a model": ({"number": INF}, Model),
    "in a model of a list": ([Model(), Model(number=-INF)], list[Model]),
    "in a model of no type": ({"a": [Model(number=NAN)]}, Any),
    "in a dataclass": (Point(0, INF), Point),
    "in a dataclass of no type": ([Point(NAN)], Any),
    "in a set": ({NAN}, set[float]),
}


@pytest.mark.parametrize(("value", "of"), NO_JSON_NUMBER.values(), ids=NO_JSON_NUMBER)
def test_nan_and_infinity_are_refused_wherever_they_hide(value: Any, of: Any) -> None:
    with pytest.raises(InvalidPayload, match=r"a payload for 'mail\.send': it has a NaN or an infinity"):
        encode(value, of)


NUL: dict[str, tuple[Any, Any]] = {
    "bare": ("\0", Any),
    "in a text": ({"a": ["x\0y"]}, Any),
    "in a key": ({"a\0": 1}, Any),
    "after a backslash": ("\\\0", Any),
    "after two": ("\\\\\0", Any),
    "in a model": ({"text": "a\0"}, Model),
    "in bytes": ({"a": b"\0"}, Any),
}


@pytest.mark.parametrize(("value", "of"), NUL.values(), ids=NUL)
def test_a_nul_character_is_refused(value: Any, of: Any) -> None:
    with pytest.raises(InvalidPayload, match=r"a payload for 'mail\.send': it has a NUL character, .*; remove it"):
        encode(value, of)


@pytest.mark.parametrize(
    "text", ["\\u0000", "\\\\u0000", "x\\u0000y\\", "u0000", "NaN", "Infinity", "-Infinity", "null"]
)
async def test_a_text_that_only_looks_like_it_is_kept(text: str, conn: asyncpg.Connection) -> None:
    raw = encode({text: text, "none": None})

    assert json.loads(raw) == {text: text, "none": None}
    assert json.loads(await conn.fetchval("SELECT $1::text::jsonb::text", raw)) == {text: text, "none": None}


NO_JSON: dict[str, tuple[Any, Any]] = {
    "a lone surrogate": ({"a": SECRET + "\ud800"}, Any),
    "a lone surrogate in a key": ({"\udfff" + SECRET: 1}, Any),
    "a lone surrogate in a model": ({"text": SECRET + "\ud800"}, Model),
    "bytes that are no text": ({"a": b"\xff" + SECRET.encode()}, Any),
    "an object": ({"a": object()}, Any),
    "a function": (encode, Any),
    "a circle": (circle(), Any),
    "ten thousand levels": (nested(10_000), Any),
}


@pytest.mark.parametrize(("value", "of"), NO_JSON.values(), ids=NO_JSON)
def test_what_is_not_json_is_refused(value: Any, of: Any) -> None:
    with pytest.raises(InvalidPayload, match=r"a payload for 'mail\.send': it is not JSON") as raised:
        encode(value, of)
    assert SECRET not in str(raised.value)


UNREADABLE: dict[str, tuple[Any, Any]] = {
    "deeper than can be read": (nested(202), Any),
    "a number longer than can be read": (10**4_300, Any),
    "a model changed after its validation": (Model.model_construct(text=5), Model),
    "a model without what it demands": (Cat.model_construct(), Cat),
    "a recursive model too deep": (
        {"below": json.loads('{"below":' * 201 + "null" + "}" * 201)},
        Tree,
    ),
}


@pytest.mark.parametrize(("value", "of"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_its_handler_could_not_read_is_refused(value: Any, of: Any) -> None:
    with pytest.raises(InvalidPayload, match=r"a payload for 'mail\.send': reading it back fails \("):
        encode(value, of)


def test_a_model_that_does_not_read_what_it_writes_is_refused() -> None:
    class Renamed(BaseModel):
        order_id: int = Field(validation_alias="in", serialization_alias="out")

    with pytest.raises(InvalidPayload, match=r"reading it back fails \(in: Field required\)"):
        encode({"in": 1}, Renamed)


def test_ten_thousand_levels_of_a_typed_payload_are_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"below": deep}

    with pytest.raises(InvalidPayload) as raised:
        encode(deep, Tree)
    assert len(str(raised.value)) < 2_000


def test_a_payload_has_256_kib_and_no_byte_more() -> None:
    assert len(encode("x" * (MAX_PAYLOAD_BYTES - 2))) == MAX_PAYLOAD_BYTES == 256 * 1024
    assert encode("ü" * (MAX_PAYLOAD_BYTES // 2 - 1))
    for value in ("x" * (MAX_PAYLOAD_BYTES - 1), "ü" * (MAX_PAYLOAD_BYTES // 2), {"a": "x" * 300 * 1024}):
        with pytest.raises(InvalidPayload, match="bytes as JSON and the limit is 262,144; store the data elsewhere"):
            encode(value)


MISFITS: dict[str, tuple[Any, Any]] = {
    "another type": ({"number": SECRET}, Model),
    "no object": (SECRET, Model),
    "no member": (SECRET, Colour),
    "no literal": (SECRET, Literal["a"]),
    "no uuid": (SECRET, UUID),
    "no date": (SECRET, date),
    "a tag nobody knows": ({"kind": SECRET}, Annotated[Cat | Dog, Field(discriminator="kind")]),
    "none of a union": (SECRET, int | Model),
    "too long": (SECRET, Annotated[str, Field(max_length=1)]),
    "no match": (SECRET, Annotated[str, Field(pattern="^x$")]),
}


@pytest.mark.parametrize(("value", "of"), MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_its_type_is_refused_without_being_quoted(
    value: Any, of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InvalidPayload, match=r"^cannot use a payload for 'mail\.send': .*; pass what its") as raised:
        encode(value, of)
    with pytest.raises(InvalidPayload, match=r"^cannot read the payload: .*; enqueue what") as read:
        decode_payload(TypeAdapter(of), json.dumps(value))

    # Nor in the traceback, which goes to the log and to job_errors.
    for error in (raised.value, read.value):
        logging.getLogger("test").error("refused", exc_info=error)
    assert "refused" in caplog.text
    assert SECRET not in caplog.text


def test_a_message_names_the_place_and_at_most_five_problems() -> None:
    with pytest.raises(InvalidPayload) as raised:
        encode({"a": {"b": "x"}}, dict[str, dict[str, int]])
    assert "a.b: Input should be a valid integer" in str(raised.value)

    with pytest.raises(InvalidPayload, match="and 95 more; pass") as raised:
        encode(["x"] * 100, list[int])
    assert str(raised.value).count("Input should be") == 5

    with pytest.raises(InvalidPayload) as raised:
        encode({"k" * 10_000: "x"}, dict[str, int])
    assert len(str(raised.value)) < 400


def test_a_text_that_is_no_json_cannot_be_decoded() -> None:
    for text in ("", SECRET, "[" * 10_000, '{"a": NaN'):
        with pytest.raises(InvalidPayload, match="cannot read the payload: Invalid JSON") as raised:
            decode_payload(ANY, text)
        assert SECRET not in str(raised.value)


# --- accepted ---


class Everything(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    id: UUID
    at: datetime
    wait: timedelta
    price: Decimal
    colour: Colour
    raw: bytes
    tags: set[str]
    pair: tuple[int, str]
    point: Point
    nothing: None = None
    own_name: int = Field(alias="ownName")


def test_what_pydantic_can_write_is_read_as_it_was() -> None:
    value = Everything(
        id=UUID(int=1),
        at=datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        wait=timedelta(seconds=1.5),
        price=Decimal("9.99"),
        colour=Colour.RED,
        raw=b"\xff\0",
        tags={"a", "b"},
        pair=(1, "x"),
        point=Point(1.5),
        ownName=1,
    )
    adapter = TypeAdapter(Everything)

    assert decode_payload(adapter, encode_payload(adapter, value, "mail.send")) == value


def test_a_set_and_bytes_become_what_json_has_for_them() -> None:
    assert encode({5}) == "[5]"
    assert encode((1, b"text")) == '[1,"text"]'


def test_a_payload_is_brought_into_the_form_of_its_type() -> None:
    assert encode({"number": "1.5", "more": 1}, Model) == '{"number":1.5,"text":null}'


def json_values() -> strategies.SearchStrategy[Any]:
    # jsonb writes 1e16 and more without an exponent, as JSON's integers, whose digits are those of the float's repr.
    floats = strategies.floats(-1e15, 1e15)
    text = strategies.text(strategies.characters(exclude_categories=["Cs"], exclude_characters="\0"))
    scalars = strategies.none() | strategies.booleans() | strategies.integers() | floats | text
    return strategies.recursive(
        scalars, lambda inner: strategies.lists(inner) | strategies.dictionaries(text, inner), max_leaves=20
    )


@pytest.fixture
def through_the_database(dsn: str) -> Iterator[Callable[[str], str]]:
    """Stores a JSON text as jsonb and reads it, on a loop of its own: hypothesis calls plain functions."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        conn = runner.run(asyncpg.connect(dsn))
        yield lambda raw: runner.run(conn.fetchval("SELECT $1::text::jsonb", raw))
        runner.run(conn.close())


@settings(max_examples=50, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=json_values())
def test_any_json_value_comes_back_from_the_database_as_it_was(
    through_the_database: Callable[[str], str], value: Any
) -> None:
    raw = encode(value)

    assert decode_payload(ANY, raw) == value
    assert decode_payload(ANY, through_the_database(raw)) == value


@pytest.mark.parametrize("value", [1e16, 5.325412298310921e16, -1.7976931348623157e308, 5e-324, -0.0])
async def test_a_float_is_the_same_float_where_the_type_says_so(value: float, conn: asyncpg.Connection) -> None:
    stored = await conn.fetchval("SELECT $1::text::jsonb", encode(value, float))

    decoded = decode_payload(TypeAdapter(float), stored)
    assert (decoded, type(decoded)) == (value, float)


# --- metadata and results ---


def test_metadata_is_a_mapping_of_json() -> None:
    assert encode_metadata({"a": [1, None]}) == '{"a":[1,null]}'
    hostile: list[Any] = [
        *({"a": NAN}, {"a": "\0"}, {"a": "\ud800"}, {"a": object()}, {"a": 10**4_300}, {"a": nested(300)}),
        *({"a": "x" * 300 * 1024}, [1], "text", 5, [("a", 1)]),
    ]
    for value in hostile:
        with pytest.raises(InvalidPayload, match="metadata"):
            encode_metadata(value)


def test_metadata_that_is_no_mapping_is_refused_by_every_way_to_enqueue() -> None:
    app = Recado()
    hostile: list[Any] = [[1], "text", 5, [("a", 1)]]

    for value in hostile:
        with pytest.raises(InvalidPayload, match="as a job's metadata: it must be a dict"):
            app.new("_smoke.echo", None, metadata=value)


def test_a_result_is_json_or_refused_and_none_is_no_result() -> None:
    assert encode_result(None) is None
    assert encode_result({"pages": 12}) == '{"pages":12}'
    assert encode_result(Model(text="a")) == '{"number":null,"text":"a"}'
    hostile: list[Any] = [NAN, Model(number=INF), Point(NAN), "\0", "\ud800", object(), 10**4_300, nested(300)]
    for value in [*hostile, "x" * 300 * 1024]:
        with pytest.raises(InvalidPayload, match="this result"):
            encode_result(value)
