"""What docs/security.md promises of the code: no SQL is built from input, and no secret gets into logs or answers.

What the database's rights allow, ``tests/queue/test_grants.py`` holds; who may ask the API, ``tests/api/test_auth.py``.
"""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit
from uuid import uuid4

import asyncpg
import pytest

from recado import Recado, embedded
from recado.api import create_app
from recado.errors import ConfigurationError, EnqueueError, TenantError
from recado.queue import NewJob, admin, claims, counts, finishes, migrate, operations, schedules
from recado.queue.enqueue import COPY_FROM, insert_job, insert_jobs
from recado.queue.finishes import Completion
from recado.queue.models import read_json
from recado.queue.schedules import Schedule
from recado.queue.statements import cancel_channel, resolve_schema, wake_channel
from recado.queue.workers import WorkerInfo, beat
from recado.settings import settings
from recado.worker import EventKind
from tests.api.conftest import bearer, client, token
from tests.commands import run_command
from tests.queue.support import WORKER, Ear, count, hungry, ordinary_role
from tests.test_imports import MODULES
from tests.worker.support import working

# --- no SQL is built from input: the code ---

SENDERS = frozenset({"execute", "executemany", "fetch", "fetchrow", "fetchval", "fetchmany", "prepare", "cursor"})
SENDERS_OF_COPIES = re.compile(r"copy_(to|from|records_to)_\w+")

STATEMENT_PARAMETERS = {
    ("recado.queue.operations", "_transaction"): "the caller's SET_TENANT or SET_SYSTEM",
    ("recado.queue.poolers", "_compare"): "constants of the module's",
    ("recado.testing", "_execute"): "CREATE and DROP DATABASE of a name it has made itself",
}
"""Functions that send what they are given, and what that is."""


def built_sql(source: str, module: str) -> list[str]:
    """Where ``module`` sends what is neither a constant nor one that was filled by ``fill()`` or ``numbered()``."""
    return [
        f"line {node.lineno}: {ast.unparse(node)[:60]}"
        for function in _functions(ast.parse(source))
        if (module, function.name) not in STATEMENT_PARAMETERS
        for node in _sent(function)
    ]


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, each with those that are within it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        else:
            yield from _functions(node)


def _sent(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    filled = _filled_names(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            arguments = [
                *node.args[:1],
                *(k.value for k in node.keywords if k.arg in ("query", "command", "statement")),
            ]
            if node.func.attr in SENDERS and _is_database(node.func.value):
                yield from (a for a in arguments if not _is_constant(a, filled))
            elif SENDERS_OF_COPIES.fullmatch(node.func.attr):
                arguments += [k.value for k in node.keywords if k.arg in ("table_name", "schema_name", "columns")]
                yield from (a for a in arguments if not _is_name(a))


def _is_database(receiver: ast.expr) -> bool:
    """A cursor's ``fetch`` takes a number, a prepared statement's the parameters; the benchmark prepares a database."""
    return not (isinstance(receiver, ast.Name) and receiver.id in ("cursor", "statement", "database"))


def _is_constant(node: ast.expr, filled: set[str]) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="fill" | "numbered"), args=[ast.Name() | ast.Attribute(), *_]):
            return True
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.isupper() or name in filled
    return False


def _is_name(node: ast.expr) -> bool:
    """The name of a table, a schema or a column: quoted by asyncpg, and still none of a caller's."""
    match node:
        case ast.Constant(value=str()) | ast.Call(func=ast.Name(id="resolve_schema")):
            return True
        case ast.Name(id=name):
            return name.isupper() or name == "columns"
    return False


def _filled_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The local names that nothing but constants and filled statements is ever assigned to."""
    good: set[str] = set()
    bad = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = (
                    zip(target.elts, node.value.elts, strict=True)
                    if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                    else [(target, node.value)]
                )
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        (good if _is_constant(value, set()) else bad).add(name.id)
    return good - bad


@pytest.mark.parametrize("module", MODULES)
def test_no_sql_is_built_from_input(module: str) -> None:
    assert built_sql(MODULES[module].read_text("utf-8"), module) == []


@pytest.mark.parametrize(
    "line",
    [
        'await conn.execute(f"DELETE FROM jobs WHERE id = {job_id}")',
        'await conn.fetch("SELECT " + columns)',
        'await conn.fetchval("SELECT %s" % name)',
        'await conn.fetchrow("SELECT {}".format(name))',
        "await conn.fetchrow(DELETE.format(name))",
        "await conn.fetch(query)",
        "await conn.fetch(fill(f'{a}', schema))",
        "await conn.fetch(fill(SELECT + name, schema))",
        "await self._conn.execute(query=name)",
        "await conn.prepare(name)",
        "await conn.copy_to_table(name)",
        "await conn.copy_to_table('jobs', schema_name=schema)",
        "statement = fill(SELECT, schema)\n    statement = name\n    await conn.fetch(statement)",
    ],
)
def test_the_rule_finds_what_is_built(line: str) -> None:
    assert built_sql(f"async def f(conn, name, query, schema):\n    {line}\n", "recado.queue.novelty") != []


@pytest.mark.parametrize(
    "line",
    [
        "await conn.execute(fill(DELETE, schema), name)",
        "await conn.execute(fill(last.down, schema))",
        "await conn.fetchval(workers.PROBE)",
        "statement = fill(SELECT, schema)\n    await conn.fetch(statement, name)",
        "a, b = fill(SELECT, schema), SELECT\n    await conn.fetch(a)\n    await conn.fetch(b)",
        "await conn.copy_to_table('jobs', schema_name=resolve_schema(schema), columns=COPY_COLUMNS, source=rows())",
        "statement = fill(SELECT, schema)\n    async def g():\n        await conn.fetch(statement)\n    await g()",
    ],
)
def test_the_rule_lets_constants_pass(line: str) -> None:
    assert built_sql(f"async def f(conn, name, query, schema):\n    {line}\n", "recado.queue.novelty") == []


def test_the_exceptions_of_the_rule_are_there() -> None:
    for module, function in STATEMENT_PARAMETERS:
        if module in MODULES:
            assert f"def {function}(" in MODULES[module].read_text("utf-8")


# --- no SQL is built from input: what is sent ---

HOSTILE = [
    "'; DROP SCHEMA recado CASCADE; --",
    '"; DROP SCHEMA recado CASCADE; --',
    "$1",
    "{schema}",
    "%s%n",
    "a\\'b\\",
    "\\.",
    "\\N",
    "a\tb\nc\rd",
    "E'\\x41'",
    "/* */ UNION SELECT",
    "Ω≈ç \U0001f4a5 \u202e",
    "{a,b}",
    "(NULL)",
]


@pytest.mark.parametrize("schema", [*HOSTILE, "", "Recado", "pg_temp", "a" * 49, "a b", "a.b", "ñ", "a\0"])
async def test_a_schemas_name_is_an_identifier_or_refused(schema: str, conn: asyncpg.Connection) -> None:
    for use in (resolve_schema, wake_channel, cancel_channel, operations.channel):
        with pytest.raises(ConfigurationError, match="as the schema's name"):
            use(schema)
    with pytest.raises(ConfigurationError, match="as the schema's name"):
        Recado(schema=schema)
    with pytest.raises(ConfigurationError, match="as the schema's name"):
        await migrate.up(conn, schema=schema)
    with pytest.raises(ConfigurationError, match="as the schema's name"):
        migrate.sql(schema=schema)


async def test_whatever_stands_in_a_job_is_a_value_and_comes_back_as_it_was(
    conn: asyncpg.Connection, schema: str
) -> None:
    """Beneath the checks of names: in the statements themselves, the COPY and the NOTIFY."""
    jobs = [
        NewJob(text, f'{{"text": {_json(text)}}}', queue=text, idempotency_key=key)
        for text in HOSTILE
        for key in (None, text)
    ]
    bulk = [NewJob(text, "{}", queue=text) for text in HOSTILE * COPY_FROM]
    await hungry(conn, *HOSTILE)
    ids = [await insert_job(conn, job) for job in jobs]
    assert await insert_jobs(conn, jobs[1::2]) == ids[1::2]
    await insert_jobs(conn, bulk)
    assert await count(conn, schema) == len(jobs) + len(bulk)

    for job_id, job in zip(ids, jobs, strict=True):
        stored = await admin.get_job(conn, job_id)
        assert (stored.job_type, stored.queue, stored.idempotency_key) == (job.job_type, job.queue, job.idempotency_key)
        assert stored.payload == read_json(job.payload)
    for text in HOSTILE:
        claimed = await claims.claim(conn, WORKER, text, 1_000, claims.NO_FLOORS)
        assert {job.job_type for job in claimed} == {text}
        assert len(claimed) == 2 + COPY_FROM
        await finishes.complete(conn, WORKER, [Completion(job.id, job.fence, _json(text)) for job in claimed])
        assert len(await admin.list_jobs(conn, job_type=text, queue=text)) == 2 + COPY_FROM
    assert await count(conn, schema, "status = 'completed'") == len(jobs) + len(bulk)
    assert (await counts.counts(conn)).pending == 0


def _json(text: str) -> str:
    return json.dumps(text)


async def test_what_a_notification_says_is_the_queues_name_and_nothing_else(
    conn: asyncpg.Connection, schema: str, dsn: str
) -> None:
    listener = await asyncpg.connect(dsn)
    try:
        ear = await Ear.on(listener, wake_channel(None))
        await hungry(conn, *HOSTILE)
        for text in HOSTILE:
            await insert_job(conn, NewJob("a.b", "{}", queue=text))
        assert await ear.heard(conn) == HOSTILE
    finally:
        await listener.close()


@pytest.mark.parametrize("organization", HOSTILE)
async def test_an_organizations_id_is_a_value(
    organization: str, conn: asyncpg.Connection, dsn: str, schema: str
) -> None:
    printable = organization.isprintable()
    job = NewJob("operation.a", "{}", idempotency_key="k")
    if not printable:
        with pytest.raises(TenantError):
            await operations.start(conn, job, organization_id=organization)
        return
    theirs = await operations.start(conn, job, organization_id="other")
    async with ordinary_role(conn, dsn, schema) as url:
        plain = await asyncpg.connect(url)
        try:
            async with operations.tenant(plain, organization):
                mine = await operations.start(plain, job, organization_id=None)
                assert [row.job_id for row in await operations.list_operations(plain, organization)] == [mine]
                assert await plain.fetchval(f"SELECT count(*) FROM {schema}.operations") == 1
            assert mine != theirs
        finally:
            await plain.close()


@pytest.mark.parametrize("text", HOSTILE)
async def test_names_of_applications_and_schedules_are_values(text: str, conn: asyncpg.Connection) -> None:
    await beat(conn, WorkerInfo(WORKER, text, 1, text, (text,), 1, 300.0), 0)
    await schedules.sync(conn, text, WORKER, [Schedule(text, text, "0 0 1 1 *", payload=_json(text))])
    await schedules.pause_schedule(conn, text, text)
    [found] = await schedules.list_schedules(conn, application=text)
    assert (found.name, found.job_type) == (text, text)


@pytest.mark.parametrize("text", [*HOSTILE, "A.b", "a", ".", "a..b", "a.b\n"])
def test_a_job_types_name_is_checked_when_it_is_declared(text: str) -> None:
    with pytest.raises((EnqueueError, ValueError)):
        Recado().declare(text)


# --- no secret gets out ---

PASSWORD = "pw-Zebra7"
SECRET = "token-Okapi3"
PAYLOAD = "payload-Quokka5"


def everything(caplog: pytest.LogCaptureFixture) -> str:
    """All that was logged, with tracebacks, as a handler would write it; but for what the tests' own client logs."""
    records = [record for record in caplog.records if not record.name.startswith("httpx")]
    return "\n".join([*map(logging.Formatter().format, records), *(repr(record.args) for record in records)])


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The netloc's query of a server that asks for passwords, where alice has one."""
    with tempfile.TemporaryDirectory(prefix="recado-guarded-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        home = Path(folder) / "home"
        with embedded.start(home, durable=False) as server:
            _alter(server.dsn(), f"CREATE ROLE alice LOGIN PASSWORD '{PASSWORD}'")
        rules = home / "pgdata" / "pg_hba.conf"
        rules.write_text("local all postgres trust\nlocal all all scram-sha-256\n")
        with embedded.start(home, durable=False) as server:
            yield urlsplit(server.dsn()).query


def _alter(dsn: str, statement: str) -> None:
    async def alter() -> None:
        conn = await asyncpg.connect(dsn)
        await conn.execute(statement)
        await conn.close()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        runner.run(alter())


WRONG_PASSWORD = f"postgresql://alice:{PASSWORD}x@/postgres?{{}}"

COMMANDS = [
    ("check",),
    ("migrate", "status"),
    ("migrate", "up"),
    ("jobs", "list"),
    ("jobs", "cancel", str(uuid4())),
    ("dead",),
    ("schedules", "list"),
]


@pytest.mark.parametrize(
    "url",
    [
        WRONG_PASSWORD,
        f"postgresql://nobody:{PASSWORD}@/postgres?{{}}",  # no such role
        f"postgresql://alice:{PASSWORD}@/nowhere?{{}}",  # no such database
        f"postgresql://alice:{PASSWORD}@127.0.0.1:1/postgres",  # nobody listens
        f"postgresql://alice:{PASSWORD}@no-such-host.invalid/postgres",
        f"postgresql://alice:{PASSWORD}#{PASSWORD}@/postgres?{{}}",  # not escaped
        f"postgresql://alice:a/{PASSWORD}@127.0.0.1:1/postgres",
        f"postgresql://alice:{PASSWORD}@127.0.0.1:port/postgres",
        f"postgresql://alice:{PASSWORD}@127.0.0.1:1/postgres?sslmode={PASSWORD}",
        f"postgresql://alice@/postgres?{{}}&password={PASSWORD}x",
        f"mysql://alice:{PASSWORD}@127.0.0.1/postgres",
        PASSWORD,
    ],
    ids=lambda url: re.sub(r"[^a-z0-9:]+", "-", url)[:50],
)
def test_a_password_in_a_dsn_that_does_not_work_is_shown_nowhere(
    url: str,
    guarded: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    commands = COMMANDS if url == WRONG_PASSWORD else COMMANDS[:1]
    monkeypatch.setenv("RECADO_DSN", url.format(guarded))
    settings.cache_clear()
    results = [run_command(monkeypatch, capsys, *command) for command in commands]
    monkeypatch.undo()
    settings.cache_clear()
    for code, out, err in results:
        assert (code, out) == (1, "")
        assert err.startswith("recado: cannot connect: ")
        assert PASSWORD not in err + everything(caplog)


def test_secrets_in_settings_that_cannot_be_read_are_shown_nowhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for tokens in (SECRET, f'[{{"name": "a", "sha256": "{SECRET}"}}]', f'[{{"{SECRET}": 1}}]', f'["{SECRET}"]'):
        monkeypatch.setenv("RECADO_TOKENS", tokens)
        monkeypatch.setenv("RECADO_DSN", f"postgresql://a:{PASSWORD}@127.0.0.1:1/a")
        settings.cache_clear()
        code, out, err = run_command(monkeypatch, capsys, "check")
        assert (code, out) == (1, "")
        assert not {word for word in (SECRET, PASSWORD) if word in err}, err
    monkeypatch.undo()
    settings.cache_clear()


def test_the_settings_show_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECADO_DSN", f"postgresql://a:{PASSWORD}@/a")
    monkeypatch.setenv("RECADO_LISTEN_DSN", f"postgresql://a:{PASSWORD}@/a")
    settings.cache_clear()
    shown = f"{settings()!r} {settings()} {settings().model_dump()} {settings().model_dump_json()}"
    monkeypatch.undo()
    settings.cache_clear()
    assert PASSWORD not in shown


async def test_a_whole_run_logs_no_password_no_token_and_no_payload(
    conn: asyncpg.Connection, dsn: str, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Jobs that succeed, fail, die, cannot be read and are cancelled; requests that are answered and refused."""
    caplog.set_level(logging.DEBUG)
    app = Recado()

    @app.job("shop.echo")
    async def echo(payload: dict[str, str]) -> dict[str, str]:
        return payload

    @app.job("shop.fail", max_attempts=1, critical=True)
    async def fail(payload: dict[str, str]) -> None:
        raise ValueError(payload["text"])

    @app.job("shop.number", max_attempts=1)
    async def number(payload: dict[str, int]) -> None: ...

    @app.job("shop.unwritable", max_attempts=1)
    async def unwritable(payload: dict[str, str]) -> object:
        return {payload["text"]: object()}

    @app.operation("load")
    async def load(payload: dict[str, str], operation: object) -> dict[str, str]:
        return payload

    value = {"text": PAYLOAD}
    async with ordinary_role(conn, dsn, schema) as url:
        password = urlsplit(url).password
        assert password
        done = [await echo.enqueue(conn, value), await load.start(conn, value, organization_id="acme")]
        done += [await unwritable.enqueue(conn, value)]
        dead = [await fail.enqueue(conn, value, idempotency_key=PAYLOAD)]
        dead += [await insert_job(conn, NewJob("shop.number", f'{{"text": "{PAYLOAD}"}}', max_attempts=1))]
        dead += [await insert_job(conn, NewJob("shop.unknown", f'{{"text": "{PAYLOAD}"}}', max_attempts=1))]
        with pytest.raises(EnqueueError) as refused:
            await app.enqueue(conn, "shop.number", value)
        async with working(app, url) as (_, seen):
            for job_id in done:
                await seen.seen(EventKind.COMPLETED, job_id)
            for job_id in dead:
                await seen.seen(EventKind.DIED, job_id)
        async with asyncpg.create_pool(url, min_size=0) as pool:
            api = create_app(app, pool, tokens=[token(SECRET, "jobs:admin", organization="acme")])
            shown = [await client(api).get(path, headers=bearer(SECRET)) for path in ("/metrics", "/nowhere")]
            shown += [await client(api).get("/metrics", headers=bearer(f"{SECRET}x"))]
            shown += [await client(api).get(f"/api/jobs?cursor={quote(PAYLOAD)}x", headers=bearer(SECRET))]
            shown += [await client(api).post(f"/api/jobs/{done[1]}/cancel", headers=bearer(SECRET))]
    assert [answer.status_code for answer in shown] == [200, 404, 401, 400, 409]

    logged = everything(caplog)
    assert str(dead[0]) in logged  # or nothing of this was tried
    assert not [word for word in (password, SECRET, PAYLOAD) if word in logged]
    assert PAYLOAD not in str(refused.value)
    answers = "".join(answer.text for answer in shown[:3] + shown[4:])  # the cursor's sentence quotes the cursor
    assert not [word for word in (password, SECRET, PAYLOAD) if word in answers]
    # Where it is kept, with the job, and said so in docs/security.md.
    assert PAYLOAD in str((await admin.get_job(conn, dead[0])).last_error)
