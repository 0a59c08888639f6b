"""Keys and environment variables: the committed page is current, and errors explain unreadable values."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.bench.endpoint import key_headers
from cluster.spec.config import DeployConfig
from cluster.spec.config_node import Node
from cluster.spec.env import ALL, API_KEYS, CACHE_DIR, TOKEN
from cluster.spec.errors import ConfigError, UserError
from cluster.spec.loader import parse_config
from cluster.spec.version import VERSION
from tests import readme
from tests.configuration_page import reference_text

MAX_KEYS = 77


def keys(kind: type[Node] = DeployConfig, path: str = "") -> list[str]:
    """Return every key of a deploy file that has a value, in dotted form."""
    found = []
    for name, field in kind.model_fields.items():
        is_section = isinstance(field.default, Node)
        found += keys(type(field.default), f"{path}{name}.") if is_section else [path + name]
    return found


def test_the_version_and_a_file_that_hides_a_package(tmp_path: Path) -> None:
    command, env = [sys.executable, "-m", "cluster.cli", "--version"], os.environ | {"PYTHONPATH": str(readme.ROOT)}
    assert subprocess.check_output(command, cwd=tmp_path, env=env, text=True) == f"baton {VERSION}\n"
    for name in ("router", "transfer", "workers"):
        hiding = tmp_path / f"{name}.py"
        hiding.write_text("print('imported')")
        run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stdout) == (2, "")
        assert run.stderr.startswith(f"{hiding} hides Baton's package {name!r}: ")
        hiding.unlink()


def test_the_committed_page_is_current() -> None:
    page = (readme.ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference_text(), "run: python -m tests.configuration_page > docs/configuration.md"


def test_every_key_has_a_record() -> None:
    page = reference_text()
    assert [key for key in keys() if f"| `{key.rsplit('.', 1)[-1]}` |" not in page] == []


def test_a_file_has_few_keys() -> None:
    """A value that nobody can choose well is a constant next to its code."""
    assert len(keys()) <= MAX_KEYS, "a new key replaces another, or is a constant"


@pytest.mark.parametrize("key", keys())
def test_a_wrong_value_of_any_key_is_refused_with_a_reason(key: str) -> None:
    text = "2026-11-23"
    for name in reversed(key.split(".")):
        text = f"{{{name}: {text}}}"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{key}: got 2026-11-23; allowed: ")


def test_each_wrong_origin_is_refused_with_a_reason() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            "router: {allowed_origins: ['*', 'https://a/', 'tauri://a', 'https://*.b', 'a', 5], port: x}", "f.yaml"
        )
    port, *origins = str(caught.value).splitlines()
    shown = {1: "'https://a/'", 3: "'https://*.b'", 4: "'a'", 5: "5"}
    words = "`*`, or an origin as browsers send it, such as https://chat.example"
    assert origins == [
        f"router.allowed_origins.{index}: got {given}; allowed: {words}" for index, given in shown.items()
    ]
    assert port.startswith("router.port: ")


def test_origins_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"allowed_origins: got '\*'; allowed: a list; each item: `\*`, or an origin"):
        parse_config("router: {allowed_origins: '*'}", "f.yaml")
    assert parse_config("router: {allowed_origins: ['http://localhost:3000']}", "f.yaml").router.allowed_origins


def test_environment_variables_have_defaults() -> None:
    assert CACHE_DIR.get({"XDG_CACHE_HOME": "/x"}) == Path("/x/baton")
    assert CACHE_DIR.get({"XDG_CACHE_HOME": "here"}) == Path.home() / ".cache" / "baton"
    assert CACHE_DIR.get({"BATON_CACHE_DIR": ""}) == Path.home() / ".cache" / "baton"
    assert TOKEN.get({}) is None


@pytest.mark.parametrize("given", ["~nobody-has-this-name/cache", "here", __file__])
def test_a_wrong_cache_folder_is_refused(given: str) -> None:
    with pytest.raises(UserError, match=r"^BATON_CACHE_DIR: got .*; allowed: the absolute path of a folder$"):
        CACHE_DIR.get({"BATON_CACHE_DIR": given})


def test_an_account_without_a_home_folder_needs_a_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    with pytest.raises(UserError, match=r"^BATON_CACHE_DIR: not set, and this account has no home folder; allowed: "):
        CACHE_DIR.get({})


def test_environment_variables_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CACHE_DIR.get({"BATON_CACHE_DIR": "/somewhere/else"}) == Path("/somewhere/else")
    assert TOKEN.get({"BATON_TOKEN": "0123456789abcdef"}) == "0123456789abcdef"
    assert API_KEYS.get({"BATON_API_KEYS": "first-key, second-key"}) == ("first-key", "second-key")
    assert (API_KEYS.get({}), TOKEN.get({"BATON_TOKEN": ""})) == ((), None)
    monkeypatch.setenv("BATON_API_KEY", "the-only-key")
    assert key_headers() == {"authorization": "Bearer the-only-key"}
    monkeypatch.delenv("BATON_API_KEY")
    assert key_headers() == {}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BATON_CACHE_DIR", "here", "BATON_CACHE_DIR: got 'here'; allowed: the absolute path of a folder"),
        ("BATON_CACHE_DIR", __file__, f"BATON_CACHE_DIR: got {__file__!r}; allowed: the absolute path of a folder"),
        ("BATON_TOKEN", "short", "BATON_TOKEN: got 5 characters; allowed: 8 or more printable ASCII characters"),
        ("BATON_ADMIN_KEY", "short", "BATON_ADMIN_KEY: got 5 characters; allowed: 8 or more printable ASCII"),
        ("BATON_API_KEY", "short", "BATON_API_KEY: got 5 characters; allowed: 8 or more printable ASCII characters"),
        ("BATON_API_KEYS", "long-enough,,x", "BATON_API_KEYS: got 14 characters; allowed: keys of 8 or more printable"),
        ("BATON_API_KEYS", "", "BATON_API_KEYS: got 0 characters; allowed: keys of 8 or more printable"),
        ("BATON_TOKEN", "with a space", "BATON_TOKEN: got 12 characters; allowed: 8 or more printable ASCII"),
    ],
)
def test_bad_environment_value_is_refused(name: str, value: str, message: str) -> None:
    variable = next(variable for variable in ALL if variable.name == name)
    with pytest.raises(UserError) as caught:
        variable.get({name: value})
    assert str(caught.value).startswith(message)


def test_environment_variables_have_descriptions() -> None:
    assert len({variable.name for variable in ALL}) == len(ALL)
    assert all(variable.name.startswith("BATON_") and variable.sentence.endswith(".") for variable in ALL)
