"""Blueprints: plans of a machine room, imported from CSV files rack by rack, while the user watches."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, NamedTuple, Self
from uuid import UUID

import asyncpg
from pydantic import BaseModel, Field, StringConstraints, ValidationError, model_validator
from uuid6 import uuid7

from examples.shop.application import app
from recado import Operation, tenant
from recado.queue.connections import Connection

MAX_UPLOAD = 1024 * 1024
"""Bytes of a CSV file: room for some ten thousand racks, and little to hold in memory."""

MAX_RACKS = 10_000
"""Of one blueprint: the largest machine rooms have about so many."""

BATCH = 20
"""Racks of one transaction: each is a commit, after which the bar may move."""

MAX_QUOTED = 40
"""Characters of a cell that is wrong, in the sentence that says so."""

UPLOADS_KEPT = "1 day"
"""An upload whose import failed is of no use to anybody; a day is long enough for its retries."""

INSERT_UPLOAD = "INSERT INTO shop.uploads (id, organization_id, name, content) VALUES ($1, $2, $3, $4)"

DELETE_OLD_UPLOADS = f"""
DELETE FROM shop.uploads WHERE organization_id = $1 AND created_at < now() - interval '{UPLOADS_KEPT}'
"""

SELECT_UPLOAD = "SELECT name, content FROM shop.uploads WHERE organization_id = $1 AND id = $2"

INSERT_DRAFT = """
INSERT INTO shop.blueprints (id, organization_id, name) VALUES ($1, $2, $3) ON CONFLICT (id) DO NOTHING
"""
"""It has the upload's id, so an attempt that is repeated goes on with the same draft."""

INSERT_RACK = """
INSERT INTO shop.racks (blueprint_id, organization_id, position, name, height_units, used_units, weight_kg)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (blueprint_id, position) DO NOTHING
"""

DELETE_SUPERSEDED = f"""
DELETE FROM shop.blueprints WHERE organization_id = $1 AND id <> $2 AND CASE
    WHEN imported_at IS NULL THEN created_at < now() - interval '{UPLOADS_KEPT}'
    ELSE name = (SELECT name FROM shop.blueprints WHERE organization_id = $1 AND id = $2)
END
"""
"""What has the same name, and the drafts of imports that were cancelled."""

PUBLISH = "UPDATE shop.blueprints SET imported_at = now() WHERE organization_id = $1 AND id = $2"

DELETE_UPLOAD = "DELETE FROM shop.uploads WHERE organization_id = $1 AND id = $2"

SELECT_IMPORTED = """
SELECT b.id, b.name, b.imported_at, count(r.position) AS racks,
       coalesce(sum(r.height_units), 0)::int AS height_units, coalesce(sum(r.used_units), 0)::int AS used_units
FROM shop.blueprints b LEFT JOIN shop.racks r ON r.blueprint_id = b.id AND r.organization_id = b.organization_id
WHERE b.organization_id = $1 AND b.imported_at IS NOT NULL AND ($2::uuid IS NULL OR b.id = $2)
GROUP BY b.id ORDER BY b.name
"""

Name = Annotated[
    str, StringConstraints(strip_whitespace=True, min_length=1, max_length=100, pattern=r"^[^\x00-\x1f\x7f]*$")
]
"""No control characters: PostgreSQL cannot store NUL, and no page shows the others."""


class Rack(BaseModel):
    """A line of the CSV file. The descriptions are what a user is told of a cell that is wrong."""

    name: Name = Field(description="1 to 100 printable characters")
    position: str = Field(pattern=r"^[A-Z]{1,2}[0-9]{1,3}$", description="a row and a column, such as B12")
    height_units: int = Field(ge=1, le=60, description="a whole number from 1 to 60")
    used_units: int = Field(default=0, ge=0, le=60, description="a whole number from 0 to 60")
    weight_kg: int = Field(default=0, ge=0, le=5_000, description="a whole number from 0 to 5000")

    @model_validator(mode="after")
    def check_used(self) -> Self:
        """No rack uses more units than it has."""
        if self.used_units > self.height_units:
            raise ValueError
        return self


COLUMNS = tuple(Rack.model_fields)

REQUIRED = tuple(name for name, field in Rack.model_fields.items() if field.is_required())

EXAMPLE = f"""\
{",".join(COLUMNS)}
Rack 1,A1,42,30,610
Rack 2,A2,42,4,120
"""


class BadFile(ValueError):
    """The CSV file cannot be imported; the text is for whoever uploaded it."""


class Blueprint(NamedTuple):
    """A blueprint that was imported to its end."""

    id: UUID
    name: str
    imported_at: datetime
    racks: int
    height_units: int
    used_units: int


class Upload(BaseModel):
    """Names a file that was uploaded; what is in it stays in its table."""

    upload_id: UUID


@app.operation("blueprint_import", backoff=(1.0, 5.0))
async def import_blueprint(payload: Upload, operation: Operation, state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Import a file rack by rack, in short transactions: nobody sees the draft before it is whole.

    Another attempt finds the draft and adds only what is missing. A blueprint that has the same name is replaced.
    """
    organization_id, blueprint_id = operation.organization_id, payload.upload_id
    async with tenant(state["pool"], organization_id) as conn:
        upload = await conn.fetchrow(SELECT_UPLOAD, organization_id, payload.upload_id)
        imported = await find(conn, organization_id, blueprint_id)
    if imported is not None:
        return _result(imported)  # an earlier attempt came to the end, but could not say so any more
    if upload is None:
        await operation.mark_error("The upload is gone. Please upload the file again.")
        return None
    try:
        # In a thread: ten thousand lines take so long that other handlers would notice.
        racks = await asyncio.to_thread(read_racks, upload["content"])
    except BadFile as error:
        await operation.mark_error(str(error))
        return None
    await _import_racks(operation, state["pool"], blueprint_id, upload["name"], racks)
    async with tenant(state["pool"], organization_id) as conn:
        await conn.execute(DELETE_SUPERSEDED, organization_id, blueprint_id)
        await conn.execute(PUBLISH, organization_id, blueprint_id)
        await conn.execute(DELETE_UPLOAD, organization_id, payload.upload_id)
        imported = await find(conn, organization_id, blueprint_id)
    return None if imported is None else _result(imported)


async def _import_racks(
    operation: Operation, pool: asyncpg.Pool, blueprint_id: UUID, name: str, racks: Sequence[Rack]
) -> None:
    organization_id = operation.organization_id
    async with tenant(pool, organization_id) as conn:
        await conn.execute(INSERT_DRAFT, blueprint_id, organization_id, name)
    for start in range(0, len(racks), BATCH):
        async with tenant(pool, organization_id) as conn:
            for rack in racks[start : start + BATCH]:
                await conn.execute(
                    INSERT_RACK,
                    *(blueprint_id, organization_id, rack.position, rack.name),
                    *(rack.height_units, rack.used_units, rack.weight_kg),
                )
        await operation.progress(100 * min(start + BATCH, len(racks)) // len(racks))


def _result(blueprint: Blueprint) -> dict[str, Any]:
    return {
        "blueprint_id": str(blueprint.id),
        "name": blueprint.name,
        "racks": blueprint.racks,
        "height_units": blueprint.height_units,
    }


# --- what the web service calls, in its tenant's transaction ---


async def upload(conn: Connection, organization_id: str, name: str, content: bytes, *, created_by: str) -> UUID:
    """Keep a file and start its import, in the caller's transaction.

    Args:
        name: the blueprint's.

    Returns:
        The operation's id.
    """
    upload_id = uuid7()
    await conn.execute(DELETE_OLD_UPLOADS, organization_id)
    await conn.execute(INSERT_UPLOAD, upload_id, organization_id, name, content)
    return await import_blueprint.start(conn, Upload(upload_id=upload_id), created_by=created_by)


async def list_blueprints(conn: Connection, organization_id: str) -> list[Blueprint]:
    """An organization's blueprints by name, without drafts."""
    return [Blueprint(**row) for row in await conn.fetch(SELECT_IMPORTED, organization_id, None)]


async def find(conn: Connection, organization_id: str, blueprint_id: UUID) -> Blueprint | None:
    """One of them; ``None`` if the organization has no such blueprint, or only its draft."""
    row = await conn.fetchrow(SELECT_IMPORTED, organization_id, blueprint_id)
    return None if row is None else Blueprint(**row)


# --- the file ---


def read_racks(content: bytes) -> list[Rack]:
    """The racks in a CSV file whose first line names the columns; the other lines may stand in any order.

    Raises:
        BadFile: in a sentence that names the line.
    """
    try:
        # As spreadsheets write it: with a byte order mark, or without.
        lines = csv.reader(io.StringIO(content.decode("utf-8-sig"), newline=""), strict=True)
    except UnicodeDecodeError:
        raise BadFile("The file is not UTF-8 text. Save it as CSV in UTF-8, and upload it again.") from None
    racks: dict[str, tuple[int, Rack]] = {}
    try:
        columns = _columns(next(lines, []))
        for cells in lines:
            _add(racks, lines.line_num, columns, cells)
    except csv.Error as error:
        raise BadFile(f"Line {lines.line_num} is no CSV: {error}.") from None
    if not racks:
        raise BadFile("The file holds no racks. Add a line for each below the names of the columns.")
    return [rack for _, rack in racks.values()]


def _columns(cells: Sequence[str]) -> list[str]:
    columns = [cell.strip().lower() for cell in cells]
    if missing := [name for name in REQUIRED if name not in columns]:
        raise BadFile(f"Line 1 must name the columns {', '.join(COLUMNS)}; it lacks {missing[0]}.")
    return columns


def _add(racks: dict[str, tuple[int, Rack]], number: int, columns: Sequence[str], cells: Sequence[str]) -> None:
    """Add the rack in line ``number`` to those that are known, each with its own line's number, by their position."""
    filled = {name: cell.strip() for name, cell in zip(columns, cells, strict=False) if cell.strip()}
    if not filled:
        return  # an empty line, as at the end
    if len(cells) != len(columns):
        raise BadFile(f"Line {number} has {len(cells)} cells instead of {len(columns)}.")
    try:
        rack = Rack.model_validate(filled)
    except ValidationError as error:
        raise BadFile(f"Line {number} is wrong: {_reason(error)}.") from None
    if rack.position in racks:
        raise BadFile(f"Line {number} is wrong: position {rack.position} is taken by line {racks[rack.position][0]}.")
    if len(racks) == MAX_RACKS:
        raise BadFile(f"Line {number} is one rack too many: a blueprint has at most {MAX_RACKS}.")
    racks[rack.position] = (number, rack)


def _reason(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_context=False)[0]
    if not problem["loc"]:
        return "it uses more units than it has"
    column = str(problem["loc"][0])
    found = "nothing" if problem["type"] == "missing" else repr(problem["input"][:MAX_QUOTED])
    return f"{column} must be {Rack.model_fields[column].description}, not {found}"
