from __future__ import annotations

from base64 import urlsafe_b64encode
from datetime import UTC, datetime
from types import SimpleNamespace
from uuid import UUID, uuid4

import asyncpg
import httpx
import pytest
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser, SimpleUser, UnauthenticatedUser
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

import recado
from recado.api import create_app, operation_routes
from recado.app import Recado
from recado.queue import get_job, operations
from recado.queue.connections import Pool
from recado.queue.operations import get_operation, system
from tests.api.conftest import bearer, begin, client, finish, progress, start, token

ACME, GLOBEX, NOBODY = bearer("acme"), bearer("globex"), bearer("nobody")
TOKENS = [token("acme", organization="acme"), token("globex", organization="globex"), token("nobody")]
"""None has a scope."""


@pytest.fixture
def ask(recado_app: Recado, tenant_pool: Pool) -> httpx.AsyncClient:
    return client(create_app(recado_app, tenant_pool, tokens=TOKENS))


def ids(response: httpx.Response) -> list[UUID]:
    assert response.status_code == 200, response.text
    return [UUID(job["job_id"]) for job in response.json()["jobs"]]


# --- one operation ---


async def test_an_operation_is_shown_to_its_organization(ask: httpx.AsyncClient, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")

    shown = (await ask.get(f"/api/jobs/{job_id}", headers=ACME)).json()

    assert list(shown) == ["job_id", "kind", "status", "progress", "result", "error", "created_at", "updated_at"]
    assert (shown["job_id"], shown["kind"]) == (str(job_id), "import")
    assert (shown["status"], shown["progress"], shown["result"], shown["error"]) == ("pending", 0, None, None)
    created_at = datetime.fromisoformat(shown["created_at"])
    assert created_at.utcoffset() is not None
    assert abs((datetime.now(UTC) - created_at).total_seconds()) < 3600


async def test_it_shows_how_far_the_work_is_and_what_came_of_it(
    ask: httpx.AsyncClient, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    await begin(conn, job_id)
    await progress(conn, job_id, 40)
    halfway = (await ask.get(f"/api/jobs/{job_id}", headers=ACME)).json()
    await finish(conn, job_id, '{"blueprint_id": 42}')
    done = (await ask.get(f"/api/jobs/{job_id}", headers=ACME)).json()

    assert (halfway["status"], halfway["progress"]) == ("processing", 40)
    assert (done["status"], done["progress"], done["result"]) == ("done", 100, {"blueprint_id": 42})
    assert done["updated_at"] > halfway["updated_at"] > done["created_at"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("HEAD", ""), ("GET", "/events"), ("HEAD", "/events"), ("POST", "/cancel")]
)
async def test_what_is_anothers_was_never_there_or_is_no_id_is_the_same_404(
    method: str, path: str, ask: httpx.AsyncClient, conn: asyncpg.Connection
) -> None:
    theirs = await start(conn, "globex")

    answers = [
        await ask.request(method, f"/api/jobs/{job_id}{path}", headers=ACME) for job_id in (theirs, uuid4(), "no-id")
    ]

    first = answers[0]
    assert first.status_code == 404
    assert first.headers["cache-control"] == "no-store"
    if method != "HEAD":
        assert first.json() == {"error": "cannot answer this request: there is nothing at this address; check its path"}
    for other in answers[1:]:
        assert (other.status_code, other.headers.raw, other.content) == (404, first.headers.raw, first.content)
    async with system(conn):
        assert (await get_operation(conn, theirs)).status == "pending"


async def test_connections_that_change_tenants_show_nobody_anothers(
    ask: httpx.AsyncClient, conn: asyncpg.Connection
) -> None:
    own = {"acme": await start(conn, "acme"), "globex": await start(conn, "globex")}

    for _ in range(5):
        for asking, headers in (("acme", ACME), ("globex", GLOBEX)):
            assert ids(await ask.get("/api/jobs", headers=headers)) == [own[asking]]
            for organization_id, job_id in own.items():
                found = await ask.get(f"/api/jobs/{job_id}", headers=headers)
                assert found.status_code == (200 if organization_id == asking else 404)


async def test_not_even_a_superusers_pool_shows_anothers(
    recado_app: Recado, pool: Pool, conn: asyncpg.Connection
) -> None:
    assert await conn.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
    theirs = await start(conn, "globex")
    ask = client(create_app(recado_app, pool, tokens=TOKENS))

    assert (await ask.get(f"/api/jobs/{theirs}", headers=ACME)).status_code == 404
    assert (await ask.get(f"/api/jobs/{theirs}/events", headers=ACME)).status_code == 404
    assert (await ask.post(f"/api/jobs/{theirs}/cancel", headers=ACME)).status_code == 404
    assert ids(await ask.get("/api/jobs", headers=ACME)) == []
    assert (await get_job(conn, theirs)).status == "pending"


# --- the list ---


async def test_the_list_goes_on_page_by_page_from_the_newest(ask: httpx.AsyncClient, conn: asyncpg.Connection) -> None:
    started = []
    for _ in range(3):
        async with conn.transaction():  # those of one transaction have one created_at
            started += [await start(conn, "acme"), await start(conn, "globex"), await start(conn, "acme")]
    own = [job_id for n, job_id in enumerate(started) if n % 3 != 1]

    seen: list[UUID] = []
    cursor = ""
    for _ in range(3):
        assert cursor is not None
        page = await ask.get("/api/jobs", params={"limit": 2, "cursor": cursor}, headers=ACME)
        seen += ids(page)
        cursor = page.json()["next"]

    assert cursor is None
    assert seen == own[::-1]


async def test_a_page_that_is_just_full_is_the_last(ask: httpx.AsyncClient, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    page = await ask.get("/api/jobs?limit=1", headers=ACME)
    assert (ids(page), page.json()["next"]) == ([job_id], None)


async def test_the_list_can_be_narrowed(ask: httpx.AsyncClient, conn: asyncpg.Connection) -> None:
    imported, restored = await start(conn, "acme"), await start(conn, "acme", "restore_full")
    await begin(conn, restored)

    async def listed(query: str) -> list[UUID]:
        return ids(await ask.get(f"/api/jobs?{query}", headers=ACME))

    assert await listed("kind=import") == [imported]
    assert await listed("status=processing") == [restored]
    assert await listed("kind=import&status=processing") == []
    assert await listed("kind=never_heard_of") == []
    assert await listed("kind=&status=&limit=&cursor=") == [restored, imported]
    assert await listed("limit=200&other=1") == [restored, imported]


def encoded(text: str) -> str:
    return urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("limit=0", "limit is '0'; give a whole number from 1 to 200"),
        ("limit=201", "limit is '201'"),
        ("limit=-1", "limit is '-1'"),
        ("limit=1.5", "limit is '1.5'"),
        ("limit=٣", "limit is '٣'"),
        ("limit=" + "9" * 5000, "limit is"),
        ("status=completed", "status is 'completed'; give one of pending, processing, done, error"),
        ("kind=no such", "kind is 'no such'"),
        ("kind=%00", "kind is"),
        ("kind=%FF", "kind is"),
        ("kind=" + "x" * 129, "kind is"),
        ("cursor=x", "cursor is 'x'"),
        ("cursor=ñ", "cursor is"),
        ("cursor=" + encoded("\N{SNOWMAN}"), "cursor is"),
        ("cursor=" + encoded("2026-01-01T00:00:00+00:00"), "cursor is"),
        ("cursor=" + encoded("2026-01-01T00:00:00+00:00|1"), "cursor is"),
        ("cursor=" + encoded(f"yesterday|{UUID(int=0)}"), "cursor is"),
        ("cursor=" + encoded(f"0001-01-01T00:00:00+23:59|{UUID(int=0)}"), "cursor is"),
        ("cursor=" + encoded(f"9999-12-31T23:59:59-23:59|{UUID(int=0)}"), "cursor is"),
    ],
)
async def test_a_parameter_that_cannot_be_is_one_sentence(query: str, says: str, ask: httpx.AsyncClient) -> None:
    response = await ask.get(f"/api/jobs?{query}", headers=ACME)

    assert response.status_code == 400
    assert response.json()["error"].startswith("cannot list operations: ")
    assert says in response.json()["error"]
    assert len(response.text) < 400


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59.999999+00:00"])
async def test_a_cursor_from_the_ends_of_time_is_none_of_the_servers_trouble(
    moment: str, ask: httpx.AsyncClient
) -> None:
    response = await ask.get("/api/jobs", params={"cursor": encoded(f"{moment}|{UUID(int=0)}")}, headers=ACME)
    assert ids(response) == []


# --- cancelling ---


async def test_cancelling_ends_the_operation_and_its_job(ask: httpx.AsyncClient, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")

    response = await ask.post(f"/api/jobs/{job_id}/cancel", headers=ACME)

    assert response.status_code == 200
    assert response.json() == (await ask.get(f"/api/jobs/{job_id}", headers=ACME)).json()
    assert (response.json()["status"], response.json()["error"]) == ("error", operations.CANCELLED)
    assert (await get_job(conn, job_id)).status == "cancelled"


async def test_what_has_ended_cannot_be_cancelled(ask: httpx.AsyncClient, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    await begin(conn, job_id)
    await finish(conn, job_id)
    before = (await ask.get(f"/api/jobs/{job_id}", headers=ACME)).json()

    response = await ask.post(f"/api/jobs/{job_id}/cancel", headers=ACME)

    assert response.status_code == 409
    assert response.json()["error"].startswith(f"cannot cancel operation {job_id}: it is done already; ")
    assert (await ask.get(f"/api/jobs/{job_id}", headers=ACME)).json() == before


async def test_reading_does_not_cancel(ask: httpx.AsyncClient, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    assert (await ask.get(f"/api/jobs/{job_id}/cancel", headers=ACME)).status_code == 405
    assert (await get_job(conn, job_id)).status == "pending"


# --- in an application with its own authentication ---


class Member(SimpleUser):
    def __init__(self, **attributes: object) -> None:
        super().__init__("ann")
        self.__dict__.update(attributes)


class Session(AuthenticationBackend):
    """The cookie is the user's name; whose name is not known is not logged in."""

    def __init__(self, **users: BaseUser) -> None:
        self._users = users

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        user = self._users.get(conn.cookies.get("session", ""))
        return None if user is None else (AuthCredentials(["authenticated"]), user)


async def plain_error(request: Request, error: Exception) -> PlainTextResponse:
    assert isinstance(error, HTTPException)
    return PlainTextResponse("the shop's own", error.status_code)


def shop(app: Recado, pool: Pool, **users: BaseUser) -> httpx.AsyncClient:
    """A service with the operations at its root, and its users."""
    service = Starlette(
        routes=operation_routes(app, pool),
        middleware=[Middleware(AuthenticationMiddleware, backend=Session(**users))],
        exception_handlers={HTTPException: plain_error},
    )
    return client(service, base_url="http://shop.example")


def session(name: str, **headers: str) -> dict[str, str]:
    return {"Cookie": f"session={name}", **{key.replace("_", "-"): value for key, value in headers.items()}}


NUMBER, IDENTIFIER = 42, UUID("0198c0de-0000-7000-8000-000000000000")


@pytest.mark.parametrize(
    ("user", "organization_id"),
    [
        (Member(organization_id="acme"), "acme"),
        (Member(organization="acme"), "acme"),
        (Member(organization_id="acme", organization="globex"), "acme"),
        (Member(organization_id=None, organization="acme"), "acme"),
        (Member(organization_id=NUMBER), str(NUMBER)),
        (Member(organization_id=IDENTIFIER), str(IDENTIFIER)),
    ],
)
async def test_a_user_of_the_service_sees_what_is_their_organizations(
    user: BaseUser, organization_id: str, recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection
) -> None:
    own, theirs = await start(conn, organization_id), await start(conn, "initech")
    ask = shop(recado_app, tenant_pool, ann=user)

    assert ids(await ask.get("/api/jobs", headers=session("ann"))) == [own]
    assert (await ask.get(f"/api/jobs/{own}", headers=session("ann"))).status_code == 200
    refused = await ask.get(f"/api/jobs/{theirs}", headers=session("ann"))
    assert (refused.status_code, refused.headers["cache-control"]) == (404, "no-store")
    assert refused.json().keys() == {"error"}


@pytest.mark.parametrize(
    ("user", "status", "says"),
    [
        (Member(), 403, "its user belongs to no organization"),
        (Member(organization_id=""), 403, "it must be an id that is not empty"),
        (Member(organization_id="0"), 403, "that is the system"),
        (Member(organization_id=0), 403, "that is the system"),
        (Member(organization=SimpleNamespace(id=1)), 403, "it must be an id"),
        (Member(organization_id="a\0b"), 403, "printable"),
        (UnauthenticatedUser(), 401, "nobody is logged in"),
    ],
    ids=["none", "empty", "system", "system as a number", "no id", "not printable", "nobody"],
)
@pytest.mark.parametrize("path", ["", "/{job_id}", "/{job_id}/events", "/{job_id}/cancel"])
async def test_who_belongs_to_no_organization_sees_nothing(
    path: str, user: BaseUser, status: int, says: str, recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    ask = shop(recado_app, tenant_pool, ann=user)
    method = "POST" if path.endswith("cancel") else "GET"

    response = await ask.request(method, f"/api/jobs{path.format(job_id=job_id)}", headers=session("ann"))

    assert response.status_code == status
    assert says in response.json()["error"]
    assert (await get_job(conn, job_id)).status == "pending"


async def test_without_a_token_or_an_organization_of_its_own_nobody_gets_in(ask: httpx.AsyncClient) -> None:
    assert (await ask.get("/api/jobs")).status_code == 401
    response = await ask.get("/api/jobs", headers=NOBODY)
    assert response.status_code == 403
    assert "belongs to no organization" in response.json()["error"]


async def test_the_application_may_say_itself_whose_operations_a_request_may_see(
    recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection
) -> None:
    own = await start(conn, "acme")

    def of_the_host(request: Request) -> str | None:
        return request.url.hostname if request.url.hostname == "acme" else None

    routes = operation_routes(recado_app, tenant_pool, organization=of_the_host)
    alone, other = (client(Starlette(routes=routes), base_url=f"http://{host}") for host in ("acme", "unknown"))
    mounted = client(
        Starlette(
            routes=[Mount("/queue", create_app(recado_app, tenant_pool, tokens=TOKENS, organization=of_the_host))]
        ),
        base_url="http://acme",
    )

    assert ids(await alone.get("/api/jobs")) == [own]
    assert (await other.get("/api/jobs")).status_code == 403
    assert ids(await mounted.get("/queue/api/jobs", headers=NOBODY)) == [own]


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "cross-site", "Origin": "http://shop.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://shop.example:8080"},
        {"Origin": "null"},
        {"Origin": "http://evil.example", "Authorization": "Basic YW5uOnNlY3JldA=="},
    ],
)
async def test_another_sites_page_cannot_have_a_browser_cancel(
    headers: dict[str, str], recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    ask = shop(recado_app, tenant_pool, ann=Member(organization_id="acme"))

    response = await ask.post(f"/api/jobs/{job_id}/cancel", headers=session("ann", **headers))

    assert response.status_code == 403
    assert "another site's page" in response.json()["error"]
    assert (await get_job(conn, job_id)).status == "pending"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec_Fetch_Site": "same-origin", "Origin": "https://shop.example"},
        {"Sec_Fetch_Site": "none"},
        {"Origin": "https://shop.example"},
    ],
)
async def test_the_services_own_pages_can(
    headers: dict[str, str], recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    ask = shop(recado_app, tenant_pool, ann=Member(organization_id="acme"))
    response = await ask.post(f"/api/jobs/{job_id}/cancel", headers=session("ann", **headers))
    assert response.status_code == 200


async def test_a_token_may_be_used_from_any_page(ask: httpx.AsyncClient, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    headers = ACME | {"Sec-Fetch-Site": "cross-site", "Origin": "https://elsewhere.example"}
    assert (await ask.post(f"/api/jobs/{job_id}/cancel", headers=headers)).status_code == 200


async def test_trouble_with_the_database_is_a_503_in_any_application(
    recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    await conn.execute(f"ALTER TABLE {schema}.operations RENAME TO elsewhere")
    ask = shop(recado_app, tenant_pool, ann=Member(organization_id="acme"))

    for path in ("", f"/{uuid4()}", f"/{uuid4()}/events"):
        response = await ask.get(f"/api/jobs{path}", headers=session("ann"))
        assert response.status_code == 503
        assert "the database is not available" in response.json()["error"]
    assert "UndefinedTableError" in caplog.text


# --- the answer to a start, and the script ---


@pytest.mark.parametrize("prefix", ["", "/queue"])
async def test_who_starts_an_operation_is_told_where_to_look(
    prefix: str, recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    answer = recado.accepted(job_id, prefix=prefix)
    ask = client(Starlette(routes=[Mount(prefix, create_app(recado_app, tenant_pool, tokens=TOKENS))]))

    assert answer.status_code == 202
    assert answer.body == b'{"job_id":"%s"}' % str(job_id).encode()
    assert int(answer.headers["retry-after"]) > 0
    found = await ask.get(answer.headers["location"], headers=ACME)
    assert found.json()["job_id"] == str(job_id)


async def test_the_script_is_for_all_and_kept_for_a_while(
    ask: httpx.AsyncClient, recado_app: Recado, tenant_pool: Pool
) -> None:
    for answer in (
        await ask.get("/api/recado.js"),
        await shop(recado_app, tenant_pool).get("/api/recado.js"),
    ):
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
        assert answer.headers["cache-control"] == "public, max-age=3600"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert "export function watch" in answer.text
        again = await ask.get("/api/recado.js", headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        changed = await ask.get("/api/recado.js", headers={"If-None-Match": '"another"'})
        assert changed.status_code == 200


async def test_the_script_writes_no_markup() -> None:
    script = (await client(Starlette(routes=[recado.api.operations.SCRIPT])).get("/api/recado.js")).text
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "import("):
        assert sink not in script
