"""Each thing that happens to a job against each other one, on two connections: while the first one's transaction is
open, between any two of its statements, the second one starts, and waits or has passed the job over; then the first one
goes on, and commits or rolls back.

What must come of a pair is not written down here: it is what comes of the same two one after the other.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

import asyncpg
import pytest

from recado.errors import IllegalTransition, JobNotFound
from recado.queue import NewJob, admin, claims, finishes, leases, operations, retention
from recado.queue.claims import NO_FLOORS
from recado.queue.enqueue import insert_job, insert_jobs
from recado.queue.finishes import Completion, Failure, Release
from recado.queue.operations import system
from recado.queue.statements import fill
from tests.queue.support import PATIENCE, WORKER, Connect, insert, row

JOB = NewJob("mail.send", "{}", idempotency_key="k")
OPERATION = NewJob("operation.report", "{}", idempotency_key="k")
ORGANIZATION = "7"

ID = UUID(int=0x0190_0000_0000_7000_8000_0000_0000_0001)
"""Of the job that all is about; older than what is pruned."""

OTHER_WORKER = UUID(int=2)
FENCE = 1
OLD = timedelta(days=30)
LONG_AGO = datetime(2000, 1, 1, tzinfo=UTC)


# --- what can happen; each tells in a word what came of it ---

Action: TypeAlias = Callable[[asyncpg.Connection], Awaitable[str]]

NOTHING = "nothing"
"""Told by what found nothing to do. What does not wait for rows tells it of a row that is locked, too."""


def word(found: object) -> str:
    return "done" if found else NOTHING


async def claim(conn: asyncpg.Connection) -> str:
    return word(await claims.claim(conn, OTHER_WORKER, "default", 10, NO_FLOORS))


async def complete(conn: asyncpg.Connection) -> str:
    return word(await finishes.complete(conn, WORKER, [Completion(ID, FENCE)]))


async def complete_one(conn: asyncpg.Connection) -> str:
    return word(await finishes.complete_one(conn, WORKER, Completion(ID, FENCE)))


async def fail(conn: asyncpg.Connection) -> str:
    return word(await finishes.fail(conn, WORKER, [Failure(ID, FENCE, 60.0, False, 1.0, "E", "m", None)]))


async def release(conn: asyncpg.Connection) -> str:
    return word(await finishes.release(conn, WORKER, [Release(ID, FENCE)]))


async def release_strays(conn: asyncpg.Connection) -> str:
    return word(await claims.release_strays(conn, WORKER, []))


async def renew(conn: asyncpg.Connection) -> str:
    return word(await leases.renew(conn, WORKER, [(ID, FENCE)]))


async def reclaim(conn: asyncpg.Connection) -> str:
    return word(await leases.reclaim(conn))


async def cancel(conn: asyncpg.Connection) -> str:
    return await told(admin.cancel(conn, ID))


async def requeue(conn: asyncpg.Connection) -> str:
    return await told(admin.requeue(conn, ID))


async def requeue_dead(conn: asyncpg.Connection) -> str:
    return word(await admin.requeue_dead(conn))


async def prune(conn: asyncpg.Connection) -> str:
    return word((await retention.prune(conn)).deleted)


async def enqueue(conn: asyncpg.Connection) -> str:
    return "existing" if await insert_job(conn, JOB) == ID else "new"


async def enqueue_many(conn: asyncpg.Connection) -> str:
    return "existing" if await insert_jobs(conn, [JOB]) == [ID] else "new"


async def start(conn: asyncpg.Connection) -> str:
    return "existing" if await operations.start(conn, OPERATION, organization_id=ORGANIZATION) == ID else "new"


async def complete_operation(conn: asyncpg.Connection) -> str:
    """As a worker's finisher does."""
    async with system(conn):
        if done := await finishes.complete(conn, WORKER, [Completion(ID, FENCE)]):
            await operations.mark_done(conn, [(ID, FENCE, "{}")])
        return word(done)


async def kill_operation(conn: asyncpg.Connection) -> str:
    """As a worker's finisher does."""
    async with system(conn):
        if dead := await finishes.fail(conn, WORKER, [Failure(ID, FENCE, 60.0, True, 1.0, "E", "m", None)]):
            await operations.mark_error(conn, [ID], operations.FAILED)
        return word(dead)


async def progress(conn: asyncpg.Connection) -> str:
    async with system(conn):
        return await told(operations.set_progress(conn, ID, FENCE, 50))


async def cancel_operation(conn: asyncpg.Connection) -> str:
    async with system(conn):
        return await told(operations.cancel_operation(conn, ID))


async def expire(conn: asyncpg.Connection) -> str:
    async with system(conn):
        return word(await operations.expire(conn, after=timedelta(hours=2)))


async def told(change: Awaitable[object]) -> str:
    try:
        await change
    except (IllegalTransition, JobNotFound) as error:
        return type(error).__name__
    return "done"


PASSES_OVER = (claim, release_strays, reclaim, requeue_dead, prune, expire)
"""What waits for nobody: what it leaves out, it finds the next time."""

WAITS = {(expire, progress)}
"""Those of them that do wait all the same: progress is told without its job's lock, and for an instant."""

ENDS_THE_ATTEMPT = (complete, complete_one, fail, release, release_strays, reclaim, complete_operation, kill_operation)
"""Whatever comes of two of these at once, only one has ended the attempt."""

CALLED_BY_SERVICES = (cancel, requeue, requeue_dead, enqueue, enqueue_many, start, cancel_operation)
"""In transactions of their own, whose isolation they choose."""


# --- in which state a job may be, and what changes it there ---


class State(NamedTuple):
    columns: dict[str, Any] | None
    """``None``: there is no job yet."""
    changed_by: Sequence[Action]
    others: Sequence[Action]
    """What may come meanwhile, besides these."""


ENQUEUES = (enqueue, enqueue_many)
ENDS = (complete, complete_one, fail, release, renew)
BY_HAND = (cancel, requeue, requeue_dead)
SWEEPS = (reclaim, release_strays, prune)
OF_OPERATIONS = (complete_operation, kill_operation, progress, cancel_operation, expire, start)

OF_JOBS = (claim, *ENDS, *BY_HAND, *SWEEPS, *ENQUEUES)

STATES = {
    "absent": State(None, ENQUEUES, OF_JOBS),
    "pending": State({"status": "pending"}, (claim, cancel), OF_JOBS),
    "running": State({"status": "running"}, (*ENDS, reclaim, release_strays, cancel), OF_JOBS),
    "dead": State({"status": "dead"}, (requeue, requeue_dead), OF_JOBS),
    "completed": State({"status": "completed"}, (requeue, prune), OF_JOBS),
    "cancelled": State({"status": "cancelled"}, (requeue, prune), OF_JOBS),
    "an operation, absent": State(None, (start,), (start, expire)),
    "an operation, pending": State(
        {"status": "pending", "job_type": OPERATION.job_type},
        (claim, cancel, cancel_operation, expire),
        (claim, cancel, requeue, *OF_OPERATIONS),
    ),
    "an operation, running": State(
        {"status": "running", "job_type": OPERATION.job_type},
        (complete_operation, kill_operation, progress, cancel_operation, expire, cancel, release, renew, reclaim),
        (release, renew, reclaim, cancel, requeue, *OF_OPERATIONS),
    ),
}


class Outcome(NamedTuple):
    """What the tables hold, and what both were told."""

    tables: tuple[Any, ...]
    second: str
    first: str = ""
    """Nobody learns it where the first one is rolled back."""


class Stepping(asyncpg.Connection):
    """Tells before each of its statements."""

    before_statement: Callable[[], Awaitable[None]] | None = None

    async def _tell(self) -> None:
        if self.before_statement is not None:
            await self.before_statement()

    async def execute(self, *args: Any, **kwargs: Any) -> str:
        await self._tell()
        return await super().execute(*args, **kwargs)

    async def fetch(self, *args: Any, **kwargs: Any) -> list[Any]:
        await self._tell()
        rows: list[Any] = await super().fetch(*args, **kwargs)
        return rows

    async def fetchval(self, *args: Any, **kwargs: Any) -> Any:
        await self._tell()
        return await super().fetchval(*args, **kwargs)

    async def fetchrow(self, *args: Any, **kwargs: Any) -> Any:
        await self._tell()
        return await super().fetchrow(*args, **kwargs)


Isolation: TypeAlias = Literal["read_committed", "repeatable_read"]

SERIALIZATION_ERROR = "serialization error"


SELECT_TABLES = """
SELECT ARRAY(SELECT (id = $1, status, attempts, reclaims, fence, locked_by, finished_at IS NULL, run_at <= now(),
                     locked_at > now() - interval '1 hour',
                     (SELECT count(*) FROM {schema}.job_errors WHERE job_id = j.id))
             FROM {schema}.jobs j ORDER BY id = $1, status),
       ARRAY(SELECT (job_id = $1, status, progress, error) FROM {schema}.operations o ORDER BY job_id = $1, status)
"""
"""All but the times, which are those of each run."""

IS_BLOCKED = "SELECT cardinality(pg_blocking_pids($1)) > 0"
"""Only this view knows: PostgreSQL has no signal for it."""


@dataclass
class Stage:
    """Where pairs are played."""

    first: Stepping
    second: asyncpg.Connection
    observer: asyncpg.Connection
    schema: str
    known: dict[tuple[Any, ...], tuple[list[str], tuple[Any, ...]]] = field(default_factory=dict)

    async def set(self, state: str) -> None:
        """One job in this state, or none. One that is running is an orphan, but its worker does not know."""
        await self.observer.execute(f"DELETE FROM {self.schema}.jobs; DELETE FROM {self.schema}.operations")
        columns = STATES[state].columns
        if columns is None:
            return
        is_operation = columns.get("job_type") == OPERATION.job_type
        key = operations_key() if is_operation else JOB.idempotency_key
        await insert(self.observer, self.schema, id=ID, idempotency_key=key, **columns)
        await self.observer.execute(
            f"UPDATE {self.schema}.jobs SET finished_at = finished_at - $1::interval, "
            "locked_at = CASE WHEN status = 'running' THEN now() - $1::interval END",
            OLD,
        )
        if is_operation:
            status = "processing" if columns["status"] == "running" else "pending"
            await self.observer.execute(
                f"INSERT INTO {self.schema}.operations (job_id, organization_id, kind, status, fence, created_at, "
                "updated_at) VALUES ($1, $2, 'report', $3, $4, now() - $5::interval, now() - $5::interval)",
                *(ID, ORGANIZATION, status, FENCE if status == "processing" else 0, OLD),
            )

    async def tables(self) -> tuple[Any, ...]:
        record = await self.observer.fetchrow(SELECT_TABLES.replace("{schema}", self.schema), ID)
        assert record is not None
        jobs, its_operations = record
        return tuple(map(tuple, jobs)), tuple(map(tuple, its_operations))

    async def alone(self, state: str, *actions: Action) -> tuple[list[str], tuple[Any, ...]]:
        """What comes of ``actions``, one after the other."""
        if (state, *actions) not in self.known:
            await self.set(state)
            words = [await action(self.observer) for action in actions]
            self.known[state, *actions] = words, await self.tables()
        return self.known[state, *actions]

    @asynccontextmanager
    async def snapshot(self, isolation: Isolation) -> AsyncIterator[None]:
        """Under REPEATABLE READ, a transaction of the second one's that has seen how things were before."""
        if isolation == "read_committed":
            yield
            return
        async with self.second.transaction(isolation=isolation):
            await self.second.fetchval(f"SELECT count(*) FROM {self.schema}.jobs")
            yield

    async def at_once(
        self, state: str, first: Action, second: Action, at: int, *, commit: bool, isolation: Isolation
    ) -> tuple[Outcome, bool]:
        """What comes of both when the second one starts after ``at`` statements of the first one's transaction, or
        after its last one; and whether that is where it was."""
        await self.set(state)
        steps = 0

        async def go_second() -> str:
            try:
                async with self.snapshot(isolation):
                    seen.set()
                    await ready.wait()
                    return await second(self.second)
            except asyncpg.SerializationError:
                return SERIALIZATION_ERROR

        async def let_second_go() -> None:
            ready.set()
            while not going.done() and not await self.observer.fetchval(IS_BLOCKED, self.second.get_server_pid()):
                pass
            assert going.done() or second not in PASSES_OVER or (second, first) in WAITS, "it has waited"

        async def before_statement() -> None:
            nonlocal steps
            steps += 1
            if steps == at + 1:
                await let_second_go()

        seen, ready = asyncio.Event(), asyncio.Event()
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as tasks:
            going = tasks.create_task(go_second())
            await seen.wait()
            transaction = self.first.transaction()
            await transaction.start()
            self.first.before_statement = before_statement
            told_first = await first(self.first)
            self.first.before_statement = None
            if was_last := not ready.is_set():
                await let_second_go()
            await (transaction.commit() if commit else transaction.rollback())
        return Outcome(await self.tables(), going.result(), told_first if commit else ""), was_last


def operations_key() -> str:
    return f'["{ORGANIZATION}", "{OPERATION.idempotency_key}"]'


@pytest.fixture
async def stage(dsn: str, connect: Connect, schema: str) -> AsyncIterator[Stage]:
    first = await asyncpg.connect(dsn, connection_class=Stepping)
    yield Stage(first, await connect(), await connect(), schema)
    await first.close()


FIRSTS = [(state, first) for state, (_, changed_by, _) in STATES.items() for first in changed_by]


def name(value: Any) -> str:
    return value if isinstance(value, str) else value.__name__


@pytest.mark.parametrize(("state", "first"), FIRSTS, ids=name)
async def test_what_comes_of_two_at_once_comes_of_one_after_the_other(state: str, first: Action, stage: Stage) -> None:
    assert (await stage.alone(state, first))[1] != (await stage.alone(state))[1]
    for second in STATES[state].others:
        for commit in (True, False):
            await check(stage, state, first, second, commit=commit, isolation="read_committed")
            if second in CALLED_BY_SERVICES:
                await check(stage, state, first, second, commit=commit, isolation="repeatable_read")


async def check(stage: Stage, state: str, first: Action, second: Action, *, commit: bool, isolation: Isolation) -> None:
    words, tables = await stage.alone(state, first, second)
    in_order = Outcome(tables, words[1], words[0])
    words, tables = await stage.alone(state, second, first)
    in_reverse = Outcome(tables, words[0], words[1])
    words, tables = await stage.alone(state, first)
    without_second = Outcome(tables, NOTHING, words[0])
    if not commit:
        words, tables = await stage.alone(state, second)
        in_order = in_reverse = Outcome(tables, words[0])
        _, tables = await stage.alone(state)
        without_second = Outcome(tables, NOTHING)

    allowed = {in_order, in_reverse}
    if second in PASSES_OVER:
        allowed.add(without_second)
    if isolation == "repeatable_read":
        allowed.add(without_second._replace(second=SERIALIZATION_ERROR))

    for at in itertools.count(1):
        outcome, was_last = await stage.at_once(state, first, second, at, commit=commit, isolation=isolation)
        case = f"{second.__name__} after {at} statements of {first.__name__}, {commit=}, {isolation}"
        assert outcome in allowed, case
        assert len(outcome.tables[0]) <= 1, case  # there is one key
        if commit:
            assert (first in ENDS_THE_ATTEMPT, outcome.first) != (True, "done") or (
                (second in ENDS_THE_ATTEMPT, outcome.second) != (True, "done")
            ), case
        if outcome.second in (NOTHING, SERIALIZATION_ERROR):
            # What was passed over is found the next time, and what was refused can be done once more.
            await second(stage.second)
            assert await stage.tables() in {in_order.tables, in_reverse.tables}, case
        if was_last:
            break


# --- one bad row among good ones ---

Finish: TypeAlias = Callable[[asyncpg.Connection, list[tuple[UUID, int]]], Awaitable[object]]


async def completed(conn: asyncpg.Connection, held: list[tuple[UUID, int]]) -> object:
    return await finishes.complete(conn, WORKER, [Completion(*lease) for lease in held])


async def failed(conn: asyncpg.Connection, held: list[tuple[UUID, int]]) -> object:
    return await finishes.fail(conn, WORKER, [Failure(*lease, 1.0, False, 1.0, "E", "m", None) for lease in held])


async def released(conn: asyncpg.Connection, held: list[tuple[UUID, int]]) -> object:
    return await finishes.release(conn, WORKER, [Release(*lease) for lease in held])


async def renewed(conn: asyncpg.Connection, held: list[tuple[UUID, int]]) -> object:
    return await leases.renew(conn, WORKER, held)


async def cancelled_as_operations(conn: asyncpg.Connection, held: list[tuple[UUID, int]]) -> object:
    return await conn.fetch(fill(operations.CANCEL_JOBS, None), [str(job_id) for job_id, _ in held])


def sweep(action: Callable[[asyncpg.Connection], Awaitable[Sequence[object]]]) -> Finish:
    """What looks for its rows itself."""
    return lambda conn, _: action(conn)


BATCHES: dict[str, tuple[str, Finish]] = {
    "claim": ("pending", sweep(lambda conn: claims.claim(conn, WORKER, "default", 10, NO_FLOORS))),
    "complete": ("running", completed),
    "fail": ("running", failed),
    "release": ("running", released),
    "renew": ("running", renewed),
    "reclaim": ("running", sweep(leases.reclaim)),
    "release_strays": ("running", sweep(lambda conn: claims.release_strays(conn, WORKER, []))),
    "requeue_dead": ("dead", sweep(admin.requeue_dead)),
    "cancel": ("running", cancelled_as_operations),
}

ODD = [
    "fence = 2147483647",
    "fence = -2147483648",
    "reclaims = 32767",
    "reclaims = -32768",
    "attempts = max_attempts",
    "attempts = 32767, max_attempts = 32767",
    "created_at = '1970-01-01 00:00:00+00'",
    "created_at = '9999-12-30 23:59:59+00'",
    "updated_at = '9999-12-30 23:59:59+00', locked_at = '9999-12-30 23:59:59+00'",
    "locked_at = '1970-01-01 00:00:00+00', finished_at = '1970-01-01 00:00:00+00'",
    "run_at = '1970-01-01 00:00:00+00'",
    "id = '00000000-0000-0000-0000-000000000000'",
    "job_type = repeat('x', 10000), last_error = repeat('x', 10000000)",
    "job_type = '', idempotency_key = ''",
    "payload = 'null', metadata = '[]', result = 'null'",
    "payload = (repeat('[', 1500) || repeat(']', 1500))::jsonb",
]
"""What the table's constraints allow, and only a person's hand writes."""


@pytest.mark.parametrize("batch", BATCHES)
async def test_one_bad_row_keeps_no_batch_and_no_sweep_from_the_others(
    batch: str, conn: asyncpg.Connection, schema: str
) -> None:
    status, act = BATCHES[batch]
    for odd in ODD:
        await conn.execute(f"DELETE FROM {schema}.jobs")
        locked = {"locked_at": LONG_AGO} if status == "running" else {}
        await insert(conn, schema, status, **locked)
        await conn.execute(f"UPDATE {schema}.jobs SET {odd}")
        good = await insert(conn, schema, status, **locked)
        before = await row(conn, schema, good)

        await act(conn, [tuple(lease) for lease in await conn.fetch(f"SELECT id, fence FROM {schema}.jobs")])

        assert await row(conn, schema, good) != before, odd


async def test_no_row_keeps_a_page_from_being_read(conn: asyncpg.Connection, schema: str) -> None:
    job_id = await insert(conn, schema)
    await conn.execute(f"UPDATE {schema}.jobs SET payload = (repeat('[', 1500) || repeat(']', 1500))::jsonb")
    await insert(conn, schema)

    assert len(await admin.list_jobs(conn)) == 2
    assert (await admin.get_job(conn, job_id)).payload == "[" * 1500 + "]" * 1500
