"""What no browser sends: the API answers it, in one sentence, and nobody learns or changes anything by it.

Through a real server, byte by byte, since clients put right what they are given. Which requests are no HTTP, the
server's parser decides; what it lets through is ours.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import socket
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio
from starlette.types import Message

from recado.api import Hub, create_app
from recado.app import Recado
from recado.queue.connections import Pool
from recado.serve import make_server
from tests.api.conftest import assert_whole, bearer, client, start, token
from tests.queue.support import PATIENCE

TOKENS = [token("ops-secret", "jobs:admin", organization="acme")]

CREDENTIALS = b"Authorization: Bearer ops-secret\r\n"

BASICS = b"Host: localhost\r\nConnection: close\r\n" + CREDENTIALS

NOTHING_HERE = "cannot answer this request: there is nothing at this address; check its path"


class Answer(NamedTuple):
    status: int
    head: str
    body: bytes


Send: TypeAlias = Callable[[bytes], Awaitable[list[Answer]]]


@pytest.fixture(autouse=True)
def no_fault(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing in here is an error of the server's."""
    yield
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR] == []


@pytest_asyncio.fixture
async def send(recado_app: Recado, tenant_pool: Pool) -> AsyncIterator[Send]:
    """Sends bytes to a server of the API's, and reads its answers until it hangs up."""
    hub = Hub(recado_app, tenant_pool)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = make_server(create_app(recado_app, tenant_pool, tokens=TOKENS, hub=hub), hub)
        serving = asyncio.create_task(server.serve([sock]))
        port = sock.getsockname()[1]

        async def send(request: bytes) -> list[Answer]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                async with asyncio.timeout(PATIENCE):
                    return answers((await asyncio.gather(reader.read(), write(writer, request)))[0])
            finally:
                writer.close()

        try:
            yield send
        finally:
            server.stop()
            await serving
    await assert_whole(tenant_pool)


async def write(writer: asyncio.StreamWriter, request: bytes) -> None:
    try:
        writer.write(request)
        await writer.drain()
    except ConnectionError:
        pass  # it had answered before it had read all


def answers(data: bytes) -> list[Answer]:
    """The responses in what came back, at most two. A chunked body stays as it is."""
    found = []
    for text in re.split(rb"(?<!\A)(?=HTTP/1\.1 \d{3} )", data):
        head, _, body = text.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), data
        found.append(Answer(int(head[9:12]), head.decode("latin-1"), body))
    return found


def get(path: bytes, *headers: bytes, method: bytes = b"GET") -> bytes:
    return b"%s %s HTTP/1.1\r\n%s%s\r\n" % (method, path, BASICS, b"".join(h + b"\r\n" for h in headers))


def anonymous(header: bytes) -> bytes:
    """A request for the metrics, with ``header`` in place of the right credentials."""
    return b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%s\r\n\r\n" % header


# --- what is no HTTP, or hardly ---


NO_HTTP = [
    get(b"/api/jobs", b"Content-Length: 0", b"Content-Length: 5") + b"hello",
    get(b"/api/jobs", b"Content-Length: -1"),
    get(b"/api/jobs", b"Content-Length: 1_0"),
    get(b"/api/jobs", b"Transfer-Encoding: xchunked"),
    get(b"/api/jobs", b"Transfer-Encoding: chunked, identity"),
    get(b"/api/jobs", b"Transfer-Encoding : chunked"),
    get(b"/api/jobs", b"Host: elsewhere"),
    get(b"/api/jobs", b"X: a\0b"),
    get(b"/api/jobs", b"X\xff: a"),
    get(b"/api/jobs\xff\xfe"),
    get(b"/api/jobs/\0"),
    get(b"/api jobs"),
    get(b"/api/jobs", method=b"GET,"),
    b"GET /api/jobs HTTP/1.1\r\n" + CREDENTIALS + b"\r\n",  # no Host
    b"GET /api/jobs\r\n\r\n",
    b"GET /api/jobs HTTP/9.9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # a client that speaks TLS
    b"\r\n" * 10 + b"\xff\r\n\r\n",
]


async def test_what_is_no_http_is_refused(send: Send) -> None:
    accepted = []
    for request in NO_HTTP:
        [answer] = await send(request)
        if (answer.status, answer.body) != (400, b"Invalid HTTP request received."):
            accepted.append((request, answer))
    assert accepted == []


async def test_a_request_that_hides_in_anothers_body_has_no_credentials_but_its_own(send: Send) -> None:
    """Servers in a chain may disagree on where a request ends. Each is authenticated here, on its own."""
    hidden = b"GET /api/v1/jobs/metricas HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    chunked = b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n0\r\n\r\n" % (5 + len(hidden))
    found = await send(b"POST /api/v1/jobs/metricas HTTP/1.1\r\nHost: localhost\r\n" + CREDENTIALS + chunked + hidden)
    assert [answer.status for answer in found] in ([405, 401], [400])


async def test_no_other_header_stands_for_credentials(send: Send) -> None:
    for name in (b"X-Forwarded-User", b"X-Authenticated", b"Remote-User", b"Proxy-Authorization", b"Cookie"):
        [answer] = await send(anonymous(name + b": Bearer ops-secret"))
        assert answer.status == 401


# --- what is HTTP ---


NOWHERE = [
    b"/api/jobs/%00",
    b"/api/jobs/%FF%FE",
    b"/api/jobs/%ED%A0%80",
    b"/api/jobs/%zz%0",
    b"/api/jobs/" + b"%D9%A3" * 32,  # Arabic digits, which int() would take
    b"/api/jobs/" + b"0" * 32 + b"%0a",
    b"/api/jobs/" + b"a" * 40_000,
    b"/metrics/",
    b"/healthz/",
    b"/api/jobs/",
    b"/api/jobs/..",
    b"/api/jobs/../../metrics",
    b"/api/%2e%2e/metrics",
    b"/healthz/../metrics",
    b"/api/recado.js/../../../../etc/passwd",
    b"/api/recado.js%00.txt",
    b"/static/recado.js",
    b"//api/jobs",
    b"/api//jobs",
    b"/API/jobs",
    b"/api/jobs;a=b",
    b"*",
    b"http://elsewhere/api/jobs",
    b"/" + b"../" * 5_000,
    b"/" + b"%2F" * 5_000,
]


@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"POST", b"PROPFIND"])
async def test_where_nothing_is_the_answer_is_the_same_404(method: bytes, send: Send) -> None:
    [plain] = await send(get(b"/nowhere", method=method))
    assert plain.status == 404
    assert (NOTHING_HERE.encode() in plain.body) == (method != b"HEAD")
    others = []
    for path in NOWHERE:
        [answer] = await send(get(path, method=method))
        if answer.status == 405 and method in (b"POST", b"PROPFIND"):
            assert path.startswith(b"/api/jobs/")  # it may be an id; nobody has looked for it
        elif undated(answer) != undated(plain):
            others.append((path, answer))
    assert others == []


def undated(answer: Answer) -> Answer:
    return answer._replace(head=re.sub(r"\r\ndate: [^\r]*", "", answer.head))


@pytest.mark.parametrize("where", ["", "/events", "/cancel"])
async def test_anothers_operation_none_and_no_id_are_the_same_404(
    where: str, send: Send, conn: asyncpg.Connection
) -> None:
    theirs = await start(conn, "globex")
    method = b"POST" if where == "/cancel" else b"GET"
    found = [
        undated((await send(get(f"/api/jobs/{job_id}{where}".encode(), method=method)))[0])
        for job_id in (theirs, uuid4(), UUID(int=0), "1", "%00", "%27%20OR%201=1--", "../" * 3 + "x")
    ]
    assert len(set(found)) == 1
    assert found[0].status == 404


async def test_a_method_that_nothing_has_is_a_405(send: Send) -> None:
    for path in (b"/metrics", b"/api/v1/jobs/metricas", b"/api/jobs"):
        for method in (b"PUT", b"PATCH", b"DELETE", b"TRACE", b"CONNECT", b"OPTIONS", b"get", b"X" * 1000):
            [answer] = await send(get(path, method=method))
            assert answer.status == 405
            assert re.search(r"\r\nallow: (HEAD, GET|GET, HEAD)\r\n", answer.head)
            assert b"ops-secret" not in answer.body  # TRACE would send it back


async def test_head_is_get_without_a_body(send: Send) -> None:
    for path in (b"/healthz", b"/readyz", b"/metrics", b"/api/v1/jobs/metricas", b"/api/jobs", b"/api/recado.js"):
        [head], [whole] = await send(get(path, method=b"HEAD")), await send(get(path))
        assert (head.status, head.body) == (200, b"")
        assert sorted(undated(head).head.split("\r\n")) == sorted(undated(whole).head.split("\r\n"))


def cursor(text: str) -> bytes:
    return b"cursor=" + urlsafe_b64encode(text.encode()).rstrip(b"=")


QUERIES = [
    (b"limit=1&limit=0", 400),  # the last one counts, as everywhere in Starlette
    (b"limit=0&limit=1", 200),
    (b"limit=1;status=x", 400),
    (b"limit[]=1&status[]=x&kind.x=1", 200),
    (b"=&&&=", 200),
    (b"%", 200),
    (b"%00=%00", 200),
    (b"limit=1%00", 400),
    (b"limit=+1", 400),
    (b"kind=%ED%A0%80", 400),
    (b"kind=" + b"a" * 40_000, 400),
    (b"cursor=" + b"A" * 40_000, 400),
    (b"cursor=" + b"=" * 4_001, 400),
    (b"cursor=%00", 400),
    (b"limit=" + str(2**70).encode(), 400),
    (b"limit=-1", 400),
    (cursor(f"0001-01-01T00:00:00+00:00|{UUID(int=0)}"), 200),
    (cursor(f"0001-01-01T00:00:00+14:00|{UUID(int=0)}"), 400),
    (cursor(f"9999-12-31T23:59:59-12:00|{UUID(int=0)}"), 400),
    (cursor(f"infinity|{UUID(int=0)}"), 400),
    (cursor("2026-01-01T00:00:00+00:00|7"), 400),
    (cursor("2026-01-01T00:00:00+00:00"), 400),
    (b"status=done%27%3B%20DROP%20TABLE%20jobs%3B--", 400),
    (b"&".join(b"p%d=1" % n for n in range(4_000)), 200),
    (b"?" * 40_000, 200),
]


async def test_a_query_is_answered_or_refused(send: Send) -> None:
    for query, status in QUERIES:
        [answer] = await send(get(b"/api/jobs?" + query))
        assert answer.status == status, query[:80]
        assert len(answer.body) < 400


MEANINGLESS = [
    [b"Accept: \xff\xfe;q=999", b"Accept-Language: " + b"x," * 9_000, b"Accept-Charset: utf-7"],
    [b"Range: bytes=999999-,-5,x", b"If-Range: x"],
    [b"Range: bytes=" + b"0-0," * 9_000],
    [b"If-None-Match: \xff", b"If-Modified-Since: never"],
    [b"Expect: the unexpected"],
    [b"Upgrade: h2c", b"HTTP2-Settings: AAA"],
    [b"Content-Type: application/json; charset=\xff"],
    [b"X-Http-Method-Override: DELETE", b"X-Original-URL: /metrics", b"X-Rewrite-URL: /metrics"],
    [b"Cookie: " + b"a=b; " * 9_000],
    [b"Origin: null", b"Sec-Fetch-Site: \xff"],
    [b"X: a\r\n b"],
    [b"X: y"] * 4_000,
    [b"X: " + b"y" * 60_000],
]


@pytest.mark.parametrize("path", [b"/api/jobs", b"/api/recado.js", b"/metrics", b"/healthz"])
async def test_headers_that_mean_nothing_change_nothing(path: bytes, send: Send) -> None:
    [plain] = await send(get(path))
    for headers in MEANINGLESS:
        [odd] = await send(get(path, *headers))
        assert (odd.status, odd.body) == (200, plain.body), headers[0][:80]


SECRETS = [b"", b"\xff\xfe", b"a" * 60_000, b"ops-secret, Bearer ops-secret", b"%6fps-secret", b"ops-secret\tx", b"'--"]


async def test_odd_credentials_are_a_401(send: Send) -> None:
    for secret in SECRETS:
        [answer] = await send(anonymous(b"Authorization: Bearer " + secret))
        assert answer.status == 401
        assert b"secret" not in answer.body


# --- cancelling ---


BODIES = [
    ([b"Content-Type: application/json", b"Content-Length: 9"], b'{"a": NaN'),
    ([b"Content-Type: application/json", b"Content-Length: 4"], b"\xff\xfe\0\0"),
    ([b"Content-Type: multipart/form-data", b"Content-Length: 2"], b"--"),
    ([b"Content-Type: application/x-www-form-urlencoded", b"Content-Length: 14"], b"_method=DELETE"),
    ([b"Transfer-Encoding: chunked"], b"5\r\nhello\r\n0\r\n\r\n"),
    ([b"Content-Length: 30000"], bytes(30_000)),
    ([b"Expect: 100-continue", b"Content-Length: 10"], b"0123456789"),
]


async def test_a_body_of_a_cancellation_is_not_read(send: Send, conn: asyncpg.Connection) -> None:
    for headers, body in BODIES:
        path = b"/api/jobs/%s/cancel" % str(await start(conn, "acme")).encode()
        [first] = await send(get(path, *headers, method=b"POST") + body)
        assert first.status == 200, headers
        [again] = await send(get(path, method=b"POST"))
        assert again.status == 409


async def test_nothing_but_post_cancels(send: Send, conn: asyncpg.Connection, schema: str) -> None:
    path = b"/api/jobs/%s/cancel" % str(await start(conn, "acme")).encode()
    for method in (b"GET", b"HEAD", b"PUT", b"DELETE", b"post", b"OPTIONS"):
        [answer] = await send(get(path, b"X-Http-Method-Override: POST", method=method))
        assert answer.status == 405
    assert await conn.fetchval(f"SELECT status FROM {schema}.operations") == "pending"


@pytest.mark.parametrize("secret", [None, "wrong"])
async def test_without_credentials_nothing_is_cancelled(
    secret: str | None, recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await start(conn, "acme")
    ask = client(create_app(recado_app, tenant_pool, tokens=TOKENS))
    answer = await ask.post(f"/api/jobs/{job_id}/cancel", headers=bearer(secret) if secret else {})
    assert answer.status_code == 401
    assert await conn.fetchval(f"SELECT status FROM {schema}.operations") == "pending"


# --- streams ---


async def test_a_last_event_id_that_is_none_of_ours_tells_all_anew(send: Send, conn: asyncpg.Connection) -> None:
    path = b"/api/jobs/%s" % str(await start(conn, "acme")).encode()
    await send(get(path + b"/cancel", method=b"POST"))
    for seen in (b"", b"-1", b"1.5", b"0x1", b"1 2", b"9" * 11, b"9" * 9_000, b"\xff", b"\xd9\xa3", b"null", b"'--"):
        [answer] = await send(get(path + b"/events", b"Last-Event-ID: " + seen))
        assert answer.status == 200, seen[:20]
        assert answer.body.count(b"event: update") == 1


async def test_a_client_that_asks_for_another_protocol_gets_the_stream(send: Send, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    path = b"/api/jobs/%s" % str(job_id).encode()
    await send(get(path + b"/cancel", method=b"POST"))
    upgrade = [b"Upgrade: websocket", b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    [answer] = await send(get(path + b"/events", *upgrade))
    assert (answer.status, answer.body.count(b"event: update")) == (200, 1)


# --- anything at all ---

ALPHABET = [
    b"/",
    b"api",
    b"jobs",
    b"metrics",
    b"..",
    b"%00",
    b"%2F",
    b"\xff",
    b"events",
    b"cancel",
    b"'",
    b";",
    b"%",
    b" ",
]

HEADERS = [b"authorization", b"host", b"last-event-id", b"range", b"origin", b"sec-fetch-site", b"if-none-match"]


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_is_asked_the_api_does_not_fail(
    seed: int, recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection
) -> None:
    """Straight at the application: a server's parser lets less through."""
    rng = random.Random(seed)
    ids = [str(await start(conn, "acme")).encode(), str(await start(conn, "globex")).encode()]
    api = create_app(recado_app, tenant_pool, tokens=TOKENS)

    def word() -> bytes:
        return rng.choice([*ALPHABET, *ids, rng.randbytes(rng.randrange(8))])

    for _ in range(150):
        path = b"/" + b"/".join(word() for _ in range(rng.randrange(6)))
        headers = [(rng.choice(HEADERS), word()) for _ in range(rng.randrange(4))]
        if rng.random() < 0.8:
            headers = [(name, value) for name, value in headers if name != b"authorization"]
            headers.append((b"authorization", b"Bearer ops-secret"))
        sent: list[Message] = []
        await api(
            {
                "type": "http",
                "asgi": {"version": "3.0"},
                "http_version": "1.1",
                "method": rng.choice(["GET", "HEAD", "POST", "PUT", "OPTIONS", "é"]),
                "scheme": "http",
                "path": unquote(path.decode("latin-1")),
                "raw_path": path,
                "query_string": b"&".join(word() + b"=" + word() for _ in range(rng.randrange(4))),
                "root_path": "",
                "headers": headers,
                "client": ("127.0.0.1", 50000),
                "server": ("localhost", 80),
                "state": {},
            },
            gone_at_once(),
            collecting(sent),
        )
        assert not sent or sent[0]["status"] < 500, (path, headers)


def gone_at_once() -> Callable[[], Awaitable[Message]]:
    messages: list[Message] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> Message:
        return messages.pop() if messages else {"type": "http.disconnect"}

    return receive


def collecting(sent: list[Message]) -> Callable[[Message], Awaitable[None]]:
    async def send(message: Message) -> None:
        sent.append(message)

    return send
