"""The floors of the house: imports go only downwards, and SQL stands nowhere but in ``recado.queue``.

Both are read from the syntax tree, so imports inside functions and under TYPE_CHECKING count as well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "recado"

FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "settings": {"errors"},
    "cron": {"errors"},
    "queue": {"cron", "errors", "settings", "version"},
    "payloads": {"queue", "errors"},
    "app": {"cron", "payloads", "queue", "errors", "settings"},
    "worker": {"app", "cron", "payloads", "queue", "errors", "settings", "version"},
    "api": {"app", "payloads", "queue", "errors", "settings", "version"},
    "embedded": {"errors", "settings"},
    # The commands that run until a signal: with the command line above it, the composition root.
    "serve": {"worker", "api", "embedded", "app", "queue", "errors", "settings"},
    "bench": {"serve", "worker", "embedded", "app", "queue", "errors", "settings", "version", "recado"},
    "recado": {"api", "app", "worker", "queue", "errors", "settings", "version"},
}
"""What each part may import besides itself; ``recado`` is the package's own ``__init__``. A new part goes in here."""

FLOORS["testing"] = FLOORS.keys() - {"cli"}
FLOORS["cli"] = FLOORS.keys() - {"cli"}
FLOORS["__main__"] = {"cli"}

SQL = re.compile(
    r"""
    \s* (?: --.*\n \s* )*                                   # comments may stand before it
    (?: (?: SELECT | WITH | CREATE | ALTER | DROP | TRUNCATE | GRANT | REVOKE | LOCK | LISTEN | UNLISTEN | NOTIFY
          | SET | RESET | SHOW | EXPLAIN | ANALYZE | VACUUM | SAVEPOINT | VALUES | COPY | MERGE | CALL | TABLE ) \s+ \S
      | (?: BEGIN | COMMIT | ROLLBACK ) (?: \s | ; | $ )
      | (?i: INSERT \s+ INTO | DELETE \s+ FROM | UPDATE \s+ \S+ .* \s SET \s | SELECT \s .* \s FROM \s )
    )
    """,
    re.VERBOSE | re.DOTALL,
)
"""The beginning of a statement. Keywords are written in capitals, which messages to people are not and paths
and HTTP methods stand alone in; the four most common statements are recognised in lower case, too."""

DATABASES = re.compile(r"(CREATE|DROP) DATABASE ")
"""Statements that can stand in no schema, and so not in ``recado.queue``: allowed where servers are started."""


def part_of(module: str) -> str:
    """``recado.queue.claims`` belongs to ``queue``."""
    _, _, below = module.partition(".")
    return below.partition(".")[0] or "recado"


def imported(tree: ast.AST, package: str, parts: set[str]) -> Iterator[tuple[int, str]]:
    """The line and the part of each import of something of recado's; ``package`` is what a dot stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "recado":
                    yield node.lineno, part_of(alias.name)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            if module == "recado":
                # A part, or a name that the package's own __init__ has.
                yield from ((node.lineno, a.name if a.name in parts else "recado") for a in node.names)
            elif module.startswith("recado."):
                yield node.lineno, part_of(module)


def bad_imports(source: str, module: str, *, package: str | None = None) -> list[str]:
    """What ``module`` imports from its own floor or one above, as ``line 3: queue imports worker``."""
    part = part_of(module)
    if part not in FLOORS:
        return [f"line 1: {part} has no floor yet; say in FLOORS what it may import"]
    allowed = FLOORS[part] | {part}
    found = imported(ast.parse(source), package or module.rpartition(".")[0], FLOORS.keys() | {"cli"})
    return [f"line {line}: {part} imports {target}" for line, target in found if target not in allowed]


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the text of each string that is not a docstring; an f-string's values read ``{}``."""
    skipped = set()
    for node in ast.walk(tree):  # an outer node always comes before those within it
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            pieces = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
            skipped.update(v for v in node.values if isinstance(v, ast.Constant))
            yield node.lineno, "".join(map(str, pieces))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.lineno, node.value


def stray_sql(source: str, module: str) -> list[str]:
    """The SQL in ``module``, as ``line 3: SELECT 1``, if it is one that should have none."""
    part = part_of(module)
    if part == "queue":
        return []
    return [
        f"line {line}: {' '.join(text.split())[:60]}"
        for line, text in texts(ast.parse(source))
        if SQL.match(text) and not (part in {"embedded", "testing"} and DATABASES.match(text))
    ]


def modules() -> dict[str, Path]:
    """Each module of recado by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_only_downwards(module: str) -> None:
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    assert bad_imports(path.read_text("utf-8"), module, package=package) == [], path


@pytest.mark.parametrize("module", MODULES)
def test_sql_stands_only_in_recado_queue(module: str) -> None:
    path = MODULES[module]
    assert stray_sql(path.read_text("utf-8"), module) == [], path


def test_the_floors_have_no_cycle() -> None:
    left = dict(FLOORS)
    while left:
        lowest = {part for part, below in left.items() if not below & left.keys()}
        assert lowest, f"each of these stands on another: {sorted(left)}"
        left = {part: below for part, below in left.items() if part not in lowest}


def test_every_module_is_looked_at() -> None:
    assert {"recado", "recado.cli", "recado.queue.migrate", "recado.worker.worker"} <= MODULES.keys()


def test_worker_and_api_do_not_know_each_other() -> None:
    assert "api" not in FLOORS["worker"]
    assert "worker" not in FLOORS["api"]


@pytest.mark.parametrize(
    ("module", "source", "found"),
    [
        ("recado.queue.claims", "import asyncio\nimport recado.worker.runner", ["line 2: queue imports worker"]),
        ("recado.queue.claims", "from recado.app import Recado", ["line 1: queue imports app"]),
        ("recado.queue.claims", "from recado import Recado", ["line 1: queue imports recado"]),
        ("recado.queue.claims", "from recado import errors, api", ["line 1: queue imports api"]),
        ("recado.queue.claims", "from ..worker import Worker", ["line 1: queue imports worker"]),
        ("recado.queue.claims", "from .. import cli", ["line 1: queue imports cli"]),
        ("recado.queue.claims", "from . import models\nfrom .models import Job", []),
        ("recado.queue.claims", "from recado.queue.models import Job\nfrom recado.errors import RecadoError", []),
        ("recado.queue.claims", "def f():\n    from recado.api import create_app", ["line 2: queue imports api"]),
        ("recado.queue.claims", "if TYPE_CHECKING:\n    import recado.app", ["line 2: queue imports app"]),
        ("recado.errors", "from recado.settings import settings", ["line 1: errors imports settings"]),
        ("recado.worker.worker", "import recado.api", ["line 1: worker imports api"]),
        ("recado.api.app", "from recado.worker import Worker", ["line 1: api imports worker"]),
        ("recado.embedded", "from recado.queue import migrate", ["line 1: embedded imports queue"]),
        ("recado.testing", "from recado.cli import main", ["line 1: testing imports cli"]),
        ("recado.worker.worker", "from recado import serve", ["line 1: worker imports serve"]),
        ("recado.cli", "from recado.api import create_app\nfrom recado.worker import Worker", []),
        ("recado.novelty", "", ["line 1: novelty has no floor yet; say in FLOORS what it may import"]),
        ("recado.api.app", "from recadology import anything\nimport starlette", []),
    ],
)
def test_the_rule_finds_imports_that_go_up_and_only_those(module: str, source: str, found: list[str]) -> None:
    assert bad_imports(source, module) == found


@pytest.mark.parametrize(
    "statement",
    [
        '"SELECT 1"',
        '"""\n    -- why\n    SELECT 1"""',
        '"select id from jobs where true"',
        '"insert into jobs values (1)"',
        '"INSERT " "INTO jobs VALUES (1)"',
        '"UPDATE jobs SET status = 1"',
        '"DELETE FROM jobs"',
        '"WITH a AS (SELECT 1) TABLE a"',
        '"CREATE TABLE a ()"',
        '"LISTEN recado"',
        '"BEGIN"',
        '"COMMIT;"',
        '"SET LOCAL synchronous_commit = off"',
        'f"SELECT {column} FROM jobs"',
        'f"LISTEN {channel}"',
    ],
)
def test_the_rule_finds_sql_outside_of_recado_queue(statement: str) -> None:
    source = f"def f():\n    return {statement}\n"
    assert [line.partition(":")[0] for line in stray_sql(source, "recado.api.jobs")] == ["line 2"]
    assert stray_sql(source, "recado.queue.admin") == []


@pytest.mark.parametrize(
    "statement",
    [
        '"cannot update the job: select another"',
        '"delete the folder, or set RECADO_DSN"',
        '"select one"',
        '"DELETE"',
        '["GET", "SET"]',
        'f"{count} jobs; SELECT one"',
        '"Set it"',
        '"BEGINNING"',
    ],
)
def test_the_rule_lets_words_to_people_pass(statement: str) -> None:
    assert stray_sql(f'"""SELECT 1 is explained here."""\nx = {statement}\n', "recado.api.jobs") == []


def test_databases_are_created_and_dropped_where_servers_are_started() -> None:
    source = 'a = f"CREATE DATABASE {name}"\nb = "DROP DATABASE a"\nc = "CREATE TABLE a ()"'
    assert stray_sql(source, "recado.testing") == ["line 3: CREATE TABLE a ()"]
    assert len(stray_sql(source, "recado.worker.worker")) == 3
