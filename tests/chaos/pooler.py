"""A PgBouncer in front of a server."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")

REQUIRED = os.environ.get("RECADO_REQUIRE_POOLER") == "1"
"""Whether a missing PgBouncer is a failure, as where one was installed for these tests."""

needs_pgbouncer = pytest.mark.skipif(
    PGBOUNCER is None and not REQUIRED,
    reason="no PgBouncer is found; install it (Debian: apt-get install pgbouncer), or set RECADO_REQUIRE_POOLER=1 "
    "to have this fail",
)

PORT = 6432
"""PgBouncer's default. Nothing listens on it: here the port is but a part of the socket's name."""

CONFIGURATION = """
[databases]
* = host={host} port={port}
[pgbouncer]
unix_socket_dir = {folder}
listen_port = {listen_port}
auth_type = trust
auth_file = {folder}/users.txt
pool_mode = {mode}
default_pool_size = {size}
max_client_conn = 500
{options}
"""


def keeps_statements_apart() -> bool:
    """Whether this PgBouncer can be told to: from 1.21 on."""
    assert PGBOUNCER is not None
    told = subprocess.run([PGBOUNCER, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"PgBouncer (\d+)\.(\d+)", told)
    assert version is not None, told
    return (int(version[1]), int(version[2])) >= (1, 21)


class Pooler:
    """A PgBouncer that can be killed, and started again."""

    def __init__(self, folder: Path, user: str | None) -> None:
        self._folder = folder
        self._user = user
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    def url(self, direct: str) -> str:
        """The URL ``direct``, by way of the pooler."""
        parts = urlsplit(direct)
        user = parts.netloc.rpartition("@")[0]
        return parts._replace(netloc=f"{user}@", query=f"host={self._folder}&port={PORT}").geturl()

    async def start(self) -> None:
        assert PGBOUNCER is not None
        identity = [] if self._user is None else ["--user", self._user]
        self._process = process = await asyncio.create_subprocess_exec(
            *(PGBOUNCER, *identity, str(self._folder / "pgbouncer.ini")), cwd="/", stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        log: list[bytes] = []
        async for line in process.stderr:
            log.append(line)
            if b"process up" in line:
                break
        else:
            raise AssertionError(f"PgBouncer did not start: {b''.join(log).decode()}")
        self._reading = asyncio.create_task(_discard(process.stderr))

    async def kill(self) -> None:
        if self._process is None:
            return
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()
        if self._reading is not None:
            await self._reading


async def _discard(log: asyncio.StreamReader) -> None:
    """Read to the end: a pipe that is full would halt PgBouncer."""
    while await log.read(65536):
        pass


@asynccontextmanager
async def pgbouncer(
    *urls: str, mode: str = "transaction", size: int = 2, options: Sequence[str] = ()
) -> AsyncIterator[Pooler]:
    """A PgBouncer with ``size`` servers for each database and role.

    Args:
        urls: of the server, as each of the roles that may come.
        mode: whom a server is given to: a ``session`` or a ``transaction``.
        options: further lines of its configuration.
    """
    host, port = _address(urls[0])
    with tempfile.TemporaryDirectory(prefix="recado-pgbouncer-") as name:
        folder = Path(name)
        (folder / "users.txt").write_text("".join(map(_entry, urls)))
        (folder / "pgbouncer.ini").write_text(
            CONFIGURATION.format(
                host=host, port=port, folder=folder, listen_port=PORT, mode=mode, size=size, options="\n".join(options)
            )
        )
        user = _user(host)
        if user is not None:
            shutil.chown(folder, user)
        pooler = Pooler(folder, user)
        try:
            await pooler.start()
            yield pooler
        finally:
            await pooler.kill()


def _user(host: str) -> str | None:
    """Whom to run as, being root, which PgBouncer refuses to be: whoever may use the server's socket."""
    if os.geteuid() != 0:
        return None
    return pwd.getpwuid(os.stat(host).st_uid).pw_name if host.startswith("/") else "nobody"


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    query = parse_qs(parts.query)
    host = query["host"][0] if "host" in query else parts.hostname or "127.0.0.1"
    return host, int(query["port"][0]) if "port" in query else parts.port or 5432


def _entry(url: str) -> str:
    parts = urlsplit(url)
    return f'"{unquote(parts.username or "postgres")}" "{unquote(parts.password or "")}"\n'
