"""The plan of every hot statement, on a table that is empty, and on a large one, whatever the planner believes of it.

What PostgreSQL believes is often wrong here: a queue's table is empty at night and full at noon, and nearly all of
its rows change their status within the minute between two visits of autovacuum. A plan has to be right all the
same, with the parameters' values known (a custom plan) and unknown (a generic one, cached by the connection).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

from recado.queue import admin, claims, enqueue, finishes, leases, operations, retention
from recado.queue.finishes import Completion, Failure, Release
from recado.queue.models import NewJob
from recado.queue.statements import fill
from tests.queue.support import WORKER, ordinary_role

MANY = 30_000
"""Rows of which reading all costs more than looking 1,000 up, though not by so much that no planner could err."""

LENGTHS = (1, 100, 1_000)
"""Of a batch: a quiet worker's, a busy one's, and the most there is."""

FILL = """
INSERT INTO {schema}.jobs (id, job_type, queue, priority, payload, status, fence, run_at, locked_at, locked_by,
    finished_at, idempotency_key)
SELECT overlay(gen_random_uuid()::text PLACING lpad(to_hex(n), 8, '0') FROM 1)::uuid, 'mail.send', 'default', n % 4,
       '{{}}', $1, 1, now() - interval '1 hour' + n * interval '1 ms',
       CASE $1 WHEN 'running' THEN now() END, CASE $1 WHEN 'running' THEN $2::uuid END,
       CASE WHEN $1 IN ('completed', 'dead') THEN now() END, $1 || n
FROM generate_series(1, $3::integer) AS n
"""
"""Ids in the order of time, like those of version 7."""


async def put(conn: asyncpg.Connection, schema: str, status: str, number: int) -> None:
    await conn.execute(FILL.format(schema=schema), status, WORKER, number)


async def mixture(conn: asyncpg.Connection, schema: str) -> None:
    for status, share in {"completed": 0.5, "pending": 0.35, "running": 0.1, "dead": 0.05}.items():
        await put(conn, schema, status, int(MANY * share))


# --- what the planner may believe of a large table ---


async def the_truth(conn: asyncpg.Connection, schema: str) -> None:
    await mixture(conn, schema)
    await conn.execute(f"ANALYZE {schema}.jobs")


async def nothing_at_all(conn: asyncpg.Connection, schema: str) -> None:
    await mixture(conn, schema)


async def that_it_is_empty(conn: asyncpg.Connection, schema: str) -> None:
    await conn.execute(f"VACUUM ANALYZE {schema}.jobs")
    await mixture(conn, schema)


async def that_all_is_pending_but_all_is_completed(conn: asyncpg.Connection, schema: str) -> None:
    await put(conn, schema, "pending", MANY)
    await conn.execute(f"ANALYZE {schema}.jobs")
    await conn.execute(f"UPDATE {schema}.jobs SET status = 'completed', finished_at = now()")


async def that_all_is_completed_but_half_is_pending(conn: asyncpg.Connection, schema: str) -> None:
    await put(conn, schema, "completed", MANY // 2)
    await conn.execute(f"ANALYZE {schema}.jobs")
    await put(conn, schema, "pending", MANY // 2)


async def that_nothing_runs_but_most_of_it_does(conn: asyncpg.Connection, schema: str) -> None:
    await put(conn, schema, "pending", MANY)
    await conn.execute(f"ANALYZE {schema}.jobs")
    await conn.execute(
        f"UPDATE {schema}.jobs SET status = 'running', locked_at = now(), locked_by = $1 WHERE priority > 0", WORKER
    )


async def that_all_runs_but_nothing_does(conn: asyncpg.Connection, schema: str) -> None:
    await put(conn, schema, "running", MANY)
    await conn.execute(f"ANALYZE {schema}.jobs")
    await conn.execute(f"UPDATE {schema}.jobs SET status = 'completed', locked_at = NULL, locked_by = NULL")


BELIEFS = [
    the_truth,
    nothing_at_all,
    that_it_is_empty,
    that_all_is_pending_but_all_is_completed,
    that_all_is_completed_but_half_is_pending,
    that_nothing_runs_but_most_of_it_does,
    that_all_runs_but_nothing_does,
]

# --- the statements ---

KEY, CLAIM, RUNNING, UNIQUE, DEAD = (
    "jobs_pkey",
    "jobs_claim_idx",
    "jobs_running_idx",
    "jobs_idempotency_key_idx",
    "jobs_dead_idx",
)
TID = "Tid Scan"


GENERIC, CUSTOM, AUTO = "force_generic_plan", "force_custom_plan", "auto"


class Sent(Exception):
    """A statement reached the connection, with these arguments."""

    def __init__(self, statement: str, arguments: tuple[Any, ...]) -> None:
        self.statement = statement
        self.arguments = arguments


class Catching:
    """A connection that gives the prepared answers, and catches the statement after them instead of sending it."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)

    async def fetch(self, statement: str, *arguments: Any) -> Any:
        if self._answers:
            return self._answers.pop(0)
        raise Sent(statement, arguments)

    fetchrow = fetchval = execute = fetch

    def is_in_transaction(self) -> bool:
        return False

    def transaction(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()


async def caught(use: Callable[[Any], Awaitable[Any]], *answers: Any) -> Sent:
    """The statement that ``use`` sends, as it sends it, when the ones before get ``answers``."""
    with pytest.raises(Sent) as sent:
        await use(Catching(*answers))
    return sent.value


@dataclass(frozen=True)
class Hot:
    """How to make the queue send a statement for these ids and keys, and by which ways only it may get at the jobs."""

    ways: set[str]
    use: Callable[[Any, list[UUID], list[str]], Awaitable[Any]]
    answers: tuple[Any, ...] = ()
    """To the statements that come before."""
    modes: tuple[str, ...] = (GENERIC, CUSTOM)

    async def sent(self, ids: list[UUID], keys: list[str]) -> Sent:
        return await caught(lambda conn: self.use(conn, ids, keys), *self.answers)


def failure(job_id: UUID) -> Failure:
    return Failure(
        job_id, 1, wait=10.0, discard=False, run_time=1.0, error_class="ValueError", message="no", traceback=None
    )


EARLY = datetime(2020, 1, 1, tzinfo=UTC)

HOT = {
    "CLAIM": Hot({CLAIM, TID}, lambda conn, ids, _: claims.claim(conn, WORKER, "default", len(ids), [None] * 4)),
    "CLAIM with floors": Hot(
        {CLAIM, TID}, lambda conn, ids, _: claims.claim(conn, WORKER, "default", len(ids), [EARLY] * 4)
    ),
    "LOOK": Hot({CLAIM}, lambda conn, _, __: claims.look(conn, "default")),
    "RELEASE_STRAYS": Hot({RUNNING, TID}, lambda conn, ids, _: claims.release_strays(conn, WORKER, ids)),
    "COMPLETE": Hot({KEY}, lambda conn, ids, _: finishes.complete(conn, WORKER, [Completion(i, 1) for i in ids])),
    "COMPLETE_ONE": Hot({KEY}, lambda conn, ids, _: finishes.complete_one(conn, WORKER, Completion(ids[0], 1))),
    "FAIL": Hot({KEY}, lambda conn, ids, _: finishes.fail(conn, WORKER, [failure(i) for i in ids])),
    "RELEASE": Hot({KEY}, lambda conn, ids, _: finishes.release(conn, WORKER, [Release(i, 1) for i in ids])),
    "RENEW": Hot({KEY}, lambda conn, ids, _: leases.renew(conn, WORKER, [(i, 1) for i in ids])),
    "HELD": Hot({KEY}, lambda conn, ids, _: leases.held(conn, WORKER, [(i, 1) for i in ids])),
    "RECLAIM": Hot({RUNNING, TID}, lambda conn, ids, _: leases.reclaim(conn, limit=len(ids))),
    "INSERT": Hot(set(), lambda conn, _, keys: enqueue.insert_job(conn, NewJob("a.b", "{}", idempotency_key="new"))),
    "SELECT_BY_KEY": Hot(
        {UNIQUE},
        lambda conn, _, keys: enqueue.insert_job(conn, NewJob("mail.send", "{}", idempotency_key=keys[0])),
        (None,),
    ),
    "SELECT_BY_KEYS": Hot(
        {UNIQUE},
        lambda conn, _, keys: enqueue.insert_jobs(
            conn, [NewJob("mail.send", "{}", idempotency_key=key) for key in keys]
        ),
        ([],),
    ),
    "CANCEL": Hot({KEY}, lambda conn, ids, _: admin.cancel(conn, ids[0])),
    "REQUEUE": Hot({KEY}, lambda conn, ids, _: admin.requeue(conn, ids[0])),
    "REQUEUE_DEAD": Hot({DEAD, TID}, lambda conn, ids, _: admin.requeue_dead(conn, limit=len(ids))),
    "DEAD_BY_ERROR": Hot({DEAD}, lambda conn, _, __: admin.dead_by_error(conn)),
    "SELECT_JOB": Hot({KEY}, lambda conn, ids, _: admin.get_job(conn, ids[0])),
    # A generic plan does not know which of the filters are in use. On a table that was never analyzed it would read
    # all of it, but costs too much there for PostgreSQL to choose it.
    "SELECT_JOBS": Hot({KEY}, lambda conn, ids, _: admin.list_jobs(conn, limit=len(ids)), modes=(CUSTOM, AUTO)),
    "SELECT_JOBS further on": Hot(
        {KEY}, lambda conn, ids, _: admin.list_jobs(conn, before=ids[-1], limit=len(ids)), modes=(CUSTOM, AUTO)
    ),
    "PRUNE": Hot({KEY, TID}, lambda conn, ids, _: retention.prune(conn, limit=len(ids))),
    "LOCK_JOBS of an expiry": Hot({KEY}, lambda conn, ids, _: conn.fetch(fill(operations.LOCK_JOBS, None), ids)),
    "JOBS_THERE of an expiry": Hot({KEY}, lambda conn, ids, _: conn.fetch(fill(operations.JOBS_THERE, None), ids)),
    "CANCEL_JOBS": Hot({KEY}, lambda conn, ids, _: conn.fetch(fill(operations.CANCEL_JOBS, None), ids)),
}


# --- asking for plans ---


@pytest_asyncio.fixture
async def conn(conn: asyncpg.Connection, schema: str) -> asyncpg.Connection:
    """A connection to a database where only the test itself gathers statistics."""
    await conn.execute(f"ALTER TABLE {schema}.jobs SET (autovacuum_enabled = false)")
    return conn


def literal(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        items = ("NULL" if item is None else f'"{_text(item)}"' for item in value)
        return "'{" + ",".join(items) + "}'"
    return f"'{_text(value)}'"


def _text(value: Any) -> str:
    return f"{value.total_seconds()} seconds" if isinstance(value, timedelta) else str(value)


def execution(name: str, sent: Sent) -> str:
    return f'EXECUTE "{name}" ({", ".join(map(literal, sent.arguments))})'


async def plan(conn: asyncpg.Connection, sent: Sent, mode: str, options: str = "") -> Any:
    """The plan of what was sent, prepared as a driver does it."""
    await conn.execute(f"SET plan_cache_mode = {mode}; PREPARE hot AS {sent.statement}")
    execute = execution("hot", sent)
    try:
        if mode == AUTO:
            for _ in range(6):  # PostgreSQL tries a generic plan after five custom ones
                await conn.execute(execute)
        [found] = json.loads(await conn.fetchval(f"EXPLAIN (FORMAT JSON {options}) {execute}"))
    finally:
        await conn.execute("DEALLOCATE hot")
    return found["Plan"]


def nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", []):
        yield from nodes(child)


def ways(node: dict[str, Any], table: str = "jobs") -> set[str]:
    """How a plan gets at the jobs: by which indexes, or by what kind of scan."""
    return {
        found.get("Index Name", found["Node Type"])
        for found in nodes(node)
        if found.get("Relation Name", table) == table
        and ("Index Name" in found or "Scan" in found["Node Type"])
        and found["Node Type"] not in ("Bitmap Heap Scan", "Subquery Scan", "Function Scan", "CTE Scan", "ModifyTable")
        and found.get("Index Name", f"{table}_").startswith(f"{table}_")
    }


async def ids_and_keys(conn: asyncpg.Connection, schema: str) -> tuple[list[UUID], list[str]]:
    """A thousand jobs that run, or whatever there is, from all over the table."""
    rows = await conn.fetch(
        f"SELECT id, idempotency_key FROM {schema}.jobs ORDER BY status <> 'running', md5(id::text) LIMIT 1000"
    )
    return [r[0] for r in rows], [r[1] for r in rows]


# --- the proof ---


@pytest.mark.parametrize("believing", BELIEFS, ids=lambda believing: believing.__name__)
async def test_on_a_large_table_every_hot_statement_uses_its_index(
    believing: Callable[[asyncpg.Connection, str], Awaitable[None]], conn: asyncpg.Connection, schema: str
) -> None:
    await believing(conn, schema)
    ids, keys = await ids_and_keys(conn, schema)

    bad = {}
    for name, hot in HOT.items():
        for length in LENGTHS:
            sent = await hot.sent(ids[:length], keys[:length])
            for mode in hot.modes:
                used = ways(await plan(conn, sent, mode))
                if used != hot.ways:
                    bad[name, length, mode] = used

    assert bad == {}


SINGLE = [
    *("LOOK", "COMPLETE_ONE", "INSERT", "SELECT_BY_KEY", "CANCEL", "REQUEUE", "DEAD_BY_ERROR", "SELECT_JOB"),
]
"""What asks for one job, or walks in the order of an index. Batches are the next test's."""


async def test_on_an_empty_table_what_asks_for_a_single_job_uses_its_index_already(
    conn: asyncpg.Connection, schema: str
) -> None:
    for name in SINGLE:
        hot = HOT[name]
        for mode in hot.modes:
            used = ways(await plan(conn, await hot.sent([uuid4()], ["k"]), mode))
            assert (name, used) == (name, hot.ways)


def effort(node: dict[str, Any]) -> float:
    """How many rows, or pairs of rows, a plan that was executed has looked at in its most laborious node."""
    names = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Join Filter")
    return max(float(found["Actual Loops"]) * sum(float(found.get(name, 0)) for name in names) for found in nodes(node))


@pytest.mark.parametrize(("rows", "analyzed"), [(0, False), (1, True), (400, True)])
async def test_a_plan_that_was_made_while_the_table_was_small_reads_it_once_at_most_when_it_has_grown(
    rows: int, analyzed: bool, conn: asyncpg.Connection, schema: str
) -> None:
    """Until autovacuum has noticed, a connection goes on with the plan it has; never with each job times each id."""
    await put(conn, schema, "running", rows)
    if analyzed:
        await conn.execute(f"VACUUM ANALYZE {schema}.jobs")
    await conn.execute(f"SET plan_cache_mode = {GENERIC}")
    for name, hot in HOT.items():
        sent = await hot.sent([uuid4()], ["k"])
        await conn.execute(f'PREPARE "{name}" AS {sent.statement}')
        await conn.execute(f"EXPLAIN {execution(name, sent)}")
    await conn.execute(f"DELETE FROM {schema}.jobs")
    await put(conn, schema, "running", 10_000)
    await put(conn, schema, "pending", 10_000)
    ids, keys = await ids_and_keys(conn, schema)

    efforts = {}
    for name, hot in HOT.items():
        execute = execution(name, await hot.sent(ids, keys))
        transaction = conn.transaction()
        await transaction.start()
        [found] = json.loads(await conn.fetchval(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {execute}"))
        await transaction.rollback()
        efforts[name] = effort(found["Plan"])

    assert {name: effort for name, effort in efforts.items() if effort > 20_000} == {}


# --- the claim's lanes ---


@pytest.mark.parametrize("mode", [GENERIC, CUSTOM])
async def test_a_claim_reads_a_lane_only_when_the_ones_before_had_too_few(
    mode: str, conn: asyncpg.Connection, schema: str
) -> None:
    await put(conn, schema, "pending", 4_000)  # a thousand of each priority
    await conn.execute(f"UPDATE {schema}.jobs SET run_at = now() + interval '1 hour' WHERE priority = 0")
    await conn.execute(f"VACUUM ANALYZE {schema}.jobs")

    async def lanes(limit: int) -> list[float | None]:
        """How many jobs each lane gave, ``None`` where it was never looked at."""
        transaction = conn.transaction()
        await transaction.start()
        sent = await caught(lambda conn: claims.claim(conn, WORKER, "default", limit, [None] * 4))
        claim = await plan(conn, sent, mode, ", ANALYZE, TIMING OFF")
        await transaction.rollback()
        found = [node for node in nodes(claim) if node["Node Type"] == "LockRows"]
        assert len(found) == 4
        assert all(node["Actual Loops"] <= 1 for node in found)
        assert claim["Actual Rows"] == limit
        return [node["Actual Rows"] if node["Actual Loops"] else None for node in found]

    assert await lanes(100) == [0, 100, None, None]
    assert await lanes(1_000) == [0, 1_000, None, None]
    assert await lanes(1_200) == [0, 1_000, 200, None]
    assert await lanes(2_001) == [0, 1_000, 1_000, 1]


async def test_a_claim_does_not_walk_over_jobs_of_a_later_time_nor_below_its_floor(
    conn: asyncpg.Connection, schema: str
) -> None:
    await put(conn, schema, "pending", 4_000)
    await conn.execute(
        f"UPDATE {schema}.jobs SET run_at = run_at + interval '2 hours' WHERE fence = 1 AND priority > 0"
    )
    floor = await conn.fetchval(
        f"SELECT run_at FROM {schema}.jobs WHERE priority = 0 ORDER BY run_at OFFSET 600 LIMIT 1"
    )
    await conn.execute(f"VACUUM ANALYZE {schema}.jobs")

    sent = await caught(lambda conn: claims.claim(conn, WORKER, "default", 4_000, [floor, None, None, None]))
    claim = await plan(conn, sent, GENERIC, ", ANALYZE, TIMING OFF")

    scans = [node for node in nodes(claim) if node.get("Index Name") == CLAIM]
    assert [node["Actual Rows"] for node in scans] == [400, 0, 0, 0]
    assert [node.get("Rows Removed by Filter", 0) for node in scans] == [0] * 4


# --- operations, as an ordinary role sees them: past the policy ---

FILL_OPERATIONS = """
INSERT INTO {schema}.operations (job_id, organization_id, kind, status, fence, created_at, updated_at)
SELECT overlay(gen_random_uuid()::text PLACING lpad(to_hex(n), 8, '0') FROM 1)::uuid, (n % 50 + 1)::text, 'plan', $1, 1,
       now() - $3::interval + n * interval '1 second', now() - $3::interval + n * interval '1 second'
FROM generate_series(1, $2::integer) AS n
"""

LONG_AGO = timedelta(days=60)
LAST_WEEK = timedelta(days=7)
THIS_MORNING = timedelta(hours=9)


async def put_operations(
    conn: asyncpg.Connection, schema: str, status: str, number: int, age: timedelta = LAST_WEEK
) -> None:
    await conn.execute(FILL_OPERATIONS.format(schema=schema), status, number, age)


async def operations_mixture(conn: asyncpg.Connection, schema: str) -> None:
    """Nearly all have ended, most of them less than a retention ago; a few are young, and a few were forgotten."""
    for status, share, age in (("done", 0.85, LAST_WEEK), ("error", 0.06, LAST_WEEK), ("done", 0.05, LONG_AGO)):
        await put_operations(conn, schema, status, int(MANY * share), age)
    for status in ("pending", "processing"):
        await put_operations(conn, schema, status, int(MANY * 0.01), THIS_MORNING)
        await put_operations(conn, schema, status, int(MANY * 0.01), timedelta(0))


async def the_truth_of_operations(conn: asyncpg.Connection, schema: str) -> None:
    await operations_mixture(conn, schema)
    await conn.execute(f"ANALYZE {schema}.operations")


async def nothing_of_operations(conn: asyncpg.Connection, schema: str) -> None:
    await operations_mixture(conn, schema)


async def that_there_are_no_operations(conn: asyncpg.Connection, schema: str) -> None:
    await conn.execute(f"VACUUM ANALYZE {schema}.operations")
    await operations_mixture(conn, schema)


async def that_all_operations_have_ended(conn: asyncpg.Connection, schema: str) -> None:
    await put_operations(conn, schema, "done", MANY)
    await conn.execute(f"ANALYZE {schema}.operations")
    await put_operations(conn, schema, "processing", MANY // 50, THIS_MORNING)


OPERATIONS_BELIEFS = [
    the_truth_of_operations,
    nothing_of_operations,
    that_there_are_no_operations,
    that_all_operations_have_ended,
]

OPERATION_KEY, ORGANIZATION, STATUS = "operations_pkey", "operations_organization_idx", "operations_status_idx"
TWO_HOURS = timedelta(hours=2)

WATCHED = {
    "INSERT": Hot(
        set(), lambda conn, _, __: conn.fetch(fill(operations.INSERT, None), str(uuid4()), "7", "plan", None)
    ),
    "MARK_PROCESSING": Hot({OPERATION_KEY}, lambda conn, ids, _: operations.mark_processing(conn, ids[0], 2)),
    "PROGRESS": Hot({OPERATION_KEY}, lambda conn, ids, _: operations.set_progress(conn, ids[0], 1, 50)),
    "MARK_DONE": Hot({OPERATION_KEY}, lambda conn, ids, _: operations.mark_done(conn, [(i, 1, "1") for i in ids])),
    "MARK_ERROR": Hot({OPERATION_KEY}, lambda conn, ids, _: operations.mark_error(conn, ids, "no")),
    "STALE": Hot({STATUS}, lambda conn, ids, _: operations.expire(conn, after=TWO_HOURS, limit=len(ids))),
    "EXPIRE": Hot(
        {OPERATION_KEY},
        lambda conn, ids, _: conn.fetch(fill(operations.EXPIRE, None), ids, "no", TWO_HOURS),
    ),
    "PRUNE": Hot({STATUS, OPERATION_KEY}, lambda conn, ids, _: operations.prune(conn, limit=len(ids))),
    "SELECT_OPERATION": Hot({OPERATION_KEY}, lambda conn, ids, _: operations.get_operation(conn, ids[0])),
    "SELECT_OPERATIONS": Hot({ORGANIZATION}, lambda conn, ids, _: operations.list_operations(conn, "7")),
    "SELECT_OPERATIONS further on": Hot(
        {ORGANIZATION},
        lambda conn, ids, _: operations.list_operations(
            conn, "7", before=operations.Cursor(EARLY, ids[0]), limit=len(ids)
        ),
    ),
}
"""Who sends them differs: the worker and the upkeep as the system, the others as a tenant; the plans do not."""


@pytest_asyncio.fixture
async def ordinary(conn: asyncpg.Connection, dsn: str, schema: str) -> AsyncIterator[asyncpg.Connection]:
    """A connection whose statements are planned with the policy, on a table without autovacuum."""
    await conn.execute(f"ALTER TABLE {schema}.operations SET (autovacuum_enabled = false)")
    async with ordinary_role(conn, dsn, schema) as role:
        connection = await asyncpg.connect(role)
        yield connection
        await connection.close()


@pytest.mark.parametrize("organization", ["0", "7"], ids=["the system", "a tenant"])
@pytest.mark.parametrize("believing", OPERATIONS_BELIEFS, ids=lambda believing: believing.__name__)
async def test_on_a_large_table_every_statement_on_operations_uses_its_index(
    believing: Callable[[asyncpg.Connection, str], Awaitable[None]],
    organization: str,
    conn: asyncpg.Connection,
    ordinary: asyncpg.Connection,
    schema: str,
) -> None:
    await believing(conn, schema)
    ids = [row[0] for row in await conn.fetch(f"SELECT job_id FROM {schema}.operations ORDER BY md5(job_id::text)")]
    await ordinary.execute(f"SET app.current_org_id = '{organization}'")

    bad = {}
    for name, hot in WATCHED.items():
        for length in LENGTHS:
            sent = await hot.sent(ids[:length], [])
            for mode in hot.modes:
                used = ways(await plan(ordinary, sent, mode), "operations")
                if used != hot.ways:
                    bad[name, length, mode] = used

    assert bad == {}
