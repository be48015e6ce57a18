"""The registry: what may be registered, what a registration error says, and what a handler is afterwards."""

from __future__ import annotations

import functools
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

import asyncpg
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict  # what pydantic demands before Python 3.12

from recado import ClaimedJob, Recado
from recado.app import JOB_DIED, SMOKE, JobDied, JobHandler
from recado.errors import (
    ConfigurationError,
    EnqueueError,
    InvalidPayload,
    MissingIdempotencyKey,
    RegistrationError,
    UnknownJobType,
)
from recado.queue import get_job
from recado.queue.backoff import BACKOFF
from recado.settings import settings

if TYPE_CHECKING:
    from email.message import EmailMessage


class Mail(BaseModel):
    order_id: int


@dataclass
class Parcel:
    order_id: int


class Letter(TypedDict):
    order_id: int


@pytest.fixture
def app() -> Recado:
    return Recado()


def register(app: Recado, function: Any, name: str = "a.job", **options: Any) -> JobHandler[Any, Any, Any]:
    """Register ``function`` in a way that a type checker would have refused."""
    handler: JobHandler[Any, Any, Any] = app.job(name, **options)(function)
    return handler


# --- what a registration error says ---


def test_two_handlers_for_one_name_are_both_named(app: Recado) -> None:
    @app.job("mail.send")
    async def first(payload: Mail) -> None: ...

    with pytest.raises(RegistrationError, match=r"second as 'mail\.send': .* taken by .*first; choose another name"):

        @app.job("mail.send")
        async def second(payload: Mail) -> None: ...

    assert app.job_types["mail.send"] is first


def test_a_partial_and_an_object_are_named_by_what_they_call(app: Recado) -> None:
    class Sender:
        def __call__(self, payload: Any) -> None: ...

    def send(payload: Any) -> None: ...

    register(app, functools.partial(send))
    with pytest.raises(RegistrationError, match=r"Sender\.__call__ as 'a\.job': .* taken by .*\.send;"):
        register(app, Sender())


@pytest.mark.parametrize("second", ["job", "declare"])
@pytest.mark.parametrize("first", ["job", "declare"])
def test_a_name_is_either_handled_or_declared_and_only_once(first: str, second: str, app: Recado) -> None:
    ways: dict[str, Callable[[], Any]] = {
        "job": lambda: register(app, lambda payload: None, "mail.send"),
        "declare": lambda: app.declare("mail.send"),
    }
    ways[first]()

    with pytest.raises(RegistrationError, match=r"'mail\.send': the name is taken by "):
        ways[second]()


BAD_NAMES: list[Any] = [
    *("", "send", "Mail.send", "mail.", ".send", "mail..send", "mail.send ", "mail.send\n", "mail send.x"),
    *("mäil.send", "mail.sénd", "-mail.send", "mail.\0", "mail." + "x" * 124, "x" * 10_000),
    *(None, 5, b"mail.send", ["mail.send"]),
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:20])
def test_a_bad_name_is_refused_and_told(name: Any, app: Recado) -> None:
    registrations: list[Callable[[], Any]] = [
        lambda: register(app, lambda payload: None, name),
        lambda: app.declare(name),
    ]
    for registration in registrations:
        with pytest.raises(RegistrationError, match=r"as a job type: it must read like 'domain\.action'") as raised:
            registration()
        assert repr(name)[:80] in str(raised.value)
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize("name", ["mail.send", "a.b.c", "_smoke.x", "a-b.c_d", "0.1", "mail." + "x" * 123])
def test_a_good_name_is_accepted(name: str, app: Recado) -> None:
    assert register(app, lambda payload: None, name).name == name


BAD_OPTIONS: dict[str, list[Any]] = {
    "queue": ["", "Mail", "a b", "a/b", "a\n", "x" * 129, "x" * 10_000, None, 1],
    "priority": [-1, 4, 1.0, "1", True, None],
    "max_attempts": [0, -1, 40_000, 2.0, "5", True, None],
    "timeout": [0, -1, float("nan"), float("inf"), True, "5", []],
    "backoff": [[], (), 5, "abc", [1, "2"], [float("nan")], [None], [True]],
}


@pytest.mark.parametrize(
    ("option", "value"),
    [(option, value) for option, values in BAD_OPTIONS.items() for value in values],
    ids=lambda value: repr(value)[:20],
)
def test_a_bad_option_is_refused_and_named(option: str, value: Any, app: Recado) -> None:
    with pytest.raises(RegistrationError, match=rf"cannot register 'a\.job': .*{option}") as raised:
        register(app, lambda payload: None, **{option: value})
    assert len(str(raised.value)) < 500
    assert "a.job" not in app.job_types
    if option in ("queue", "priority", "max_attempts"):
        with pytest.raises(RegistrationError, match=rf"cannot register 'a\.job': .*{option}"):
            app.declare("a.job", **{option: value})


def test_options_are_kept_with_the_job_type(app: Recado) -> None:
    @app.job("a.set", queue="q", priority=3, max_attempts=7, timeout=2, backoff=[1, 2], critical=True)
    async def set_up(payload: Any) -> None: ...

    @app.job("a.plain")
    async def plain(payload: Any) -> None: ...

    assert (set_up.queue, set_up.priority, set_up.max_attempts, set_up.critical) == ("q", 3, 7, True)
    assert (set_up.timeout, set_up.backoff) == (2.0, (1.0, 2.0))
    assert (plain.queue, plain.priority, plain.max_attempts, plain.critical) == ("default", 1, 5, False)
    assert (plain.timeout, plain.backoff) == (None, BACKOFF)


def test_a_parameter_nobody_can_fill_is_named(app: Recado) -> None:
    async def unknown(payload: Mail, mailer: Any) -> None: ...
    async def keyword_only(payload: Mail, *, mailer: Any) -> None: ...
    async def payload_last(conn: Any, mailer: Any) -> None: ...
    async def no_position(*, mailer: Any) -> None: ...

    for function in (unknown, keyword_only, payload_last, no_position):
        with pytest.raises(
            RegistrationError, match=rf"{function.__name__} as 'a\.job': nobody can fill its parameter 'mailer'; .*conn"
        ):
            register(app, function)


def test_a_parameter_that_can_only_be_filled_by_its_name_must_have_one(app: Recado) -> None:
    async def positional(payload: Mail, job: ClaimedJob, /) -> None: ...

    with pytest.raises(RegistrationError, match="nobody can fill its parameter 'job'"):
        register(app, positional)


def test_a_plain_function_cannot_have_a_connection(app: Recado) -> None:
    def plain(payload: Mail, conn: Any) -> None: ...

    with pytest.raises(RegistrationError, match=r"plain as 'a\.job': a plain function runs in a thread.*async def"):
        register(app, plain)


def test_a_generator_is_refused_however_it_is_wrapped(app: Recado) -> None:
    def generator(payload: Any) -> Any:
        yield

    async def async_generator(payload: Any) -> Any:
        yield

    class Generating:
        def __call__(self, payload: Any) -> Any:
            yield

    for function in (generator, async_generator, functools.partial(generator), Generating()):
        with pytest.raises(RegistrationError, match=r"'a\.job': it is a generator, which would never run"):
            register(app, function)


def test_what_is_no_function_is_refused(app: Recado) -> None:
    for thing in (5, None, "text", Mail):
        with pytest.raises(RegistrationError, match="it is not a function; decorate a def"):
            register(app, thing)


def test_a_function_whose_parameters_are_not_known_is_refused(app: Recado) -> None:
    with pytest.raises(RegistrationError, match=r"builtins\.max as 'a\.job': its parameters are not known"):
        register(app, max)


def test_the_decorator_without_its_parentheses_is_told(app: Recado) -> None:
    async def send(payload: Mail) -> None: ...

    with pytest.raises(RegistrationError, match=r"send.* as a job type: it must read like 'domain\.action'"):
        app.job(send)  # type: ignore[arg-type]


class Plain:
    """No type that pydantic can read."""


def test_an_annotation_that_is_no_type_is_quoted(app: Recado) -> None:
    async def missing(payload: Missing) -> None: ...  # type: ignore[name-defined] # noqa: F821
    async def typing_only(payload: EmailMessage) -> None: ...
    async def unreadable(payload: Plain) -> None: ...

    for function, annotation in ((missing, "Missing"), (typing_only, "EmailMessage"), (unreadable, "Plain")):
        with pytest.raises(
            RegistrationError,
            match=rf"{function.__name__} as 'a\.job': its payload's annotation '{annotation}' is no type that pydantic",
        ):
            register(app, function)


@pytest.mark.parametrize("payload", [Plain, Plain(), 5])
def test_declaring_a_payload_that_is_no_type_is_an_error_that_names_it(payload: Any, app: Recado) -> None:
    with pytest.raises(RegistrationError, match=r"'a\.job': its payload's type .* is no type that pydantic can read"):
        app.declare("a.job", payload)


# --- payloads and parameters ---


async def test_a_payload_may_be_a_model_a_dataclass_a_typed_dict_a_dict_or_anything(
    app: Recado, conn: asyncpg.Connection
) -> None:
    @app.job("a.model")
    async def model(payload: Mail) -> None: ...

    @app.job("a.dataclass")
    async def parcel(payload: Parcel) -> None: ...

    @app.job("a.typed-dict")
    async def letter(payload: Letter) -> None: ...

    @app.job("a.dict")
    async def mapping(payload: dict[str, int]) -> None: ...

    @app.job("a.list")
    async def listing(payload: list[int]) -> None: ...

    @app.job("a.annotated")
    async def annotated(payload: Annotated[int, Field(gt=0)]) -> None: ...

    @app.job("a.untyped")
    async def untyped(payload) -> None: ...  # type: ignore[no-untyped-def]

    ids = [
        await model.enqueue(conn, Mail(order_id=1)),
        await app.enqueue(conn, "a.model", {"order_id": "1"}),
        await parcel.enqueue(conn, Parcel(1)),
        await letter.enqueue(conn, {"order_id": 1}),
        await mapping.enqueue(conn, {"order_id": 1}),
    ]
    assert [(await get_job(conn, job_id)).payload for job_id in ids] == [{"order_id": 1}] * 5
    assert (await get_job(conn, await listing.enqueue(conn, [1, 2]))).payload == [1, 2]
    assert (await get_job(conn, await annotated.enqueue(conn, 5))).payload == 5
    assert (await get_job(conn, await untyped.enqueue(conn, {"a": [None, "b"]}))).payload == {"a": [None, "b"]}

    bad: list[tuple[str, Any]] = [("a.model", {"order": 1}), ("a.dataclass", {}), ("a.typed-dict", {"order_id": "x"})]
    bad += [("a.dict", {"a": "x"}), ("a.list", {}), ("a.annotated", 0)]
    for name, payload in bad:
        with pytest.raises(InvalidPayload, match=f"cannot use a payload for '{name}'"):
            app.new(name, payload)


def test_a_model_from_inside_a_function_is_found(app: Recado) -> None:
    class Local(BaseModel):
        order_id: int

    @app.job("a.local")
    async def local(payload: Local) -> None: ...

    assert local.new(Local(order_id=1)).payload == '{"order_id":1}'


async def test_a_handler_may_have_no_payload_at_all(app: Recado, conn: asyncpg.Connection) -> None:
    @app.job("a.bare")
    async def bare() -> int:
        return 1

    @app.job("a.injected")
    async def injected(job: ClaimedJob, *, state: Any) -> None: ...

    assert (bare.takes_payload, bare.wants) == (False, frozenset())
    assert (injected.takes_payload, injected.wants) == (False, frozenset({"job", "state"}))
    assert (await get_job(conn, await bare.enqueue(conn, None))).payload is None
    assert await bare() == 1


def test_injected_parameters_are_found_by_their_names_and_their_annotations_are_left_alone(app: Recado) -> None:
    @app.job("a.all")
    async def everything(
        payload: Mail,
        conn: EmailMessage,  # imported for the type checker only
        job: Missing,  # type: ignore[name-defined] # noqa: F821
        *,
        state: Mapping[str, Any],
        retries: int = 3,
    ) -> None: ...

    assert everything.wants == {"conn", "job", "state"}
    assert everything.takes_payload


# --- what a handler is afterwards ---


async def test_a_handler_stays_callable(app: Recado) -> None:
    @app.job("a.async")
    async def later(payload: Mail, job: Any = None) -> int:
        """Says the order."""
        return payload.order_id

    @app.job("a.plain")
    def now(payload: Mail, *, state: Any) -> tuple[int, Any]:
        return payload.order_id, state

    assert await later(Mail(order_id=1)) == 1
    assert now(Mail(order_id=2), state="s") == (2, "s")
    assert (later.is_async, now.is_async) == (True, False)
    assert (vars(later)["__name__"], later.__doc__, later.__module__) == ("later", "Says the order.", __name__)
    assert repr(later) == "<JobHandler a.async>"


async def test_a_methods_an_object_and_a_partial_are_handlers_too(app: Recado) -> None:
    class Service:
        async def send(self, payload: Mail, job: Any) -> int:
            return payload.order_id

        async def __call__(self, payload: Mail) -> int:
            return payload.order_id

        @app.job("a.static")
        @staticmethod
        async def static(payload: Mail) -> int:
            return payload.order_id

    async def configured(payload: Mail, factor: int) -> int:
        return payload.order_id * factor

    handlers = [
        register(app, functools.partial(configured, factor=1), "a.partial"),
        register(app, Service(), "a.object"),
        Service.static,
    ]
    method = register(app, Service().send, "a.method")

    assert [await handler(Mail(order_id=1)) for handler in handlers] == [1, 1, 1]
    assert [handler.is_async for handler in (*handlers, method)] == [True] * 4
    assert method.wants == {"job"}


def test_attributes_of_a_function_are_not_taken_for_options(app: Recado) -> None:
    def send(payload: Mail) -> None: ...

    send.queue = "Not A Queue"  # type: ignore[attr-defined]
    send.name = "other"  # type: ignore[attr-defined]

    handler = register(app, send)

    assert (handler.queue, handler.name) == ("default", "a.job")
    assert app.job_types["a.job"] is handler


def test_a_wrapped_function_shows_its_own_parameters(app: Recado) -> None:
    def logged(function: Any) -> Any:
        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await function(*args, **kwargs)

        return wrapper

    @logged
    async def send(payload: Mail, job: Any) -> None: ...

    handler = register(app, send)

    assert (handler.wants, handler.is_async) == (frozenset({"job"}), True)
    assert handler.new({"order_id": 1}).payload == '{"order_id":1}'


def test_new_makes_a_job_that_is_ready_to_be_inserted(app: Recado) -> None:
    @app.job("mail.send", queue="mail")
    async def send(payload: Mail) -> None: ...

    job = send.new(Mail(order_id=1), idempotency_key="k", metadata={"a": 1})

    assert job == app.new("mail.send", {"order_id": 1}, idempotency_key="k", metadata={"a": 1})
    assert (job.job_type, job.payload, job.queue, job.metadata) == ("mail.send", '{"order_id":1}', "mail", '{"a":1}')


async def test_an_unknown_job_type_is_named_before_any_sql(app: Recado, conn: asyncpg.Connection) -> None:
    await conn.close()
    unknown: tuple[Any, ...] = ("mail.send", "", None, ["mail.send"], "x" * 10_000)

    for name in unknown:
        with pytest.raises(UnknownJobType, match=r"no job type of this name is registered; .*app\.declare") as raised:
            await app.enqueue(conn, name, {})
        assert repr(name)[:80] in str(raised.value)
        assert len(str(raised.value)) < 300
        with pytest.raises(EnqueueError):
            app.new(name, {})


async def test_a_declared_type_is_enqueued_and_has_no_handler(app: Recado, conn: asyncpg.Connection) -> None:
    send = app.declare("mail.send", Mail, queue="mail", priority=0, max_attempts=2, critical=True)

    assert not isinstance(send, JobHandler)
    with pytest.raises(MissingIdempotencyKey):
        await send.enqueue(conn, Mail(order_id=1))
    with pytest.raises(InvalidPayload):
        send.new({"order_id": "x"}, idempotency_key="k")  # type: ignore[arg-type]
    job = await get_job(conn, await send.enqueue(conn, Mail(order_id=1), idempotency_key="k"))
    assert (job.queue, job.priority, job.max_attempts) == ("mail", 0, 2)
    assert app.declare("any.thing").new(["any", {"thing": None}]).payload == '["any",{"thing":null}]'


def test_the_registry_shows_its_types_and_cannot_be_changed_past_it(app: Recado) -> None:
    declared = app.declare("mail.send")

    assert dict(app.job_types) == {
        SMOKE: app.job_types[SMOKE],
        JOB_DIED: app.job_types[JOB_DIED],
        "mail.send": declared,
    }
    with pytest.raises(TypeError):
        app.job_types["a.b"] = declared  # type: ignore[index]


# --- built in ---


async def test_the_smoke_job_takes_anything_and_does_nothing(app: Recado) -> None:
    smoke = app.job_types[SMOKE]
    assert isinstance(smoke, JobHandler)

    anything: list[Any] = [None, {}, [1], "text"]
    for payload in anything:
        smoke.new(payload)
        assert await smoke(payload) is None


async def test_the_built_in_alarm_says_what_died_and_how_to_be_told(
    app: Recado, caplog: pytest.LogCaptureFixture
) -> None:
    died = app.job_types[JOB_DIED]
    assert isinstance(died, JobHandler)
    job_id = uuid4()

    with caplog.at_level(logging.ERROR, logger="recado"):
        await died(JobDied(job_id=job_id, job_type="mail.send", queue="q", attempts=5, error_class="ValueError"))

    assert str(job_id) in caplog.text
    assert "register a handler for recado.job_died" in caplog.text


@pytest.mark.parametrize("name", [JOB_DIED, SMOKE])
def test_an_application_may_replace_what_is_built_in_once(name: str, app: Recado) -> None:
    @app.job(name, queue="pager", max_attempts=20)
    async def page(payload: JobDied) -> None: ...

    assert app.job_types[name] is page
    assert Recado().job_types[name] is not page
    with pytest.raises(RegistrationError, match=r"page; choose another"):
        app.declare(name)


# --- the application itself ---


@pytest.mark.parametrize(
    "name", ["Bad-Name", "", "Recado", "1a", "a b", 'a"b', "a;b", "pg_recado", "x" * 49, "ü", "a\n", "a.b", "{schema}"]
)
def test_a_schemas_name_that_is_no_plain_identifier_is_refused(name: str) -> None:
    with pytest.raises(ConfigurationError, match="as the schema's name: it must be a lower-case identifier"):
        Recado(schema=name)


@pytest.mark.parametrize("name", [1, b"recado", "x" * 1_000_000])
def test_a_schema_that_is_no_name_at_all_is_one_short_sentence(name: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Recado(schema=name)
    assert len(str(caught.value)) < 300


def test_the_schemas_name_comes_from_the_application_or_the_environment(
    monkeypatch: pytest.MonkeyPatch, schema: str
) -> None:
    assert Recado(schema="shop_2").schema == "shop_2"
    assert Recado(schema="x" * 48).schema == "x" * 48
    assert Recado().schema == schema

    monkeypatch.setenv("RECADO_SCHEMA", "from_environment")
    settings.cache_clear()
    try:
        assert Recado().schema == "from_environment"
        assert Recado(schema="shop").schema == "shop"
        monkeypatch.setenv("RECADO_SCHEMA", "Not One")
        settings.cache_clear()
        with pytest.raises(ConfigurationError, match=r"'Not One'.*unset RECADO_SCHEMA"):
            Recado()
    finally:
        monkeypatch.undo()
        settings.cache_clear()


async def test_the_lifespan_yields_what_handlers_share_and_is_torn_down_after_them(app: Recado) -> None:
    steps = []

    @app.lifespan
    async def lifespan() -> AsyncIterator[dict[str, Any]]:
        steps.append("up")
        yield {"smtp": "client"}
        steps.append("down")

    for _ in range(2):
        async with app.run_lifespan() as state:
            assert state == {"smtp": "client"}
            steps.append("work")

    assert steps == ["up", "work", "down"] * 2


async def test_without_a_lifespan_the_state_is_empty(app: Recado) -> None:
    async with app.run_lifespan() as state:
        assert state == {}


def test_a_lifespan_that_is_no_async_generator_function_is_refused(app: Recado) -> None:
    def plain() -> Any:
        yield {}

    async def returning() -> Any:
        return {}

    things: tuple[Any, ...] = (plain, returning, 5, None)
    for thing in things:
        with pytest.raises(RegistrationError, match="as the lifespan: it is not an async generator function"):
            app.lifespan(thing)


# --- types ---

TYPED = """
from uuid import UUID
from collections.abc import Mapping
from typing import Any
from pydantic import BaseModel
from recado import Recado
from recado.queue.connections import Connection

app = Recado()

class Mail(BaseModel):
    order_id: int

@app.job("a.async", queue="q")
async def later(payload: Mail, conn: Connection) -> str:
    return ""

@app.job("a.plain")
def now(payload: dict[str, int]) -> int:
    return 1

@app.job("a.bare")
async def bare() -> bool:
    return True

declared = app.declare("b.declared", Mail)

async def use(conn: Connection) -> None:
    reveal_type(await later.enqueue(conn, Mail(order_id=1)))  # uuid.UUID
    reveal_type(await later(Mail(order_id=1), conn))  # str
    reveal_type(now({"a": 1}))  # int
    reveal_type(await bare())  # bool
    reveal_type(declared)  # recado.app.JobType[typed.Mail]
    await bare.enqueue(conn, None)
    later.new(Mail(order_id=1), priority=0)
    later.new({"order_id": 1})  # arg-type
    await now.enqueue(conn, Mail(order_id=1))  # arg-type
    declared.new("text")  # arg-type
    later(Mail(order_id=1))  # call-arg
    await later.enqueue(conn)  # call-arg
"""


def test_a_type_checker_knows_the_payload_the_result_and_the_id(tmp_path: Path) -> None:
    (tmp_path / "typed.py").write_text(TYPED)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    command += [
        "--disable-error-code=unused-coroutine",
        f"--cache-dir={tmp_path / 'cache'}",
        str(tmp_path / "typed.py"),
    ]

    checked = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)

    message = r'typed\.py:(\d+): (?:note: Revealed type is "(.*)"|error: .*\[(.*)\])$'
    told = re.findall(message, checked.stdout, re.MULTILINE)
    lines = enumerate(TYPED.splitlines(), 1)
    expected = {number: line.partition("  # ")[2] for number, line in lines if "  # " in line}
    assert {int(number): shown or code for number, shown, code in told} == expected, checked.stdout + checked.stderr
