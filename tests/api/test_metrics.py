from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import asyncpg
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from recado.api import create_app, metrics
from recado.app import Recado
from recado.queue.connections import Pool
from tests.api.conftest import assert_whole, bearer, client, insert, relay, token

Connect = Callable[[], Awaitable[asyncpg.Connection]]

METRICAS = "/api/v1/jobs/metricas"


@pytest.fixture
def ask(recado_app: Recado, pool: Pool) -> httpx.AsyncClient:
    tokens = [token("admin-secret", "jobs:admin"), token("scraper-secret", "jobs:metrics")]
    return client(create_app(recado_app, pool, tokens=tokens))


async def test_an_empty_queue_has_nothing_pending_and_no_age(ask: httpx.AsyncClient) -> None:
    response = await ask.get(METRICAS, headers=bearer("admin-secret"))

    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.text == '{"pendientes":0,"fallidos":0,"antiguedad_mas_viejo_segundos":null}'


async def test_metricas_has_exactly_its_three_keys_and_their_types(
    ask: httpx.AsyncClient, conn: asyncpg.Connection, schema: str
) -> None:
    await insert(conn, schema)
    await insert(conn, schema)
    await insert(conn, schema, "dead")
    await conn.execute(f"UPDATE {schema}.jobs SET created_at = now() - interval '90 s' WHERE status = 'pending'")

    body = (await ask.get(METRICAS, headers=bearer("admin-secret"))).json()

    assert list(body) == ["pendientes", "fallidos", "antiguedad_mas_viejo_segundos"]
    assert (body["pendientes"], body["fallidos"]) == (2, 1)
    assert [type(value) for value in body.values()] == [int, int, float]
    assert 90 <= body["antiguedad_mas_viejo_segundos"] < 120


async def test_metricas_counts_what_is_scheduled_for_later(
    ask: httpx.AsyncClient, conn: asyncpg.Connection, schema: str
) -> None:
    await insert(conn, schema)
    await conn.execute(f"UPDATE {schema}.jobs SET run_at = now() + interval '1 day'")

    body = (await ask.get(METRICAS, headers=bearer("admin-secret"))).json()

    assert body["pendientes"] == 1
    assert body["antiguedad_mas_viejo_segundos"] is not None


async def test_prometheus_gets_gauges_it_can_parse(
    ask: httpx.AsyncClient, conn: asyncpg.Connection, schema: str
) -> None:
    await insert(conn, schema)
    await insert(conn, schema, "dead", 'odd."type"\nwith\\escapes')

    response = await ask.get("/metrics", headers=bearer("scraper-secret"))

    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=")
    families = {family.name: family for family in text_string_to_metric_families(response.text)}
    assert {family.type for family in families.values()} == {"gauge"}
    assert set(families) == {
        "recado_jobs",
        "recado_oldest_ready_job_age_seconds",
        "recado_workers",
        "recado_notification_queue_usage_ratio",
    }
    jobs = {
        (s.labels["queue"], s.labels["job_type"], s.labels["state"]): s.value for s in families["recado_jobs"].samples
    }
    assert jobs["default", "mail.send", "ready"] == 1
    assert jobs["default", "mail.send", "dead"] == 0
    assert jobs["default", 'odd."type"\nwith\\escapes', "dead"] == 1
    [age] = families["recado_oldest_ready_job_age_seconds"].samples
    assert age.labels == {"queue": "default", "job_type": "mail.send"}
    assert 0 <= age.value < 60
    assert [s.value for s in families["recado_workers"].samples] == [0]
    assert [s.value for s in families["recado_notification_queue_usage_ratio"].samples] == [0]


async def test_no_scrape_remembers_an_earlier_one(
    ask: httpx.AsyncClient, conn: asyncpg.Connection, schema: str
) -> None:
    await insert(conn, schema)
    before = await ask.get("/metrics", headers=bearer("scraper-secret"))
    await conn.execute(f"DELETE FROM {schema}.jobs")
    after = await ask.get("/metrics", headers=bearer("scraper-secret"))

    assert "mail.send" in before.text
    assert "mail.send" not in after.text


@pytest.mark.parametrize("path", [METRICAS, "/metrics"])
async def test_a_count_that_takes_too_long_is_cancelled_on_the_server_too(
    path: str,
    recado_app: Recado,
    ask: httpx.AsyncClient,
    pool: Pool,
    connect: Connect,
    schema: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "DATABASE_TIMEOUT", 0.2)
    blocker, observer = await connect(), await connect()

    async with blocker.transaction():
        await blocker.execute(f"LOCK TABLE {schema}.jobs IN ACCESS EXCLUSIVE MODE")
        response = await ask.get(path, headers=bearer("admin-secret"))
        waiting = await observer.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted")

    assert response.status_code == 503
    assert response.json() == {"error": "cannot answer this request: the database is not available; try again later"}
    assert waiting == 0
    await assert_whole(pool)


async def test_a_connection_that_goes_silent_is_given_up(
    recado_app: Recado, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "DATABASE_TIMEOUT", 0.2)

    async with (
        relay(dsn) as line,
        asyncpg.create_pool(dsn, host="127.0.0.1", port=line.port, ssl=False, min_size=0, max_size=1) as pool,
    ):
        ask = client(create_app(recado_app, pool, tokens=[token("admin-secret", "jobs:admin")]))
        answers = [(await ask.get(METRICAS, headers=bearer("admin-secret"))).status_code]
        line.flowing.clear()
        async with asyncio.timeout(5):
            answers.append((await ask.get(METRICAS, headers=bearer("admin-secret"))).status_code)
        line.flowing.set()
        await assert_whole(pool)

    assert answers == [200, 503]


@pytest.mark.parametrize("path", [METRICAS, "/metrics"])
async def test_counts_wait_for_a_connection_no_longer_than_the_timeout(
    path: str, ask: httpx.AsyncClient, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "DATABASE_TIMEOUT", 0.2)

    async with asyncio.timeout(5):
        held = [await pool.acquire() for _ in range(pool.get_max_size())]
        response = await ask.get(path, headers=bearer("admin-secret"))
        for conn in held:
            await pool.release(conn)

    assert response.status_code == 503
    await assert_whole(pool)
