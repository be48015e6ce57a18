from __future__ import annotations

import hmac
import json

import httpx
import pytest
from starlette.applications import Starlette
from starlette.authentication import (
    AuthCredentials,
    AuthenticationBackend,
    AuthenticationError,
    BaseUser,
    SimpleUser,
)
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.routing import Mount

from recado.api import TokenBackend, User, auth, create_app
from recado.app import Recado
from recado.errors import ConfigurationError
from recado.queue.connections import Pool
from recado.settings import Token, settings
from tests.api.conftest import bearer, client, token

METRICAS = "/api/v1/jobs/metricas"
TOKENS = [
    token("admin-secret", "jobs:admin", name="ops"),
    token("scraper-secret", "jobs:metrics", name="prometheus"),
    token("useless-secret", name="nobody"),
    token("contraseña", "jobs:admin", name="spanish"),
]


@pytest.fixture
def ask(recado_app: Recado, pool: Pool) -> httpx.AsyncClient:
    return client(
        create_app(recado_app, pool, tokens=TOKENS), address="203.0.113.7", base_url="https://queue.example.com"
    )


# --- tokens ---


@pytest.mark.parametrize(
    ("secret", "metricas", "metrics"),
    [
        (None, 401, 401),
        ("wrong", 401, 401),
        ("useless-secret", 403, 403),
        ("scraper-secret", 403, 200),
        ("admin-secret", 200, 200),
    ],
)
async def test_who_gets_what(ask: httpx.AsyncClient, secret: str | None, metricas: int, metrics: int) -> None:
    headers = {} if secret is None else bearer(secret)

    assert (await ask.get(METRICAS, headers=headers)).status_code == metricas
    assert (await ask.get("/metrics", headers=headers)).status_code == metrics


async def test_without_credentials_the_challenge_names_no_error(ask: httpx.AsyncClient) -> None:
    response = await ask.get(METRICAS)

    assert response.headers["www-authenticate"] == 'Bearer realm="recado"'
    assert response.json() == {"error": "cannot answer this request: it has no valid credentials; send a bearer token"}


async def test_a_lacking_scope_is_no_matter_of_credentials(ask: httpx.AsyncClient) -> None:
    response = await ask.get(METRICAS, headers=bearer("useless-secret"))

    assert "www-authenticate" not in response.headers
    assert response.json() == {"error": "cannot answer this request: its credentials lack the scope for it; use others"}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer  \t ",
        b"admin-secret",
        b"Basic YWRtaW4tc2VjcmV0",
        b"Token admin-secret",
        b"Bearer\tadmin-secret",
        b"Bearer admin-secret extra",
        b"Bearer admin-secret,",
        b'Bearer "admin-secret"',
        b"Bearer ADMIN-SECRET",
        b"Bearer \xff\xfe\x00",
        b"Bearer \xe2\x98\xa0",
        b"Bearer " + b"x" * 1_000_000,
        b"\x00" * 100,
    ],
    ids=lambda header: repr(header[:30]),
)
async def test_credentials_that_are_not_valid_get_a_401_that_repeats_none_of_them(
    ask: httpx.AsyncClient, header: bytes
) -> None:
    response = await ask.get(METRICAS, headers={b"Authorization": header})

    assert response.status_code == 401
    assert response.headers["www-authenticate"] == 'Bearer realm="recado", error="invalid_token"'
    assert response.json() == {"error": "cannot answer this request: it has no valid credentials; send a bearer token"}


async def test_two_authorization_headers_are_refused_even_if_one_is_right(ask: httpx.AsyncClient) -> None:
    headers = [("Authorization", "Bearer admin-secret"), ("Authorization", "Bearer wrong")]

    assert (await ask.get(METRICAS, headers=headers)).status_code == 401
    assert (await ask.get(METRICAS, headers=headers[::-1])).status_code == 401


@pytest.mark.parametrize("header", [b"bearer admin-secret", b"BEARER  admin-secret ", "Bearer contraseña".encode()])
async def test_the_scheme_ignores_case_and_the_secret_is_bytes(ask: httpx.AsyncClient, header: bytes) -> None:
    assert (await ask.get(METRICAS, headers={b"Authorization": header})).status_code == 200


async def test_the_digest_of_nothing_opens_nothing(recado_app: Recado, pool: Pool) -> None:
    ask = client(create_app(recado_app, pool, tokens=[token("", "jobs:admin")]))

    assert (await ask.get(METRICAS, headers=bearer(""))).status_code == 401


async def test_the_digest_itself_opens_nothing(ask: httpx.AsyncClient) -> None:
    assert (await ask.get(METRICAS, headers=bearer(TOKENS[0].sha256))).status_code == 401


@pytest.mark.parametrize("secret", ["admin-secret", "contraseña", "wrong"])
async def test_every_token_is_compared_in_constant_time_whichever_fits(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bytes] = []

    def compare(known: bytes, given: bytes) -> bool:
        compared.append(known)
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(auth, "compare_digest", compare)
    conn = HTTPConnection({"type": "http", "headers": [(b"authorization", b"Bearer " + secret.encode())]})
    try:
        await TokenBackend(TOKENS).authenticate(conn)
    except AuthenticationError:
        assert secret == "wrong"

    assert compared == [bytes.fromhex(t.sha256) for t in TOKENS]


async def test_a_token_gives_a_user_with_a_name_and_an_organization() -> None:
    conn = HTTPConnection({"type": "http", "headers": [(b"authorization", b"Bearer s3cret")]})
    result = await TokenBackend([token("s3cret", "jobs:admin", organization="acme")]).authenticate(conn)

    assert result is not None
    credentials, user = result
    assert credentials.scopes == ["jobs:admin"]
    assert user == User("ops", organization="acme")
    assert user.is_authenticated
    assert (user.display_name, user.identity) == ("ops", "ops")


async def test_an_address_that_does_not_exist_is_told_to_users_only(ask: httpx.AsyncClient) -> None:
    assert (await ask.get("/nothing/here")).status_code == 401
    assert (await ask.get("/nothing/here", headers=bearer("admin-secret"))).status_code == 404


async def test_the_tokens_of_the_environment_are_used(
    recado_app: Recado, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = token("env-secret", "jobs:admin").model_dump(mode="json")
    monkeypatch.setenv("RECADO_TOKENS", json.dumps([entry]))
    settings.cache_clear()
    try:
        ask = client(create_app(recado_app, pool))
    finally:
        monkeypatch.undo()
        settings.cache_clear()

    assert (await ask.get(METRICAS)).status_code == 401
    assert (await ask.get(METRICAS, headers=bearer("env-secret"))).status_code == 200


# --- no tokens ---


@pytest.mark.parametrize(
    ("address", "base_url"),
    [
        ("127.0.0.1", "http://localhost"),
        ("127.0.0.1", "http://LOCALHOST:8710"),
        ("127.0.0.1", "http://127.0.0.1:8710"),
        ("127.8.8.8", "http://127.8.8.8"),
        ("::1", "http://[::1]:8710"),
        ("::ffff:127.0.0.1", "http://127.0.0.1:8710"),
    ],
)
async def test_without_tokens_this_machine_is_let_in(
    address: str, base_url: str, recado_app: Recado, pool: Pool
) -> None:
    ask = client(create_app(recado_app, pool), address=address, base_url=base_url)

    assert (await ask.get(METRICAS)).status_code == 200
    assert (await ask.get("/metrics")).status_code == 200


@pytest.mark.parametrize(
    ("address", "base_url"),
    [
        ("192.168.1.20", "http://localhost"),
        ("203.0.113.7", "http://127.0.0.1:8710"),
        ("::ffff:203.0.113.7", "http://127.0.0.1:8710"),
        ("2001:db8::1", "http://[::1]:8710"),
        ("0.0.0.0", "http://localhost"),
        ("testclient", "http://localhost"),
        ("", "http://localhost"),
        # DNS rebinding: the browser is here, the name is the attacker's.
        ("127.0.0.1", "http://rebind.attacker.example:8710"),
        ("127.0.0.1", "http://localhost.attacker.example"),
        ("127.0.0.1", "http://127.0.0.1.nip.io"),
        ("127.0.0.1", "http://attacker.localhost"),
        ("127.0.0.1", "http://localhost."),
        ("127.0.0.1", "http://0.0.0.0:8710"),
        ("127.0.0.1", "http://192.168.1.20:8710"),
        # A proxy on this machine that passes Host on.
        ("127.0.0.1", "https://queue.example.com"),
    ],
)
async def test_without_tokens_nobody_else_is_let_in(
    address: str, base_url: str, recado_app: Recado, pool: Pool
) -> None:
    ask = client(create_app(recado_app, pool), address=address, base_url=base_url)

    response = await ask.get(METRICAS)

    assert response.status_code == 403
    assert response.json()["error"].startswith("cannot answer this request: no tokens are configured")
    assert (await ask.get("/metrics")).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Forwarded-For": "127.0.0.1"},
        {"X-Forwarded-For": "203.0.113.7"},
        {"X-Forwarded-For": ""},
        {"X-Forwarded-Proto": "https"},
        {"X-Forwarded-Host": "localhost"},
        {"Forwarded": "for=127.0.0.1"},
        {"Via": "1.1 proxy"},
        {"X-Real-IP": "127.0.0.1"},
        {"CF-Connecting-IP": "203.0.113.7"},
        {"Host": "localhost@attacker.example"},
        {"Host": "attacker.example@localhost"},
        {"Host": "localhost,attacker.example"},
        {"Host": "localhost:8710:8710"},
        {"Host": ""},
        {"Origin": "https://attacker.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
    ids=str,
)
async def test_without_tokens_a_request_on_behalf_of_somebody_else_is_refused(
    headers: dict[str, str], recado_app: Recado, pool: Pool
) -> None:
    assert (await client(create_app(recado_app, pool)).get(METRICAS, headers=headers)).status_code == 403


@pytest.mark.parametrize(
    "headers", [{"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"}, {"Sec-Fetch-Site": "none"}], ids=str
)
async def test_without_tokens_a_page_of_its_own_is_let_in(
    headers: dict[str, str], recado_app: Recado, pool: Pool
) -> None:
    assert (await client(create_app(recado_app, pool)).get(METRICAS, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "scope",
    [
        {"client": None},
        {"http_version": "1.0"},
        {"headers": []},
        {"headers": [(b"host", b"localhost"), (b"host", b"localhost")]},
    ],
    ids=str,
)
async def test_without_tokens_what_proves_nothing_is_refused(scope: dict[str, object]) -> None:
    whole: dict[str, object] = {
        "type": "http",
        "scheme": "http",
        "http_version": "1.1",
        "client": ("127.0.0.1", 50000),
        "headers": [(b"host", b"localhost")],
    }
    backend = auth.LoopbackBackend()

    _, user = await backend.authenticate(HTTPConnection(whole))
    assert user.name == "local"
    with pytest.raises(HTTPException) as refused:
        await backend.authenticate(HTTPConnection(whole | scope))
    assert refused.value.status_code == 403


async def test_an_empty_list_of_tokens_lets_nobody_in_from_elsewhere(recado_app: Recado, pool: Pool) -> None:
    api = create_app(recado_app, pool, tokens=[])

    assert (await client(api, address="203.0.113.7").get(METRICAS, headers=bearer(""))).status_code == 403
    assert (await client(api).get(METRICAS)).status_code == 200


async def test_mounted_without_tokens_it_is_as_closed_as_alone(recado_app: Recado, pool: Pool) -> None:
    service = Starlette(routes=[Mount("/queue", create_app(recado_app, pool))])
    behind_a_proxy = client(service, base_url="https://shop.example.com")

    assert (await behind_a_proxy.get(f"/queue{METRICAS}")).status_code == 403
    assert (await client(service).get(f"/queue{METRICAS}")).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_without_tokens_the_api_may_be_bound_to_loopback(host: str) -> None:
    auth.check_exposure(host, [])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "queue.example.com", "", "localhost.example"])
def test_without_tokens_the_api_cannot_be_bound_to_anything_else(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^cannot bind to .+: no tokens are configured.+`recado token`"):
        auth.check_exposure(host, [])
    auth.check_exposure(host, TOKENS)


# --- other backends ---


class Sessions(AuthenticationBackend):
    """Stands for a user's own: the header says who it is, and what they may do."""

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        match conn.headers.get("x-session", "").split(":", 1):
            case ["broken", _]:
                raise AuthenticationError(f"bad session {conn.headers['x-session']}")
            case [name, scopes]:
                return AuthCredentials(scopes.split()), SimpleUser(name)
        return None


SESSION_CASES = [
    ("", 401),
    ("broken:jobs:admin", 401),
    ("eve:", 403),
    ("eve:authenticated", 403),
    ("ana:authenticated jobs:admin", 200),
]


@pytest.mark.parametrize(("session", "status"), SESSION_CASES)
async def test_the_users_own_backend_decides(session: str, status: int, recado_app: Recado, pool: Pool) -> None:
    ask = client(
        create_app(recado_app, pool, authentication=Sessions()),
        address="203.0.113.7",
        base_url="https://queue.example.com",
    )

    response = await ask.get(METRICAS, headers={"X-Session": session})

    assert response.status_code == status
    assert ("www-authenticate" in response.headers) == (status == 401)
    assert "broken" not in response.text


async def test_the_users_own_backend_closes_the_way_by_loopback(recado_app: Recado, pool: Pool) -> None:
    assert (await client(create_app(recado_app, pool, authentication=Sessions())).get(METRICAS)).status_code == 401


@pytest.mark.parametrize(("session", "status"), [case for case in SESSION_CASES if "broken" not in case[0]])
async def test_the_user_of_the_application_around_is_respected(
    session: str, status: int, recado_app: Recado, pool: Pool
) -> None:
    service = _service(recado_app, pool)
    ask = client(service, address="203.0.113.7", base_url="https://shop.example.com")

    assert (await ask.get(f"/queue{METRICAS}", headers={"X-Session": session})).status_code == status
    assert (await client(service).get(f"/queue{METRICAS}", headers={"X-Session": session})).status_code == status


async def test_tokens_given_by_name_outrank_the_user_of_the_application_around(recado_app: Recado, pool: Pool) -> None:
    ask = client(_service(recado_app, pool, tokens=TOKENS))

    session = {"X-Session": "ana:jobs:admin"}
    assert (await ask.get(f"/queue{METRICAS}", headers=session)).status_code == 401
    assert (await ask.get(f"/queue{METRICAS}", headers=bearer("admin-secret"))).status_code == 200


async def test_a_backend_and_tokens_at_once_are_refused(recado_app: Recado, pool: Pool) -> None:
    with pytest.raises(ConfigurationError, match="in two ways"):
        create_app(recado_app, pool, authentication=Sessions(), tokens=TOKENS)


def _service(app: Recado, pool: Pool, tokens: list[Token] | None = None) -> Starlette:
    """An application with a login of its own that mounts the API."""
    return Starlette(
        routes=[Mount("/queue", create_app(app, pool, tokens=tokens))],
        middleware=[Middleware(AuthenticationMiddleware, backend=Sessions())],
    )
