from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple
from uuid import UUID

import asyncpg
import httpx
import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message

from recado.api import Hub, create_app, operation_routes
from recado.app import Recado
from recado.queue import operations
from recado.queue.connections import Pool
from recado.queue.operations import channel, system
from recado.serve import Server, make_server
from tests import leaks
from tests.api.conftest import bearer, begin, client, finish, progress, start, token
from tests.queue.support import PATIENCE, Connect, ordinary_role

ACME = bearer("acme")
TOKENS = [token("acme", organization="acme"), token("globex", organization="globex")]

LISTENING = "SELECT pid FROM pg_stat_activity WHERE application_name = 'recado events' AND datname = current_database()"

ACTIVITY = """
SELECT pid, application_name, query_start, state_change, query FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() ORDER BY pid
"""
"""What has not changed between two looks: no statement has run on any connection, and none was opened or closed."""


class Event(NamedTuple):
    id: int
    data: dict[str, Any]


class Stream:
    """The client of a stream; what it reads is what the application has sent."""

    def __init__(self, path: str, headers: dict[str, str], method: str = "GET") -> None:
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 50000),
            "server": ("localhost", 80),
            "state": {},
        }
        self.reading = asyncio.Event()
        self.reading.set()
        self.start: Message = {}
        self._sent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._asked = False
        self._gone = asyncio.Event()

    async def receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.reading.wait()
        if message["type"] == "http.response.start":
            self.start = message
            return
        if message["body"]:
            self._sent.put_nowait(message["body"])
        if not message.get("more_body", False):
            self._sent.put_nowait(None)

    async def run(self, api: ASGIApp) -> None:
        """Ask ``api``, until the stream has ended or its client has left."""
        await api(self.scope, self.receive, self.send)

    def leave(self) -> None:
        """The client is gone."""
        self._gone.set()

    async def chunk(self) -> bytes | None:
        """The next bytes; ``None`` at the end."""
        async with asyncio.timeout(PATIENCE):
            return await self._sent.get()

    def forget(self) -> None:
        """Skip what has come already."""
        while not self._sent.empty():
            self._sent.get_nowait()

    async def event(self) -> Event | None:
        """The next event, or the end; heartbeats are skipped."""
        async with asyncio.timeout(PATIENCE):  # for all of them: they come for ever
            while (chunk := await self.chunk()) is not None and chunk.startswith(b":"):
                assert chunk.endswith(b"\n\n")
        return None if chunk is None else parsed(chunk.decode())

    async def heartbeat(self) -> None:
        """The next chunk, which must be one."""
        assert (await self.chunk() or b"").startswith(b":")


def parsed(text: str) -> Event:
    lines = text.split("\n")
    assert lines[3:] == ["", ""], text
    names, values = zip(*(line.split(": ", 1) for line in lines[:3]), strict=True)
    assert names == ("id", "event", "data")
    assert values[1] == "update"
    return Event(int(values[0]), json.loads(values[2]))


def state(event: Event | None) -> tuple[str, int]:
    """The status and the progress that an event tells."""
    assert event is not None, "the stream has ended"
    return event.data["status"], event.data["progress"]


@asynccontextmanager
async def opened(
    api: ASGIApp, job_id: UUID, organization_id: str = "acme", *, prefix: str = "", **headers: str
) -> AsyncIterator[Stream]:
    """An open stream, which its client leaves when the block ends."""
    async with many_opened(api, [(job_id, organization_id)], prefix=prefix, **headers) as (stream,):
        yield stream


@asynccontextmanager
async def many_opened(
    api: ASGIApp, watched: Sequence[tuple[UUID, str]], *, prefix: str = "", **headers: str
) -> AsyncIterator[list[Stream]]:
    """An open stream for each operation and organization."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    streams = [Stream(f"{prefix}/api/jobs/{job_id}/events", bearer(name) | given) for job_id, name in watched]
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(stream.run(api))
        try:
            yield streams
        finally:
            for stream in streams:
                stream.reading.set()
                stream.leave()


@pytest.fixture
def hub(recado_app: Recado, tenant_pool: Pool) -> Hub:
    return Hub(recado_app, tenant_pool)


@pytest.fixture
def api(recado_app: Recado, tenant_pool: Pool, hub: Hub) -> Starlette:
    return create_app(recado_app, tenant_pool, tokens=TOKENS, hub=hub)


@pytest_asyncio.fixture
async def observer(connect: Connect) -> asyncpg.Connection:
    return await connect()


async def listeners(observer: asyncpg.Connection) -> list[int]:
    """The backends that listen."""
    return [row[0] for row in await observer.fetch(LISTENING)]


async def nobody_listens(observer: asyncpg.Connection) -> None:
    """Wait until the listening backend has gone; only this view knows."""
    async with asyncio.timeout(PATIENCE):
        while await listeners(observer):
            pass


async def settled(conn: asyncpg.Connection, job_id: UUID, stream: Stream) -> None:
    """Wait until the hub listens and has looked at all that was watched before ``job_id``."""
    await begin(conn, job_id)
    while state(await stream.event())[0] == "pending":
        pass


# --- what a stream tells ---


async def test_it_begins_with_the_present_state_in_the_words_of_a_poll(
    api: Starlette, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    await begin(conn, job_id)
    await progress(conn, job_id, 40)
    polled = await client(api).get(f"/api/jobs/{job_id}", headers=ACME)

    async with opened(api, job_id) as stream:
        chunk = await stream.chunk()

    assert chunk == b"id: 3\nevent: update\ndata: %s\n\n" % polled.content
    assert stream.start["status"] == 200
    headers = httpx.Headers(stream.start["headers"])
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-store"
    assert headers["x-accel-buffering"] == "no"
    assert "content-length" not in headers


async def test_it_tells_each_change_and_ends_with_the_operation(api: Starlette, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    async with opened(api, job_id) as stream:
        assert state(await stream.event()) == ("pending", 0)
        await begin(conn, job_id)
        assert state(await stream.event()) == ("processing", 0)
        await progress(conn, job_id, 40)
        assert state(await stream.event()) == ("processing", 40)
        await finish(conn, job_id, '"line\\nbreak"')
        last = await stream.event()
        assert state(last) == ("done", 100)
        assert last is not None
        assert last.data["result"] == "line\nbreak"
        assert await stream.event() is None


async def test_changes_are_told_on_when_the_versions_start_over(
    api: Starlette, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await start(conn, "acme")
    await begin(conn, job_id)
    async with system(conn):
        await conn.execute(f"UPDATE {schema}.operations SET version = $1", operations.LAST_NUMBER)
    async with opened(api, job_id, Last_Event_ID="7") as stream:
        before = await stream.event()
        await progress(conn, job_id, 40)
        after = await stream.event()
        await finish(conn, job_id)
        assert state(await stream.event()) == ("done", 100)
        assert await stream.event() is None
    assert before is not None
    assert after is not None
    assert (before.id, after.id, state(after)) == (operations.LAST_NUMBER, 1, ("processing", 40))


async def test_a_cancellation_over_http_is_told_too(api: Starlette, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    async with opened(api, job_id) as stream:
        await stream.event()
        await client(api).post(f"/api/jobs/{job_id}/cancel", headers=ACME)
        told = await stream.event()
        assert told is not None
        assert (told.data["status"], told.data["error"]) == ("error", operations.CANCELLED)
        assert await stream.event() is None


async def test_what_the_client_has_seen_is_not_told_again(api: Starlette, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    async with opened(api, job_id, Last_Event_ID="1") as stream:
        await begin(conn, job_id)
        assert await stream.event() == (2, (await client(api).get(f"/api/jobs/{job_id}", headers=ACME)).json())


@pytest.mark.parametrize("seen", ["1", "7", "", "x", "-1", "1.0", "٢", "2, 2", "9" * 5000])
async def test_what_the_client_may_have_missed_is_told_at_once(
    seen: str, api: Starlette, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    await begin(conn, job_id)
    async with opened(api, job_id, Last_Event_ID=seen) as stream:
        assert state(await stream.event()) == ("processing", 0)


async def test_who_has_seen_the_end_is_told_not_to_come_back(api: Starlette, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    await begin(conn, job_id)
    await finish(conn, job_id)

    async with opened(api, job_id) as stream:
        last = await stream.event()
        assert last is not None
        assert await stream.event() is None
    async with opened(api, job_id, Last_Event_ID=str(last.id)) as again:
        assert await again.event() is None

    assert again.start["status"] == 204


async def test_asking_for_the_headers_alone_opens_no_stream(api: Starlette, conn: asyncpg.Connection) -> None:
    job_id = await start(conn, "acme")
    async with asyncio.timeout(PATIENCE):
        response = await client(api).head(f"/api/jobs/{job_id}/events", headers=ACME)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_silence_is_broken_by_heartbeats(recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection) -> None:
    hub = Hub(recado_app, tenant_pool, heartbeat=0.01)
    job_id = await start(conn, "acme")
    async with opened(create_app(recado_app, tenant_pool, tokens=TOKENS, hub=hub), job_id) as stream:
        await stream.event()
        for _ in range(3):
            await stream.heartbeat()
        await begin(conn, job_id)
        assert state(await stream.event()) == ("processing", 0)


async def test_a_change_between_the_first_read_and_the_first_event_is_told(
    recado_app: Recado, conn: asyncpg.Connection, dsn: str, schema: str
) -> None:
    job_id, other = await start(conn, "acme"), await start(conn, "acme")
    listening: Stream | None = None

    async def move(released: object) -> None:
        if listening is not None:  # the state has been read, and nothing was sent
            await begin(conn, job_id)
            await progress(conn, other, 1)  # told after it, so the hub has heard of both
            assert state(await listening.event()) == ("processing", 1)

    async with ordinary_role(conn, dsn, schema) as url, asyncpg.create_pool(url, min_size=0, reset=move) as pool:
        api = create_app(recado_app, pool, tokens=TOKENS)
        async with opened(api, other) as first:
            await first.event()
            await settled(conn, other, first)  # so the hub does not look at what is new by itself
            listening = first
            async with opened(api, job_id) as stream:
                told = await stream.event()
                while state(told) == ("pending", 0):
                    told = await stream.event()
                assert state(told) == ("processing", 0)


async def test_a_client_that_reads_slowly_finds_the_newest_state_and_nothing_before(
    api: Starlette, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    async with opened(api, job_id) as slow, opened(api, job_id) as quick:
        await slow.event()
        await quick.event()
        await settled(conn, job_id, quick)
        await slow.event()
        slow.reading.clear()
        for percent in range(1, 51):
            await progress(conn, job_id, percent)
        while state(await quick.event()) != ("processing", 50):
            pass
        slow.reading.set()
        on_its_way = await slow.event()
        if state(on_its_way) != ("processing", 50):
            assert state(await slow.event()) == ("processing", 50)
        await finish(conn, job_id)
        assert state(await slow.event()) == ("done", 100)


async def test_an_operation_that_is_gone_ends_its_streams(
    api: Starlette, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await start(conn, "acme")
    async with opened(api, job_id) as stream:
        await stream.event()
        await settled(conn, job_id, stream)
        await conn.execute(f"DELETE FROM {schema}.operations")
        await conn.execute("SELECT pg_notify($1, $2)", channel(schema), str(job_id))
        assert await stream.event() is None


# --- who listens, and what it costs ---


@pytest.mark.parametrize("payload", ["", "no id", "00000000-0000-0000-0000-000000000000", "\N{SNOWMAN}" * 99, None])
async def test_what_anybody_may_notify_is_only_a_reason_to_look(
    payload: str | None, api: Starlette, conn: asyncpg.Connection, schema: str, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = await start(conn, "acme")
    async with opened(api, job_id) as stream:
        await stream.event()
        await settled(conn, job_id, stream)
        await conn.execute("SELECT pg_notify($1, $2)", channel(schema), payload or str(job_id))
        await progress(conn, job_id, 1)
        assert state(await stream.event()) == ("processing", 1)
    assert caplog.records == []


async def test_a_thousand_streams_cost_the_database_nothing_while_nothing_changes(
    recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection, observer: asyncpg.Connection
) -> None:
    # A minute's probes are no polls, but statements; they are left to their own test.
    hub = Hub(recado_app, tenant_pool, heartbeat=0.5, probe_interval=600)
    api = create_app(recado_app, tenant_pool, tokens=TOKENS, hub=hub)
    watched = [(await start(conn, name), name) for _ in range(50) for name in ("acme", "globex")] * 10
    async with many_opened(api, watched) as streams:
        for stream in streams:
            assert state(await stream.event()) == ("pending", 0)
        await settled(conn, watched[-1][0], streams[-1])
        for stream in streams[99:-1:100]:
            assert state(await stream.event()) == ("processing", 0)
        before = await observer.fetch(ACTIVITY)
        for stream in streams:
            stream.forget()

        for _ in range(3):
            for stream in streams:
                await stream.heartbeat()

        assert await observer.fetch(ACTIVITY) == before
        assert len(await listeners(observer)) == 1
        assert len(before) <= tenant_pool.get_max_size() + 2, "the pool's, the one that listens, and this test's"

        await begin(conn, watched[0][0])
        assert state(await streams[0].event()) == ("processing", 0)
    await nobody_listens(observer)


async def test_the_silent_connection_is_probed(
    recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection, observer: asyncpg.Connection
) -> None:
    hub = Hub(recado_app, tenant_pool, probe_interval=0.01)
    job_id = await start(conn, "acme")
    async with opened(create_app(recado_app, tenant_pool, tokens=TOKENS, hub=hub), job_id) as stream:
        await stream.event()
        await settled(conn, job_id, stream)
        (pid,) = await listeners(observer)
        async with asyncio.timeout(PATIENCE):
            while "pg_is_in_recovery" not in await observer.fetchval(
                "SELECT query FROM pg_stat_activity WHERE pid = $1", pid
            ):
                pass
        await progress(conn, job_id, 1)
        assert state(await stream.event()) == ("processing", 1)
        assert await listeners(observer) == [pid]


async def test_a_lost_connection_is_opened_again_and_what_was_missed_is_told(
    api: Starlette, conn: asyncpg.Connection, observer: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = await start(conn, "acme")
    async with opened(api, job_id) as stream:
        await stream.event()
        await settled(conn, job_id, stream)
        (pid,) = await listeners(observer)
        async with system(conn):  # the change is committed while nobody listens
            await operations.set_progress(conn, job_id, 1, 7)
            assert await observer.fetchval("SELECT pg_terminate_backend($1, 5000)", pid)
        assert state(await stream.event()) == ("processing", 7)
        await progress(conn, job_id, 8)
        assert state(await stream.event()) == ("processing", 8)
        assert pid not in await listeners(observer)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "the connection that listens for operations is lost: ConnectionResetError"
    ]


async def test_a_client_that_leaves_takes_everything_with_it(
    api: Starlette, conn: asyncpg.Connection, observer: asyncpg.Connection
) -> None:
    first, second = await start(conn, "acme"), await start(conn, "acme")
    before = leaks.tasks()
    async with opened(api, first) as staying:
        await staying.event()
        await settled(conn, first, staying)
        (pid,) = await listeners(observer)
        alone = leaks.tasks()
        async with opened(api, second) as leaving:
            await leaving.event()
        assert leaks.tasks() == alone
        assert await listeners(observer) == [pid]
        await progress(conn, first, 1)
        assert state(await staying.event()) == ("processing", 1)
    assert leaks.tasks() == before
    await nobody_listens(observer)

    async with opened(api, first) as back:
        await back.event()
        await progress(conn, first, 2)
        assert state(await back.event()) == ("processing", 2)


async def test_a_stream_that_is_refused_or_has_ended_makes_nobody_listen(
    recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection
) -> None:
    done, theirs = await start(conn, "acme"), await start(conn, "globex")
    await begin(conn, done)
    await finish(conn, done)
    hub = Hub(recado_app, tenant_pool)
    api = create_app(recado_app, tenant_pool, tokens=TOKENS, hub=hub)

    for job_id, status in ((done, 200), (theirs, 404)):
        before = leaks.tasks()
        assert (await client(api).get(f"/api/jobs/{job_id}/events", headers=ACME)).status_code == status
        assert leaks.tasks() == before


async def test_it_works_mounted_where_no_lifespan_reaches(
    recado_app: Recado, tenant_pool: Pool, conn: asyncpg.Connection, observer: asyncpg.Connection
) -> None:
    hub = Hub(recado_app, tenant_pool)

    def whose(request: object) -> str:
        return "acme"

    service = Starlette(
        routes=[
            Mount("/queue", create_app(recado_app, tenant_pool, tokens=TOKENS, hub=hub)),
            *operation_routes(recado_app, tenant_pool, organization=whose, hub=hub),
        ]
    )
    job_id = await start(conn, "acme")
    async with opened(service, job_id) as own, opened(service, job_id, prefix="/queue") as mounted:
        await own.event()
        await mounted.event()
        await settled(conn, job_id, own)
        assert state(await mounted.event()) == ("processing", 0)
        assert len(await listeners(observer)) == 1


# --- behind a real server ---


@asynccontextmanager
async def served(app: ASGIApp, hub: Hub) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    """A server, and a client of it; it stops when the block ends, unless it has been stopped before."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = make_server(app, hub)
        serving = asyncio.create_task(server.serve([sock]))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=PATIENCE) as client:
                yield client, server
        finally:
            server.stop()
            await serving


async def test_a_server_that_stops_ends_its_streams_in_good_order(
    api: Starlette, hub: Hub, conn: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    job_id = await start(conn, "acme")
    async with (
        served(api, hub) as (ask, server),
        ask.stream("GET", f"/api/jobs/{job_id}/events", headers=ACME) as response,
    ):
        assert response.status_code == 200
        chunks = response.aiter_text()
        assert state(parsed(await anext(chunks))) == ("pending", 0)
        await begin(conn, job_id)
        assert state(parsed(await anext(chunks))) == ("processing", 0)
        server.stop()
        # Cut off after the server's grace it would raise: the last chunk would be missing.
        assert [chunk async for chunk in chunks] == []
    assert caplog.records == []


async def test_a_stream_that_is_opened_while_the_server_stops_ends_after_the_state(
    api: Starlette, hub: Hub, conn: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    hub.stop()
    async with opened(api, job_id) as stream:
        assert state(await stream.event()) == ("pending", 0)
        assert await stream.event() is None


async def test_a_browser_that_goes_away_is_noticed_without_a_word(
    api: Starlette, hub: Hub, conn: asyncpg.Connection, observer: asyncpg.Connection
) -> None:
    job_id = await start(conn, "acme")
    async with served(api, hub) as (ask, _):
        async with ask.stream("GET", f"/api/jobs/{job_id}/events", headers=ACME) as response:
            chunks = response.aiter_text()
            await anext(chunks)
            await begin(conn, job_id)
            await anext(chunks)
            assert len(await listeners(observer)) == 1
            await response.aclose()
        await nobody_listens(observer)
