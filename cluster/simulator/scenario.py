"""Input of one simulation: the cluster, its requests and its faults."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from cluster.spec.hicache_config import PrefetchPolicy, WritePolicy
from cluster.spec.ids import Role
from cluster.spec.registry import KvOwnership, TransferMode, Verify
from cluster.spec.strategy import DpPolicy
from workers.scheduler.decode_request import QUARANTINE_LIMIT

PAGE_SIZE = 4
VOCAB_SIZE = 251

MACHINE_LOST_S = 15.0
"""Maximum time for which a lost machine stays unreachable beyond the fault's duration."""
_LOSSY_TIMEOUT_S = 600.0
"""Timeout long enough for all attempts of all requests in sequence, even if each loses some messages."""
_MAX_MILD_FAULTS = 3
"""Maximum number of faults in a mild scenario; a request has as many retries."""


class FaultKind(StrEnum):
    """Kind of a fault or operator command with a start time."""

    KILL = "kill"
    """One process of a member dies."""
    PAUSE = "pause"
    """All processes of a replica pause for a while."""
    PARTITION = "partition"
    """Two machines cannot reach each other for a while."""
    LOSE_MACHINE = "lose_machine"
    """A replica's machine becomes unreachable from home; its processes continue, or pause for a part of that time."""
    DRAIN = "drain"
    """A replica is drained."""
    RESTART = "restart"
    """An operator requests a rolling restart of a replica."""
    SCALE = "scale"
    """An operator scales a role up to this replica."""
    STAND_BY = "stand_by"
    """An operator drains a replica and resumes it later."""


COMMANDS = frozenset({FaultKind.RESTART, FaultKind.SCALE, FaultKind.STAND_BY})
"""Kinds in which nothing fails."""
_MILD = frozenset({FaultKind.KILL, FaultKind.PAUSE, FaultKind.DRAIN, FaultKind.LOSE_MACHINE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Fault with its start time."""

    kind: FaultKind
    at_s: float
    member: str
    other: str = ""
    """Other side of a partition; ``home`` is where supervisor, bootstrap and router run."""
    rank: int = 0
    """Rank of the process that dies."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """Rates at which messages between machines, writes and tier jobs fail, from 0 to 1."""

    drop: float = 0.0
    duplicate: float = 0.0
    """Rate of messages that arrive twice."""
    reorder: float = 0.0
    """Rate of messages that later ones of the same sender overtake."""
    stale: float = 0.0
    """Rate of tickets followed by a late message about the previous ticket."""
    fail_write: float = 0.0
    slow_write: float = 0.0
    flip: float = 0.0
    """Rate of pages that arrive with one bit changed; above 0 only if pages are verified."""
    fail_move: float = 0.0
    """Rate of tier jobs that fail on one rank."""
    slow_move: bool = False
    """Some tier jobs take seconds."""
    slowness: float = 1.0
    """Factor for the duration of steps and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Request of one client."""

    at_s: float
    prompt: bytes
    """Prompt, one byte per token."""
    max_tokens: int
    patience_s: float | None = None
    """Time after which the client leaves."""
    dp_rank: int | None = None
    """DP rank that the client requests."""
    enough: int | None = None
    """Number of tokens after which the client's stop string is complete."""
    is_choice: bool = False
    """True for another choice of the previous request; it arrives at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    """Host memory, and storage that outlives replicas."""

    host_pages: int
    """Pages in each rank's host memory."""
    write: WritePolicy
    prefetch: PrefetchPolicy
    shares_host: bool = True
    """Ranks of a replica can read each other's host memory even if its owner is dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size and settings of the cluster."""

    num_prefill: int = 1
    num_decode: int = 1
    cp: int = 1
    dp: int = 1
    """Number of prefill's DP ranks; each has its own requests and pages."""
    tp: int = 1
    """Number of prefill's TP ranks; cp and pp are also those of prefill."""
    pp: int = 1
    decode_dp: int = 1
    decode_tp: int = 1
    decode_pp: int = 1
    num_layers: int = 4
    has_extra_group: bool = False
    """Some layers store a second KV group with one head."""
    window: int | None = None
    """Number of tokens that every second layer sees; None if it sees all."""
    num_kv_heads: int = 2
    """Number of KV heads; ranks of a larger TP group share heads."""
    dp_policy: DpPolicy = DpPolicy.LEAST_TOKENS
    prefill_pages: int = 24
    """Number of pages of one DP rank of prefill; with sharded KV, its ranks divide them evenly."""
    decode_pages: int = 24
    chunk_tokens: int = 16
    mode: TransferMode = TransferMode.ALL_RANKS
    ownership: KvOwnership = KvOwnership.REPLICATED
    """Location of prefill's KV; with sharded KV, every rank sends the pages that it owns."""
    prefix_cache: bool = True
    tiers: TierShape | None = None
    """Tiers below the device cache; they need the prefix cache."""
    skip_below_tokens: int = 0
    """Prompt length below which decode computes the prompt itself."""
    settle_s: float = 0.0
    """Time during which bytes can still arrive after their sender died or failed."""
    reuses_addresses: bool = False
    """A restarted replica listens at its previous addresses."""
    verify: Verify = Verify.COUNTS
    transfer_timeout_s: float = 5.0
    quarantine_limit: float = QUARANTINE_LIMIT
    request_timeout_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Complete input of a run. Two runs of one scenario are identical."""

    seed: int
    shape: Shape
    asks: tuple[Ask, ...]
    faults: tuple[Fault, ...] = ()
    hazards: Hazards = Hazards()

    @property
    def is_calm(self) -> bool:
        """Return whether nothing fails, so that every request must be answered whatever an operator does."""
        return self.hazards == Hazards() and all(fault.kind in COMMANDS for fault in self.faults)

    @cached_property
    def is_mild(self) -> bool:
        """Return whether faults spare the router, the network and a replica of each role.

        Every request must then be answered.
        """
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
        """Return whether only messages are lost, so that no request may end by its deadline."""
        hazards = self.hazards
        on_messages = Hazards(
            drop=hazards.drop, duplicate=hazards.duplicate, reorder=hazards.reorder, stale=hazards.stale
        )
        return hazards.drop > 0 and not self.faults and hazards == on_messages

    @property
    def request_timeout_s(self) -> float:
        return _LOSSY_TIMEOUT_S if self.is_lossy else self.shape.request_timeout_s

    @property
    def members(self) -> list[str]:
        prefill = [f"prefill-{index}" for index in range(self.shape.num_prefill)]
        return ["bootstrap", "router", *prefill, *(f"decode-{index}" for index in range(self.shape.num_decode))]
