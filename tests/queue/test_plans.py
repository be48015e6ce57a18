"""The plan of every hot statement, on a table that is empty, and on a large one, whatever the planner believes of it.

What PostgreSQL believes is often wrong here: a queue's table is empty at night and full at noon, and nearly all of
its rows change their status within the minute between two visits of autovacuum. A plan has to be right all the
same, with the parameters' values known (a custom plan) and unknown (a generic one, cached by the connection).
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
import pytest_asyncio

from recado.queue import admin, claims, enqueue, finishes, leases, retention
from recado.queue.finishes import Completion, Failure, Release
from recado.queue.models import NewJob
from tests.queue.support import WORKER

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


def ways(node: dict[str, Any]) -> set[str]:
    """How a plan gets at the jobs: by which indexes, or by what kind of scan."""
    return {
        found.get("Index Name", found["Node Type"])
        for found in nodes(node)
        if found.get("Relation Name", "jobs") == "jobs"
        and ("Index Name" in found or "Scan" in found["Node Type"])
        and found["Node Type"] not in ("Bitmap Heap Scan", "Subquery Scan", "Function Scan", "CTE Scan", "ModifyTable")
        and found.get("Index Name", "jobs_").startswith("jobs_")
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
