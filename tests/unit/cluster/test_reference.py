"""docs/configuration.md is what the schema says, and every key can be refused in words."""

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.config_node import Node
from cluster.spec.errors import ConfigError
from cluster.spec.loader import parse_config
from tests import readme
from tests.configuration_page import reference_text

MAX_KEYS = 75


def keys(kind: type[Node] = DeployConfig, path: str = "") -> list[str]:
    """Every key of a deploy file that has a value of its own, with dots."""
    found = []
    for name, field in kind.model_fields.items():
        is_section = isinstance(field.default, Node)
        found += keys(type(field.default), f"{path}{name}.") if is_section else [path + name]
    return found


def test_the_committed_page_is_current() -> None:
    page = (readme.ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference_text(), "run: python -m tests.configuration_page > docs/configuration.md"


def test_every_key_has_a_row() -> None:
    page = reference_text()
    assert [key for key in keys() if f"| `{key.rsplit('.', 1)[-1]}` |" not in page] == []


def test_a_file_has_few_keys() -> None:
    """Axes of both roles count once. What nobody can choose with knowledge is a constant, beside the code it is for."""
    counted = {key.replace("decode.parallel.", "prefill.parallel.") for key in keys()}
    assert len(counted) <= MAX_KEYS, "a new key replaces another, or is a constant"


@pytest.mark.parametrize("key", keys())
def test_a_wrong_value_of_any_key_is_refused_in_words(key: str) -> None:
    text = "2026-11-23"
    for name in reversed(key.split(".")):
        text = f"{{{name}: {text}}}"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, "f.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{key}: got 2026-11-23; allowed: ")


def test_each_wrong_origin_is_refused_in_words() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(
            "router: {allowed_origins: ['*', 'https://a/', 'tauri://a', 'https://*.b', 'a', 5], port: x}", "f.yaml"
        )
    port, *origins = str(caught.value).splitlines()
    shown = {1: "'https://a/'", 3: "'https://*.b'", 4: "'a'", 5: "5"}
    words = "`*`, or an origin as browsers name it, such as https://chat.example"
    assert origins == [
        f"router.allowed_origins.{place}: got {given}; allowed: {words}" for place, given in shown.items()
    ]
    assert port.startswith("router.port: ")


def test_origins_are_a_list() -> None:
    with pytest.raises(ConfigError, match=r"allowed_origins: got '\*'; allowed: a list; in it: `\*`, or an origin"):
        parse_config("router: {allowed_origins: '*'}", "f.yaml")
    assert parse_config("router: {allowed_origins: ['http://localhost:3000']}", "f.yaml").router.allowed_origins
