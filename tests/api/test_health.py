from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import httpx
import pytest

from recado.api import create_app, health
from recado.app import Recado
from recado.queue.connections import Connection, Pool
from recado.queue.migrate import check_schema
from tests.api.conftest import assert_whole, bearer, client, relay, token

PROMISED = 1.0
"""Seconds within which /readyz answers."""


async def readyz(app: Recado, pool: Pool) -> tuple[int, dict[str, Any]]:
    """The status and the body of an answer that came in time."""
    loop = asyncio.get_running_loop()
    asked = loop.time()
    response = await client(create_app(app, pool, tokens=())).get("/readyz")
    assert loop.time() - asked < PROMISED
    return response.status_code, response.json()


async def test_it_is_ready_when_the_database_answers_with_the_current_schema(recado_app: Recado, pool: Pool) -> None:
    assert await readyz(recado_app, pool) == (200, {"status": "ready"})


async def test_it_is_not_ready_in_time_when_the_pool_is_exhausted(recado_app: Recado, pool: Pool) -> None:
    held = [await pool.acquire() for _ in range(pool.get_max_size())]
    answers = await asyncio.gather(*(readyz(recado_app, pool) for _ in range(10)))
    for conn in held:
        await pool.release(conn)

    assert {status for status, _ in answers} == {503}
    assert "free connection" in answers[0][1]["reason"]
    await assert_whole(pool)
    assert (await readyz(recado_app, pool))[0] == 200


async def test_it_is_not_ready_in_time_when_the_server_accepts_and_never_answers(recado_app: Recado) -> None:
    gone = asyncio.Event()

    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        gone.set()

    async with _server(swallow) as port, _pool(f"postgresql://app:s3cret@127.0.0.1:{port}/shop") as pool:
        status, body = await readyz(recado_app, pool)
        async with asyncio.timeout(5):
            await gone.wait()

    assert status == 503
    assert body.keys() == {"status", "reason"}
    assert body["status"] == "unavailable"
    assert "s3cret" not in body["reason"]


async def test_it_is_not_ready_in_time_when_an_open_connection_goes_silent(recado_app: Recado, dsn: str) -> None:
    async with relay(dsn) as line, _pool(dsn, host="127.0.0.1", port=line.port, ssl=False) as pool:
        assert (await readyz(recado_app, pool))[0] == 200
        line.flowing.clear()
        frozen = [await readyz(recado_app, pool) for _ in range(pool.get_max_size() + 1)]
        line.flowing.set()

        assert [status for status, _ in frozen] == [503] * (pool.get_max_size() + 1)
        await assert_whole(pool)
        assert (await readyz(recado_app, pool))[0] == 200


async def test_a_connection_that_goes_silent_when_it_is_given_back_is_dropped_soon(
    recado_app: Recado, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with relay(dsn) as line, _pool(dsn, host="127.0.0.1", port=line.port, ssl=False, max_size=1) as pool:

        async def check_and_go_silent(conn: Connection, *, schema: str) -> None:
            await check_schema(conn, schema=schema)
            line.flowing.clear()

        monkeypatch.setattr(health, "check_schema", check_and_go_silent)
        assert (await readyz(recado_app, pool))[0] == 503
        line.accepted.clear()
        async with asyncio.timeout(5), asyncio.TaskGroup() as group:
            group.create_task(assert_whole(pool))
            await line.accepted.wait()  # the pool connects anew, so the old connection has made room
            line.flowing.set()


async def test_it_is_not_ready_in_time_when_its_statement_is_blocked(
    recado_app: Recado, pool: Pool, conn: asyncpg.Connection, schema: str
) -> None:
    async with conn.transaction():
        await conn.execute(f"LOCK TABLE {schema}.schema_migrations IN ACCESS EXCLUSIVE MODE")
        status, _ = await readyz(recado_app, pool)

    assert status == 503
    await assert_whole(pool)


async def test_it_is_not_ready_without_a_schema(pool: Pool) -> None:
    status, body = await readyz(Recado(schema="never_migrated"), pool)

    assert (status, body["status"]) == (503, "unavailable")
    assert "never_migrated" in body["reason"]
    assert "recado migrate up" in body["reason"]


async def test_it_is_not_ready_with_a_schema_too_old(
    recado_app: Recado, pool: Pool, conn: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(
        f"DELETE FROM {schema}.schema_migrations WHERE number = (SELECT max(number) FROM {schema}.schema_migrations)"
    )
    status, body = await readyz(recado_app, pool)

    assert status == 503
    assert "recado migrate up" in body["reason"]


async def test_it_is_not_ready_with_a_schema_too_new(
    recado_app: Recado, pool: Pool, conn: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(
        f"INSERT INTO {schema}.schema_migrations (number, name, checksum) VALUES (9999, 'tomorrow', 'x')"
    )
    status, body = await readyz(recado_app, pool)

    assert status == 503
    assert "newer" in body["reason"]


async def test_what_the_server_says_stays_in_the_log(
    recado_app: Recado, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with _pool(dsn, database="confidential") as pool:
        status, body = await readyz(recado_app, pool)

    assert status == 503
    assert "confidential" not in body["reason"]
    assert "confidential" in caplog.text


async def test_it_is_not_ready_when_something_else_listens_on_the_port(recado_app: Recado) -> None:
    async def serve_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await reader.read()
        writer.close()

    async with _server(serve_http) as port, _pool(f"postgresql://app@127.0.0.1:{port}/shop") as pool:
        status, _ = await readyz(recado_app, pool)

    assert status == 503


async def test_it_is_not_ready_when_the_pool_is_closed(recado_app: Recado, dsn: str) -> None:
    async with _pool(dsn) as pool:
        pass
    assert (await readyz(recado_app, pool))[0] == 503


async def test_the_process_is_healthy_without_any_database(recado_app: Recado, unused_tcp_port: int) -> None:
    async with _pool(f"postgresql://app@127.0.0.1:{unused_tcp_port}/shop") as pool:
        http = client(create_app(recado_app, pool))
        healthy, ready = await http.get("/healthz"), await http.get("/readyz")

    assert (healthy.status_code, healthy.json()) == (200, {"status": "ok"})
    assert ready.status_code == 503


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
@pytest.mark.parametrize("headers", [{}, bearer("wrong"), {"Authorization": "nonsense"}])
async def test_health_needs_no_token_and_minds_no_wrong_one(
    path: str, headers: dict[str, str], recado_app: Recado, pool: Pool
) -> None:
    api = create_app(recado_app, pool, tokens=[token("s3cret", "jobs:admin")])
    far_away = client(api, address="203.0.113.7", base_url="http://queue.example.com")

    assert (await far_away.get(path, headers=headers)).status_code == 200


async def test_health_answers_a_head_request(recado_app: Recado, pool: Pool) -> None:
    response: httpx.Response = await client(create_app(recado_app, pool)).head("/readyz")

    assert (response.status_code, response.content) == (200, b"")


@asynccontextmanager
async def _server(serve: Any) -> AsyncIterator[int]:
    """A TCP server on a free port; the block ends when its clients have left."""
    async with asyncio.TaskGroup() as group:
        server = await asyncio.start_server(lambda r, w: group.create_task(serve(r, w)), "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()


def _pool(dsn: str, **overrides: Any) -> Pool:
    return asyncpg.create_pool(dsn, **{"min_size": 0, "max_size": 2, **overrides})
