"""Installs the peers, each into an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.catalog import System
from bench.errors import PeerError

ROOT = Path(__file__).resolve().parents[1]

MARK = "installed.txt"
"""Written last into an environment: how it was made, so that a half-made or an outdated one is made anew."""

LATER_PYTHONS = ("python3.12", "python3.13", "python3.14")
"""Looked for on the PATH for a peer that does not run on the interpreter of the benchmark."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A system that can be started."""

    system: System
    command: tuple[str, ...]
    environment: Mapping[str, str]


def install(system: System, folder: Path) -> Installed:
    """Make the system's environment below ``folder``, unless it is there already.

    Raises:
        PeerError: what it takes is missing, or cannot be downloaded.
    """
    target = folder.resolve() / system.name
    if system.node:
        node, npm = _program("node"), _program("npm")
        _make(target, [(npm, "install", "--no-fund", "--no-audit", "--prefix", str(target), *system.requirements)])
        script = ROOT / "bench" / "peers" / f"{system.module}.cjs"
        return Installed(system, (node, str(script)), {"NODE_PATH": str(target / "node_modules")})
    python = sys.executable
    if system.requirements:
        python = str(target / "bin" / "python")
        pip = (python, "-m", "pip", "install", "--disable-pip-version-check", *system.requirements)
        _make(target, [(_python(system), "-m", "venv", str(target)), pip])
    return Installed(system, (python, "-m", "bench.peers", system.module), {"PYTHONPATH": str(ROOT)})


def _make(target: Path, commands: Sequence[tuple[str, ...]]) -> None:
    how = "\n".join(" ".join(command) for command in commands)
    mark = target / MARK
    if mark.exists() and mark.read_text() == how:
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for command in commands:
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            reason = (made.stderr.strip() or made.stdout.strip() or "it said nothing").splitlines()[-1]
            raise PeerError(f"cannot be installed: {reason}")
    mark.write_text(how)


def _program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PeerError(f"cannot be installed: there is no {name} on the PATH")
    return found


def _python(system: System) -> str:
    """An interpreter that the system runs on, the benchmark's own if it can be."""
    if sys.version_info >= system.python:
        return sys.executable
    for name in LATER_PYTHONS:
        # It may be a version manager's stand-in for an interpreter that is not there.
        if (found := shutil.which(name)) and subprocess.run([found, "-V"], capture_output=True).returncode == 0:
            return found
    oldest = ".".join(map(str, system.python))
    raise PeerError(f"cannot be installed: it needs Python {oldest}, and there is none on the PATH")
