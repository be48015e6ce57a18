"""Hears NOTIFY on a connection of its own, and notices when that connection is dead."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from uuid import UUID

import asyncpg

from recado.queue.connections import TRANSIENT, Connector
from recado.queue.statements import cancel_channel, wake_channel
from recado.queue.workers import PROBE
from recado.worker.retrying import Waits

logger = logging.getLogger("recado.worker")

PROBE_INTERVAL = 10.0
"""Seconds between two probes: a half-open socket is silent for hours, and nothing else is ever sent on it."""

PROBE_TIMEOUT = 5.0
"""Seconds a probe may take; a SELECT 1 takes a millisecond."""


class Listener:
    """Owns the LISTEN connection. While it is down the workers' polls go on beneath.

    Args:
        connector: how to reach the server itself; LISTEN hears nothing through a transaction-mode pooler.
        on_wake: called with a queue's name when there is work in it.
        on_cancel: called with a job's id when a running job was cancelled.
        on_connect: called each time the connection stands: what was sent before was not heard.
    """

    def __init__(
        self,
        connector: Connector,
        *,
        schema: str,
        on_wake: Callable[[str], None],
        on_cancel: Callable[[UUID], None],
        on_connect: Callable[[], None],
        probe_interval: float = PROBE_INTERVAL,
    ) -> None:
        self._connector = connector
        self._schema = schema
        self._on_wake = on_wake
        self._on_cancel = on_cancel
        self._on_connect = on_connect
        self._probe_interval = probe_interval

    async def run(self) -> None:
        """Listen until cancelled."""
        waits = Waits()
        while True:
            try:
                await self._listen(waits)
            except (*TRANSIENT, asyncpg.PostgresError) as error:
                logger.warning("the LISTEN connection is lost: %s; polling meanwhile", type(error).__name__)
            await asyncio.sleep(waits.next())

    async def _listen(self, waits: Waits) -> None:
        conn = await self._connector.connect("listener")
        try:
            closed = asyncio.Event()
            conn.add_termination_listener(lambda _: closed.set())
            await conn.add_listener(wake_channel(self._schema), self._wake)
            await conn.add_listener(cancel_channel(self._schema), self._cancel)
            waits.reset()
            self._on_connect()
            while not closed.is_set():
                try:
                    async with asyncio.timeout(self._probe_interval):
                        await closed.wait()
                except TimeoutError:
                    if await conn.fetchval(PROBE, timeout=PROBE_TIMEOUT):
                        raise ConnectionResetError("the server has become a standby") from None
            raise ConnectionResetError("closed by the server")
        finally:
            # Not closed politely: nobody waits for it, and a dead socket would not answer.
            conn.terminate()

    def _wake(self, conn: object, pid: int, channel: str, payload: object) -> None:
        self._on_wake(str(payload))

    def _cancel(self, conn: object, pid: int, channel: str, payload: object) -> None:
        try:
            job_id = UUID(str(payload))
        except ValueError:  # anyone who may connect may notify
            logger.warning("ignored a cancellation that names no job")
            return
        self._on_cancel(job_id)
