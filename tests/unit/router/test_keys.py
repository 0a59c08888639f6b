"""API keys: reading the file, checking requests, counting use."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from cluster.spec.errors import UserError
from cluster.spec.router_config import RouterConfig
from cluster.spec.worker_spec import ALONE, router_shares
from router.api_keys import ApiKey, KeyLimits, read_keys
from router.errors import KeyLimitError
from router.request import ANYBODY


class Clock:
    """Clock that tests set."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


def file_of(folder: Path, text: str) -> RouterConfig:
    path = folder / "keys.yaml"
    path.write_text(text)
    return RouterConfig(api_keys_file=str(path))


def test_keys_come_from_file_and_environment(tmp_path: Path) -> None:
    config = file_of(tmp_path, "- {name: ann, key: key-of-ann, max_requests: 2}")
    ring = read_keys(config, {"BATON_API_KEYS": "key-number-0,key-number-1", "BATON_ADMIN_KEY": "key-of-admin"})
    ann, second = ring.find(b"key-of-ann"), ring.find(b"key-number-1")
    assert ann is not None
    assert second is not None
    assert (ann.name, ann.max_requests, second.name) == ("ann", 2, "key-1")
    assert ring.find(b"key-of-admin") is None
    assert ring.find(b"") is None
    assert ring.is_admin(b"key-of-admin")
    assert not ring.is_admin(b"")


def test_a_salt_stays_with_its_key(tmp_path: Path) -> None:
    """Names from the environment are numbers, which other keys have after a restart; names in a file are chosen."""
    before, after = (
        read_keys(RouterConfig(), {"BATON_API_KEYS": keys})
        for keys in ("key-of-ann,key-of-bob", "key-of-eve,key-of-bob,key-of-ann")
    )
    salts = {name: ring.find(b"key-of-ann").salt for name, ring in (("before", before), ("after", after))}  # type: ignore[union-attr]
    assert salts["before"] == salts["after"]
    assert len({key.salt for key in [*before, *after]}) == 3
    (renewed,), (old,) = (
        read_keys(file_of(tmp_path, f"- {{name: ann, key: key-of-ann-{number}}}"), {}) for number in (1, 2)
    )
    assert renewed.salt == old.salt == "ann\0"


def test_without_keys_it_is_open_and_has_no_administrator() -> None:
    ring = read_keys(RouterConfig(), {})
    assert not ring
    assert not ring.is_admin(b"")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {name: ann, key: short}", r"0\.key: a key has 8 or more printable ASCII characters without a space;"),
        ("- {name: ann, key: a key with spaces}", r"0\.key: a key has 8 or more printable"),
        ("- {name: ann}", r"0\.key"),
        ("- {name: ann, key: long-enough, colour: red}", r"0\.colour"),
        ("name: ann", "the file"),
        ("[]", "the file"),
        ("- {name: [", "is not YAML"),
        ("- {name: a, key: same-same}\n- {name: b, key: same-same}", "the same key"),
        ("- {name: a, key: one-one-1}\n- {name: a, key: two-two-2}", "the same name"),
        ("- {name: a, key: one-one-1, max_requests: 0}", "max_requests"),
        ("- {name: a, key: one-one-1, priority: -9223372036854775809}", "priority"),
    ],
)
def test_a_bad_file_is_refused_without_quoting_a_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        read_keys(file_of(tmp_path, text), {})
    assert not any(key in str(refused.value) for key in ("short", "same-same", "one-one-1", "long-enough"))


def limits_of(keys: int | None = None, tokens: int | None = None, clock: Clock | None = None) -> KeyLimits:
    return KeyLimits(RouterConfig(key_max_requests=keys, key_tokens_per_minute=tokens), ALONE, clock or Clock())


ANN, BOB = (ApiKey(name=name, key="long-enough") for name in ("ann", "bob"))


def test_limits_are_the_keys_own_or_the_routers() -> None:
    limits = limits_of(3, 70)
    with limits.open(None) as anybody, limits.open(ANN.model_copy(update={"max_requests": 9})) as own:
        assert (anybody.name, anybody.max_requests, anybody.tokens_per_minute) == (ANYBODY, 3, 70)
        assert (own.name, own.max_requests, own.tokens_per_minute) == ("ann", 9, 70)


def test_router_processes_share_the_limits() -> None:
    config = RouterConfig(key_max_requests=3, key_tokens_per_minute=70)
    found = []
    for share in router_shares(4):
        with KeyLimits(config, share, Clock()).open(None) as account:
            found.append((account.max_requests, account.tokens_per_minute))
    assert found == [(1, 18), (1, 18), (1, 17), (1, 17)]
    assert [share.of(0) for share in router_shares(2)] == [0, 0]


def test_requests_at_once() -> None:
    limits = limits_of(1)
    with limits.open(ANN), limits.open(BOB), pytest.raises(KeyLimitError), limits.open(ANN):
        pass
    with limits.open(ANN):
        pass


def test_every_choice_counts() -> None:
    limits = limits_of(4)
    with limits.open(ANN, 3):
        with (
            limits.open(ANN, 16),
            pytest.raises(KeyLimitError, match="19 requests are open; allowed: 4"),
        ):
            limits.open(ANN).__enter__()
        with limits.open(ANN):
            pass


def test_token_budgets_refill_over_time() -> None:
    clock = Clock()
    limits = limits_of(None, 60, clock)
    with limits.open(ANN) as account:
        account.use(90)
    with pytest.raises(KeyLimitError, match="60 per minute") as refused, limits.open(ANN):
        pass
    assert refused.value.headers["retry-after"] == "31"
    clock.time_s += 30
    with pytest.raises(KeyLimitError), limits.open(ANN):
        pass
    clock.time_s += 1
    with limits.open(ANN):
        pass


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(0, 500)), max_size=30), st.integers(1, 300))
@hypothesis_settings(deadline=None)
def test_waiting_for_retry_after_is_enough(steps: list[tuple[float, int]], tokens_per_minute: int) -> None:
    clock = Clock()
    limits = limits_of(None, tokens_per_minute, clock)
    for wait_s, num_tokens in steps:
        clock.time_s += wait_s
        try:
            with limits.open(ANN) as account:
                account.use(num_tokens)
        except KeyLimitError as error:
            clock.time_s += int(error.headers["retry-after"])
            with limits.open(ANN):
                pass
