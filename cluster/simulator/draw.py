"""Random scenarios: size, load and faults, drawn from a seed."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from cluster.simulator.scenario import (
    COMMANDS,
    MILD,
    OBSERVERS,
    PAGE_SIZE,
    VOCAB_SIZE,
    ClientRequest,
    Fault,
    FaultKind,
    Hazards,
    Scenario,
    Shape,
    TierShape,
)
from cluster.spec.hicache_config import PrefetchPolicy, WritePolicy
from cluster.spec.ids import Role, replica_id
from cluster.spec.registry import KvOwnership, TransferMode, Verify
from cluster.spec.strategy import DpPolicy


def draw_scenario(seed: int) -> Scenario:
    """Return the scenario of a seed. One in eight is calm, though observers may stall, and one in eight is mild."""
    random = Random(seed)
    shape = _draw_shape(random)
    requests = _draw_requests(random, shape)
    members = Scenario(seed=seed, shape=shape, requests=()).members
    kind = random.random()
    if kind < 0.125:
        stalls = tuple(_draw_stall(random, OBSERVERS) for _ in range(random.randint(0, 2)))
        commands = _draw_commands(random, members)
        return Scenario(seed=seed, shape=shape, requests=requests, faults=stalls + commands)
    if kind < 0.25:
        return draw_mild(random, Scenario(seed=seed, shape=shape, requests=requests))
    faults = tuple(_draw_fault(random, members) for _ in range(random.randint(0, 4)))
    hazards = _draw_hazards(random, shape)
    faults += _draw_commands(random, members)
    return Scenario(seed=seed, shape=shape, requests=requests, faults=faults, hazards=hazards)


def draw_mild(random: Random, scenario: Scenario) -> Scenario:
    """Return a scenario with two replicas per role, and faults in the first of them only."""
    shape = replace(scenario.shape, num_prefill=2, num_decode=2)
    faults = [_draw_mild_fault(random) for _ in range(random.randint(1, 3))]
    return replace(scenario, shape=shape, faults=tuple(faults))


def _draw_mild_fault(random: Random) -> Fault:
    kind = random.choice([FaultKind.KILL, *MILD])
    at_s, duration_s = random.uniform(0, 10), random.uniform(0.1, 12)
    members = ["prefill-0", "decode-0"]
    if kind is FaultKind.ONE_WAY:
        member, other = random.sample([*members, "home"], 2)
        # Some outlast every deadline.
        duration_s = random.choice([duration_s, 120.0])
        return Fault(kind=kind, at_s=at_s, member=member, other=other, duration_s=duration_s)
    if kind is FaultKind.STALL:
        members += OBSERVERS
    member = random.choice(members)
    return Fault(kind=kind, at_s=at_s, member=member, rank=random.randrange(8), duration_s=duration_s)


def _draw_shape(random: Random) -> Shape:
    tp, pp, decode_tp, decode_pp = (
        random.choice(sizes) for sizes in ([1, 1, 2, 4], [1, 1, 1, 2], [1, 1, 2, 4], [1, 1, 1, 2])
    )
    cp = random.randint(1, max(1, 4 // (tp * pp)))
    is_sharded = cp > 1 and random.random() < 0.3
    return Shape(
        num_prefill=random.randint(1, 2),
        num_decode=random.randint(1, 2),
        cp=cp,
        dp=random.choice([1, 1, 2]) if cp * tp * pp <= 4 else 1,
        tp=tp,
        pp=pp,
        decode_dp=random.choice([1, 1, 2, 3]) if decode_tp * decode_pp == 1 else random.choice([1, 1, 2]),
        decode_tp=decode_tp,
        decode_pp=decode_pp,
        num_layers=random.randint(2, 6),
        num_kv_heads=random.choice([1, 2, 4]),
        dp_policy=random.choice(list(DpPolicy)),
        prefill_pages=random.randint(3, 7) * cp if is_sharded else random.randint(10, 30),
        decode_pages=random.randint(10, 24),
        chunk_tokens=random.choice([3, 8, 16, 64]),
        mode=TransferMode.ALL_RANKS if is_sharded else random.choice(list(TransferMode)),
        ownership=KvOwnership.SHARDED if is_sharded else KvOwnership.REPLICATED,
        prefix_cache=(prefix_cache := random.random() < 0.7),
        tiers=_draw_tiers(random) if prefix_cache and random.random() < 0.5 else None,
        skip_below_tokens=random.choice([0, 0, 3 * PAGE_SIZE]),
        settle_s=random.choice([0.0, 2.0]),
        reuses_addresses=random.random() < 0.5,
        verify=random.choice(list(Verify)),
        has_extra_group=random.random() < 0.4,
        window=None if is_sharded or random.random() < 0.5 else random.randint(1, 3 * PAGE_SIZE),
    )


def _draw_tiers(random: Random) -> TierShape:
    return TierShape(
        host_pages=random.randint(4, 16),
        write=random.choice(list(WritePolicy)),
        prefetch=random.choice(list(PrefetchPolicy)),
        shares_host=random.random() < 0.7,
    )


def _draw_requests(random: Random, shape: Shape) -> tuple[ClientRequest, ...]:
    """Return requests that fit, with their output, in the smaller of the two pools. Some share a prefix."""
    num_pages = min(shape.prefill_pages, shape.decode_pages) // (1 if shape.window is None else 2)
    num_tokens = num_pages * PAGE_SIZE
    beginnings = [_draw_tokens(random, num_tokens // 3) for _ in range(2)]
    requests = []
    for _ in range(random.randint(1, 10)):
        max_tokens = random.randint(1, 12)
        shared = random.choice(beginnings)[: random.randint(0, num_tokens // 3)] if random.random() < 0.6 else b""
        own = _draw_tokens(random, random.randint(1, num_tokens - max_tokens - len(shared)))
        requests.append(
            ClientRequest(
                at_s=random.uniform(0, 8),
                prompt=shared + own,
                max_tokens=max_tokens,
                dp_rank=random.randrange(3) if random.random() < 0.1 else None,
                patience_s=random.uniform(0, 1) if random.random() < 0.15 else None,
                enough=random.randint(1, max_tokens) if random.random() < 0.1 else None,
            )
        )
        if random.random() < 0.2:
            lengths = [random.randint(1, max_tokens) for _ in range(random.randint(1, 3))]
            requests += [replace(requests[-1], is_choice=True, max_tokens=length, enough=None) for length in lengths]
    return tuple(requests)


def _draw_tokens(random: Random, count: int) -> bytes:
    return bytes(random.randrange(VOCAB_SIZE) for _ in range(count))


def _draw_fault(random: Random, members: list[str]) -> Fault:
    kinds = [kind for kind in FaultKind if kind not in COMMANDS]
    kind = random.choices(kinds, weights=[5, 3, 2, 2, 1, 3, 2, 1])[0]
    replicas = members[2:]
    at_s = random.uniform(0, 10)
    if kind is FaultKind.STALL:
        return _draw_stall(random, [*members, "driver"])
    if kind in (FaultKind.KILL, FaultKind.HANG):
        return Fault(kind=kind, at_s=at_s, member=random.choice(members), rank=random.randrange(8))
    if kind in (FaultKind.PARTITION, FaultKind.ONE_WAY):
        member, other = random.sample([*replicas, "home"], 2)
        return Fault(kind=kind, at_s=at_s, member=member, other=other, duration_s=random.uniform(0.1, 12))
    return Fault(kind=kind, at_s=at_s, member=random.choice(replicas), duration_s=random.uniform(0.1, 12))


def _draw_stall(random: Random, members: Sequence[str]) -> Fault:
    at_s, duration_s = random.uniform(0, 10), random.uniform(0.1, 12)
    member, rank = random.choice(members), random.randrange(8)
    return Fault(kind=FaultKind.STALL, at_s=at_s, member=member, rank=rank, duration_s=duration_s)


def _draw_commands(random: Random, members: list[str]) -> tuple[Fault, ...]:
    if random.random() < 0.6:
        return ()
    return tuple(_draw_command(random, members) for _ in range(random.randint(1, 3)))


def _draw_command(random: Random, members: list[str]) -> Fault:
    kind = random.choice(sorted(COMMANDS))
    if kind is FaultKind.SCALE:
        member = str(replica_id(random.choice(list(Role)), random.randrange(3)))
    else:
        member = random.choice(members[2:])
    return Fault(kind=kind, at_s=random.uniform(0, 8), member=member, duration_s=random.uniform(1, 12))


def _draw_hazards(random: Random, shape: Shape) -> Hazards:
    def rate() -> float:
        return random.choice([0.0, 0.0, 0.02, 0.1])

    return Hazards(
        drop=rate(),
        duplicate=rate(),
        reorder=rate(),
        stale=rate(),
        fail_write=rate(),
        slow_write=rate(),
        flip=rate() if shape.verify is Verify.DIGEST else 0.0,
        fail_move=rate(),
        slow_move=random.random() < 0.3,
        slowness=random.choice([1.0, 1.0, 10.0, 30.0]),
    )
