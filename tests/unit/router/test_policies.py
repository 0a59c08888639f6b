"""Policies are pure functions of the candidates."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cluster.spec.ids import Room
from cluster.spec.router_config import PolicyName
from router.directory import Load
from router.picker import POLICIES, Candidate, PickInputs
from tests.fakes.bootstrap import peer_of


def candidates_of(*tokens: int, requests: int = 1) -> list[Candidate]:
    return [
        Candidate(peer=peer_of(f"decode-{i}"), load=Load(num_requests=requests, num_tokens=count))
        for i, count in enumerate(tokens)
    ]


def inputs_of(number: int = 0, unit: float = 0.0, room: int = 1, session_id: str = "") -> PickInputs:
    return PickInputs(number=number, unit=unit, room=Room(room), session_id=session_id)


def picks(name: PolicyName, candidates: list[Candidate], count: int) -> list[int]:
    policy = POLICIES[name]
    chosen = [policy(candidates, inputs_of(number, number / count)) for number in range(count)]
    return [candidates.index(candidate) for candidate in chosen]


def test_round_robin_cycles() -> None:
    assert picks("round_robin", candidates_of(5, 0, 9), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_random_is_uniform() -> None:
    assert Counter(picks("random", candidates_of(5, 0, 9), 30)) == {0: 10, 1: 10, 2: 10}


def test_least_tokens_picks_the_fewest_and_ties_alternate() -> None:
    assert picks("least_tokens", candidates_of(5, 2, 9), 3) == [1, 1, 1]
    assert picks("least_tokens", candidates_of(2, 9, 2), 3) == [0, 2, 2]


def test_least_tokens_looks_at_requests_next() -> None:
    few, many = Load(num_requests=1, num_tokens=5), Load(num_requests=2, num_tokens=5)
    candidates = [Candidate(peer=peer_of("decode-0"), load=many), Candidate(peer=peer_of("decode-1"), load=few)]
    assert picks("least_tokens", candidates, 2) == [1, 1]


def test_least_requests_looks_at_tokens_next() -> None:
    loads = [Load(num_requests=2, num_tokens=1), Load(num_requests=1, num_tokens=9), Load(num_requests=1, num_tokens=5)]
    candidates = [Candidate(peer=peer_of(f"decode-{i}"), load=load) for i, load in enumerate(loads)]
    assert picks("least_requests", candidates, 2) == [2, 2]


def test_power_of_two_picks_the_better_of_equally_likely_pairs() -> None:
    # Of the six ordered pairs of three candidates, four contain the best one, and the second best wins the other two.
    assert Counter(picks("power_of_two", candidates_of(9, 0, 5), 6)) == {1: 4, 2: 2}
    assert picks("power_of_two", candidates_of(7), 3) == [0, 0, 0]


LOADS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10**6)), min_size=1, max_size=6)


def loaded(loads: list[tuple[int, int]], cached: list[int]) -> list[Candidate]:
    return [
        Candidate(peer=peer_of(f"prefill-{i}"), load=Load(num_requests=requests, num_tokens=tokens), cached_tokens=hit)
        for i, ((requests, tokens), hit) in enumerate(zip(loads, cached, strict=True))
    ]


@given(loads=LOADS, number=st.integers(0, 100), cached=st.integers(0, 10**6))
def test_with_equal_caches_prefix_aware_is_least_tokens(loads: list[tuple[int, int]], number: int, cached: int) -> None:
    for everywhere in (0, cached):
        candidates, inputs = loaded(loads, [everywhere] * len(loads)), inputs_of(number)
        assert POLICIES["prefix_aware"](candidates, inputs) is POLICIES["least_tokens"](candidates, inputs)


@given(loads=LOADS, number=st.integers(0, 100), data=st.data())
def test_prefix_aware_never_waits_longer_than_least_tokens(
    loads: list[tuple[int, int]], number: int, data: st.DataObject
) -> None:
    """The tokens ahead of the prompt's last one are never more. Misjudged caches do not make it worse."""
    cached = data.draw(st.lists(st.integers(0, 10**6), min_size=len(loads), max_size=len(loads)))
    candidates, inputs = loaded(loads, cached), inputs_of(number)
    by_prefix, by_load = (POLICIES[name](candidates, inputs) for name in ("prefix_aware", "least_tokens"))
    wait, wait_by_load = (chosen.load.num_tokens - chosen.cached_tokens for chosen in (by_prefix, by_load))
    assert wait <= wait_by_load


def test_a_cached_prefix_is_worth_a_queue_of_its_length() -> None:
    policy = POLICIES["prefix_aware"]
    for num_tokens, chosen in ((999, 0), (1001, 1), (5000, 1)):
        candidates = loaded([(1, num_tokens), (1, 2000)], [0, 1000])
        assert policy(candidates, inputs_of()) is candidates[chosen]


def test_beyond_the_bounds_load_alone_decides() -> None:
    policy = POLICIES["prefix_aware"]
    for requests, chosen in ((33, 1), (34, 0), (80, 0)):
        candidates = loaded([(1, 500), (requests, 600)], [0, 1000])
        assert policy(candidates, inputs_of()) is candidates[chosen]
    candidates = loaded([(100, 500), (190, 600)], [0, 1000])
    assert policy(candidates, inputs_of()) is candidates[1]


def test_follow_room_is_the_rooms_remainder() -> None:
    candidates = candidates_of(5, 0, 9)
    policy = POLICIES["follow_room"]
    assert [candidates.index(policy(candidates, inputs_of(room=room))) for room in (7, 8, 9)] == [1, 2, 0]


@given(session=st.text(min_size=1), gone=st.integers(0, 4), tokens=st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_a_replica_that_leaves_moves_only_its_own_sessions(session: str, gone: int, tokens: list[int]) -> None:
    candidates, policy = candidates_of(*tokens), POLICIES["session"]
    before = policy(candidates, inputs_of(session_id=session))
    rest = [candidate for index, candidate in enumerate(candidates) if index != gone]
    after = policy(rest, inputs_of(number=3, unit=0.5, room=9, session_id=session))
    assert after == before or before == candidates[gone]


def test_sessions_are_spread_and_requests_without_one_go_by_load() -> None:
    candidates, policy = candidates_of(5, 2, 9), POLICIES["session"]
    homes = Counter(policy(candidates, inputs_of(session_id=str(i))).peer.replica for i in range(300))
    assert all(70 < count < 130 for count in homes.values()), homes
    assert policy(candidates, inputs_of()) == candidates[1]


def test_a_session_stays_when_its_replica_starts_again() -> None:
    policy = POLICIES["session"]
    old, new = ([Candidate(peer=peer_of(f"decode-{i}", start), load=Load()) for i in range(4)] for start in (1, 2))
    for session in map(str, range(20)):
        chosen = (policy(candidates, inputs_of(session_id=session)).peer.replica for candidates in (old, new))
        assert len(set(chosen)) == 1


@given(
    name=st.sampled_from(sorted(POLICIES)),
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    number=st.integers(0, 100),
    unit=st.floats(0, 1, exclude_max=True),
    room=st.integers(1, 2**63 - 1),
    session=st.text(max_size=3),
)
def test_any_choice_is_a_candidate(
    name: PolicyName, tokens: list[int], number: int, unit: float, room: int, session: str
) -> None:
    candidates = candidates_of(*tokens)
    assert POLICIES[name](candidates, inputs_of(number, unit, room, session)) in candidates
