"""Hostile and odd input of those who look at the queue and steer it: one clear sentence, before any SQL."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from recado.errors import InvalidArgument, RecadoError, ScheduleNotFound
from recado.queue import (
    JobStatus,
    NewJob,
    OperationStatus,
    cancel,
    cancel_operation,
    dead_by_error,
    get_job,
    get_operation,
    list_errors,
    list_jobs,
    list_operations,
    list_schedules,
    pause,
    pause_schedule,
    requeue,
    requeue_dead,
    resume,
    resume_schedule,
    system,
    tenant,
)
from recado.queue.limits import MAX_NAME_LENGTH, MAX_ROWS
from recado.queue.operations import Cursor, start
from tests.queue.support import insert

Call = Callable[[asyncpg.Connection, Any], Awaitable[object]]

AN_ID = UUID("6f1b7e0a-3d5c-4c3e-9a59-3d8f3e3b8a10")
NOW = datetime(2026, 1, 1, tzinfo=UTC)
EAST, WEST = timezone(timedelta(hours=14)), timezone(-timedelta(hours=12))

NO_IDS: list[Any] = [
    None,
    str(AN_ID),
    AN_ID.hex,
    AN_ID.bytes,
    AN_ID.int,
    0,
    -1,
    2**130,
    True,
    1.0,
    "",
    "\0",
    b"",
    [],
    {},
]

NO_TEXTS: list[Any] = ["a\0b", "\ud800", "a\udcffb", "x" * 129, "x" * 10**7, b"mail", 5, 2**70, True, [], object()]

NO_LIMITS: list[Any] = [None, 0, -1, -(2**70), 2**31, 2**63, 2**70, 10**5_000, True, False, 1.0, float("nan"), "5", []]

NO_MOMENTS: list[Any] = [
    datetime(2026, 1, 1),
    datetime.min,
    datetime.min.replace(tzinfo=EAST),
    datetime.max.replace(tzinfo=WEST),
    date(2026, 1, 1),
    timedelta(1),
    *("2026-01-01T00:00:00Z", "", 1_893_456_000, 2**70, 0.0, True, []),
]

NO_STATUSES: list[Any] = ["", "Dead", "dead ", "a\0b", "\ud800", "x" * 10_000, b"dead", 0, 2**70, True, [], object()]

NO_CURSORS: list[Any] = [
    *("", "abc", (), [], 0, True, AN_ID, NOW, (NOW,), (NOW, AN_ID, 1), {"created_at": NOW, "job_id": AN_ID}),
    *(Cursor(moment, AN_ID) for moment in [None, *NO_MOMENTS]),
    *(Cursor(NOW, job_id) for job_id in NO_IDS),
]


def optional(values: list[Any]) -> list[Any]:
    """Where None is no filter at all."""
    return [value for value in values if value is not None]


async def enter(conn: asyncpg.Connection, organization: Any) -> None:
    async with tenant(conn, organization):
        pass


DOORS: dict[str, tuple[list[Any], list[Call]]] = {
    "an id": (NO_IDS, [get_job, list_errors, cancel, requeue, get_operation, cancel_operation]),
    "the last id of a page": (optional(NO_IDS), [lambda conn, value: list_jobs(conn, before=value)]),
    "the end of a page": (NO_CURSORS, [lambda conn, value: list_operations(conn, "7", before=value)]),
    "a moment": (NO_MOMENTS, [lambda conn, value: requeue_dead(conn, before=value)]),
    "a limit": (
        NO_LIMITS,
        [
            lambda conn, value: list_jobs(conn, limit=value),
            lambda conn, value: dead_by_error(conn, limit=value),
            lambda conn, value: requeue_dead(conn, limit=value),
            lambda conn, value: list_operations(conn, "7", limit=value),
        ],
    ),
    "a status": (
        NO_STATUSES,
        [
            lambda conn, value: list_jobs(conn, status=value),
            lambda conn, value: list_operations(conn, "7", status=value),
        ],
    ),
    "a name to look for": (
        NO_TEXTS,
        [
            lambda conn, value: list_jobs(conn, queue=value),
            lambda conn, value: list_jobs(conn, job_type=value),
            lambda conn, value: requeue_dead(conn, queue=value),
            lambda conn, value: requeue_dead(conn, job_type=value),
            lambda conn, value: list_operations(conn, "7", kind=value),
            lambda conn, value: list_schedules(conn, application=value),
        ],
    ),
    "a name": (
        [None, *NO_TEXTS],
        [
            pause,
            resume,
            lambda conn, value: pause_schedule(conn, value, "report.daily"),
            lambda conn, value: pause_schedule(conn, "shop", value),
            lambda conn, value: resume_schedule(conn, value, "report.daily"),
            lambda conn, value: resume_schedule(conn, "shop", value),
        ],
    ),
    "an organization": (
        [None, "", "0", 0, 10**5_000, True, 1.0, b"7", [], object(), "a\0b", "\ud800", "a\nb", "x" * 257, "x" * 10**7],
        [enter, list_operations],
    ),
}


@pytest.mark.parametrize("door", DOORS)
async def test_what_cannot_be_is_refused_in_one_sentence_before_any_sql(door: str, conn: asyncpg.Connection) -> None:
    values, calls = DOORS[door]
    await conn.close()  # any SQL is now an InterfaceError
    for call in calls:
        for value in values:
            with pytest.raises(RecadoError, match=r"^cannot [^\n]+: [^\n]+; [^\n]+$") as raised:
                await call(conn, value)
            message = str(raised.value)
            assert isinstance(raised.value, ValueError), message
            assert len(message) < 400, message
            assert message.isprintable(), message


async def test_a_sentence_names_what_was_passed_and_what_may_be(conn: asyncpg.Connection) -> None:
    await conn.close()
    for call, says in [
        (list_jobs(conn, limit=-1), "cannot use -1 as a limit: it must be an integer from 1 to 1,000,000; pass one"),
        (get_job(conn, "7"), "cannot use '7' as an id: it must be a UUID; pass one"),  # type: ignore[arg-type]
        (list_jobs(conn, queue="a\0"), r"cannot look for queue 'a\x00': a name is text of at most 128 characters"),
        (list_jobs(conn, status="Dead"), "choose one of pending, running, completed, dead, cancelled"),  # type: ignore[arg-type]
        (requeue_dead(conn, before=datetime(2026, 1, 1)), "before: it must be a datetime with a time zone; pass one"),
        (list_operations(conn, 7, status="x"), "choose one of pending, processing, done, error"),  # type: ignore[arg-type]
    ]:
        with pytest.raises(InvalidArgument) as raised:
            await call
        assert says in str(raised.value)


# --- what may be asked for is asked, and finds what there is ---

STRANGE = [
    "",
    " ",
    "Mail",
    "a\nb",
    "\x01",
    "ä",
    "\U0001f600" * MAX_NAME_LENGTH,
    "'; DROP TABLE jobs; --",
    "%",
    "$1",
    "{}",
]
"""Nothing is called so, and nothing needs to be."""

MOMENTS = [datetime.min.replace(tzinfo=UTC), datetime.min.replace(tzinfo=WEST), datetime.max.replace(tzinfo=UTC)]


async def test_what_matches_nothing_finds_nothing(conn: asyncpg.Connection, schema: str) -> None:
    await insert(conn, schema, "dead")
    await start(conn, NewJob("operation.report", "{}"), organization_id="7")
    async with system(conn):
        for text in STRANGE:
            assert await list_jobs(conn, queue=text) == []
            assert await list_jobs(conn, job_type=text) == []
            assert await requeue_dead(conn, queue=text) == []
            assert await requeue_dead(conn, job_type=text) == []
            assert await list_operations(conn, "7", kind=text) == []
            assert await list_schedules(conn, application=text) == []
            for change in (pause_schedule, resume_schedule):
                with pytest.raises(ScheduleNotFound):
                    await change(conn, text, text)
        assert await list_errors(conn, AN_ID) == []


async def test_the_edges_of_what_may_be_asked_for_are_taken(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema, "dead")
    operation = await start(conn, NewJob("operation.report", "{}"), organization_id="7")

    async with system(conn):
        for limit in (1, MAX_ROWS):
            assert len(await list_operations(conn, "7", limit=limit)) == 1
            assert len(await list_jobs(conn, status=JobStatus.DEAD, limit=limit)) == 1
            assert len(await dead_by_error(conn, limit=limit)) == 1
        for moment in MOMENTS:
            found = await list_operations(conn, "7", before=Cursor(moment, operation))
            assert len(found) == (moment.year == 9999)
    for edge in (UUID(int=0), UUID(int=2**128 - 1)):
        assert len(await list_jobs(conn, status=JobStatus.DEAD, before=edge)) == (edge.int > 0)
    assert [await requeue_dead(conn, before=moment) for moment in MOMENTS] == [[], [], [job_id]]


async def test_a_status_may_be_its_name(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema, "dead")
    dead: Any = "dead"
    error: Any = "error"
    assert [job.id for job in await list_jobs(conn, status=dead)] == [job_id]
    assert await list_jobs(conn, status=JobStatus.PENDING) == []
    async with system(conn):
        assert await list_operations(conn, "7", status=error) == []
        assert await list_operations(conn, "7", status=OperationStatus.DONE) == []


async def test_an_id_may_be_the_drivers_own(conn: asyncpg.Connection, schema: str) -> None:
    """What asyncpg reads is of a subclass of UUID."""
    job_id = await insert(conn, schema)
    own = await conn.fetchval("SELECT $1::uuid", job_id)
    assert type(own) is not UUID
    assert (await get_job(conn, own)).id == job_id


# --- rows that somebody has inserted by hand ---

LISTED = {
    "jobs": ["created_at", "updated_at", "locked_at", "finished_at", "run_at"],
    "job_errors": ["started_at", "ended_at"],
    "operations": ["created_at", "updated_at"],
    "schedules": ["last_tick", "paused_at", "created_at", "updated_at"],
    "workers": ["started_at", "heartbeat_at"],
}
"""The columns of each table that a list reads, or a person."""

TIMES = [(table, column) for table, columns in LISTED.items() for column in columns]

UNREADABLE = [
    "infinity",
    "-infinity",
    "294276-12-31 23:59:59+00",
    "4713-01-01 00:00:00+00 BC",
    "1969-12-31 23:59:59.999999+00",
    "9999-12-31 00:00:00+00",
]

READABLE = ["1970-01-01 00:00:00+00", "9999-12-30 23:59:59.999999+00"]


async def populate(conn: asyncpg.Connection, schema: str) -> UUID:
    """One row in each of these tables; the dead job's id."""
    job_id = await insert(conn, schema, "dead")
    await conn.execute(
        f"INSERT INTO {schema}.job_errors (job_id, fence, attempt, error_class, message) VALUES ($1, 1, 1, 'E', 'no')",
        job_id,
    )
    await start(conn, NewJob("operation.report", "{}"), organization_id="7")
    await conn.execute(
        f"""
        INSERT INTO {schema}.schedules
            (application, name, job_type, expression, timezone, payload, overlap, definition, last_tick)
        VALUES ('shop', 'daily', 'mail.send', '0 6 * * *', 'UTC', '{{}}', 'skip', '', now());
        INSERT INTO {schema}.workers (id, host, pid, version, queues, slots, lease, silence)
        VALUES (gen_random_uuid(), 'host', 1, '0', '{{default}}', 1, '5 minutes', '1 minute');
        """
    )
    return job_id


@pytest.mark.parametrize(("table", "column"), TIMES)
async def test_a_time_that_python_cannot_read_gets_into_no_table_and_every_other_is_listed(
    table: str, column: str, conn: asyncpg.Connection, schema: str
) -> None:
    job_id = await populate(conn, schema)
    async with system(conn):
        for time in UNREADABLE:
            with pytest.raises(asyncpg.CheckViolationError):
                async with conn.transaction():
                    await conn.execute(f"UPDATE {schema}.{table} SET {column} = '{time}'")
        for time in READABLE:
            assert await conn.execute(f"UPDATE {schema}.{table} SET {column} = '{time}'") != "UPDATE 0"
            assert len(await list_jobs(conn)) == 2
            assert len(await list_errors(conn, job_id)) == 1
            assert len(await dead_by_error(conn)) == 1
            assert len(await list_operations(conn, "7")) == 1
            assert len(await list_schedules(conn)) == 1


async def test_every_time_that_a_list_reads_is_bounded(conn: asyncpg.Connection, schema: str) -> None:
    """The table above knows all of them."""
    columns = await conn.fetch(
        """
        SELECT table_name, column_name FROM information_schema.columns
        WHERE table_schema = $1 AND table_name = ANY ($2) AND data_type = 'timestamp with time zone'
        """,
        schema,
        list(LISTED),
    )
    assert {tuple(row) for row in columns} == set(TIMES)


@pytest.mark.parametrize("column", ["lease", "silence"])
@pytest.mark.parametrize("span", ["-1 second", "2000 years", "178000000 years"])
async def test_a_worker_whose_spans_would_break_the_sweeps_is_not_registered(
    column: str, span: str, conn: asyncpg.Connection, schema: str
) -> None:
    await populate(conn, schema)
    with pytest.raises(asyncpg.CheckViolationError, match="workers_spans_check"):
        await conn.execute(f"UPDATE {schema}.workers SET {column} = '{span}'")
