"""A primary and its synchronous standby, of which the primary is lost."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import asyncpg

from recado import embedded
from recado.embedded import EmbeddedServer

PROMOTE = "SELECT pg_promote()"
"""Returns when the standby has become a primary."""

SYNCHRONOUS = {"synchronous_standby_names": "*", "wal_level": "replica"}
"""A commit is answered when the standby has it on its disk."""

FOLLOWING = "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')"


class Pair:
    """Two servers with the same data."""

    def __init__(self, primary: EmbeddedServer, standby: EmbeddedServer, address: Path) -> None:
        self._primary = primary
        self._standby = standby
        self._address = address
        self._lead_to(primary)

    @property
    def hosts_dsn(self) -> str:
        """Names both, and wants the primary of them."""
        servers = (self._primary, self._standby)
        hosts, ports = (
            ",".join(map(str, values)) for values in zip(*[(s.socket_dir, s.port) for s in servers], strict=True)
        )
        return f"postgresql://postgres@/postgres?host={hosts}&port={ports}&target_session_attrs=read-write"

    @property
    def address_dsn(self) -> str:
        """Names an address that is moved to the new primary, as a virtual IP is."""
        return f"postgresql://postgres@/postgres?host={self._address}&port={self._primary.port}"

    def kill_primary(self) -> None:
        """SIGKILL to the server and to all its backends, as when the machine is gone."""
        children = Path(f"/proc/{self._primary.pid}/task/{self._primary.pid}/children").read_text().split()
        os.kill(self._primary.pid, signal.SIGKILL)
        for child in children:
            with suppress(ProcessLookupError):  # it has noticed
                os.kill(int(child), signal.SIGKILL)

    async def promote(self) -> None:
        """Make the standby the primary, and have the address lead to it."""
        conn = await asyncpg.connect(self._standby.dsn())
        try:
            assert await conn.fetchval(PROMOTE)
        finally:
            await conn.close()
        self._lead_to(self._standby)

    async def is_synchronous(self) -> bool:
        """Whether the standby follows, and commits wait for it."""
        conn = await asyncpg.connect(self._primary.dsn())
        try:
            return bool(await conn.fetchval(FOLLOWING))
        finally:
            await conn.close()

    def _lead_to(self, server: EmbeddedServer) -> None:
        moved = self._address.with_suffix(".new")
        moved.symlink_to(server.socket_dir)
        moved.replace(self._address)


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """Two new servers in ``folder``. It blocks: servers are started from the main thread, whose end they follow."""
    first, second = folder / "first", folder / "second"
    with embedded.start(first) as server:
        source = server.socket_dir
    # A cluster that is stopped is its own base backup.
    shutil.copytree(first / "pgdata", second / "pgdata")
    _own_alike(first / "pgdata", second / "pgdata")
    (second / "pgdata" / "standby.signal").touch()
    try:
        with embedded.start(first, options=SYNCHRONOUS) as primary:
            conninfo = f"host={source} port={primary.port} user=postgres"
            with embedded.start(second, options={"primary_conninfo": conninfo}) as standby:
                yield Pair(primary, standby, folder / "address")
    finally:
        # A server that was killed leaves its shared memory behind, which the next one on its data takes away.
        embedded.start(first).stop()


def _own_alike(source: Path, target: Path) -> None:
    owner = source.stat()
    for path in (target, *target.rglob("*")):
        os.chown(path, owner.st_uid, owner.st_gid)
