"""A TCP proxy in front of a server, and what networks do to connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qs, urlsplit

CHUNK = 16 * 1024
"""Bytes forwarded at once; little enough for a throttled line to be evenly slow."""


class Proxy:
    """Forwards bytes, as long as it is let.

    Args:
        dsn: of the server, on a Unix socket or TCP.
    """

    def __init__(self, dsn: str) -> None:
        self._upstream = urlsplit(dsn)
        self._port = 0
        self._serving: set[asyncio.Task[None]] = set()
        self._links: set[_Link] = set()
        self._delay = 0.0
        self._bytes_per_second = float("inf")
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._losing = False
        self._refusing = False

    @property
    def dsn(self) -> str:
        """The server's URL, by way of the proxy."""
        user = self._upstream.username or "postgres"
        return f"postgresql://{user}@127.0.0.1:{self._port}{self._upstream.path}"

    def delay(self, seconds: float) -> None:
        """Hold up whatever is sent, in both directions."""
        self._delay = seconds

    def throttle(self, bytes_per_second: float) -> None:
        """Let through so much of each connection in each direction."""
        self._bytes_per_second = bytes_per_second

    def stall(self) -> None:
        """Let nothing through; it arrives when the network has healed, as TCP sends it again."""
        self._flowing.clear()

    def half_open(self) -> None:
        """Forget the connections, as a firewall does: what is sent on them is lost, and nobody is told. New ones meet
        the same fate until the network has healed; those that are lost stay so."""
        self._losing = True
        for link in self._links:
            link.lost = True

    def cut(self) -> None:
        """Reset all connections, and each new one."""
        self._refusing = True
        for link in self._links:
            link.abort()

    def heal(self) -> None:
        """Let everything through again. The server gives up the sessions whose connections were lost, as it would on
        a missing answer to its keep-alives; the workers' sides stay half-open."""
        self._delay, self._bytes_per_second = 0.0, float("inf")
        self._losing = self._refusing = False
        self._flowing.set()
        for link in self._links:
            if link.lost and link.server is not None:
                link.server.transport.abort()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a new connection."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def open(self) -> asyncio.Server:
        server = await asyncio.start_server(self.accept, "127.0.0.1", 0)
        self._port = server.sockets[0].getsockname()[1]
        return server

    async def close(self) -> None:
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(writer, lost=self._losing)
        self._links.add(link)
        try:
            if not self._refusing:
                await self._forward(link, reader)
        except OSError:
            pass  # one side has gone, and the other follows
        finally:
            self._links.remove(link)
            link.abort()

    async def _forward(self, link: _Link, reader: asyncio.StreamReader) -> None:
        server_reader, link.server = await self._connect()
        pumps = [
            asyncio.ensure_future(self._pump(link, reader, link.server)),
            asyncio.ensure_future(self._pump(link, server_reader, link.client)),
        ]
        try:
            # Whichever side ends takes the other one along, unless that is not to hear of it.
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if link.lost:
                await asyncio.wait({pumps[0]})
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        query = parse_qs(self._upstream.query)
        if self._upstream.hostname is None and "host" in query:
            return await asyncio.open_unix_connection(f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}")
        return await asyncio.open_connection(self._upstream.hostname, self._upstream.port or 5432)

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(CHUNK):
                await asyncio.sleep(self._delay + len(data) / self._bytes_per_second)
                await self._flowing.wait()
                if not link.lost:
                    writer.write(data)
                    await writer.drain()


class _Link:
    """A connection through the proxy."""

    def __init__(self, client: asyncio.StreamWriter, *, lost: bool) -> None:
        self.client = client
        self.server: asyncio.StreamWriter | None = None
        self.lost = lost

    def abort(self) -> None:
        self.client.transport.abort()
        if self.server is not None:
            self.server.transport.abort()


@asynccontextmanager
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    """A proxy in front of the server that ``dsn`` names."""
    made = Proxy(dsn)
    server = await made.open()
    try:
        yield made
    finally:
        server.close()
        await made.close()
        await server.wait_closed()
