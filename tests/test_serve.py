"""What the long-running commands make of their arguments, before anything runs."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recado import Recado
from recado.errors import ConfigurationError, RecadoError
from recado.serve import listening, load_app, read_queues
from recado.settings import settings
from recado.worker.worker import DEFAULT_SLOTS

# --- the application ---


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, which is on no path; what is imported from it is forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before:
        del sys.modules[name]


def test_an_application_is_found_from_the_current_folder(folder: Path) -> None:
    (folder / "loaded_shop").mkdir()
    (folder / "loaded_shop" / "jobs.py").write_text("from recado import Recado\napp = Recado('shop')\n")
    app = load_app("loaded_shop.jobs:app")
    assert isinstance(app, Recado)
    assert app.name == "shop"
    assert load_app("loaded_shop.jobs:app") is app
    assert sys.path.count(str(folder)) == 1


@pytest.mark.parametrize("path", ["", "shop", "shop:", ":app", "shop:app:app", ".shop:app", "a..b:app", "shop.py/:app"])
def test_a_path_of_another_form_is_refused(path: str) -> None:
    with pytest.raises(ConfigurationError, match=r"it must read like package\.module:name"):
        load_app(path)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("loaded_nowhere:app", "there is no module 'loaded_nowhere'; call recado from the folder it is in"),
        ("loaded_module.jobs:app", "there is no module 'loaded_module.jobs'"),
        ("loaded_module:app", "there is no such name in the module; name the variable"),
        ("loaded_module:sys", "it is a module; name the variable"),
        ("loaded_module:Recado", "it is a type; name the variable"),
    ],
)
def test_an_application_that_is_not_there_is_one_sentence(folder: Path, path: str, says: str) -> None:
    (folder / "loaded_module.py").write_text("import sys\nfrom recado import Recado\n")
    with pytest.raises(ConfigurationError) as caught:
        load_app(path)
    assert str(caught.value).startswith(f"cannot load {path!r}: ")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import loaded_elsewhere", ModuleNotFoundError),
        ("import loaded_faulty_too", ModuleNotFoundError),  # begins like the module itself
        ("from recado import nothing_of_this_name", ImportError),
        ("1 / 0", ZeroDivisionError),
        ("(", SyntaxError),
    ],
)
def test_what_goes_wrong_inside_the_module_comes_out_as_it_is(folder: Path, line: str, error: type[Exception]) -> None:
    (folder / "loaded_faulty.py").write_text(f"{line}\n")
    with pytest.raises(error) as caught:
        load_app("loaded_faulty:app")
    assert not isinstance(caught.value, RecadoError)


# --- queues ---


@pytest.mark.parametrize(
    ("options", "queues"),
    [
        ([], {"default": DEFAULT_SLOTS}),
        (["mail:20", "default"], {"mail": 20, "default": DEFAULT_SLOTS}),
        (["a.b-c_1:1", "b:9999"], {"a.b-c_1": 1, "b": 9999}),
    ],
)
def test_queues_are_read(options: list[str], queues: dict[str, int]) -> None:
    assert read_queues(options) == queues


@pytest.mark.parametrize("option", ["", ":5", "mail:", "mail:0", "mail:-1", "mail:1.5", "mail:x", "a:1:2", "a:10000"])
def test_a_queue_of_another_form_is_refused(option: str) -> None:
    with pytest.raises(ConfigurationError, match="it must read like mail or mail:20"):
        read_queues(["default", option])


def test_a_queue_with_a_bad_name_is_refused() -> None:
    with pytest.raises(RecadoError, match="cannot use 'Mail' as a queue"):
        read_queues(["Mail:5"])


def test_a_queue_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cannot serve queue 'mail' twice"):
        read_queues(["mail:5", "mail"])


# --- the port ---


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One is configured."""
    monkeypatch.setenv("RECADO_TOKENS", f'[{{"name": "ci", "sha256": "{"0" * 64}"}}]')
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


def test_a_port_is_taken_as_soon_as_somebody_listens() -> None:
    with listening("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        # Nobody serves it yet: a port that is only bound, Linux would let the second one bind, too.
        with (
            pytest.raises(ConfigurationError, match=rf"cannot serve at 127.0.0.1:{port}: .* choose another --host"),
            listening("127.0.0.1", port),
        ):
            pass
    with listening("127.0.0.1", port):
        pass


@pytest.mark.parametrize("host", ["0.0.0.0", "", "::", "192.0.2.1", "example.org"])
def test_without_tokens_only_this_machine_is_listened_to(host: str) -> None:
    with pytest.raises(ConfigurationError, match="no tokens are configured"), listening(host, 0):
        pass


@pytest.mark.usefixtures("tokens")
@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b", "192.0.2.1", "2001:db8::1"])
def test_a_host_that_is_not_ours_is_one_sentence(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot serve at .*; choose another --host"), listening(host, 0):
        pass


@pytest.mark.usefixtures("tokens")
def test_with_tokens_every_address_can_be_listened_to() -> None:
    with listening("0.0.0.0", 0) as sock:
        assert sock.getsockname()[0] == "0.0.0.0"


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_is_listened_to() -> None:
    try:
        with listening("::1", 0) as sock:
            assert sock.family is socket.AF_INET6
    except ConfigurationError as error:
        pytest.skip(str(error))
