"""``recado worker``, ``api`` and ``dev``: real processes, from what they say to how they end."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import asyncpg
import httpx
import pytest

import recado
from recado import Recado, cli, embedded
from recado.queue import get_job, migrate
from recado.settings import settings
from tests import catalog
from tests.chaos.support import PATIENCE, Watch, WorkerProcess
from tests.commands import run_command
from tests.test_embedded import ROOT, as_user

APPLICATION = """
import asyncio, os, threading
from recado import Recado

app = Recado()

@app.job("shop.echo")
async def echo(payload: dict) -> dict:
    return payload

@app.job("shop.mail", queue="mail")
async def mail(payload: dict) -> dict:
    return payload

@app.job("shop.environment")
async def environment(payload: dict) -> dict:
    return {name: value for name, value in os.environ.items() if name.startswith("RECADO_")}

@app.job("shop.hang")
async def hang(payload: dict) -> None:
    await asyncio.Event().wait()

@app.job("shop.stick")
def stick(payload: dict) -> None:
    threading.Event().wait()
"""
"""The module ``shop``, which every test finds in its current folder."""

WITHOUT_UNIX = """
import sys
sys.modules.update(dict.fromkeys(["fcntl", "pwd", "grp", "resource", "termios", "uvloop"]))
from recado.cli import main
main()
"""
"""``recado`` where these cannot be imported, as on Windows."""

Connect = Callable[[], Awaitable[asyncpg.Connection]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The current folder of the processes."""
    (tmp_path / "shop.py").write_text(APPLICATION)
    return tmp_path


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="recado-open-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def service() -> Recado:
    """The application of somebody who enqueues."""
    app = Recado()
    for name in ("shop.echo", "shop.environment", "shop.hang", "shop.stick"):
        app.declare(name)
    app.declare("shop.mail", queue="mail")
    return app


class Process(WorkerProcess):
    """One ``recado``, and what it logs."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self._silent = False

    async def read_log(self) -> None:
        await super().read_log()
        self._silent = True
        self._logged.set()

    async def found(self, pattern: str, since: int = 0) -> str:
        """Wait until it has logged a line with ``pattern``, not counting its first ``since``; the pattern's group."""
        async with asyncio.timeout(PATIENCE):
            while (match := re.search(pattern, "".join(self.log[since:]))) is None:
                assert not self._silent, f"it ended without {pattern!r}, but with: {''.join(self.log)}"
                self._logged.clear()
                await self._logged.wait()
        return match[match.lastindex or 0]

    async def logged(self, text: str, since: int = 0) -> None:
        await self.found(re.escape(text), since)

    async def url(self) -> str:
        """Where its API is."""
        return await self.found(r"the API is at (http://[^\s,]+)")

    async def dsn(self) -> str:
        """Where its own database is."""
        return await self.found(r"the database is at (\S+)")


def environment(variables: dict[str, str]) -> dict[str, str]:
    """Of the ``RECADO_*`` variables these only, but for what the suite itself goes by."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RECADO_")}
    kept |= {name: os.environ[name] for name in ("RECADO_SCHEMA", "RECADO_PG_BIN") if name in os.environ}
    return kept | {"PYTHONPATH": str(Path(recado.__file__).parent.parent), "PYTHONWARNINGS": "error"} | variables


@asynccontextmanager
async def python(folder: Path, *command: str, **variables: str) -> AsyncIterator[Process]:
    """The interpreter with ``command``; killed at the end, if it has not ended before."""
    process = Process(
        await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=folder,
            env=environment(variables),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
    )
    async with asyncio.TaskGroup() as group:
        group.create_task(process.read_log())
        try:
            yield process
        finally:
            if process.process.returncode is None:
                process.process.kill()
            await process.process.wait()


def running(folder: Path, *args: str, **variables: str) -> AbstractAsyncContextManager[Process]:
    """``recado`` with ``args``. ``-P``: as with the console script, the current folder is not on the path by itself."""
    return python(folder, "-P", "-m", "recado", *args, **variables)


class Result(NamedTuple):
    code: int
    err: str


async def ended(folder: Path, *args: str, **variables: str) -> Result:
    """How ``recado`` with ``args`` ended, and all that it wrote to stderr."""
    async with running(folder, *args, **variables) as process:
        code = await process.ended()
    return Result(code, "".join(process.log))


async def get(url: str, token: str | None = None) -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as client:
        return await client.get(url, headers=headers)


@asynccontextmanager
async def connected(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    conn = await asyncpg.connect(dsn)
    try:
        yield conn
    finally:
        await conn.close()


@asynccontextmanager
async def end_of_process(pid: int) -> AsyncIterator[None]:
    """The block ends a process that is not our child; wait for that, by a signal from the kernel."""
    descriptor = os.pidfd_open(pid)
    gone = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, gone.set)
    try:
        yield
        async with asyncio.timeout(PATIENCE):
            await gone.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def postmaster(data: Path) -> int:
    """The pid of the server that runs on ``data``."""
    return int((data / "pgdata" / "postmaster.pid").read_text().split("\n", 1)[0])


def assert_one_sentence(result: Result, says: str) -> None:
    assert result.code == 1
    assert result.err.startswith("recado: cannot ")
    assert says in result.err
    assert "; " in result.err, "it must say what to do"
    assert result.err.count("\n") == 1
    assert result.err.endswith("\n")


# --- recado worker ---


async def test_a_worker_serves_the_queues_it_is_told_and_ends_at_sigterm(
    folder: Path, service: Recado, dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    async with (
        Watch(await connect(), schema) as watch,
        running(folder, "worker", "shop:app", "-q", "mail:20", "-q", "default", RECADO_DSN=dsn) as worker,
    ):
        await worker.logged("serves mail:20, default:50")
        await service.enqueue(conn, "shop.mail", {})
        await service.enqueue(conn, "shop.echo", {})
        unserved = await service.enqueue(conn, "shop.echo", {}, queue="other")
        await watch.until(f"count(*) = 2 FROM {schema}.jobs WHERE status = 'completed'")
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0
    assert (await get_job(conn, unserved)).status == "pending"


async def test_an_empty_dsn_option_is_none_at_all(folder: Path, dsn: str, conn: asyncpg.Connection) -> None:
    """As in ``--dsn "$UNSET"``: it must not lead to whatever database libpq takes by default."""
    async with running(folder, "worker", "shop:app", "--dsn", "", RECADO_DSN=dsn) as worker:
        await worker.logged("serves default:50")
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0


async def test_a_worker_and_the_api_run_without_what_only_unix_has(
    folder: Path, service: Recado, dsn: str, conn: asyncpg.Connection, connect: Connect, schema: str
) -> None:
    async with (
        Watch(await connect(), schema) as watch,
        python(folder, "-c", WITHOUT_UNIX, "worker", "shop:app", RECADO_DSN=dsn) as worker,
        python(folder, "-c", WITHOUT_UNIX, "api", "shop:app", "--port", "0", RECADO_DSN=dsn) as api,
    ):
        await service.enqueue(conn, "shop.echo", {})
        await watch.until(f"count(*) = 1 FROM {schema}.jobs WHERE status = 'completed'")
        assert (await get(f"{await api.url()}/readyz")).status_code == 200
        for process in (worker, api):
            process.send(signal.SIGTERM)
            assert await process.ended() == 0


MISTAKES: list[tuple[list[str], dict[str, str], str]] = [
    (["worker", "nowhere:app"], {}, "there is no module 'nowhere'"),
    (["worker", "shop:app"], {}, "no database is named; give --dsn, or set RECADO_DSN"),
    (["worker", "shop:app", "-q", "mail:x"], {}, "it must read like mail or mail:20"),
    (["worker", "shop:app", "-q", "mail", "-q", "mail:3"], {}, "cannot serve queue 'mail' twice"),
    (["worker", "shop:app", "--dsn", "postgresql://u:hunter2@127.0.0.1:1/db"], {}, "Connect call failed"),
    (["worker", "shop:app"], {"RECADO_TOKENS": "hunter2"}, "cannot read the environment"),
    (["worker", "refused:app"], {}, "'shop.twice': the name is taken"),
    (["api", "shop:app", "--host", "0.0.0.0"], {"RECADO_DSN": "unused"}, "make one with `recado token`"),
    (["api", "shop:app"], {"RECADO_DSN": "unused", "RECADO_API_HOST": "::"}, "no tokens are configured"),
    (["api", "shop:app", "--port", "0"], {"RECADO_DSN": "hunter2"}, "write postgresql://user:password@host"),
    (["dev", "shop:app", "--host", "0.0.0.0"], {}, "no tokens are configured"),
]


async def test_mistakes_are_one_sentence_each_and_start_nothing(folder: Path) -> None:
    (folder / "refused.py").write_text(
        f"{APPLICATION}\napp.declare('shop.twice')\napp.declare('shop.twice')  # two of one name\n"
    )
    slots = asyncio.Semaphore(os.cpu_count() or 1)

    async def call(args: list[str], variables: dict[str, str]) -> Result:
        async with slots:
            return await ended(folder, *args, **variables)

    results = await asyncio.gather(*(call(args, variables) for args, variables, _ in MISTAKES))
    for result, (_, _, says) in zip(results, MISTAKES, strict=True):
        assert_one_sentence(result, says)
        assert "hunter2" not in result.err
    assert not (folder / ".recado").exists()


async def test_what_an_application_raises_on_import_shows_its_traceback(folder: Path) -> None:
    (folder / "faulty.py").write_text("import not_installed\n")
    result = await ended(folder, "worker", "faulty:app")
    assert result.code == 1
    assert f'File "{folder / "faulty.py"}", line 1' in result.err
    assert result.err.endswith("ModuleNotFoundError: No module named 'not_installed'\n")


async def test_an_applications_own_settings_are_not_taken_for_recados(folder: Path) -> None:
    """Theirs may well be called Settings, too."""
    (folder / "faulty.py").write_text(
        "from pydantic_settings import BaseSettings\nclass Settings(BaseSettings):\n    api_key: str\nSettings()\n"
    )
    result = await ended(folder, "worker", "faulty:app")
    assert result.code == 1
    assert "RECADO_API_KEY" not in result.err
    assert f'File "{folder / "faulty.py"}", line 4' in result.err


@pytest.mark.parametrize("command", ["worker", "api"])
async def test_a_schema_that_does_not_fit_is_refused_with_the_command_that_helps(
    folder: Path, recado_server: str, command: str
) -> None:
    async with catalog.empty_database(recado_server) as dsn, connected(dsn) as conn:
        missing = await ended(folder, command, "shop:app", RECADO_DSN=dsn, RECADO_SCHEMA="other")
        assert_one_sentence(missing, "run `recado migrate up --schema other`")
        await migrate.up(conn, schema="recado")
        await conn.execute("INSERT INTO recado.schema_migrations VALUES (99, 'future', 'unknown')")
        too_new = await ended(folder, command, "shop:app", RECADO_DSN=dsn, RECADO_SCHEMA="recado")
        assert_one_sentence(too_new, "0099_future; upgrade recado")


@pytest.mark.parametrize(
    "args",
    [
        ["worker"],
        ["worker", "shop:app", "--lease", "0"],
        ["worker", "shop:app", "--silence", "nan"],
        ["worker", "shop:app", "--timeout", "-1"],
        ["worker", "shop:app", "--grace", "-1"],
        ["worker", "shop:app", "--lease", "1e300"],
        ["worker", "shop:app", "--log-level", "loud"],
        ["api", "shop:app", "--port", "65536"],
        ["dev", "shop:app", "--port", "-1"],
    ],
)
def test_wrong_usage_exits_with_2(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_command(monkeypatch, capsys, *args)
    assert code == 2
    assert "Usage: recado" in err


# --- recado api ---


async def test_without_tokens_the_api_is_for_this_machine_and_says_so(
    folder: Path, service: Recado, dsn: str, conn: asyncpg.Connection
) -> None:
    await service.enqueue(conn, "shop.echo", {})
    async with running(folder, "api", "shop:app", "--port", "0", "--dsn", dsn) as api:
        url = await api.url()
        assert url.startswith("http://127.0.0.1:")
        await api.logged("for this machine only: no tokens are configured")
        assert (await get(f"{url}/healthz")).status_code == 200
        assert (await get(f"{url}/readyz")).status_code == 200
        counts = (await get(f"{url}/api/v1/jobs/metricas")).json()
        assert (counts["pendientes"], counts["fallidos"]) == (1, 0)

        second = await ended(folder, "api", "shop:app", "--port", url.rpartition(":")[2], "--dsn", dsn)
        assert_one_sentence(second, "choose another --host or --port")

        api.send(signal.SIGTERM)
        assert await api.ended() == 0
    assert not any("Traceback" in line for line in api.log)


async def test_with_a_token_the_api_is_for_all_who_have_it(
    folder: Path,
    dsn: str,
    conn: asyncpg.Connection,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["recado", "token", "grafana", "--scope", "jobs:admin"])
    with pytest.raises(SystemExit):
        cli.main()
    _, secret, _, entry = (line.strip() for line in capsys.readouterr().out.splitlines())
    options = ("--host", "0.0.0.0", "--port", "0")
    async with running(folder, "api", "shop:app", *options, RECADO_DSN=dsn, RECADO_TOKENS=f"[{entry}]") as api:
        url = (await api.url()).replace("0.0.0.0", "127.0.0.1")
        assert not any("for this machine only" in line for line in api.log)
        assert (await get(f"{url}/readyz")).status_code == 200
        assert (await get(f"{url}/api/v1/jobs/metricas")).status_code == 401
        assert (await get(f"{url}/api/v1/jobs/metricas", "another")).status_code == 401
        assert (await get(f"{url}/api/v1/jobs/metricas", secret)).status_code == 200
        api.send(signal.SIGTERM)
        assert await api.ended() == 0


@pytest.mark.skipif("RECADO_TEST_DSN" in os.environ, reason="the server's processes are out of reach")
async def test_a_database_that_hangs_does_not_keep_the_api_from_ending(
    folder: Path, dsn: str, conn: asyncpg.Connection
) -> None:
    async with running(folder, "api", "shop:app", "--port", "0", RECADO_DSN=dsn) as api:
        assert (await get(f"{await api.url()}/readyz")).status_code == 200
        backend = await conn.fetchval("SELECT pid FROM pg_stat_activity WHERE application_name = 'recado api'")
        os.kill(backend, signal.SIGSTOP)
        try:
            api.send(signal.SIGTERM)
            async with asyncio.timeout(10):
                assert await api.ended() == 0
        finally:
            os.kill(backend, signal.SIGCONT)


# --- recado dev ---


async def test_dev_runs_everything_and_its_data_survives_kill_9(folder: Path, service: Recado, schema: str) -> None:
    data = folder / ".recado"
    elsewhere = {"RECADO_DSN": "postgresql://127.0.0.1:1/elsewhere", "RECADO_LISTEN_DSN": "postgresql://127.0.0.1:1/x"}
    async with running(folder, "dev", "shop:app", "--port", "0", **elsewhere) as dev:
        url, dsn = await dev.url(), await dev.dsn()
        assert (await get(f"{url}/healthz")).json() == {"status": "ok"}
        async with connected(dsn) as conn, connected(dsn) as observer:
            await dev.logged("serves default:50")
            async with Watch(observer, schema) as watch:
                first = await service.enqueue(conn, "shop.environment", {})
                later = await service.enqueue(conn, "shop.mail", {"order": 7})
                await watch.until(f"count(*) = 1 FROM {schema}.jobs WHERE status = 'completed'")
            await conn.execute("DROP FUNCTION tell() CASCADE")
            # Handlers that connect by themselves must not meet another database.
            result = (await get_job(conn, first, schema=schema)).result
            assert result["RECADO_DSN"] == dsn
            assert "RECADO_LISTEN_DSN" not in result
        assert (await get(f"{url}/readyz")).json() == {"status": "ready"}
        counts = (await get(f"{url}/api/v1/jobs/metricas")).json()
        assert counts.keys() == {"pendientes", "fallidos", "antiguedad_mas_viejo_segundos"}
        assert counts["pendientes"] == 1
        if sys.platform == "linux":
            async with end_of_process(postmaster(data)):
                dev.send(signal.SIGKILL)
        else:
            dev.send(signal.SIGKILL)
        assert await dev.ended() == -signal.SIGKILL

    async with running(folder, "dev", "shop:app", "--port", "0", "-q", "mail:1") as dev:
        assert await dev.dsn() == dsn
        async with connected(dsn) as conn, connected(dsn) as observer, Watch(observer, schema) as watch:
            await watch.until(f"count(*) = 2 FROM {schema}.jobs WHERE status = 'completed'")
            assert (await get_job(conn, later, schema=schema)).result == {"order": 7}
        server = postmaster(data)
        dev.send(signal.SIGTERM)
        assert await dev.ended() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)


async def test_a_second_dev_on_the_same_data_attaches(folder: Path, service: Recado, schema: str) -> None:
    async with running(folder, "dev", "shop:app", "--port", "0") as first:
        url, dsn = await first.url(), await first.dsn()
        await first.logged("serves default:50")
        server = postmaster(folder / ".recado")
        taken = await ended(folder, "dev", "shop:app", "--port", url.rpartition(":")[2])
        assert_one_sentence(taken, "choose another --host or --port")

        async with running(folder, "dev", "shop:app", "--port", "0", "-q", "mail") as second:
            assert await second.dsn() == dsn
            assert (await get(f"{await second.url()}/readyz")).status_code == 200
            await second.logged("serves mail:50")
            second.send(signal.SIGTERM)
            assert await second.ended() == 0

        assert postmaster(folder / ".recado") == server
        assert (await get(f"{url}/readyz")).status_code == 200
        async with connected(dsn) as conn, connected(dsn) as observer, Watch(observer, schema) as watch:
            await service.enqueue(conn, "shop.echo", {})
            await watch.until(f"count(*) = 1 FROM {schema}.jobs WHERE status = 'completed'")
        first.send(signal.SIGTERM)
        assert await first.ended() == 0


async def test_a_second_sigterm_ends_dev_at_once_and_gives_its_jobs_back(
    folder: Path, service: Recado, schema: str
) -> None:
    """Also from a thread that does not end: the server is stopped nevertheless."""
    async with running(folder, "dev", "shop:app", "--port", "0") as dev:
        dsn = await dev.dsn()
        await dev.logged("serves default:50")
        async with connected(dsn) as conn, connected(dsn) as observer, Watch(observer, schema) as watch:
            await service.enqueue(conn, "shop.hang", {})
            await service.enqueue(conn, "shop.stick", {})
            await watch.until(f"count(*) = 2 FROM {schema}.jobs WHERE status = 'running'")
        dev.send(signal.SIGTERM)
        await dev.logged("once more to stop at once")
        dev.send(signal.SIGTERM)
        async with asyncio.timeout(15):  # half of the grace that the first one gives
            assert await dev.ended() == 0
    with embedded.start(folder / ".recado") as server:
        async with connected(server.dsn()) as conn:
            rows = await conn.fetch(f"SELECT status, attempts FROM {schema}.jobs")
    assert [tuple(row) for row in rows] == [("pending", 0)] * 2


async def test_sigterm_while_the_server_starts_stops_it_again(folder: Path, open_folder: Path) -> None:
    begun, gate = asyncio.Event(), open_folder / "gate"
    real = embedded._find_binaries(folder, embedded._server_account(folder)).folder
    os.mkfifo(gate)
    gate.chmod(0o666)
    (open_folder / "initdb").write_text(f'#!/bin/sh\nexec {real}/initdb "$@"\n')
    (open_folder / "postgres").write_text(
        f'#!/bin/sh\ntest "$1" = -D && echo begun > {gate}\nexec {real}/postgres "$@"\n'
    )
    for program in ("initdb", "postgres"):
        (open_folder / program).chmod(0o755)
    reader = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    asyncio.get_running_loop().add_reader(reader, begun.set)
    async with (
        asyncio.timeout(PATIENCE),
        running(folder, "dev", "shop:app", "--port", "0", RECADO_PG_BIN=str(open_folder)) as dev,
    ):
        await begun.wait()
        asyncio.get_running_loop().remove_reader(reader)
        os.close(reader)
        dev.send(signal.SIGTERM)
        assert await dev.ended() == 0
    # The server's last process would still hold the lock.
    assert embedded.remove(folder / ".recado")


async def test_where_the_port_is_taken_dev_starts_no_server(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = await ended(folder, "dev", "shop:app", RECADO_API_PORT=str(other.getsockname()[1]))
    assert_one_sentence(result, "choose another --host or --port")
    assert not (folder / ".recado").exists()


async def test_data_that_cannot_be_used_is_one_sentence(folder: Path) -> None:
    old = folder / "old"
    (old / "pgdata").mkdir(parents=True)
    (old / "pgdata" / "PG_VERSION").write_text("10\n")
    for data, says in (("old", "PostgreSQL 10 wrote it"), ("shop.py/data", "set RECADO_DATA_DIR to another folder")):
        result = await ended(folder, "dev", "shop:app", "--port", "0", "--data", data, "--log-level", "warning")
        assert_one_sentence(result, says)


async def test_a_database_that_is_newer_stops_its_server_again(folder: Path, schema: str) -> None:
    with embedded.start(folder / ".recado", durable=False) as server:
        async with connected(server.dsn()) as conn:
            await migrate.up(conn, schema=schema)
            await conn.execute(f"INSERT INTO {schema}.schema_migrations VALUES (99, 'future', 'unknown')")
    result = await ended(folder, "dev", "shop:app", "--port", "0", "--log-level", "warning")
    assert_one_sentence(result, "0099_future; upgrade recado")
    assert embedded.remove(folder / ".recado")


async def test_a_worker_that_fails_takes_dev_down_with_it(folder: Path) -> None:
    """An API without its worker would look as if all were well."""
    (folder / "faulty.py").write_text(
        f"{APPLICATION}\n@app.lifespan\nasync def lifespan():\n    raise RuntimeError('no mail server')\n    yield\n"
    )
    result = await ended(folder, "dev", "faulty:app", "--port", "0")
    assert result.code == 1
    assert result.err.endswith("RuntimeError: no mail server\n")
    assert embedded.remove(folder / ".recado")


def test_a_read_only_folder_is_one_sentence(open_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (open_folder / "shop_of_nobody.py").write_text(APPLICATION)
    (open_folder / "data").mkdir(mode=0o555)
    monkeypatch.chdir(open_folder)
    monkeypatch.setattr(
        sys, "argv", ["recado", "dev", "shop_of_nobody:app", "--port", "0", "--data", "data", "--log-level", "warning"]
    )

    def call() -> str:
        with contextlib.redirect_stderr(io.StringIO()) as err, pytest.raises(SystemExit) as exit_:
            cli.main()
        return json.dumps([exit_.value.code, err.getvalue()])

    answer = as_user("nobody", call) if ROOT else call()
    sys.modules.pop("shop_of_nobody", None)
    settings.cache_clear()
    assert_one_sentence(Result(*json.loads(answer)), "set RECADO_DATA_DIR to another folder")
