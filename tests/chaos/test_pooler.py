"""PgBouncer between recado and its server: found out, put up with, and refused where it cannot work."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
import pytest_asyncio

from recado import ClaimedJob, Operation, Recado, Worker
from recado.api import Hub, create_app
from recado.errors import ConfigurationError
from recado.queue import cancel, get_job, poolers, tenant
from recado.queue.checks import Level, check_poolers
from recado.queue.connections import Pool, connector
from recado.queue.operations import system
from recado.queue.poolers import Sharing
from recado.queue.statements import fill
from recado.settings import settings
from recado.worker import EventKind
from tests.api.conftest import begin, finish, progress, start, token
from tests.api.test_events import many_opened, opened, state
from tests.chaos.pooler import Pooler, keeps_statements_apart, needs_pgbouncer, pgbouncer
from tests.chaos.scenarios.pooler import SHORT, share_servers
from tests.chaos.support import ROOT
from tests.queue.support import ordinary_role
from tests.worker.support import NEVER, Observed, logged

pytestmark = needs_pgbouncer

ORGANIZATIONS = [f"org-{n}" for n in range(6)]

TOKENS = [token(name, organization=name) for name in ORGANIZATIONS]

SEEN = "SELECT organization_id, job_id FROM {schema}.operations"
"""No condition: what a tenant sees, the policy alone decides."""

CREATE_EFFECTS = "CREATE TABLE public.effects (job uuid NOT NULL)"


@pytest.fixture
def listen_dsn(monkeypatch: pytest.MonkeyPatch, dsn: str) -> Iterator[str]:
    """The server's own URL, which ``RECADO_LISTEN_DSN`` names."""
    with monkeypatch.context() as patch:
        patch.setenv("RECADO_LISTEN_DSN", dsn)
        settings.cache_clear()
        yield dsn
    settings.cache_clear()


@pytest_asyncio.fixture
async def pooler(dsn: str) -> AsyncIterator[Pooler]:
    """In transaction mode."""
    async with pgbouncer(dsn) as pooler:
        yield pooler


@asynccontextmanager
async def pool_of(url: str, size: int, cache: int = 0) -> AsyncIterator[Pool]:
    async with asyncpg.create_pool(url, min_size=0, max_size=size, statement_cache_size=cache) as pool:
        yield pool


# --- found out ---


async def test_a_server_itself_is_taken_for_no_pooler(dsn: str) -> None:
    assert await poolers.sharing(connector(dsn)) is Sharing.NONE


@pytest.mark.parametrize("options", [(), ("server_round_robin = 1",)], ids=["last first", "round robin"])
async def test_servers_that_are_shared_are_found_out_and_sessions_are_not(dsn: str, options: tuple[str, ...]) -> None:
    apart = ("max_prepared_statements = 0",) if keeps_statements_apart() else ()
    async with pgbouncer(dsn, options=options + apart) as pooler:
        assert await poolers.sharing(connector(pooler.url(dsn))) is Sharing.STATEMENTS
    async with pgbouncer(dsn, mode="session", options=options) as pooler:
        assert await poolers.sharing(connector(pooler.url(dsn))) is Sharing.NONE


async def test_a_single_server_that_is_shared_is_found_out(dsn: str) -> None:
    async with pgbouncer(dsn, size=1) as pooler:
        assert await poolers.sharing(connector(pooler.url(dsn))) is not Sharing.NONE


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_a_busy_pooler_is_found_out_as_well(dsn: str, mode: str) -> None:
    async with pgbouncer(dsn, mode=mode, size=6) as pooler, asyncio.TaskGroup() as group:
        url = pooler.url(dsn)
        load = [group.create_task(_busy(url)) for _ in range(4)]
        for _ in range(5):
            assert (await poolers.sharing(connector(url)) is Sharing.NONE) is (mode == "session")
        for task in load:
            task.cancel()


async def _busy(url: str) -> None:
    conn = await asyncpg.connect(url, statement_cache_size=0)
    try:
        while True:
            await conn.fetchval("SELECT 1")
    finally:
        conn.terminate()


async def test_statements_that_the_pooler_keeps_apart_may_be_kept(dsn: str) -> None:
    if not keeps_statements_apart():
        pytest.skip("this PgBouncer is older than 1.21 and mixes them up")
    async with pgbouncer(dsn, options=("max_prepared_statements = 100",)) as pooler:
        assert await poolers.sharing(connector(pooler.url(dsn))) is Sharing.TRANSACTIONS


async def test_the_check_names_what_a_pooler_spoils(dsn: str, pooler: Pooler) -> None:
    there, shared = connector(dsn), connector(pooler.url(dsn))
    assert await check_poolers(there, None) == []
    found = [(finding.level, finding.sentence) for finding in await check_poolers(shared, shared)]
    assert found[0][0] is Level.ERROR
    assert found[0][1].startswith("RECADO_LISTEN_DSN leads through a pooler")
    assert "LISTEN hears nothing" in (await check_poolers(shared, None))[0].sentence


# --- refused ---


async def test_a_worker_refuses_a_pool_whose_statements_get_mixed_up(dsn: str) -> None:
    apart = ("max_prepared_statements = 0",) if keeps_statements_apart() else ()
    async with pgbouncer(dsn, options=apart) as pooler, pool_of(pooler.url(dsn), 2, cache=100) as pool:
        with pytest.raises(ConfigurationError, match="create the pool with statement_cache_size=0"):
            await Worker(Recado(), pool).run()


async def test_a_worker_refuses_to_listen_through_the_pooler(dsn: str, pooler: Pooler) -> None:
    with pytest.raises(ConfigurationError, match="let RECADO_LISTEN_DSN name the server itself"):
        await Worker(Recado(), dsn, listen=pooler.url(dsn)).run()


async def test_several_processes_are_not_even_started(dsn: str, pooler: Pooler, schema: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "recado", "worker", "tests.chaos.mixture:app", "--processes", "2"),
        cwd=ROOT,
        env={**os.environ, "RECADO_DSN": dsn, "RECADO_LISTEN_DSN": pooler.url(dsn)},
        stderr=asyncio.subprocess.PIPE,
    )
    _, told = await process.communicate()
    assert process.returncode == 1
    assert told.decode().startswith("recado: cannot start a worker: its URL for LISTEN leads through a pooler")


async def test_a_worker_starts_while_the_server_to_listen_at_is_away(dsn: str, tmp_path: Path) -> None:
    seen = Observed()
    async with Worker(Recado(), dsn, listen=f"postgresql://ann@/shop?host={tmp_path}", observe=seen):
        await seen.seen(EventKind.STARTED)


# --- put up with ---


async def test_a_worker_without_a_direct_url_says_that_it_polls_and_one_with_it_is_woken(
    dsn: str, pooler: Pooler, conn: asyncpg.Connection
) -> None:
    app, seen = Recado(), Observed()

    @app.job("mix.plain")
    async def plain(payload: object) -> None: ...

    url = pooler.url(dsn)
    async with logged("looking for jobs every 0.2 s"), Worker(app, url, poll_interval=0.2, observe=seen):
        await seen.asleep()
        job_id = await app.enqueue(conn, "mix.plain", {})
        await seen.seen(EventKind.COMPLETED, job_id)
    assert seen.count(EventKind.LISTENING) == 0

    worker = Worker(app, url, listen=dsn, observe=seen)
    worker._poll_interval = 3600.0  # longer than it may be: what happens was woken
    async with worker:
        await seen.seen(EventKind.LISTENING)
        await seen.asleep()
        async with pool_of(url, 1) as pool, pool.acquire() as pooled:
            job_id = await app.enqueue(pooled, "mix.plain", {})
        await seen.seen(EventKind.COMPLETED, job_id)


@pytest.mark.parametrize(
    ("mode", "direct", "poll_interval"),
    [("transaction", False, 0.05), ("transaction", True, NEVER), ("session", False, NEVER)],
    ids=["polled", "heard at the server", "heard through sessions"],
)
async def test_a_stream_tells_each_change(
    dsn: str,
    conn: asyncpg.Connection,
    request: pytest.FixtureRequest,
    mode: str,
    direct: bool,
    poll_interval: float,
) -> None:
    if direct:
        request.getfixturevalue("listen_dsn")
    app = Recado()
    async with pgbouncer(dsn, mode=mode, size=6) as pooler, pool_of(pooler.url(dsn), 2) as pool:
        api = create_app(app, pool, tokens=TOKENS, hub=Hub(app, pool, poll_interval=poll_interval))
        job_id = await start(conn, ORGANIZATIONS[0])
        async with opened(api, job_id, ORGANIZATIONS[0]) as stream:
            assert state(await stream.event()) == ("pending", 0)
            await begin(conn, job_id)
            assert state(await stream.event()) == ("processing", 0)
            await progress(conn, job_id, 40)
            assert state(await stream.event()) == ("processing", 40)
            await finish(conn, job_id)
            assert state(await stream.event()) == ("done", 100)


class Shop:
    """An application that counts what it does."""

    def __init__(self) -> None:
        self.app = Recado()
        self.runs: Counter[UUID] = Counter()
        self.hanging: set[UUID] = set()
        self.hangs = asyncio.Event()
        app = self.app

        @app.job("mix.plain")
        async def plain(payload: object, job: ClaimedJob) -> None:
            self.runs[job.id] += 1

        @app.job("mix.fails", backoff=(0.05,))
        async def fails(payload: object, job: ClaimedJob) -> None:
            self.runs[job.id] += 1
            if job.attempt == 1:
                raise ValueError("as it is meant to")

        @app.job("mix.pays", backoff=(0.05,))
        async def pays(payload: object, job: ClaimedJob, conn: asyncpg.Connection) -> None:
            await conn.execute("INSERT INTO public.effects VALUES ($1)", job.id)
            self.runs[job.id] += 1
            if job.attempt == 1 and job.id.int % 3 == 0:
                raise ValueError("behind its write")

        @app.job("mix.hangs")
        async def hangs(payload: object, job: ClaimedJob) -> None:
            self.hanging.add(job.id)
            self.hangs.set()
            await asyncio.Event().wait()

        @app.operation("import")
        async def import_(payload: object, operation: Operation) -> str:
            await operation.progress(50)
            return operation.organization_id

    async def enqueue(self, pool: Pool, count: int) -> list[UUID]:
        """One client's jobs, and as many that it takes back."""
        ids = []
        for n in range(count):
            async with pool.acquire() as conn:
                taken_back = conn.transaction()
                await taken_back.start()
                await self.app.enqueue(conn, "mix.plain", {"n": n})
                await taken_back.rollback()
                job_type = ("mix.plain", "mix.pays", "mix.fails")[n % 3]
                ids.append(await self.app.enqueue(conn, job_type, {"n": n}))
        return ids

    async def cancel_one(self, pool: Pool) -> UUID:
        """Catch a job in the act, and cancel it."""
        async with pool.acquire() as conn:
            job_id = await self.app.enqueue(conn, "mix.hangs", {})
        while job_id not in self.hanging:
            self.hangs.clear()
            await self.hangs.wait()
        async with pool.acquire() as conn:
            await cancel(conn, job_id)
        return job_id

    async def start_imports(self, pool: Pool, organization_id: str, count: int) -> list[UUID]:
        """One tenant's operations; between them it must see its own, and a stranger none."""
        ids: list[UUID] = []
        for _ in range(count):
            async with pool.acquire() as conn, tenant(conn, organization_id):
                ids.append(await self.app.start_operation(conn, "import", {}))
                assert {tuple(row) for row in await conn.fetch(fill(SEEN, None))} == {
                    (organization_id, job_id) for job_id in ids
                }
            async with pool.acquire() as conn:
                assert await conn.fetch(fill(SEEN, None)) == []
        return ids


async def test_a_mixed_load_of_many_clients_on_two_servers_comes_out_right(
    dsn: str, conn: asyncpg.Connection, schema: str
) -> None:
    shop, observed = Shop(), Observed()
    await conn.execute(CREATE_EFFECTS)
    async with (
        ordinary_role(conn, dsn, schema) as tenant_url,
        pgbouncer(dsn, tenant_url) as pooler,
        pool_of(pooler.url(dsn), 20) as pool,
        pool_of(pooler.url(tenant_url), 10) as tenants,
        Worker(shop.app, pooler.url(dsn), poll_interval=0.2, heartbeat=0.2, observe=observed),
        Worker(shop.app, pool, listen=dsn, observe=observed),
    ):
        async with asyncio.TaskGroup() as clients:
            jobs = [clients.create_task(shop.enqueue(pool, 12)) for _ in range(20)]
            cancelled = [clients.create_task(shop.cancel_one(pool)) for _ in range(3)]
            started = {name: clients.create_task(shop.start_imports(tenants, name, 3)) for name in ORGANIZATIONS}
        watched = [(job_id, name) for name, task in started.items() for job_id in task.result()]
        api = create_app(shop.app, tenants, tokens=TOKENS, hub=Hub(shop.app, tenants, poll_interval=0.1))
        async with many_opened(api, watched) as streams:
            for (_, name), stream in zip(watched, streams, strict=True):
                event = await stream.event()
                while event is not None and event.data["status"] != "done":
                    event = await stream.event()
                assert event is not None, "the stream has ended early"
                assert event.data["result"] == name
        ids = {job_id for task in jobs for job_id in task.result()}
        await observed.until(lambda: ids <= set(observed.jobs(EventKind.COMPLETED)))

    assert len(ids) == 240
    paying = {job_id for job_id in ids if (await get_job(conn, job_id)).job_type == "mix.pays"}
    assert Counter([row[0] for row in await conn.fetch("SELECT job FROM public.effects")]) == Counter(paying)
    assert {str((await get_job(conn, task.result())).status) for task in cancelled} == {"cancelled"}
    counts = await conn.fetch(f"SELECT status, count(*) FROM {schema}.jobs GROUP BY status")
    assert {row["status"]: row["count"] for row in counts} == {
        "completed": len(ids) + len(watched),
        "cancelled": len(cancelled),
    }
    async with system(conn):
        assert len(await conn.fetch(f"SELECT FROM {schema}.operations WHERE status = 'done'")) == len(watched)


async def test_nothing_is_lost_by_worker_processes_on_shared_servers_while_the_pooler_is_killed(
    dsn: str, schema: str, tmp_path: Path
) -> None:
    outcome = await share_servers(dsn, schema, tmp_path, SHORT)
    assert outcome.audit.faults == ()
    assert outcome.audit.acknowledged >= SHORT.jobs
