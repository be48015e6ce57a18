"""Backups: what an organization has planned, in a file, and back again.

A file is JSON Lines: a header, then a line for each row, and at the end the SHA-256 of all that stands before.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from pydantic import BaseModel

from examples.shop.application import app
from recado import ClaimedJob, Operation, tenant
from recado.queue.connections import Connection

FORMAT = "shop-backup/1"

KEPT = 3
"""Backups of an organization; the older ones are deleted, or a busy demonstration would fill the disk."""

BATCH = 200
"""Rows that are read, or written, at once."""

TABLES = {
    "blueprints": "SELECT to_jsonb(b)::text FROM shop.blueprints b "
    "WHERE b.organization_id = $1 AND b.imported_at IS NOT NULL ORDER BY b.id",
    "racks": "SELECT to_jsonb(r)::text FROM shop.racks r JOIN shop.blueprints b ON b.id = r.blueprint_id "
    "WHERE r.organization_id = $1 AND b.organization_id = $1 AND b.imported_at IS NOT NULL "
    "ORDER BY r.blueprint_id, r.position",
}
"""What is backed up, in the order in which it can be put back. Drafts are not: their imports are under way."""

INSERT_ROWS = {
    table: f"INSERT INTO shop.{table} SELECT * FROM jsonb_populate_recordset(NULL::shop.{table}, $1::text::jsonb)"
    for table in TABLES
}
"""The inverse of ``to_jsonb``, for each type of column. Rows of another organization are refused by the policy."""

COUNT_ROWS = f"""
SELECT count(*) FROM ({" UNION ALL ".join(f"({select})" for select in TABLES.values())}) AS backed_up
"""

DELETE_BLUEPRINTS = "DELETE FROM shop.blueprints WHERE organization_id = $1 AND imported_at IS NOT NULL"
"""The racks go with them."""

LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('shop.restore:' || $1, 0))"
"""Two restores of one organization come one after the other, and the later one is what stays."""

INSERT_BACKUP = """
INSERT INTO shop.backups (id, organization_id, file, sha256, row_count) VALUES ($1, $2, $3, $4, $5)
ON CONFLICT (id) DO UPDATE SET file = excluded.file, sha256 = excluded.sha256, row_count = excluded.row_count
"""

DELETE_OLD_BACKUPS = f"""
DELETE FROM shop.backups WHERE organization_id = $1 AND id NOT IN (
    SELECT id FROM shop.backups WHERE organization_id = $1 ORDER BY created_at DESC, id DESC LIMIT {KEPT}
) RETURNING file
"""

SELECT_BACKUP = "SELECT file, sha256, row_count FROM shop.backups WHERE organization_id = $1 AND id = $2"

SELECT_BACKUPS = """
SELECT id, row_count, created_at FROM shop.backups WHERE organization_id = $1 ORDER BY created_at DESC, id DESC
"""


class Backup(NamedTuple):
    """A backup that can be restored."""

    id: UUID
    row_count: int
    created_at: datetime


class Restore(BaseModel):
    """Names a backup."""

    backup_id: UUID


class DamagedBackup(Exception):
    """The file is missing, or not what was written."""


@app.operation("backup_full", backoff=(1.0, 5.0))
async def back_up(payload: None, operation: Operation, job: ClaimedJob, state: Mapping[str, Any]) -> dict[str, Any]:
    """Write what the organization has, as it is at one moment, into a file.

    The file gets its name when it is whole. The name bears the attempt's fence, so an attempt that was taken for dead
    and goes on writes a file of its own.
    """
    folder: Path = state["backups"]
    async with state["pool"].acquire() as conn:
        lines = await _read_rows(conn, operation)
        path = folder / f"{operation.job_id}-{job.fence}.jsonl"
        digest = await asyncio.to_thread(write, path, operation.organization_id, lines)
        async with tenant(conn, operation.organization_id):
            await conn.execute(
                INSERT_BACKUP, operation.job_id, operation.organization_id, path.name, digest, len(lines)
            )
            old = await conn.fetch(DELETE_OLD_BACKUPS, operation.organization_id)
    # After the commit: a rollback would bring the rows back, but not the files.
    for row in old:
        await asyncio.to_thread((folder / row["file"]).unlink, missing_ok=True)
    return {"backup_id": str(operation.job_id), "rows": len(lines), "sha256": digest}


async def _read_rows(conn: Connection, operation: Operation) -> list[str]:
    """The lines of a backup, all as they are at one moment: the only transaction here that is open for long."""
    lines: list[str] = []
    async with conn.transaction(isolation="repeatable_read", readonly=True), tenant(conn, operation.organization_id):
        total = await conn.fetchval(COUNT_ROWS, operation.organization_id)
        for table, select in TABLES.items():
            cursor = await conn.cursor(select, operation.organization_id)
            while rows := await cursor.fetch(BATCH):
                lines += [f'{{"table":"{table}","row":{row[0]}}}' for row in rows]
                await operation.progress(90 * len(lines) // total)
    return lines


@app.operation("restore_full", backoff=(1.0, 5.0))
async def restore(payload: Restore, operation: Operation, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Put back exactly what a backup holds, in one transaction: until it commits everybody sees what was before."""
    organization_id = operation.organization_id
    async with tenant(state["pool"], organization_id) as conn:
        backup = await conn.fetchrow(SELECT_BACKUP, organization_id, payload.backup_id)
    if backup is None:
        await operation.mark_error("There is no such backup any more. Choose another one.")
        return None
    try:
        path = state["backups"] / backup["file"]
        rows = await asyncio.to_thread(read, path, organization_id, backup["sha256"])
    except DamagedBackup as error:
        await operation.mark_error(f"The backup cannot be restored: {error}. Choose another one.")
        return None
    async with tenant(state["pool"], organization_id) as conn:
        await conn.execute(LOCK, organization_id)
        await conn.execute(DELETE_BLUEPRINTS, organization_id)
        restored = 0
        for table in TABLES:
            for start in range(0, len(rows[table]), BATCH):
                batch = rows[table][start : start + BATCH]
                await conn.execute(INSERT_ROWS[table], f"[{','.join(batch)}]")
                restored += len(batch)
                await operation.progress(100 * restored // backup["row_count"])
    return {"backup_id": str(payload.backup_id), "rows": restored}


async def list_backups(conn: Connection, organization_id: str) -> list[Backup]:
    """An organization's backups, newest first; in its tenant's transaction."""
    return [Backup(**row) for row in await conn.fetch(SELECT_BACKUPS, organization_id)]


# --- the file; these functions run in threads ---


def write(path: Path, organization_id: str, lines: Sequence[str]) -> str:
    """Write a backup: whole and on the disk once it has its name, or not at all. Returns its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = _header(organization_id) + "".join(f"{line}\n" for line in lines).encode()
    digest = hashlib.sha256(content).hexdigest()
    # Beside the file that it becomes: only within a file system a rename is atomic. Readable by its owner alone.
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, prefix=".", suffix=".tmp", delete=False) as file:
        try:
            file.write(content + _trailer(digest))
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    _sync_folder(path.parent)
    return digest


def _sync_folder(folder: Path) -> None:
    """The new name is in the folder, which has to reach the disk as well."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path, organization_id: str, sha256: str) -> dict[str, list[str]]:
    """The rows of a backup, as JSON texts by table.

    Raises:
        DamagedBackup: it is not the file with this SHA-256, or not this organization's.
    """
    try:
        *body, trailer = path.read_bytes().splitlines(keepends=True)
    except FileNotFoundError:
        raise DamagedBackup("its file is missing") from None
    except ValueError:
        raise DamagedBackup("its file is empty") from None
    if hashlib.sha256(b"".join(body)).hexdigest() != sha256 or trailer != _trailer(sha256):
        raise DamagedBackup("its file is damaged, since its checksum is another")
    if body[0] != _header(organization_id):
        raise DamagedBackup("its file is another organization's, or of another format")
    rows: dict[str, list[str]] = {table: [] for table in TABLES}
    for line in body[1:]:
        entry = json.loads(line)
        rows[entry["table"]].append(json.dumps(entry["row"]))
    return rows


def _header(organization_id: str) -> bytes:
    return json.dumps({"format": FORMAT, "organization_id": organization_id}).encode() + b"\n"


def _trailer(sha256: str) -> bytes:
    return json.dumps({"sha256": sha256}).encode() + b"\n"
