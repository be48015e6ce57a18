from __future__ import annotations

import asyncpg
import httpx
import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from recado.api import create_app
from recado.app import Recado
from recado.queue.connections import Pool
from tests.api.conftest import bearer, client, insert, token

METRICAS = "/api/v1/jobs/metricas"
ADMIN = bearer("s3cret")
TOKENS = [token("s3cret", "jobs:admin")]


@pytest.fixture
def ask(recado_app: Recado, pool: Pool) -> httpx.AsyncClient:
    return client(create_app(recado_app, pool, tokens=TOKENS))


@pytest.mark.parametrize("prefix", ["/queue", "/internal/tools/queue", "/{tenant}/queue"])
async def test_it_works_under_any_prefix(prefix: str, recado_app: Recado, pool: Pool) -> None:
    async def home(request: object) -> PlainTextResponse:
        return PlainTextResponse("the shop")

    api = create_app(recado_app, pool, tokens=TOKENS)
    ask = client(Starlette(routes=[Route("/", home), Mount(prefix, api)]))
    prefix = prefix.replace("{tenant}", "acme")

    assert (await ask.get(f"{prefix}/healthz")).json() == {"status": "ok"}
    assert (await ask.get(f"{prefix}/readyz")).json() == {"status": "ready"}
    assert (await ask.get(f"{prefix}{METRICAS}", headers=ADMIN)).json()["pendientes"] == 0
    assert (await ask.get(f"{prefix}{METRICAS}")).status_code == 401
    assert (await ask.get(f"{prefix}/metrics", headers=ADMIN)).status_code == 200
    assert (await ask.get("/")).text == "the shop"


async def test_it_looks_at_the_schema_of_its_application(
    recado_app: Recado, pool: Pool, conn: asyncpg.Connection, schema: str
) -> None:
    await insert(conn, schema)
    await conn.execute(f"ALTER SCHEMA {schema} RENAME TO another_queue")
    here, there = (client(create_app(app, pool, tokens=TOKENS)) for app in (recado_app, Recado(schema="another_queue")))

    assert (await here.get(METRICAS, headers=ADMIN)).status_code == 503
    assert (await there.get(METRICAS, headers=ADMIN)).json()["pendientes"] == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 200),
        ("GET", "/readyz", 200),
        ("GET", METRICAS, 200),
        ("GET", "/metrics", 200),
        ("GET", "/nothing", 404),
        ("POST", METRICAS, 405),
    ],
)
async def test_no_response_is_stored_or_sniffed(method: str, path: str, status: int, ask: httpx.AsyncClient) -> None:
    response = await ask.request(method, path, headers=ADMIN)

    assert response.status_code == status
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("headers", [{}, bearer("wrong")])
async def test_a_refusal_is_not_stored_either(ask: httpx.AsyncClient, headers: dict[str, str]) -> None:
    assert (await ask.get(METRICAS, headers=headers)).headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("method", "path", "reason"), [("GET", "/nothing", "nothing at this address"), ("POST", METRICAS, "method")]
)
async def test_an_error_is_one_sentence_of_json(method: str, path: str, reason: str, ask: httpx.AsyncClient) -> None:
    response = await ask.request(method, path, headers=ADMIN)

    assert response.json().keys() == {"error"}
    assert reason in response.json()["error"]
    assert (response.headers.get("allow") is not None) == (method == "POST")


async def test_trouble_with_the_database_is_a_503_that_tells_nothing_of_it(
    ask: httpx.AsyncClient, conn: asyncpg.Connection, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    await conn.execute(f"ALTER TABLE {schema}.jobs RENAME TO elsewhere")

    response = await ask.get(METRICAS, headers=ADMIN)

    assert response.status_code == 503
    assert response.json() == {"error": "cannot answer this request: the database is not available; try again later"}
    assert "UndefinedTableError" in caplog.text


async def test_a_connection_that_was_lost_costs_one_request_at_most(
    ask: httpx.AsyncClient, pool: Pool, conn: asyncpg.Connection
) -> None:
    assert (await ask.get(METRICAS, headers=ADMIN)).status_code == 200
    async with pool.acquire() as pooled:
        pid = pooled.get_server_pid()
        await conn.execute("SELECT pg_terminate_backend($1, 5000)", pid)

    answers = [(await ask.get(METRICAS, headers=ADMIN)).status_code for _ in range(pool.get_max_size() + 1)]

    assert answers[-1] == 200


class Broken(AuthenticationBackend):
    def __init__(self, error: Exception) -> None:
        self._error = error

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        raise self._error


async def test_a_fault_is_a_500_that_tells_nothing_of_it(recado_app: Recado, pool: Pool) -> None:
    ask = client(create_app(recado_app, pool, authentication=Broken(RuntimeError("s3cret"))))

    response = await ask.get(METRICAS)

    assert response.status_code == 500
    assert response.json() == {"error": "cannot answer this request: the API failed; its log says why"}
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (ConnectionRefusedError("10.0.0.7"), 503, "the database is not available"),
        (asyncpg.InterfaceError("pool is closing"), 503, "the database is not available"),
        (HTTPException(429, "too many logins; wait a minute"), 429, "too many logins; wait a minute"),
        (HTTPException(418), 418, "I'm a Teapot"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_the_users_own_backend_fails_like_everything_else(
    error: Exception, status: int, sentence: str, recado_app: Recado, pool: Pool
) -> None:
    response = await client(create_app(recado_app, pool, authentication=Broken(error))).get(METRICAS)

    assert response.status_code == status
    assert sentence in response.json()["error"]
