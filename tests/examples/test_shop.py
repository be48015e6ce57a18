"""The example shop: each endpoint by itself, and ``make run`` as a whole."""

from __future__ import annotations

import asyncio
import email.policy
import json
import os
import re
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.message import EmailMessage
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import aiosmtplib
import asyncpg
import httpx
import pytest
import pytest_asyncio

from examples.shop import tables, webhooks
from examples.shop.application import app
from examples.shop.backups import KEPT
from examples.shop.jobs import OPERATIONS, Day, Order, outages, process_event, reconcile, send_receipt, sync_inventory
from examples.shop.mailbox import mail_server
from examples.shop.web import create_service
from recado import embedded
from recado.queue import get_job, list_errors, list_jobs, requeue
from recado.queue.connections import Pool
from recado.queue.models import Job
from recado.worker import EventKind
from tests.examples.conftest import SECRET
from tests.worker.support import Observed, working

PROJECT = Path(__file__).parents[2]

SECONDS = float(os.environ.get("SHOP_TEST_SECONDS", "5"))
"""How long the shop is open in the test of the whole; a minute shows more of it, and is for a quiet hour."""

LIMIT = SECONDS + 60
"""Seconds until a run of the shop is taken for hung."""

ORDER = {"customer": "Núria Puig, filla", "email": "nuria@example.com", "total_cents": 1999}

QUEUES = {"default": 5, "mail": 5}


# --- the endpoints, with a real worker and a real mail server ---


@pytest_asyncio.fixture
async def pool(dsn: str) -> AsyncIterator[Pool]:
    async with asyncpg.create_pool(dsn, min_size=0) as pool:
        async with pool.acquire() as conn:
            await tables.create(conn)
        yield pool


@pytest_asyncio.fixture
async def mails(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """The folder of a mail server that the shop's workers send to."""
    folder = tmp_path / "mail"
    async with mail_server(folder) as port:
        monkeypatch.setenv("SHOP_SMTP_PORT", str(port))
        monkeypatch.setenv("RECADO_DSN", dsn)
        yield folder


@pytest_asyncio.fixture
async def worker(pool: Pool, mails: Path) -> AsyncIterator[Observed]:
    async with working(app, pool, queues=QUEUES) as (_, observed):
        yield observed


@pytest_asyncio.fixture
async def shop(pool: Pool) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_service(pool, webhook_secret=SECRET, session_secret=SECRET))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


async def place(shop: httpx.AsyncClient, **changes: Any) -> UUID:
    answer = await shop.post("/orders", json=ORDER | changes)
    assert answer.status_code == 201, answer.text
    return UUID(answer.json()["order_id"])


def payment(order_id: UUID, amount_cents: int = 1999) -> bytes:
    return json.dumps({"id": f"evt_{uuid4().hex}", "order_id": str(order_id), "amount_cents": amount_cents}).encode()


async def deliver(shop: httpx.AsyncClient, body: bytes, signature: str | None = None) -> httpx.Response:
    header = webhooks.sign(body, SECRET) if signature is None else signature
    # As bytes: a header can hold more than ASCII.
    return await shop.post("/webhooks/payments", content=body, headers={webhooks.HEADER.encode(): header.encode()})


async def pay(shop: httpx.AsyncClient, body: bytes) -> UUID:
    answer = await deliver(shop, body)
    assert answer.status_code == 200, answer.text
    return UUID(answer.json()["job_id"])


async def job_for(conn: asyncpg.Connection, job_type: str, order_id: UUID) -> Job:
    [job] = [job for job in await list_jobs(conn, job_type=job_type) if job.payload == {"order_id": str(order_id)}]
    return job


async def ledger(conn: asyncpg.Connection) -> list[tuple[str, int]]:
    rows = await conn.fetch("SELECT account, amount_cents FROM shop.ledger ORDER BY event_id, account")
    return [(row["account"], row["amount_cents"]) for row in rows]


async def status(shop: httpx.AsyncClient) -> tables.Status:
    answer: tables.Status = (await shop.get("/")).json()
    return answer


def messages(folder: Path) -> list[EmailMessage]:
    parser = BytesParser(EmailMessage, policy=email.policy.default)
    return [parser.parsebytes(file.read_bytes()) for file in folder.glob("*.eml")]


def names(folder: Path) -> list[str]:
    return [file.name for file in folder.iterdir()]


def assert_sentence(answer: httpx.Response) -> None:
    assert answer.status_code == 400
    assert re.fullmatch(r"cannot [^\n]+: [^\n]+; [^\n]+", answer.json()["error"])


async def test_an_order_and_its_jobs_are_written_by_one_transaction(
    shop: httpx.AsyncClient, conn: asyncpg.Connection, schema: str
) -> None:
    order_id = await place(shop)

    [order] = await conn.fetch("SELECT id, xmin::text FROM shop.orders")
    jobs = await conn.fetch(f"SELECT job_type, payload->>'order_id' AS order_id, xmin::text FROM {schema}.jobs")
    assert order["id"] == order_id
    assert {job["job_type"] for job in jobs} == {"email.send_receipt", "inventory.sync"}
    assert {(job["order_id"], job["xmin"]) for job in jobs} == {(str(order_id), order["xmin"])}


async def test_the_customer_gets_a_receipt(
    shop: httpx.AsyncClient, worker: Observed, mails: Path, conn: asyncpg.Connection
) -> None:
    order_id = await place(shop)
    job = await job_for(conn, send_receipt.name, order_id)
    await worker.seen(EventKind.COMPLETED, job.id)

    [message] = messages(mails)
    [recipient] = message["To"].addresses
    assert (recipient.display_name, recipient.addr_spec) == ("Núria Puig, filla", "nuria@example.com")
    assert message["X-Order-Id"] == str(order_id)
    assert message["Message-ID"] == f"<{job.id}@shop.example>"
    text = message.get_content()
    assert "Dear Núria Puig, filla," in text
    assert "19.99 EUR" in text


async def test_a_receipt_that_is_sent_again_is_the_same_message(
    shop: httpx.AsyncClient, worker: Observed, mails: Path, conn: asyncpg.Connection
) -> None:
    job = await job_for(conn, send_receipt.name, await place(shop))
    await worker.seen(EventKind.COMPLETED, job.id)
    await requeue(conn, job.id)
    await worker.seen(EventKind.COMPLETED, job.id, times=2)

    assert len(messages(mails)) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'{"customer": "Ada"',
        json.dumps(ORDER | {"customer": ""}).encode(),
        json.dumps(ORDER | {"customer": "Ada\0"}).encode(),
        json.dumps(ORDER | {"customer": "Ada\r\nBcc: everybody@example.com"}).encode(),
        json.dumps(ORDER | {"customer": "\ud800"}).encode(),
        json.dumps(ORDER | {"customer": None}).encode(),
        json.dumps(ORDER | {"email": "nobody"}).encode(),
        json.dumps(ORDER | {"email": "ada..lovelace@example.com"}).encode(),
        json.dumps(ORDER | {"email": "ada@example.com\n"}).encode(),
        json.dumps(ORDER | {"total_cents": 0}).encode(),
        json.dumps(ORDER | {"total_cents": 2**31}).encode(),
        b"\xff",
    ],
)
async def test_a_bad_order_is_refused_in_one_sentence(shop: httpx.AsyncClient, body: bytes) -> None:
    assert_sentence(await shop.post("/orders", content=body))

    now = await status(shop)
    assert now["orders"] == now["jobs"]["pending"] == 0


async def test_a_payment_is_booked_in_two_lines_that_sum_to_0(
    shop: httpx.AsyncClient, worker: Observed, conn: asyncpg.Connection, schema: str
) -> None:
    order_id = await place(shop)
    job_id = await pay(shop, payment(order_id))
    await worker.seen(EventKind.COMPLETED, job_id)

    assert await ledger(conn) == [("bank", 1999), ("sales", -1999)]
    # The lines and the job's completion are of one transaction.
    written_by = await conn.fetch(
        f"SELECT xmin::text FROM shop.ledger UNION SELECT xmin::text FROM {schema}.jobs WHERE id = $1", job_id
    )
    assert len(written_by) == 1


async def test_an_event_that_is_delivered_again_changes_nothing(
    shop: httpx.AsyncClient, worker: Observed, conn: asyncpg.Connection
) -> None:
    body = payment(await place(shop))
    async with asyncio.TaskGroup() as group:
        at_once = [group.create_task(pay(shop, body)) for _ in range(10)]
    [job_id] = {task.result() for task in at_once}
    await worker.seen(EventKind.COMPLETED, job_id)
    before = await get_job(conn, job_id)

    assert await pay(shop, body) == job_id
    assert await get_job(conn, job_id) == before
    assert len(await list_jobs(conn, job_type=process_event.name)) == 1
    assert await ledger(conn) == [("bank", 1999), ("sales", -1999)]


async def test_a_payment_that_is_processed_again_is_not_booked_again(
    shop: httpx.AsyncClient, worker: Observed, conn: asyncpg.Connection
) -> None:
    job_id = await pay(shop, payment(await place(shop)))
    await worker.seen(EventKind.COMPLETED, job_id)
    await requeue(conn, job_id)
    await worker.seen(EventKind.COMPLETED, job_id, times=2)

    assert await ledger(conn) == [("bank", 1999), ("sales", -1999)]


async def test_a_payment_for_no_order_dies_and_the_staff_is_told(
    shop: httpx.AsyncClient, worker: Observed, mails: Path, conn: asyncpg.Connection
) -> None:
    job_id = await pay(shop, payment(uuid4()))
    await worker.seen(EventKind.DIED, job_id)
    [alert] = await list_jobs(conn, job_type="recado.job_died")
    await worker.seen(EventKind.COMPLETED, alert.id)

    [message] = messages(mails)
    assert message["X-Job-Id"] == str(job_id)
    assert message["To"].addresses[0].addr_spec == "staff@shop.example"
    assert await ledger(conn) == []


def test_the_signature_is_that_of_stripe() -> None:
    # From: printf '1700000000.{"id":"evt_1"}' | openssl dgst -sha256 -hmac whsec_test
    expected = "c89214b5b5da833daed6f0b8c5bb6bd58cea9022bd80ccc78230f3942d632925"
    assert webhooks.sign(b'{"id":"evt_1"}', SECRET, 1700000000) == f"t=1700000000,v1={expected}"


async def test_one_good_signature_among_several_is_enough(shop: httpx.AsyncClient) -> None:
    body = payment(uuid4())
    time_part, _, good = webhooks.sign(body, SECRET).partition(",")
    _, _, of_the_old_secret = webhooks.sign(body, "the secret before").partition(",")

    assert (await deliver(shop, body, f"{time_part},{of_the_old_secret},{good},v0=legacy")).status_code == 200


@pytest.mark.parametrize(
    "forge",
    [
        lambda body: "",
        lambda body: "t=,v1=",
        lambda body: webhooks.sign(body, "another secret"),
        lambda body: webhooks.sign(body + b" ", SECRET),
        lambda body: webhooks.sign(body, SECRET).partition(",")[2],
        lambda body: webhooks.sign(body, SECRET).partition(",")[0],
        lambda body: webhooks.sign(body, SECRET).replace("v1=", "v0="),
        lambda body: webhooks.sign(body, SECRET).replace("t=", "t=1"),
        lambda body: webhooks.sign(body, SECRET, int(time.time()) - webhooks.TOLERANCE - 10),
        lambda body: webhooks.sign(body, SECRET, int(time.time()) + webhooks.TOLERANCE + 10),
        lambda body: webhooks.sign(body, SECRET).replace("v1=", "v1=é"),
        lambda body: webhooks.sign(body, SECRET).replace("t=", "t=²"),
    ],
)
async def test_a_bad_signature_is_refused_in_one_sentence(
    shop: httpx.AsyncClient, forge: Callable[[bytes], str]
) -> None:
    body = payment(uuid4())
    assert_sentence(await deliver(shop, body, forge(body)))

    now = await status(shop)
    assert now["payments"] == now["jobs"]["pending"] == 0


@pytest.mark.parametrize("body", [b"", b"{}", b'{"id": "evt 1"}', payment(uuid4(), -5), payment(uuid4(), 2**31)])
async def test_a_bad_event_is_refused_in_one_sentence(shop: httpx.AsyncClient, body: bytes) -> None:
    assert_sentence(await deliver(shop, body))


async def test_reconciling_a_day_finds_what_does_not_match(
    shop: httpx.AsyncClient, worker: Observed, conn: asyncpg.Connection
) -> None:
    paid, underpaid, _ = [await place(shop) for _ in range(3)]
    for body in (payment(paid), payment(underpaid, 1)):
        await worker.seen(EventKind.COMPLETED, await pay(shop, body))
    today = Day(day=await conn.fetchval("SELECT (now() AT TIME ZONE 'UTC')::date"))
    another = Day(day=datetime(2020, 2, 29, tzinfo=UTC).date())
    jobs = [await reconcile.enqueue(conn, day) for day in (today, another)]
    for job_id in jobs:
        await worker.seen(EventKind.COMPLETED, job_id)

    assert [(await get_job(conn, job_id)).result for job_id in jobs] == [
        {"orders": 3, "unpaid": 1, "mismatched": [str(underpaid)], "balance_cents": 0},
        {"orders": 0, "unpaid": 0, "mismatched": [], "balance_cents": 0},
    ]


async def test_the_flaky_warehouse_fails_as_foretold(
    worker: Observed, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_inventory, "backoff", (0.0,))
    never, once, always = [await sync_inventory.enqueue(conn, Order(order_id=UUID(int=number))) for number in (3, 1, 0)]
    await worker.seen(EventKind.COMPLETED, never)
    await worker.seen(EventKind.COMPLETED, once)
    await worker.seen(EventKind.DIED, always)

    jobs = [await get_job(conn, job_id) for job_id in (never, once, always)]
    assert [(job.status, job.attempts) for job in jobs] == [("completed", 0), ("completed", 1), ("dead", 3)]
    assert [len(await list_errors(conn, job.id)) for job in jobs] == [0, 1, 3]
    assert jobs[1].result == {"warehouse": "Madrid", "attempt": 2}


async def test_the_api_of_the_queue_is_part_of_the_service(shop: httpx.AsyncClient) -> None:
    await place(shop)

    assert (await shop.get("/queue/readyz")).status_code == 200
    metrics = (await shop.get("/queue/api/v1/jobs/metricas")).json()
    assert (metrics["pendientes"], metrics["fallidos"]) == (2, 0)


async def test_a_message_cannot_leave_the_mail_folder(mails: Path) -> None:
    message = EmailMessage()
    message["From"] = message["To"] = "mallory@example.com"
    message["Message-ID"] = "<../../evil/x@example.com>"
    await aiosmtplib.send(message, hostname="127.0.0.1", port=int(os.environ["SHOP_SMTP_PORT"]), local_hostname="x")

    assert names(mails) == [".._.._evil_x@example.com.eml"]


# --- the whole, as `make run` runs it ---


@asynccontextmanager
async def running(folder: Path, *options: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The shop in a process of its own, with all that it says in its ``stdout``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "examples.shop", *options),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PROJECT)} | variables,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def run(folder: Path, *options: str, **variables: str) -> tuple[int | None, str]:
    """Run the shop to its end; its exit code, and what it said."""
    async with asyncio.timeout(LIMIT), running(folder, *options, **variables) as process:
        output, _ = await process.communicate()
    return process.returncode, output.decode()


@asynccontextmanager
async def books(folder: Path) -> AsyncIterator[asyncpg.Connection]:
    """The shop's database, after the shop has closed."""
    with embedded.start(folder / ".recado", durable=False) as server:
        conn = await asyncpg.connect(server.dsn())
        try:
            yield conn
        finally:
            await conn.close()


async def audit(conn: asyncpg.Connection, mails: Path, schema: str) -> int:
    """Check everything that must hold when every job is over; how many orders there are."""
    jobs = await conn.fetch(
        f"SELECT id, job_type, status, attempts, idempotency_key, payload::text, result::text FROM {schema}.jobs"
    )
    assert Counter(job["status"] for job in jobs if job["status"] not in ("completed", "dead")) == {}
    of_type = {t: [job for job in jobs if job["job_type"] == t] for t in app.job_types}
    received = messages(mails)

    orders = Counter(str(row["id"]) for row in await conn.fetch("SELECT id FROM shop.orders"))
    assert Counter(m["X-Order-Id"] for m in received if "X-Order-Id" in m) == orders
    assert Counter(json.loads(job["payload"])["order_id"] for job in of_type["email.send_receipt"]) == orders
    assert {job["status"] for job in of_type["email.send_receipt"]} == {"completed"}

    synced = {
        json.loads(job["payload"])["order_id"]: (job["status"], job["attempts"]) for job in of_type["inventory.sync"]
    }
    foretold = {0: ("completed", 0), 1: ("completed", 1), 3: ("dead", 3)}
    assert len(of_type["inventory.sync"]) == len(orders)
    assert synced == {order_id: foretold[outages(UUID(order_id))] for order_id in orders}

    events = await conn.fetch(
        "SELECT e.id, o.id IS NOT NULL AS known, count(l.account) AS lines, coalesce(sum(l.amount_cents), 0) AS sum "
        "FROM shop.payment_events e LEFT JOIN shop.orders o ON o.id = e.order_id "
        "LEFT JOIN shop.ledger l ON l.event_id = e.id GROUP BY e.id, o.id"
    )
    assert {(event["known"], event["lines"], event["sum"]) for event in events} == {(True, 2, 0), (False, 0, 0)}
    assert Counter(job["idempotency_key"] for job in of_type["stripe.process_event"]) == Counter(
        e["id"] for e in events
    )
    processed = {job["idempotency_key"]: job["status"] for job in of_type["stripe.process_event"]}
    assert processed == {event["id"]: "completed" if event["known"] else "dead" for event in events}
    strays = [str(job["id"]) for job in of_type["stripe.process_event"] if job["status"] == "dead"]
    assert Counter(m["X-Job-Id"] for m in received if "X-Job-Id" in m) == Counter(strays)

    for job in of_type["reconcile.daily"]:
        result = json.loads(job["result"])
        assert (result["mismatched"], result["balance_cents"]) == ([], 0)
    await audit_plans(conn, mails.with_name("backups"), {job["id"]: job["status"] for job in jobs}, schema)
    return len(orders)


async def audit_plans(conn: asyncpg.Connection, backups: Path, jobs: dict[UUID, str], schema: str) -> None:
    """The same for what the robot plans, asked as the superuser, who sees it."""
    operations = await conn.fetch(f"SELECT job_id, kind, status, progress, error FROM {schema}.operations")
    assert {operation["kind"] for operation in operations} == {operation.kind for operation in OPERATIONS}
    for operation in operations:
        if operation["error"] is None:
            assert (operation["status"], operation["progress"], jobs[operation["job_id"]]) == ("done", 100, "completed")
        else:
            assert (operation["kind"], operation["status"]) == ("blueprint_import", "error")
            assert jobs[operation["job_id"]] == "dead"
            assert re.fullmatch(r"Line \d+ is wrong: height_units .*", operation["error"])
    assert await conn.fetchval("SELECT count(*) FROM shop.blueprints WHERE imported_at IS NULL") == 0
    assert await conn.fetchval("SELECT count(DISTINCT name) - count(*) FROM shop.blueprints") == 0
    written = {row["file"]: row["sha256"] for row in await conn.fetch("SELECT file, sha256 FROM shop.backups")}
    assert 1 <= len(written) <= KEPT
    for name, sha256 in written.items():
        assert json.loads((backups / name).read_bytes().splitlines()[-1]) == {"sha256": sha256}


async def test_nothing_is_lost_or_done_twice(tmp_path: Path, schema: str) -> None:
    mails = tmp_path / ".recado" / "mail"
    code, output = await run(tmp_path, "--port=0", "--rate=50", f"--seconds={SECONDS}")
    assert code == 0, output
    assert "the shop is open at http://127.0.0.1:" in output
    assert re.search(r"plan and watch at http://127\.0\.0\.1:\d+/blueprints", output)
    assert re.search(r"operations: 0 pending, 0 processing, [1-9]\d* done, [1-9]\d* error", output)
    async with books(tmp_path) as conn:
        first = await audit(conn, mails, schema)
        assert first > 10 * SECONDS

    # A second run finds what the first one left, and ends in good order when it is told to.
    async with asyncio.timeout(LIMIT), running(tmp_path, "--port=0", "--rate=50") as process:
        assert process.stdout is not None
        async for line in process.stdout:
            cells = line.split()
            if cells and cells[0].isdigit() and int(cells[0]) > first:
                break
        process.send_signal(signal.SIGTERM)
        rest, _ = await process.communicate()
    assert process.returncode == 0, rest.decode()
    async with books(tmp_path) as conn:
        assert await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs WHERE status = 'running'") == 0

    # What had to wait for its retry meanwhile is done by the third.
    code, output = await run(tmp_path, "--port=0", "--seconds=0", "--quiet")
    assert code == 0, output
    async with books(tmp_path) as conn:
        assert await audit(conn, mails, schema) > first


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"RECADO_DATA_DIR": "/dev/null/recado"}, "cannot run PostgreSQL in /dev/null/recado: Not a directory"),
        ({"RECADO_PG_BIN": "/nowhere"}, "cannot start PostgreSQL from /nowhere: there is no postgres or no initdb"),
    ],
)
async def test_what_keeps_the_database_from_starting_is_said_in_one_sentence(
    tmp_path: Path, variables: dict[str, str], sentence: str
) -> None:
    code, output = await run(tmp_path, "--port=0", **variables)
    assert (code, output.count("\n")) == (1, 1)
    assert output.startswith(sentence)


async def test_data_of_another_major_version_are_refused_in_one_sentence(tmp_path: Path) -> None:
    pgdata = tmp_path / ".recado" / "pgdata"
    pgdata.mkdir(parents=True)
    (pgdata / "PG_VERSION").write_text("10\n")

    code, output = await run(tmp_path, "--port=0")
    assert (code, output.count("\n")) == (1, 1)
    assert "PostgreSQL 10 wrote it" in output


async def test_a_port_that_is_taken_is_said_in_one_sentence_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = await run(tmp_path, SHOP_PORT=str(port))
    assert (code, output.count("\n")) == (1, 1)
    assert output.startswith(f"cannot open the shop on 127.0.0.1:{port}: Address already in use; ")
    assert names(tmp_path) == []
