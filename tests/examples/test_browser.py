"""The planner's page in a real browser: headless Chromium, driven by Playwright."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest
import pytest_asyncio
from playwright.async_api import Browser, FilePayload, Page, async_playwright, expect

from examples.shop.__main__ import listening, serving
from examples.shop.accounts import USERS
from examples.shop.application import app
from examples.shop.blueprints import BATCH
from examples.shop.web import create_service
from recado.api import Hub
from recado.queue.connections import Pool
from tests.worker.support import PATIENCE, Observed

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

REQUIRED = os.environ.get("RECADO_REQUIRE_BROWSER") == "1"
"""Whether a missing browser is a failure, as where one was installed for these tests."""

pytestmark = pytest.mark.skipif(
    CHROMIUM is None and not REQUIRED,
    reason="no Chromium is found; install it (Debian: apt-get install chromium), or set RECADO_REQUIRE_BROWSER=1 "
    "to have this fail",
)

ARGUMENTS = [
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--no-first-run",
    # Chromium's sandbox does not run as root; what it opens here is our own page.
    *(["--no-sandbox"] if os.geteuid() == 0 else []),
]

GATE = 7
"""The advisory lock that imports wait for halfway."""

HALF, WHOLE = 3 * BATCH, 5 * BATCH
"""Racks: what is committed before the gate, and all of them."""


@pytest_asyncio.fixture
async def url(web_pool: Pool, planning_worker: Observed) -> AsyncIterator[str]:
    """Where the shop is served, with a worker behind it."""
    hub = Hub(app, web_pool)
    service = create_service(web_pool, webhook_secret="", session_secret=secrets.token_hex(), hub=hub)
    with listening(0) as sock:
        async with serving(service, sock, hub):
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"


@pytest_asyncio.fixture
async def browser() -> AsyncIterator[Browser]:
    assert CHROMIUM is not None, "no Chromium is found, but RECADO_REQUIRE_BROWSER is set"
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        await browser.close()


@asynccontextmanager
async def opened(browser: Browser, url: str, user: str, *, script: str = "") -> AsyncIterator[Page]:
    """The planner's page as ``user`` sees it, in a profile of its own, after ``script`` has run in it.

    It must meet no error on the way, such as something that its Content-Security-Policy forbids.
    """
    errors: list[str] = []
    context = await browser.new_context(base_url=url)
    await context.add_init_script(script)
    page = await context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    await page.goto("/blueprints")
    await page.get_by_role("button", name=USERS[user].full_name).click()
    await expect(page.get_by_text(USERS[user].organization_id)).to_be_visible()
    yield page
    await context.close()
    assert errors == []


@asynccontextmanager
async def gate(conn: asyncpg.Connection) -> AsyncIterator[None]:
    """Imports stop after :data:`HALF` of the racks until the block ends."""
    await conn.execute(f"""
        CREATE FUNCTION shop.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_advisory_xact_lock_shared({GATE});
            RETURN NEW;
        END $$;
        CREATE TRIGGER wait BEFORE INSERT ON shop.racks FOR EACH ROW WHEN (NEW.position = 'A{HALF + 1}')
        EXECUTE FUNCTION shop.wait();
    """)
    await conn.execute("SELECT pg_advisory_lock($1)", GATE)
    try:
        yield
    finally:
        await conn.execute("SELECT pg_advisory_unlock($1)", GATE)


async def upload(page: Page, *, extra: str = "") -> None:
    """Import a hall of :data:`WHOLE` racks, and a line of which the test says what it is."""
    lines = ["name,position,height_units", *(f"Rack {n},A{n},42" for n in range(1, WHOLE + 1)), extra]
    file: FilePayload = {"name": "Hall 7.csv", "mimeType": "text/csv", "buffer": "\n".join(lines).encode()}
    await page.get_by_label("Racks, as CSV").set_input_files(file)
    await page.get_by_role("button", name="Import").click()


async def shows(page: Page, state: str, **result: str) -> None:
    """Wait until the page tells this state, and of the result at least this."""
    await expect(page.locator("#state")).to_have_text(state, timeout=PATIENCE * 1000)
    for name, value in result.items():
        await expect(page.locator("#result dt", has_text=re.compile(f"^{name}$")).locator("+ dd")).to_have_text(value)


async def bar_is_at(page: Page, percent: int) -> None:
    bar = page.get_by_role("progressbar")
    await expect(bar).to_have_js_property("value", percent, timeout=PATIENCE * 1000)
    await expect(bar).to_be_visible()


async def test_an_import_moves_the_bar_and_shows_its_result(
    browser: Browser, url: str, conn: asyncpg.Connection
) -> None:
    async with opened(browser, url, "ada") as page:
        async with page.expect_request("**/events"), gate(conn):
            await upload(page)
            await bar_is_at(page, 100 * HALF // WHOLE)
            await shows(page, f"{100 * HALF // WHOLE} %")
            await expect(page.locator("#result")).to_be_hidden()
        await shows(page, "done", name="Hall 7", racks=str(WHOLE), height_units=str(42 * WHOLE))
        await bar_is_at(page, 100)
        await expect(page.get_by_role("cell", name="Hall 7")).to_be_visible()
        await expect(page.locator("#error")).to_be_hidden()


async def test_a_bad_file_shows_the_sentence(browser: Browser, url: str) -> None:
    async with opened(browser, url, "ada") as page:
        await upload(page, extra="Rack 0,Z1,<b>tall</b>")
        sentence = f"Line {WHOLE + 2} is wrong: height_units must be a whole number from 1 to 60, not '<b>tall</b>'."
        await expect(page.get_by_role("alert")).to_have_text(sentence, timeout=PATIENCE * 1000)
        await expect(page.locator("#result")).to_be_hidden()
        await expect(page.get_by_text("None yet.")).to_be_visible()


async def test_without_event_source_the_page_polls(browser: Browser, url: str, conn: asyncpg.Connection) -> None:
    requests: list[str] = []
    async with opened(browser, url, "ada", script="delete window.EventSource") as page:
        page.on("request", lambda request: requests.append(request.url))
        async with gate(conn):
            await upload(page)
            await bar_is_at(page, 100 * HALF // WHOLE)
        await shows(page, "done", racks=str(WHOLE))
    assert any(re.search(r"/api/jobs/[0-9a-f-]{36}$", request) for request in requests)
    assert not any(request.endswith("/events") for request in requests)


async def test_another_organization_sees_nothing_of_it(browser: Browser, url: str) -> None:
    async with opened(browser, url, "ada") as page, opened(browser, url, "grace") as other:
        async with page.expect_response("**/import") as started:
            await upload(page)
        job_url = (await (await started.value).all_headers())["location"]
        await shows(page, "done")

        await other.reload()
        await expect(other.get_by_text("None yet.")).to_be_visible()
        assert (await page.context.request.get(url + job_url)).status == 200
        for path in (job_url, f"{job_url}/events"):
            assert (await other.context.request.get(url + path)).status == 404


async def test_a_blueprint_is_analyzed_backed_up_and_restored(
    browser: Browser, url: str, conn: asyncpg.Connection
) -> None:
    async with opened(browser, url, "ada") as page:
        await upload(page)
        await shows(page, "done")
        await page.get_by_role("button", name="Analyze").click()
        await shows(page, "done", free_units=str(42 * WHOLE), suggestions="none")
        await page.get_by_role("button", name="Back up").click()
        await shows(page, "done", rows=str(1 + WHOLE))
        await conn.execute("DELETE FROM shop.blueprints")
        await page.reload()
        await expect(page.get_by_text("None yet.")).to_be_visible()
        await page.get_by_role("button", name="Restore").click()
        await shows(page, "done", rows=str(1 + WHOLE))
        await expect(page.get_by_role("cell", name="Hall 7")).to_be_visible()


async def test_an_import_is_cancelled(browser: Browser, url: str, conn: asyncpg.Connection) -> None:
    async with opened(browser, url, "ada") as page, gate(conn):
        await upload(page)
        await bar_is_at(page, 100 * HALF // WHOLE)
        await page.get_by_role("button", name="Cancel").click()
        await expect(page.get_by_role("alert")).to_have_text("The operation was cancelled.")
        await expect(page.get_by_text("None yet.")).to_be_visible()
