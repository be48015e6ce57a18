"""The shop's planner: what its users start and watch, each organization for itself."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import httpx
import pytest

from examples.shop import accounts, backups
from examples.shop.analysis import MAX_WEIGHT, Load, analyze, consolidate
from examples.shop.application import app
from examples.shop.backups import KEPT, back_up, restore
from examples.shop.blueprints import MAX_RACKS, MAX_UPLOAD, BadFile, Upload, import_blueprint, read_racks
from examples.shop.planner import PAGES
from recado import tenant
from recado.queue import get_job
from recado.queue.connections import Pool
from recado.worker import EventKind
from tests.worker.support import Observed

HEADER = "name,position,height_units,used_units,weight_kg"

ADA, GRACE = (accounts.USERS[name].organization_id for name in ("ada", "grace"))


def csv_of(count: int, *, used: int = 10) -> bytes:
    lines = [f"Rack {n},A{n},42,{used},{200 + n}" for n in range(1, count + 1)]
    return "\n".join([HEADER, *lines, ""]).encode()


def text(*lines: str) -> bytes:
    return "\n".join([HEADER, *lines]).encode()


async def start(client: httpx.AsyncClient, path: str, **request: Any) -> UUID:
    answer = await client.post(path, **request)
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"/api/jobs/{answer.json()['job_id']}"
    return UUID(answer.json()["job_id"])


async def send(client: httpx.AsyncClient, content: bytes, name: str = "Hall") -> UUID:
    """Send a file to be imported."""
    headers = {"Content-Type": "text/csv"}
    return await start(client, "/blueprints/import", params={"name": name}, content=content, headers=headers)


async def ended(client: httpx.AsyncClient, worker: Observed, job_id: UUID) -> dict[str, Any]:
    """Wait for the operation's end, and return what its user is shown."""
    await worker.until(lambda: job_id in worker.jobs(EventKind.COMPLETED) + worker.jobs(EventKind.DIED))
    operation: dict[str, Any] = (await client.get(f"/api/jobs/{job_id}")).json()
    assert operation["status"] in ("done", "error")
    return operation


async def done(client: httpx.AsyncClient, worker: Observed, job_id: UUID) -> dict[str, Any]:
    """The same, of one that ended well; its result."""
    operation = await ended(client, worker, job_id)
    assert (operation["status"], operation["error"]) == ("done", None)
    result: dict[str, Any] = operation["result"]
    return result


async def error_of(client: httpx.AsyncClient, worker: Observed, job_id: UUID) -> str:
    """The same, of one that ended badly; its error."""
    operation = await ended(client, worker, job_id)
    assert (operation["status"], operation["result"]) == ("error", None)
    error: str = operation["error"]
    return error


async def plans(conn: asyncpg.Connection) -> list[tuple[Any, ...]]:
    """All there is of blueprints and racks, drafts included; asked as the superuser, who sees it."""
    rows = await conn.fetch(
        "SELECT * FROM shop.blueprints b LEFT JOIN shop.racks r ON r.blueprint_id = b.id ORDER BY 1, 8"
    )
    return [tuple(row) for row in rows]


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


# --- imports ---


async def test_a_file_is_imported_rack_by_rack_and_its_result_told(
    ada: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection
) -> None:
    job_id = await start(ada, "/blueprints/import", files={"file": ("Hall 7.csv", csv_of(50), "text/csv")})
    result = await done(ada, planning_worker, job_id)

    [blueprint] = await conn.fetch(
        "SELECT id, name, organization_id, imported_at IS NULL AS draft FROM shop.blueprints"
    )
    assert tuple(blueprint) == (UUID(result["blueprint_id"]), "Hall 7", ADA, False)
    assert result == {"blueprint_id": str(blueprint["id"]), "name": "Hall 7", "racks": 50, "height_units": 50 * 42}
    racks = await conn.fetch("SELECT name, position, height_units, used_units, weight_kg FROM shop.racks")
    assert {tuple(rack) for rack in racks} == {(f"Rack {n}", f"A{n}", 42, 10, 200 + n) for n in range(1, 51)}
    assert await conn.fetchval("SELECT count(*) FROM shop.uploads") == 0


async def test_there_is_no_upload_without_its_operation_and_no_operation_without_its_job(
    ada: httpx.AsyncClient, conn: asyncpg.Connection, schema: str
) -> None:
    await conn.execute(f"""
        CREATE FUNCTION shop.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'no'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON {schema}.operations FOR EACH ROW EXECUTE FUNCTION shop.refuse();
    """)
    with pytest.raises(asyncpg.RaiseError):
        await send(ada, csv_of(1))
    for table in ("shop.uploads", f"{schema}.jobs", f"{schema}.operations"):
        assert await conn.fetchval(f"SELECT count(*) FROM {table}") == 0


async def test_an_attempt_that_is_repeated_doubles_no_rack(
    ada: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_blueprint, "backoff", (0.0,))
    # Fails at the 30th rack, once: what a sequence counts is not rolled back.
    await conn.execute("""
        CREATE SEQUENCE shop.tries;
        CREATE FUNCTION shop.fail_once() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
            IF nextval('shop.tries') = 1 THEN RAISE 'the disk is full'; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER fail_once BEFORE INSERT ON shop.racks FOR EACH ROW WHEN (NEW.position = 'A30')
        EXECUTE FUNCTION shop.fail_once();
    """)
    job_id = await send(ada, csv_of(50))
    result = await done(ada, planning_worker, job_id)

    assert planning_worker.jobs(EventKind.FAILED) == [job_id]
    assert result["racks"] == await conn.fetchval("SELECT count(*) FROM shop.racks") == 50
    # The second attempt went on with the first one's draft.
    writers = await conn.fetch(
        "SELECT xmin::text FROM shop.racks WHERE position IN ('A1', 'A20', 'A30') ORDER BY position"
    )
    assert writers[0] == writers[1] != writers[2]


async def test_an_attempt_after_the_end_only_tells_the_result(
    ada: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await send(ada, csv_of(3))
    first = await done(ada, planning_worker, job_id)
    before = await plans(conn)
    async with tenant(conn, ADA):
        again = await import_blueprint.start(conn, Upload(upload_id=UUID(first["blueprint_id"])))

    assert await done(ada, planning_worker, again) == first
    assert await plans(conn) == before


async def test_a_blueprint_of_the_same_name_is_replaced_and_another_organizations_is_not(
    ada: httpx.AsyncClient, grace: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection
) -> None:
    others = await done(grace, planning_worker, await send(grace, csv_of(2)))
    await done(ada, planning_worker, await send(ada, csv_of(3)))
    newest = await done(ada, planning_worker, await send(ada, csv_of(4)))

    ids = await conn.fetch("SELECT id FROM shop.blueprints")
    assert {str(row["id"]) for row in ids} == {others["blueprint_id"], newest["blueprint_id"]}


async def test_a_file_with_a_bad_line_ends_in_a_sentence_that_names_it_and_leaves_nothing(
    ada: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection
) -> None:
    job_id = await send(ada, csv_of(30) + b"Rack 31,A31,tall,0,0\n")
    error = await error_of(ada, planning_worker, job_id)

    assert error == "Line 32 is wrong: height_units must be a whole number from 1 to 60, not 'tall'."
    assert await plans(conn) == []
    job = await get_job(conn, job_id)
    assert (job.status, job.attempts) == ("dead", 1)  # another attempt would read the same file


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "Line 1 must name the columns name, position, height_units, used_units, weight_kg; it lacks name."),
        (b"name,height_units\n", "Line 1 must name the columns name, position, height_units, used_units, weight_kg; "
         "it lacks position."),
        (text(), "The file holds no racks. Add a line for each below the names of the columns."),
        (text("R,A1,42,0,0", "R,A2,42"), "Line 3 has 3 cells instead of 5."),
        (text("R,A1,42,0,0,0"), "Line 2 has 6 cells instead of 5."),
        (text("R,A1,0,0,0"), "Line 2 is wrong: height_units must be a whole number from 1 to 60, not '0'."),
        (text("R,A1,,0,0"), "Line 2 is wrong: height_units must be a whole number from 1 to 60, not nothing."),
        (text("R,A1,42,43,0"), "Line 2 is wrong: it uses more units than it has."),
        (text("R,a1,42,0,0"), "Line 2 is wrong: position must be a row and a column, such as B12, not 'a1'."),
        (text("R\0,A1,42,0,0"), "Line 2 is wrong: name must be 1 to 100 printable characters, not 'R\\x00'."),
        (text("R,A1,42,0," + "9" * 5000),
         f"Line 2 is wrong: weight_kg must be a whole number from 0 to 5000, not '{'9' * 40}'."),
        (text("R,A1,42,0,0", "", "S,A1,42,0,0"), "Line 4 is wrong: position A1 is taken by line 2."),
        (text('"R,A1,42,0,0'), "Line 2 is no CSV: unexpected end of data."),
        (b"\xff\xfe", "The file is not UTF-8 text. Save it as CSV in UTF-8, and upload it again."),
    ],
)  # fmt: skip
def test_whatever_is_wrong_with_a_file_is_said_in_a_sentence(content: bytes, sentence: str) -> None:
    with pytest.raises(BadFile) as caught:
        read_racks(content)
    assert str(caught.value) == sentence


def test_a_file_as_spreadsheets_write_it_is_read() -> None:
    content = '\ufeffPosition;x,Name,Position,Height_units\r\n?,"Núria, ""alta""",A1,42\r\n\r\n,,,\r\n'.encode()
    [rack] = read_racks(content)
    assert rack.model_dump() == {
        "name": 'Núria, "alta"',
        "position": "A1",
        "height_units": 42,
        "used_units": 0,
        "weight_kg": 0,
    }


def test_a_blueprint_has_no_more_racks_than_it_may() -> None:
    lines = [f"R,{chr(65 + n // 999)}{n % 999 + 1},1,0,0" for n in range(MAX_RACKS + 1)]
    assert len(read_racks(text(*lines[:MAX_RACKS]))) == MAX_RACKS
    with pytest.raises(BadFile, match=f"^Line {MAX_RACKS + 2} is one rack too many"):
        read_racks(text(*lines))


@pytest.mark.parametrize(
    ("status", "request_"),
    [
        (413, {"content": b"x" * (MAX_UPLOAD + 1), "headers": {"Content-Type": "text/csv"}, "params": {"name": "H"}}),
        (413, {"files": {"file": ("h.csv", b"x" * (MAX_UPLOAD + 8192))}}),
        (415, {"json": {}}),
        (400, {"content": csv_of(1), "headers": {"Content-Type": "text/csv"}}),
        (400, {"content": csv_of(1), "headers": {"Content-Type": "text/csv"}, "params": {"name": "a\nb"}}),
        (400, {"content": b"no form", "headers": {"Content-Type": "multipart/form-data; boundary=x"}}),
        (400, {"content": b"no form", "headers": {"Content-Type": "multipart/form-data"}}),
        (400, {"files": {"name": (None, "Hall")}}),
        (400, {"files": [("file", ("a.csv", b"")), ("file", ("b.csv", b""))]}),
    ],
)
async def test_an_upload_that_cannot_be_taken_is_refused_in_one_sentence(
    ada: httpx.AsyncClient, conn: asyncpg.Connection, status: int, request_: dict[str, Any]
) -> None:
    answer = await ada.post("/blueprints/import", **request_)
    assert answer.status_code == status
    assert answer.json()["error"].startswith("cannot import: ")
    assert await conn.fetchval("SELECT count(*) FROM shop.uploads") == 0


# --- analyses ---


def test_the_emptiest_racks_are_emptied_into_those_they_fill_best() -> None:
    empty, small, loose, tight = (
        Load("E", 42, 0, 0),
        Load("S", 42, 5, 100),
        Load("L", 42, 20, 300),
        Load("T", 42, 37, 800),
    )
    assert consolidate([empty, small, loose, tight]) == [(small, tight)]
    # It would be too heavy there.
    assert consolidate([small._replace(weight_kg=300), tight]) == []
    # What took something in stays, and what it took counts.
    assert consolidate([Load("A", 10, 4, 1), Load("B", 10, 5, 1), Load("C", 10, 5, 1)]) == [
        (Load("A", 10, 4, 1), Load("B", 10, 5, 1))
    ]


def test_an_analysis_sums_up_and_says_what_is_too_heavy() -> None:
    racks = [Load("Light", 40, 40, 100), Load("Heavy", 40, 10, MAX_WEIGHT + 1)]
    assert analyze(racks) == {
        "racks": 2,
        "height_units": 80,
        "free_units": 30,
        "percent_used": 62,
        "heaviest": {"name": "Heavy", "weight_kg": MAX_WEIGHT + 1},
        "suggestions": [f"Heavy weighs {MAX_WEIGHT + 1} kg; move something out until it is {MAX_WEIGHT} kg."],
    }
    assert analyze([])["percent_used"] == 0


async def test_a_blueprint_is_analyzed(ada: httpx.AsyncClient, planning_worker: Observed) -> None:
    content = text("Small,A1,42,2,50", "Large,A2,42,40,700")
    imported = await done(ada, planning_worker, await send(ada, content))
    job_id = await start(ada, f"/blueprints/{imported['blueprint_id']}/analysis")

    result = await done(ada, planning_worker, job_id)
    assert (result["name"], result["free_units"]) == ("Hall", 42)
    assert result["suggestions"] == ["Move the 2 units of Small into Large, and give Small up."]


# --- backups ---


async def test_a_restore_puts_back_exactly_what_the_backup_wrote(
    ada: httpx.AsyncClient, grace: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection
) -> None:
    kept = await done(ada, planning_worker, await send(ada, csv_of(300), "Núria's hall"))
    lost = await done(ada, planning_worker, await send(ada, csv_of(3), "Hall 2"))
    await done(grace, planning_worker, await send(grace, csv_of(5)))
    before = await plans(conn)
    backup = await done(ada, planning_worker, await start(ada, "/backups"))
    assert backup["rows"] == 2 + 303

    await conn.execute("DELETE FROM shop.blueprints WHERE id = $1", UUID(lost["blueprint_id"]))
    await conn.execute("UPDATE shop.racks SET used_units = 0 WHERE blueprint_id = $1", UUID(kept["blueprint_id"]))
    await done(ada, planning_worker, await send(ada, csv_of(7), "A later one"))
    assert await plans(conn) != before

    for _ in range(2):  # again changes nothing
        job_id = await start(ada, f"/backups/{backup['backup_id']}/restore")
        assert await done(ada, planning_worker, job_id) == {"backup_id": backup["backup_id"], "rows": 305}
        assert await plans(conn) == before


async def test_a_backup_of_nothing_restores_nothing(
    ada: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection
) -> None:
    backup = await done(ada, planning_worker, await start(ada, "/backups"))
    await done(ada, planning_worker, await send(ada, csv_of(3)))
    await done(ada, planning_worker, await start(ada, f"/backups/{backup['backup_id']}/restore"))
    assert await plans(conn) == []


async def test_a_backup_is_a_private_file_with_its_checksum(
    ada: httpx.AsyncClient, planning_worker: Observed, backup_dir: Path
) -> None:
    await done(ada, planning_worker, await send(ada, csv_of(3)))
    backup = await done(ada, planning_worker, await start(ada, "/backups"))

    [file] = files(backup_dir)
    assert file.stat().st_mode & 0o777 == 0o600
    header, *rows, trailer = file.read_bytes().splitlines(keepends=True)
    assert json.loads(header) == {"format": "shop-backup/1", "organization_id": ADA}
    assert [json.loads(row)["table"] for row in rows] == ["blueprints", "racks", "racks", "racks"]
    digest = hashlib.sha256(b"".join([header, *rows])).hexdigest()
    assert json.loads(trailer) == {"sha256": digest}
    assert backup["sha256"] == digest


@pytest.mark.parametrize("damage", ["a byte", "the end", "the whole", "the name"])
async def test_a_damaged_backup_is_not_restored(
    ada: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection, backup_dir: Path, damage: str
) -> None:
    await done(ada, planning_worker, await send(ada, csv_of(3)))
    backup = await done(ada, planning_worker, await start(ada, "/backups"))
    before = await plans(conn)
    [file] = files(backup_dir)
    content = file.read_bytes()
    match damage:
        case "a byte":
            file.write_bytes(content.replace(b"Rack 2", b"Rack 9"))
        case "the end":
            file.write_bytes(content[:-80])
        case "the whole":
            file.write_bytes(b"")
        case "the name":
            file.rename(file.with_suffix(".gone"))

    error = await error_of(ada, planning_worker, await start(ada, f"/backups/{backup['backup_id']}/restore"))
    assert error.startswith("The backup cannot be restored: its file is ")
    assert await plans(conn) == before


async def test_the_last_backups_are_kept_and_older_ones_deleted(
    ada: httpx.AsyncClient, grace: httpx.AsyncClient, planning_worker: Observed, backup_dir: Path
) -> None:
    others = await done(grace, planning_worker, await start(grace, "/backups"))
    made = [await done(ada, planning_worker, await start(ada, "/backups")) for _ in range(KEPT + 2)]

    kept = {backup["backup_id"] for backup in [others, *made[-KEPT:]]}
    assert {file.stem.rpartition("-")[0] for file in files(backup_dir)} == kept
    assert "no such backup" in await error_of(
        ada, planning_worker, await start(ada, f"/backups/{made[0]['backup_id']}/restore")
    )


def test_a_backup_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(IsADirectoryError):
        backups.write(taken, ADA, ["{}"])
    assert list(tmp_path.iterdir()) == [taken]


# --- organizations ---


async def test_another_organization_sees_nothing_and_gets_nowhere(
    ada: httpx.AsyncClient, grace: httpx.AsyncClient, planning_worker: Observed, conn: asyncpg.Connection
) -> None:
    job_id = await send(ada, csv_of(3), "Ada's hall")
    blueprint = await done(ada, planning_worker, job_id)
    backup = await done(ada, planning_worker, await start(ada, "/backups"))
    before = await plans(conn)
    assert "Ada&#39;s hall" in (await ada.get("/blueprints")).text

    assert "Ada&#39;s hall" not in (await grace.get("/blueprints")).text
    assert (await grace.get("/api/jobs")).json()["jobs"] == []
    theirs, nobodys = [await grace.get(f"/api/jobs/{id_}") for id_ in (job_id, uuid4())]
    assert theirs.status_code == 404
    assert (theirs.headers, theirs.content) == (nobodys.headers, nobodys.content)
    for path in (f"/blueprints/{blueprint['blueprint_id']}/analysis", f"/backups/{backup['backup_id']}/restore"):
        error = await error_of(grace, planning_worker, await start(grace, path))
        assert error.startswith("There is no such ")
    assert await plans(conn) == before


async def test_row_level_security_holds_for_the_role_of_the_web_service(
    ada: httpx.AsyncClient, planning_worker: Observed, web_pool: Pool, schema: str
) -> None:
    await done(ada, planning_worker, await send(ada, csv_of(3)))
    await done(ada, planning_worker, await start(ada, "/backups"))
    await send(ada, b"")
    tables = ["shop.uploads", "shop.blueprints", "shop.racks", "shop.backups", f"{schema}.operations"]

    async with web_pool.acquire() as conn:
        for table in tables:
            assert await conn.fetchval(f"SELECT count(*) FROM {table}") == 0
        async with tenant(conn, GRACE):
            for table in tables:
                assert await conn.fetchval(f"SELECT count(*) FROM {table}") == 0
            with pytest.raises(asyncpg.InsufficientPrivilegeError, match="row-level security"):
                await conn.execute(
                    "INSERT INTO shop.uploads (id, organization_id, name, content) VALUES ($1, $2, 'H', '')",
                    uuid4(),
                    ADA,
                )
        async with tenant(conn, ADA):
            for table in tables[1:]:
                assert await conn.fetchval(f"SELECT count(*) FROM {table}") > 0


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM {schema}.jobs",
        "DELETE FROM {schema}.operations",
        "UPDATE shop.ledger SET amount_cents = 0",
        "INSERT INTO shop.racks SELECT * FROM shop.racks",
        "TRUNCATE shop.uploads",
        "ALTER TABLE shop.uploads DISABLE ROW LEVEL SECURITY",
        "CREATE TABLE shop.mine ()",
        "CREATE TABLE {schema}.mine ()",
    ],
)
async def test_the_web_service_may_do_no_more_than_it_has_to(web_pool: Pool, schema: str, statement: str) -> None:
    async with web_pool.acquire() as conn:
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await conn.execute(statement.format(schema=schema))


# --- who asks ---

EVERYTHING = [
    ("POST", "/blueprints/import"),
    ("POST", f"/blueprints/{uuid4()}/analysis"),
    ("POST", "/backups"),
    ("POST", f"/backups/{uuid4()}/restore"),
    ("GET", "/api/jobs"),
    ("GET", f"/api/jobs/{uuid4()}"),
    ("GET", f"/api/jobs/{uuid4()}/events"),
    ("POST", f"/api/jobs/{uuid4()}/cancel"),
]


@pytest.mark.parametrize("cookie", [None, "", "ada", "ada.", "ada.é", f"ada.{accounts.sign('grace', 'whsec_test')}"])
async def test_without_a_cookie_of_ours_there_is_only_the_login(ada: httpx.AsyncClient, cookie: str | None) -> None:
    ada.cookies.clear()
    headers = {} if cookie is None else {b"Cookie": f"{accounts.COOKIE}={cookie}".encode()}
    for method, path in EVERYTHING:
        assert (await ada.request(method, path, headers=headers)).status_code == 401
    page = await ada.get("/blueprints", headers=headers)
    assert (page.status_code, "Choose who you are" in page.text) == (200, True)


async def test_whoever_logs_out_is_nobody(ada: httpx.AsyncClient) -> None:
    assert (await ada.get("/api/jobs")).status_code == 200
    assert (await ada.post("/logout")).status_code == 303
    assert (await ada.get("/api/jobs")).status_code == 401
    assert (await ada.post("/login", data={"user": "nobody"})).status_code == 400


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
                                     {"Origin": "http://localhost:8080"}, {"Origin": "null"}])  # fmt: skip
async def test_other_sites_pages_can_start_nothing(
    ada: httpx.AsyncClient, conn: asyncpg.Connection, schema: str, headers: dict[str, str]
) -> None:
    for path in ("/backups", "/login", "/logout", f"/api/jobs/{uuid4()}/cancel"):
        assert (await ada.post(path, headers=headers)).status_code == 403
    assert await conn.fetchval(f"SELECT count(*) FROM {schema}.jobs") == 0


async def test_under_another_name_the_planner_does_not_answer(ada: httpx.AsyncClient) -> None:
    assert (await ada.get("/blueprints", headers={"Host": "attacker.example"})).status_code == 400


async def test_the_page_allows_no_script_but_this_hosts(ada: httpx.AsyncClient) -> None:
    page = await ada.get("/blueprints")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    script = (await ada.get("/blueprints.js")).text
    assert "innerHTML" not in script
    for name in ("login.html", "blueprints.html"):
        assert not re.search(r"\s(on[a-z]+|style)=|<style|<script(?! type=\"module\" src=)", (PAGES / name).read_text())


def test_these_are_the_kinds() -> None:
    kinds = {name.removeprefix("operation.") for name in app.job_types if name.startswith("operation.")}
    assert kinds == {"blueprint_import", "ai_analysis", back_up.kind, restore.kind}
    assert (back_up.kind, restore.kind) == ("backup_full", "restore_full")
