"""What one simulation is about: the cluster, its requests and its faults, all drawn from one seed."""

from dataclasses import dataclass
from enum import StrEnum
from random import Random

from cluster.spec.registry import KvOwnership, PageFilter, TransferMode

PAGE_SIZE = 4
VOCAB_SIZE = 251

MACHINE_LOST_S = 15.0
"""Longest silence before a machine counts as lost."""


class FaultKind(StrEnum):
    """What can go wrong at a given moment."""

    KILL = "kill"
    """One process of a member dies."""
    PAUSE = "pause"
    """All processes of a replica stand still for a while."""
    PARTITION = "partition"
    """Two machines cannot reach each other for a while."""
    LOSE_MACHINE = "lose_machine"
    """A replica's machine cannot be reached by the supervisor, bootstrap and router; its processes may live on."""
    DRAIN = "drain"
    """A replica is asked to take no new requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault at one moment."""

    kind: FaultKind
    at_s: float
    member: str
    other: str = ""
    """The other side of a partition; ``home`` is where supervisor, bootstrap and router run."""
    rank: int = 0
    """Which process of the member dies."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """What goes wrong all the time: how often, in parts of one, with a message between machines or with a write."""

    drop: float = 0.0
    duplicate: float = 0.0
    """A second copy arrives later."""
    reorder: float = 0.0
    """Later messages of the same sender overtake it."""
    stale: float = 0.0
    """A late word of the ticket before it follows a ticket."""
    fail_write: float = 0.0
    slow_write: float = 0.0
    slowness: float = 1.0
    """Factor on the time of steps and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request of one client."""

    at_s: float
    prompt: bytes
    """One byte a token."""
    max_tokens: int
    patience_s: float | None = None
    """The client leaves so long after it came."""
    enough: int | None = None
    """Tokens after which the client's stop string is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The cluster."""

    num_prefill: int = 1
    num_decode: int = 1
    cp: int = 1
    prefill_pages: int = 24
    """Of a whole prefill replica; sharded, its ranks divide them evenly."""
    decode_pages: int = 24
    chunk_tokens: int = 16
    mode: TransferMode = TransferMode.ALL_RANKS
    page_filter: PageFilter = PageFilter.MODULAR
    ownership: KvOwnership = KvOwnership.REPLICATED
    """Where prefill keeps KV; sharded, every rank sends the pages it owns."""
    prefix_cache: bool = True
    settle_s: float = 0.0
    """How long bytes are on their way after their sender died or failed."""
    reuses_addresses: bool = False
    """A replica that starts again listens where it did before."""
    transfer_timeout_s: float = 10.0
    request_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that decides a run: two runs of one scenario are the same."""

    seed: int
    shape: Shape
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    hazards: Hazards = Hazards()

    @property
    def is_calm(self) -> bool:
        """Nothing goes wrong, so every request must be answered."""
        return not self.faults and self.hazards == Hazards()

    @property
    def members(self) -> list[str]:
        """What the supervisor runs."""
        prefill = [f"prefill-{index}" for index in range(self.shape.num_prefill)]
        return ["bootstrap", "router", *prefill, *(f"decode-{index}" for index in range(self.shape.num_decode))]


def draw_scenario(seed: int) -> Scenario:
    """The scenario of a seed; one of eight is calm."""
    random = Random(seed)
    shape = _draw_shape(random)
    asks = _draw_asks(random, shape)
    if random.random() < 0.125:
        return Scenario(seed=seed, shape=shape, asks=asks)
    members = Scenario(seed=seed, shape=shape, asks=()).members
    faults = tuple(_draw_fault(random, members, shape) for _ in range(random.randint(0, 4)))
    return Scenario(seed=seed, shape=shape, asks=asks, faults=faults, hazards=_draw_hazards(random))


def _draw_shape(random: Random) -> Shape:
    cp = random.randint(1, 4)
    is_sharded = cp > 1 and random.random() < 0.3
    return Shape(
        num_prefill=random.randint(1, 2),
        num_decode=random.randint(1, 2),
        cp=cp,
        prefill_pages=random.randint(3, 7) * cp if is_sharded else random.randint(10, 30),
        decode_pages=random.randint(10, 24),
        chunk_tokens=random.choice([3, 8, 16, 64]),
        mode=TransferMode.ALL_RANKS if is_sharded else random.choice(list(TransferMode)),
        page_filter=PageFilter.MODULAR if is_sharded else random.choice(list(PageFilter)),
        ownership=KvOwnership.SHARDED if is_sharded else KvOwnership.REPLICATED,
        prefix_cache=random.random() < 0.7,
        settle_s=random.choice([0.0, 2.0]),
        reuses_addresses=random.random() < 0.5,
    )


def _draw_asks(random: Random, shape: Shape) -> tuple[Ask, ...]:
    """Prompts that begin alike now and then, and that fit into the smaller pool with their answers."""
    num_tokens = min(shape.prefill_pages, shape.decode_pages) * PAGE_SIZE
    beginnings = [_draw_tokens(random, num_tokens // 3) for _ in range(2)]
    asks = []
    for _ in range(random.randint(1, 10)):
        max_tokens = random.randint(1, 12)
        shared = random.choice(beginnings)[: random.randint(0, num_tokens // 3)] if random.random() < 0.6 else b""
        own = _draw_tokens(random, random.randint(1, num_tokens - max_tokens - len(shared)))
        asks.append(
            Ask(
                at_s=random.uniform(0, 8),
                prompt=shared + own,
                max_tokens=max_tokens,
                patience_s=random.uniform(0, 1) if random.random() < 0.15 else None,
                enough=random.randint(1, max_tokens) if random.random() < 0.1 else None,
            )
        )
    return tuple(asks)


def _draw_tokens(random: Random, count: int) -> bytes:
    return bytes(random.randrange(VOCAB_SIZE) for _ in range(count))


def _draw_fault(random: Random, members: list[str], shape: Shape) -> Fault:
    kind = random.choices(list(FaultKind), weights=[5, 3, 3, 1, 1])[0]
    replicas = members[2:]
    at_s = random.uniform(0, 10)
    if kind is FaultKind.KILL:
        return Fault(kind=kind, at_s=at_s, member=random.choice(members), rank=random.randrange(shape.cp))
    if kind is FaultKind.PARTITION:
        member, other = random.sample([*replicas, "home"], 2)
        return Fault(kind=kind, at_s=at_s, member=member, other=other, duration_s=random.uniform(0.1, 12))
    return Fault(kind=kind, at_s=at_s, member=random.choice(replicas), duration_s=random.uniform(0.1, 12))


def _draw_hazards(random: Random) -> Hazards:
    def rate() -> float:
        return random.choice([0.0, 0.0, 0.02, 0.1])

    return Hazards(
        drop=rate(),
        duplicate=rate(),
        reorder=rate(),
        stale=rate(),
        fail_write=rate(),
        slow_write=rate(),
        slowness=random.choice([1.0, 1.0, 10.0, 30.0]),
    )
