"""Streams of an operation's changes, as Server-Sent Events (the HTML standard, section 9.2).

One connection listens for a whole process, and only while somebody waits for news. What a notification says is not
believed, since anybody may notify: it only makes the hub look, once for each operation and organization, and what it
finds goes to all streams that wait for it. While nothing changes, a thousand of them cost the database nothing.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any
from uuid import UUID

import asyncpg
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from recado.app import Recado
from recado.errors import OperationNotFound
from recado.queue import poolers
from recado.queue.connections import TRANSIENT, Connection, Connector, Pool, connector
from recado.queue.operations import OperationRow, channel, get_operation, is_newer, tenant
from recado.queue.poolers import Sharing
from recado.queue.workers import PROBE
from recado.settings import settings

logger = logging.getLogger("recado.api")

HEARTBEAT = 15.0
"""Seconds of silence after which a stream sends a comment, as the HTML standard advises for proxies that drop what
idles."""

HEARTBEAT_COMMENT = b": still here\n\n"
"""No event; clients skip it."""

PROBE_INTERVAL = 10.0
"""Seconds between two probes of the listening connection: a half-open socket is silent for hours."""

PROBE_TIMEOUT = 5.0
"""Seconds a probe may take; it takes a millisecond."""

POLL_INTERVAL = 2.0
"""Seconds between two looks where nothing is heard: as late as a job may start that was not notified of."""

FIRST_WAIT = 0.1
"""Seconds before a lost connection is opened again: it was usually cut alone."""

LONGEST_WAIT = 5.0
"""Seconds: how late the streams may learn that the server is back."""

DATABASE_TIMEOUT = 5.0
"""Seconds to wait for a connection of the pool, and as many for the answer, as for the metrics."""


def as_json(operation: OperationRow) -> dict[str, Any]:
    """What a client is shown of an operation."""
    return {
        "job_id": str(operation.job_id),
        "kind": operation.kind,
        "status": operation.status,
        "progress": operation.progress,
        "result": operation.result,
        "error": operation.error,
        "created_at": operation.created_at.isoformat(),
        "updated_at": operation.updated_at.isoformat(),
    }


@asynccontextmanager
async def as_tenant(pool: Pool, organization_id: str) -> AsyncIterator[Connection]:
    """A connection of the pool, in a transaction of the organization's, for a limited time.

    Raises:
        TimeoutError: the pool or the server took too long.
    """
    async with (
        pool.acquire(timeout=DATABASE_TIMEOUT) as conn,
        asyncio.timeout(DATABASE_TIMEOUT),
        tenant(conn, organization_id),
    ):
        yield conn


async def own_operation(conn: Connection, organization_id: str, job_id: UUID, *, schema: str) -> OperationRow:
    """The organization's operation with this id, in a transaction of the organization's.

    Raises:
        OperationNotFound: there is none, or it is another organization's.
    """
    operation = await get_operation(conn, job_id, schema=schema)
    if operation.organization_id != organization_id:
        # The policy has hidden it, unless we are connected as a superuser, for whom there are no policies.
        raise OperationNotFound(f"cannot find operation {job_id}: it is another organization's; ask for one of yours")
    return operation


class Watch:
    """What one stream has yet to tell: the newest state, and nothing that came before it."""

    def __init__(self, hub: Hub, organization_id: str, seen: int | None) -> None:
        self._hub = hub
        self.organization_id = organization_id
        self._seen = seen
        self._version: int | None = None
        self._newest: OperationRow | None = None
        self._ended = False
        self._news = asyncio.Event()

    def offer(self, operation: OperationRow) -> None:
        """Keep a state, unless it is known; two reads of it may come in any order."""
        known = self._version is not None and not is_newer(operation.version, self._version)
        if not known and operation.version != self._seen:
            self._seen = None
            self._version = operation.version
            self._newest = operation
            self._news.set()

    def end(self) -> None:
        """Nothing will follow what is known now."""
        self._ended = True
        self._news.set()

    async def next(self) -> OperationRow | None:
        """Wait for the next state; ``None`` when there will be none."""
        if self._newest is None and not self._ended:
            self._hub.listen()
            await self._news.wait()
        newest, self._newest = self._newest, None
        if not self._ended:
            self._news.clear()
        return newest


class Hub:
    """Tells the streams of a process what changes.

    It listens as long as one of them waits for news, and the last one takes the connection with it: there is nothing
    to open or to close, so it works in a mounted application too, which no lifespan reaches.

    Args:
        app: the application whose operations these are.
        pool: what the streams read first states from. The hub connects as it does, or to ``RECADO_LISTEN_DSN``:
            LISTEN hears nothing through a pooler in transaction mode, and the hub looks every two seconds there.
        heartbeat: seconds of silence after which a stream sends a comment.
        probe_interval: seconds between two looks at the silent connection.
        poll_interval: seconds between two looks at the operations where nothing is heard.
    """

    def __init__(
        self,
        app: Recado,
        pool: Pool,
        *,
        heartbeat: float = HEARTBEAT,
        probe_interval: float = PROBE_INTERVAL,
        poll_interval: float = POLL_INTERVAL,
    ) -> None:
        self.schema = app.schema
        self.pool = pool
        self.heartbeat = heartbeat
        self._probe_interval = probe_interval
        self._poll_interval = poll_interval
        self._hears: bool | None = None
        """Whether notifications reach us; what stands in between stays for as long as the process."""
        self._watches: dict[UUID, set[Watch]] = {}
        self._changed: dict[UUID, None] = {}  # in the order in which they changed
        self._news = asyncio.Event()
        self._wait = FIRST_WAIT
        self._listening: asyncio.Task[None] | None = None
        self._stopped = False

    def stop(self) -> None:
        """End all streams, now and from now on.

        To be called when the server is about to end: it answers open requests first, and a stream has no end of its
        own. ``recado api`` does it; of another server, uvicorn cancels the streams after its
        ``timeout_graceful_shutdown``.
        """
        self._stopped = True
        self._end_all()

    @asynccontextmanager
    async def watch(self, organization_id: str, job_id: UUID, seen: int | None = None) -> AsyncIterator[Watch]:
        """Hear of an operation until the block ends.

        Args:
            seen: the version that the client knows.
        """
        watch = Watch(self, organization_id, seen)
        if self._stopped:
            watch.end()
        self._watches.setdefault(job_id, set()).add(watch)
        try:
            yield watch
        finally:
            self._watches[job_id].discard(watch)
            if not self._watches[job_id]:
                del self._watches[job_id]
            if not self._watches:
                await self._hang_up()

    def listen(self) -> None:
        """Begin to listen, unless that is under way."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen_always(_listen_connector(self.pool)))
            self._listening.add_done_callback(self._listening_ended)

    async def _hang_up(self) -> None:
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
            await asyncio.wait({listening})

    def _listening_ended(self, listening: asyncio.Task[None]) -> None:
        if listening.cancelled() or (error := listening.exception()) is None:
            return
        # A fault of ours. Streams that stay silent would hide it; those that end are opened again by their clients.
        logger.error("cannot hear of changes: the listener failed", exc_info=error)
        if self._listening is listening:
            self._listening = None
            self._end_all()

    def _end_all(self) -> None:
        for watches in self._watches.values():
            for watch in watches:
                watch.end()

    async def _listen_always(self, connector: Connector) -> None:
        while True:
            try:
                await self._listen(connector)
            except (*TRANSIENT, asyncpg.PostgresError) as error:
                logger.warning("the connection that listens for operations is lost: %s", type(error).__name__)
            # With jitter, so that a fleet does not come back at once.
            await asyncio.sleep(self._wait * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, guards nothing
            self._wait = min(self._wait * 2, LONGEST_WAIT)

    async def _listen(self, connector: Connector) -> None:
        # What a pooler in transaction mode prepares, it mixes up.
        conn = await connector.connect("events", statement_cache_size=0)
        try:
            conn.add_termination_listener(lambda _: self._news.set())
            if self._hears is None:
                self._hears = not await poolers.is_pooled(conn) or await poolers.sharing(connector) is Sharing.NONE
                if not self._hears:
                    logger.warning(
                        "behind a pooler in transaction mode LISTEN hears nothing: looking for changes of operations "
                        "every %g s; let RECADO_LISTEN_DSN name the server itself",
                        self._poll_interval,
                    )
            if self._hears:
                await conn.add_listener(channel(self.schema), self._hear)
            # What was sent before was not heard, so look at all of them.
            self._changed.update(dict.fromkeys(self._watches))
            while not conn.is_closed():
                await self._look_at_changed(conn)
                self._wait = FIRST_WAIT  # it works
                # Nothing was awaited since no change was left, so no news is lost here.
                self._news.clear()
                if not conn.is_closed():
                    await self._sleep(conn)
            raise ConnectionResetError("closed by the server")
        finally:
            # Not closed politely: nobody waits for it, and a dead socket would not answer.
            conn.terminate()

    async def _sleep(self, conn: Connection) -> None:
        """Wait for news; now and then see whether the server is still there and could send any, or what there is."""
        try:
            async with asyncio.timeout(self._probe_interval if self._hears else self._poll_interval):
                await self._news.wait()
        except TimeoutError:
            if not self._hears:
                self._changed.update(dict.fromkeys(self._watches))
            elif await conn.fetchval(PROBE, timeout=PROBE_TIMEOUT):
                raise ConnectionResetError("the server has become a standby") from None

    def _hear(self, conn: object, pid: int, channel: str, payload: object) -> None:
        try:
            job_id = UUID(str(payload))
        except ValueError:  # anybody may notify
            return
        if job_id in self._watches:
            self._changed[job_id] = None
            self._news.set()

    async def _look_at_changed(self, conn: Connection) -> None:
        # One after the other, on the connection that listens: however much changes at once, the pool is left to the
        # requests. What changes again meanwhile is looked at once more, not once for each change.
        while self._changed:
            job_id = next(iter(self._changed))
            del self._changed[job_id]
            for organization_id in {watch.organization_id for watch in self._watches.get(job_id, ())}:
                await self._look(conn, organization_id, job_id)

    async def _look(self, conn: Connection, organization_id: str, job_id: UUID) -> None:
        operation = None
        with suppress(OperationNotFound):  # pruned
            async with tenant(conn, organization_id):
                operation = await own_operation(conn, organization_id, job_id, schema=self.schema)
        for watch in self._watches.get(job_id, ()):
            if watch.organization_id == organization_id:
                if operation is None:
                    watch.end()
                else:
                    watch.offer(operation)


def _listen_connector(pool: Pool) -> Connector:
    dsn = settings().listen_dsn
    return connector(pool if dsn is None else dsn.get_secret_value())


class EventStream(Response):
    """An operation's state and every change of it, until it has ended.

    Each event has the operation's version as its id, so that a client which comes back with ``Last-Event-ID`` is
    told only what is new. Raises ``OperationNotFound`` before anything is sent.

    Args:
        seen: the version that the client knows.
    """

    media_type = "text/event-stream"

    def __init__(self, hub: Hub, organization_id: str, job_id: UUID, seen: int | None) -> None:
        self._hub = hub
        self._organization_id = organization_id
        self._job_id = job_id
        self._seen = seen
        self.status_code = 200
        # Proxies must neither keep it nor, as nginx does, collect it.
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Watched before it is read: a change in between is either in what is read, or heard of.
        async with self._hub.watch(self._organization_id, self._job_id, self._seen) as watch:
            operation = await self._read()
            if operation.status.ended and operation.version == self._seen:
                # Of all answers only this one keeps an EventSource from coming back (the HTML standard, 9.2.3).
                await Response(status_code=204)(scope, receive, send)
                return
            watch.offer(operation)
            if scope["method"] == "HEAD":
                watch.end()
            await _until_one_ends(self._send(watch, send), _disconnect(receive))

    async def _read(self) -> OperationRow:
        async with as_tenant(self._hub.pool, self._organization_id) as conn:
            return await own_operation(conn, self._organization_id, self._job_id, schema=self._hub.schema)

    async def _send(self, watch: Watch, send: Send) -> None:
        with suppress(OSError):  # as ASGI says that the client is gone
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            more = True
            while more:
                try:
                    async with asyncio.timeout(self._hub.heartbeat):
                        operation = await watch.next()
                except TimeoutError:
                    body = HEARTBEAT_COMMENT
                else:
                    body = b"" if operation is None else _event(operation)
                    more = operation is not None and not operation.status.ended
                await send({"type": "http.response.body", "body": body, "more_body": more})


def _event(operation: OperationRow) -> bytes:
    # JSON has no line breaks outside of strings, and within them they are escaped: one data line holds all of it.
    data = bytes(JSONResponse(as_json(operation)).body)
    return b"id: %d\nevent: update\ndata: %s\n\n" % (operation.version, data)


async def _disconnect(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until_one_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run them side by side; when one has ended, the others are cancelled."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
        for task in tasks:
            task.add_done_callback(lambda _: [other.cancel() for other in tasks])
