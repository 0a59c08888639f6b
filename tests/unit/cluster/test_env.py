"""Environment variables: what is read, and what is said about values that cannot be."""

from pathlib import Path

import pytest

from cluster.bench.endpoint import key_headers
from cluster.spec.env import ALL, API_KEYS, CACHE_DIR, TOKEN
from cluster.spec.errors import UserError


def test_environment_variables_have_defaults() -> None:
    assert CACHE_DIR.get({"XDG_CACHE_HOME": "/x"}) == Path("/x/baton")
    assert CACHE_DIR.get({"BATON_CACHE_DIR": ""}) == Path.home() / ".cache" / "baton"
    assert TOKEN.get({}) is None


def test_environment_variables_are_read() -> None:
    assert CACHE_DIR.get({"BATON_CACHE_DIR": "/somewhere/else"}) == Path("/somewhere/else")
    assert TOKEN.get({"BATON_TOKEN": "0123456789abcdef"}) == "0123456789abcdef"
    assert API_KEYS.get({"BATON_API_KEYS": "first-key, second-key"}) == ("first-key", "second-key")
    assert key_headers({"BATON_API_KEY": "the-only-key"}) == {"authorization": "Bearer the-only-key"}
    assert key_headers({}) == {}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("BATON_CACHE_DIR", "here", "BATON_CACHE_DIR: got 'here'; allowed: the absolute path of a folder"),
        ("BATON_CACHE_DIR", __file__, f"BATON_CACHE_DIR: got {__file__!r}; allowed: the absolute path of a folder"),
        ("BATON_TOKEN", "short", "BATON_TOKEN: got 5 characters; allowed: 8 or more printable ASCII characters"),
        ("BATON_ADMIN_KEY", "short", "BATON_ADMIN_KEY: got 5 characters; allowed: 8 or more printable ASCII"),
        ("BATON_API_KEY", "short", "BATON_API_KEY: got 5 characters; allowed: 8 or more printable ASCII characters"),
        ("BATON_API_KEYS", "long-enough,,x", "BATON_API_KEYS: got 14 characters; allowed: keys of 8 or more printable"),
        ("BATON_TOKEN", "with a space", "BATON_TOKEN: got 12 characters; allowed: 8 or more printable ASCII"),
    ],
)
def test_bad_environment_value_is_refused(name: str, value: str, message: str) -> None:
    variable = next(variable for variable in ALL if variable.name == name)
    with pytest.raises(UserError) as caught:
        variable.get({name: value})
    assert str(caught.value).startswith(message)


def test_environment_variables_say_what_they_do() -> None:
    assert len({variable.name for variable in ALL}) == len(ALL)
    assert all(variable.name.startswith("BATON_") and variable.sentence.endswith(".") for variable in ALL)
