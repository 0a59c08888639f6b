"""The input of one simulation: the cluster, its requests and its faults."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from cluster.spec.hicache_config import PrefetchPolicy, WritePolicy
from cluster.spec.lifecycle import Role
from cluster.spec.registry import KvOwnership, PageFilter, TransferMode, Verify
from cluster.spec.strategy import DpPolicy
from workers.scheduler.decode_request import QUARANTINE_LIMIT

PAGE_SIZE = 4
VOCAB_SIZE = 251

MACHINE_LOST_S = 15.0
"""A lost machine cannot be reached for so much longer than the fault says, at most."""


class FaultKind(StrEnum):
    """Faults that begin at a given time."""

    KILL = "kill"
    """One process of a member dies."""
    PAUSE = "pause"
    """All processes of a replica stand still for a while."""
    PARTITION = "partition"
    """Two machines cannot reach each other for a while."""
    LOSE_MACHINE = "lose_machine"
    """A replica's machine cannot be reached from home; its processes live on, or stand still for a part of it."""
    DRAIN = "drain"
    """A replica is asked to take no new requests."""
    RESTART = "restart"
    """An operator orders a rolling restart of a replica."""
    SCALE = "scale"
    """An operator orders replicas of a role up to this one."""
    STAND_BY = "stand_by"
    """An operator lets a replica drain, and later take requests again."""


ORDERS = frozenset({FaultKind.RESTART, FaultKind.SCALE, FaultKind.STAND_BY})
"""Nothing goes wrong in these."""


_MILD = frozenset({FaultKind.KILL, FaultKind.PAUSE, FaultKind.DRAIN, FaultKind.LOSE_MACHINE})
_LOSSY_TIMEOUT_S = 600.0
"""Time for every attempt of every request, one after the other, though each loses some messages."""
_MAX_MILD_FAULTS = 3
"""The number of a request's further attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault at one time."""

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
    """Rates at which messages between machines, writes and tier jobs go wrong, from 0 to 1."""

    drop: float = 0.0
    duplicate: float = 0.0
    """A second copy arrives later."""
    reorder: float = 0.0
    """Later messages of the same sender overtake it."""
    stale: float = 0.0
    """A late word of the ticket before it follows a ticket."""
    fail_write: float = 0.0
    slow_write: float = 0.0
    flip: float = 0.0
    """A page arrives with one bit changed; only where pages are verified."""
    fail_move: float = 0.0
    """A tier job fails on one rank."""
    slow_move: bool = False
    """Some tier jobs take seconds."""
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
    dp_rank: int | None = None
    """The DP rank that the client wants."""
    enough: int | None = None
    """Tokens after which the client's stop string is complete."""
    is_choice: bool = False
    """Another choice of the request before it, which came at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    """Host memory, and storage that outlives replicas."""

    host_pages: int
    """In each rank's host memory."""
    write: WritePolicy
    prefetch: PrefetchPolicy
    shares_host: bool = True
    """Ranks of a replica can read each other's host memory even when its owner is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The cluster."""

    num_prefill: int = 1
    num_decode: int = 1
    cp: int = 1
    dp: int = 1
    """DP ranks of prefill; each has requests and pages of its own."""
    tp: int = 1
    """TP ranks of prefill; cp and pp are prefill's, too."""
    pp: int = 1
    decode_dp: int = 1
    decode_tp: int = 1
    decode_pp: int = 1
    num_layers: int = 4
    has_extra_group: bool = False
    """Whether layers store a second KV group, of one head."""
    num_kv_heads: int = 2
    """Ranks of a larger TP group share heads."""
    dp_policy: DpPolicy = DpPolicy.LEAST_TOKENS
    prefill_pages: int = 24
    """Pages of one DP rank of prefill; sharded, its ranks divide them evenly."""
    decode_pages: int = 24
    chunk_tokens: int = 16
    mode: TransferMode = TransferMode.ALL_RANKS
    page_filter: PageFilter = PageFilter.MODULAR
    ownership: KvOwnership = KvOwnership.REPLICATED
    """Where prefill keeps KV; sharded, every rank sends the pages it owns."""
    prefix_cache: bool = True
    tiers: TierShape | None = None
    """Below the device caches; needs the prefix cache."""
    skip_below_tokens: int = 0
    """Decode computes shorter prompts itself."""
    settle_s: float = 0.0
    """How long bytes are on their way after their sender died or failed."""
    reuses_addresses: bool = False
    """A replica that starts again listens where it did before."""
    verify: Verify = Verify.COUNTS
    transfer_timeout_s: float = 5.0
    quarantine_limit: float = QUARANTINE_LIMIT
    request_timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Everything that decides a run: two runs of one scenario are the same."""

    seed: int
    shape: Shape
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    hazards: Hazards = Hazards()

    @property
    def is_calm(self) -> bool:
        """Nothing goes wrong, so every request must be answered, whatever an operator orders."""
        return self.hazards == Hazards() and all(fault.kind in ORDERS for fault in self.faults)

    @cached_property
    def is_mild(self) -> bool:
        """A replica of each role, the router and the network are spared, so every request must be answered."""
        struck = {fault.member for fault in self.faults} - {"bootstrap"}
        spared = set(self.members) - struck
        return (
            self.hazards == Hazards()
            and all(fault.kind in _MILD for fault in self.faults)
            and len(self.faults) <= _MAX_MILD_FAULTS
            and "router" in spared
            and all(any(name.startswith(role) for name in spared) for role in Role)
        )

    @property
    def is_lossy(self) -> bool:
        """Messages are lost, and nothing else goes wrong, so no request may be ended by its deadline."""
        hazards = self.hazards
        on_messages = Hazards(
            drop=hazards.drop, duplicate=hazards.duplicate, reorder=hazards.reorder, stale=hazards.stale
        )
        return hazards.drop > 0 and not self.faults and hazards == on_messages

    @property
    def request_timeout_s(self) -> float:
        """When the router gives a request up."""
        return _LOSSY_TIMEOUT_S if self.is_lossy else self.shape.request_timeout_s

    @property
    def members(self) -> list[str]:
        """Return the names of all that the supervisor runs."""
        prefill = [f"prefill-{index}" for index in range(self.shape.num_prefill)]
        return ["bootstrap", "router", *prefill, *(f"decode-{index}" for index in range(self.shape.num_decode))]
