"""Choice of replicas for an attempt: replicas that failed it or are failing now are avoided while others are ready."""

import random

import msgspec
import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Peer, Role, Room
from cluster.spec.kv import page_keys
from cluster.spec.messages import KvEvents
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.tiers import Tier
from cluster.spec.wire import TokenIds
from cluster.spec.worker_spec import router_shares
from router.directory import Breakers, BreakerState, Directory, LoadBook
from router.page_index import PromptKeys
from router.picker import Picker
from router.request import ANYBODY, GenerateRequest, KnownTokens, Placement
from tests.fakes.bootstrap import entry_of, peer_of, table_of

ASK = GenerateRequest(prompt_ids=TokenIds.of([1, 2, 3]), sampling=Sampling(), stopping=Stopping(max_tokens=4))
PEERS = [peer_of(f"{role}-{index}") for role in ("prefill", "decode") for index in range(2)]


class Choices:
    """Repeated choices of one picker."""

    def __init__(self, *ready: Peer) -> None:
        self.breakers = Breakers(max_failures=1, open_s=10.0)
        directory = Directory(grace_s=3.0)
        directory.update(table_of(*map(entry_of, ready)), 0.0)
        config = DeployConfig.model_validate(
            {"router": {"prefill_policy": "round_robin", "decode_policy": "round_robin"}}
        )
        self._picker = Picker(config, directory, LoadBook(), self.breakers, random.Random(0))

    def picks(self, *avoided: Peer, now_s: float = 0.0) -> list[Placement | None]:
        return [self._picker.pick(ASK, Room(1), frozenset(avoided), now_s) for _ in range(6)]

    def names(self, *avoided: Peer, now_s: float = 0.0) -> set[str]:
        picks = self.picks(*avoided, now_s=now_s)
        return {peer.replica for pick in picks if pick for peer in (pick.prefill, pick.decode) if peer}


def test_all_are_picked() -> None:
    assert Choices(*PEERS).names() == {"prefill-0", "prefill-1", "decode-0", "decode-1"}


def test_replicas_that_failed_the_request_are_avoided_in_both_roles() -> None:
    assert Choices(*PEERS).names(PEERS[0], PEERS[3]) == {"prefill-1", "decode-0"}


def test_the_only_replica_is_picked_anyway() -> None:
    choices = Choices(PEERS[0], PEERS[2])
    choices.breakers.fail(PEERS[2], 0.0)
    assert choices.names(*PEERS) == {"prefill-0", "decode-0"}


@pytest.mark.parametrize("broken", PEERS)
def test_an_open_breaker_moves_requests_and_half_open_lets_one_through(broken: Peer) -> None:
    choices = Choices(*PEERS)
    choices.breakers.fail(broken, 0.0)
    assert choices.names() == {peer.replica for peer in PEERS if peer != broken}
    assert len(choices.names(now_s=10.0)) == 4
    choices.breakers.begin(broken, 10.0)
    assert len(choices.names(now_s=10.0)) == 3


def test_a_breaker_yields_to_replicas_that_failed_the_request() -> None:
    choices = Choices(*PEERS)
    choices.breakers.fail(PEERS[2], 0.0)
    assert choices.names(PEERS[3]) == {"prefill-0", "prefill-1", "decode-0"}


@pytest.mark.parametrize("ready", [PEERS[:2], PEERS[2:], []])
def test_no_pair_is_picked_if_a_role_has_no_replica(ready: list[Peer]) -> None:
    assert set(Choices(*ready).picks()) == {None}


@pytest.mark.parametrize(
    ("kv", "skip_below_tokens", "roles"),
    [
        ({}, 0, [Role.PREFILL]),
        ({}, 8, [Role.PREFILL, Role.DECODE]),
        ({"prefix_cache": False}, 8, []),
    ],
)
def test_page_keys_are_computed_if_there_is_a_cache(
    kv: dict[str, bool], skip_below_tokens: int, roles: list[Role]
) -> None:
    settings = {"kv": kv, "prefill": {"skip_below_tokens": skip_below_tokens}}
    router = {"prefill_policy": "prefix_aware", "decode_policy": "least_tokens"}
    config = DeployConfig.model_validate(settings | {"router": router})
    breakers = Breakers(max_failures=1, open_s=10.0)
    assert Picker(config, Directory(grace_s=3.0), LoadBook(), breakers).prefix_roles == roles


def picked_with_cached_prompt(config: DeployConfig, tier: Tier) -> Placement | None:
    """Return the choice for a prompt of 256 pages that all replicas have in one tier."""
    directory = Directory(grace_s=3.0)
    directory.update(table_of(*map(entry_of, PEERS)), 0.0)
    picker = Picker(config, directory, LoadBook(), Breakers(max_failures=1, open_s=10.0), random.Random(0))
    prompt = TokenIds.of(range(16_384))
    ask = GenerateRequest(
        prompt_ids=prompt, sampling=Sampling(), stopping=Stopping(max_tokens=4), page_keys=PromptKeys(prompt, 64, "")
    )
    picker.pages.update(PEERS, 0.0)
    for peer in PEERS:
        events = KvEvents(replica=peer.replica, incarnation=peer.incarnation, number=0, stored=[], removed=[])
        picker.pages.on_kv_events(events, 0.0)
        events = msgspec.structs.replace(events, number=1, stored=page_keys(prompt, 64, ""), tier=tier)
        picker.pages.on_kv_events(events, 0.0)
    return picker.pick(ask, Room(1), frozenset(), 0.0)


@pytest.mark.parametrize(("tier", "is_skipped"), [(Tier.DEVICE, True), (Tier.HOST, True), (Tier.STORAGE, False)])
def test_decode_computes_short_prompts_missing_from_its_memory(tier: Tier, *, is_skipped: bool) -> None:
    """Storage could fail to deliver, and decode would then compute a long prompt next to its streams."""
    config = DeployConfig.model_validate({"kv": {"page_size": 64}, "prefill": {"skip_below_tokens": 128}})
    placement = picked_with_cached_prompt(config, tier)
    assert placement is not None
    assert (placement.prefill is None) == is_skipped


@pytest.mark.parametrize("tier", Tier)
def test_known_tokens_are_those_of_all_tiers_without_the_last_page(tier: Tier) -> None:
    placement = picked_with_cached_prompt(DeployConfig.model_validate({"kv": {"page_size": 64}}), tier)
    assert placement is not None
    assert placement.known == KnownTokens(255 * 64, 0 if tier is Tier.STORAGE else 255 * 64)
    assert (placement.cached_tokens == placement.known.total) == (tier is Tier.DEVICE)


def test_a_further_choice_that_is_tried_again_needs_pages_for_its_prompt() -> None:
    config = DeployConfig.model_validate({"decode": {"max_fill": 1.0}, "router": {"decode_policy": "round_robin"}})
    directory, load = Directory(grace_s=3.0), LoadBook()
    directory.update(table_of(entry_of(PEERS[0]), *(entry_of(peer, total_pages=10) for peer in PEERS[2:])), 0.0)
    load.add(PEERS[2], 30)
    picker = Picker(config, directory, load, Breakers(max_failures=1, open_s=10.0), random.Random(0))
    stopping = Stopping(max_tokens=4)
    ask = GenerateRequest(prompt_ids=TokenIds.of(range(8)), sampling=Sampling(), stopping=stopping, shares_prompt=True)
    picks = [picker.pick(ask, Room(1), frozenset(), 0.0) for _ in range(4)]
    assert [pick.decode for pick in picks if pick] == [PEERS[3]] * 4
    assert ask.decode_len == 4


def test_a_tenant_leaves_room_for_others_at_every_decode_replica() -> None:
    config = DeployConfig.model_validate({"decode": {"max_fill": 10.0}})
    directory, load = Directory(grace_s=3.0), LoadBook()
    directory.update(table_of(entry_of(PEERS[0]), entry_of(PEERS[2], total_pages=10)), 0.0)
    picker = Picker(config, directory, load, Breakers(max_failures=1, open_s=10.0), random.Random(0))
    capacity = 10 * (directory.pool_tokens_of(PEERS[2]) or 0)

    def ask(tenant: str, num_tokens: int) -> GenerateRequest:
        return GenerateRequest(
            prompt_ids=TokenIds.of([1]),
            sampling=Sampling(),
            stopping=Stopping(max_tokens=num_tokens - 1),
            tenant=tenant,
        )

    load.add(PEERS[2], capacity * 8 // 10 - 5, "mallory")
    assert picker.why_full([ask("mallory", 5)], 0.0) is None
    load.add(PEERS[2], 5, "mallory")
    assert "or those of this key 4 times what is free" in (picker.why_full([ask("mallory", 5)], 0.0) or "")
    assert picker.why_full([ask("alice", capacity // 10)], 0.0) is None
    load.add(PEERS[2], capacity // 10, "alice")
    assert picker.why_full([ask("alice", 2)], 0.0) is None
    assert picker.why_full([ask("bob", capacity // 20)], 0.0) is None
    for tenant, held in (("mallory", capacity * 8 // 10 - 5), ("mallory", 5), ("alice", capacity // 10)):
        load.remove(PEERS[2], held, tenant)
    assert load.tokens_of(PEERS[2], "mallory") == 0
    load.add(PEERS[2], capacity * 9 // 10)
    assert picker.why_full([ask(ANYBODY, capacity // 10)], 0.0) is None, "without keys, there are no others"


def test_router_processes_share_each_replicas_capacity() -> None:
    config = DeployConfig.model_validate({"prefill": {"max_queued_tokens": 10}})
    directory = Directory(grace_s=3.0)
    directory.update(table_of(*map(entry_of, PEERS)), 0.0)
    for share, limit in zip(router_shares(3), (4, 3, 3), strict=True):
        load = LoadBook()
        picker = Picker(config, directory, load, Breakers(max_failures=1, open_s=10.0), share=share)
        for peer in PEERS[:2]:
            load.add(peer, limit - 1)
        assert picker.why_full([ASK], 0.0) is None
        for peer in PEERS[:2]:
            load.add(peer, 1)
        assert f"{limit} prompt tokens or more" in (picker.why_full([ASK], 0.0) or "")


PEER, OTHER = peer_of("decode-0"), peer_of("decode-1")


def opened() -> Breakers:
    """Return a breaker that opened at 1.0 for ten seconds."""
    breakers = Breakers(max_failures=2, open_s=10.0)
    breakers.fail(PEER, 0.0)
    breakers.fail(PEER, 1.0)
    return breakers


def test_it_opens_after_failures_in_a_row() -> None:
    breakers = Breakers(max_failures=2, open_s=10.0)
    for _ in range(3):
        breakers.fail(PEER, 0.0)
        assert breakers.allows(PEER, 0.0)
        breakers.forget(PEER)
    breakers.fail(PEER, 0.0)
    breakers.fail(PEER, 0.0)
    assert breakers.state(PEER, 0.0) is BreakerState.OPEN
    assert not breakers.allows(PEER, 9.9)
    assert breakers.allows(OTHER, 0.0)


def test_a_single_request_tries_it() -> None:
    breakers = opened()
    assert breakers.state(PEER, 11.0) is BreakerState.HALF_OPEN
    assert breakers.allows(PEER, 11.0)
    breakers.begin(PEER, 11.0)
    assert not breakers.allows(PEER, 20.9)
    assert breakers.allows(PEER, 21.0)


def test_a_success_closes_it() -> None:
    breakers = opened()
    breakers.begin(PEER, 11.0)
    breakers.forget(PEER)
    assert breakers.state(PEER, 11.0) is BreakerState.CLOSED
    breakers.fail(PEER, 12.0)
    assert breakers.allows(PEER, 12.0)


def test_one_failure_opens_it_again() -> None:
    breakers = opened()
    breakers.begin(PEER, 11.0)
    breakers.fail(PEER, 12.0)
    assert breakers.state(PEER, 21.9) is BreakerState.OPEN
    assert breakers.state(PEER, 22.0) is BreakerState.HALF_OPEN


def test_a_restarted_replica_is_a_new_one() -> None:
    breakers = opened()
    assert breakers.allows(peer_of("decode-0", 2), 1.0)
    breakers.forget(PEER)
    assert breakers.allows(PEER, 1.0)


def test_decode_alone_computes_a_probe_and_not_the_replica_that_it_checks() -> None:
    directory = Directory(grace_s=3.0)
    directory.update(table_of(*map(entry_of, PEERS)), 0.0)
    picker = Picker(DeployConfig(), directory, LoadBook(), Breakers(max_failures=1, open_s=10.0), random.Random(0))
    probe = msgspec.structs.replace(ASK, is_probe=True)
    picks = [picker.pick(probe, Room(1), frozenset([PEERS[2]]), 0.0) for _ in range(4)]
    assert picks == [Placement(prefill=None, decode=PEERS[3])] * 4
