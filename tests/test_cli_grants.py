"""``recado grants``: what it prints, without any database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from recado.queue.grants import Role, grants
from recado.settings import settings
from tests.commands import Result, run_command


@pytest.fixture(autouse=True)
def no_database(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One that cannot be reached: whoever asked it would fail."""
    monkeypatch.setenv("RECADO_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> Result:
    return run_command(monkeypatch, capsys, "grants", *args)


@pytest.mark.parametrize("role", Role)
def test_it_prints_the_statements_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], schema: str, role: Role
) -> None:
    code, out, err = call(monkeypatch, capsys, 'we"b', "--as", role)
    assert (code, err) == (0, "")
    assert out == grants('we"b', [role], schema=schema)
    assert out.startswith(f'GRANT USAGE ON SCHEMA {schema} TO "we""b";\n')


def test_a_role_may_be_for_several_purposes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(monkeypatch, capsys, "web", "--as", "operations", "--as", "api", "--schema", "another")
    assert (code, err) == (0, "")
    assert out == grants("web", [Role.OPERATIONS, Role.API], schema="another")


@pytest.mark.parametrize("name", ["public", "none", "", "x" * 64, "a\x1b[2Jb"])
def test_a_name_that_cannot_be_is_one_sentence_and_grants_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    code, out, err = call(monkeypatch, capsys, name, "--as", "worker")
    assert (code, out) == (1, "")
    assert err.startswith("recado: cannot grant to ")
    assert err.count("\n") == 1
    assert "\x1b" not in err


@pytest.mark.parametrize("args", [["web"], ["web", "--as", "owner"], ["--as", "api"]])
def test_wrong_usage_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    code, out, _ = call(monkeypatch, capsys, *args)
    assert (code, out) == (2, "")
