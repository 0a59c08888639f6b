"""Policies are functions of what they are shown."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.config import RouterConfig
from router.policies.candidate import Candidate, Chance, Load
from router.policies.registry import POLICIES, find_policy
from tests.fakes.bootstrap import peer_of


def candidates_of(*tokens: int) -> list[Candidate]:
    return [
        Candidate(peer=peer_of(f"decode-{i}"), load=Load(num_requests=1, num_tokens=count))
        for i, count in enumerate(tokens)
    ]


def picks(name: str, candidates: list[Candidate], count: int) -> list[int]:
    policy = find_policy(name)
    chosen = [policy(candidates, Chance(turn=turn, unit=turn / count)) for turn in range(count)]
    return [candidates.index(candidate) for candidate in chosen]


def test_round_robin_goes_round() -> None:
    assert picks("round_robin", candidates_of(5, 0, 9), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_random_is_uniform() -> None:
    assert Counter(picks("random", candidates_of(5, 0, 9), 30)) == {0: 10, 1: 10, 2: 10}


def test_least_tokens_takes_the_least_and_equals_take_turns() -> None:
    assert picks("least_tokens", candidates_of(5, 2, 9), 3) == [1, 1, 1]
    assert picks("least_tokens", candidates_of(2, 9, 2), 3) == [0, 2, 2]


def test_least_tokens_looks_at_requests_next() -> None:
    few, many = Load(num_requests=1, num_tokens=5), Load(num_requests=2, num_tokens=5)
    candidates = [Candidate(peer=peer_of("decode-0"), load=many), Candidate(peer=peer_of("decode-1"), load=few)]
    assert picks("least_tokens", candidates, 2) == [1, 1]


@given(
    name=st.sampled_from(sorted(POLICIES)),
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    turn=st.integers(0, 100),
    unit=st.floats(0, 1, exclude_max=True),
)
def test_any_choice_is_a_candidate(name: str, tokens: list[int], turn: int, unit: float) -> None:
    candidates = candidates_of(*tokens)
    assert find_policy(name)(candidates, Chance(turn=turn, unit=unit)) in candidates


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown policy 'best'; allowed: least_tokens, random, round_robin"):
        find_policy("best")


@pytest.mark.parametrize("field", ["prefill_policy", "decode_policy"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_the_yaml_takes_every_policy(field: str, name: str) -> None:
    assert getattr(RouterConfig.model_validate({field: name}), field) == name
