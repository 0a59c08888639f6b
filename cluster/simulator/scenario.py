"""Input of one simulation: the cluster, its requests and its faults."""

from dataclasses import dataclass, replace
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
"""Maximum extra time, beyond the fault's duration, for which a lost machine stays unreachable."""
_LOSSY_TIMEOUT_S = 600.0
"""Timeout that is long enough for all attempts, one after another, each with some lost messages."""
_MAX_MILD_FAULTS = 3
"""Maximum number of faults in a mild scenario: few enough for a request's retries."""


class FaultKind(StrEnum):
    """Kind of a fault or of an operator command."""

    KILL = "kill"
    """One process of a member dies."""
    PAUSE = "pause"
    """All processes of a replica pause for a while."""
    PARTITION = "partition"
    """Two machines cannot reach each other for a while."""
    ONE_WAY = "one_way"
    """Messages from one machine do not reach another for a while, but those in the other direction do."""
    LOSE_MACHINE = "lose_machine"
    """A replica's machine becomes unreachable from home. Its processes continue, or pause for a while."""
    STALL = "stall"
    """The loop of one process freezes for a while, and then handles everything that has arrived meanwhile."""
    HANG = "hang"
    """A process takes connections and messages, but reads none of them until it is replaced."""
    DRAIN = "drain"
    """A replica is drained."""
    RESTART = "restart"
    """An operator restarts a replica with ``--rolling``."""
    SCALE = "scale"
    """An operator scales a role up or down, so that this replica becomes its last one."""
    STAND_BY = "stand_by"
    """An operator drains a replica and resumes it later."""


COMMANDS = frozenset({FaultKind.RESTART, FaultKind.SCALE, FaultKind.STAND_BY})
"""Faults that are operator commands; no component fails in them."""
MILD = (
    FaultKind.ONE_WAY,
    FaultKind.KILL,
    FaultKind.PAUSE,
    FaultKind.DRAIN,
    FaultKind.LOSE_MACHINE,
    FaultKind.STALL,
    FaultKind.HANG,
)
"""Faults that may occur in a mild scenario."""
OBSERVERS = ("bootstrap", "driver")
"""Processes that judge others and serve no requests. If only they stall, nothing else may fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: FaultKind
    at_s: float
    member: str
    other: str = ""
    """Other side of a partition. ``home`` is where the supervisor, the bootstrap service and the router run."""
    rank: int = 0
    """Rank of the process that dies, stalls or hangs."""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """Random disturbances of messages between machines, of writes and of tier jobs. Rates are from 0 to 1."""

    drop: float = 0.0
    duplicate: float = 0.0
    """Rate of messages that arrive twice."""
    reorder: float = 0.0
    """Rate of messages that the sender's later messages overtake."""
    stale: float = 0.0
    """Rate of tickets that are followed by an old answer, one from or for an earlier incarnation."""
    fail_write: float = 0.0
    slow_write: float = 0.0
    flip: float = 0.0
    """Rate of pages that arrive with one wrong bit; above 0 only if pages are verified."""
    fail_move: float = 0.0
    """Rate of tier jobs that fail on one rank."""
    slow_move: bool = False
    """True if some tier jobs take seconds."""
    slowness: float = 1.0
    """Factor for the duration of steps and writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    at_s: float
    prompt: bytes
    """One byte per token."""
    max_tokens: int
    patience_s: float | None = None
    """Time after which the client disconnects."""
    dp_rank: int | None = None
    """DP rank that the client requests."""
    enough: int | None = None
    """Number of tokens after which the client's stop string is complete; None if no stop string occurs."""
    is_choice: bool = False
    """Whether this is a further choice of the previous request; both arrive at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    host_pages: int
    write: WritePolicy
    prefetch: PrefetchPolicy
    shares_host: bool = True
    """True if the ranks of a replica can read each other's host memory even after its owner has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Size and settings of the cluster."""

    num_prefill: int = 1
    num_decode: int = 1
    cp: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    """Size of the PP axis in prefill; ``cp``, ``dp`` and ``tp`` are sizes in prefill too."""
    decode_dp: int = 1
    decode_tp: int = 1
    decode_pp: int = 1
    num_layers: int = 4
    has_extra_group: bool = False
    """True if every second layer also stores a KV group with one head."""
    window: int | None = None
    """Number of latest tokens that every second layer sees; None if every layer sees all tokens."""
    num_kv_heads: int = 2
    """Number of KV heads. In a TP group with more ranks than this, ranks share heads."""
    dp_policy: DpPolicy = DpPolicy.LEAST_TOKENS
    prefill_pages: int = 24
    """Number of pages per DP rank of prefill. If the KV is sharded, the CP ranks divide them evenly."""
    decode_pages: int = 24
    chunk_tokens: int = 16
    mode: TransferMode = TransferMode.ALL_RANKS
    ownership: KvOwnership = KvOwnership.REPLICATED
    prefix_cache: bool = True
    tiers: TierShape | None = None
    """Tiers below the device cache, if any. They need the prefix cache."""
    skip_below_tokens: int = 0
    """Number of uncached prompt tokens below which decode computes the prompt."""
    settle_s: float = 0.0
    """Time for which bytes can still arrive after their sender has died or failed."""
    reuses_addresses: bool = False
    """True if a restarted replica has the same addresses as before."""
    verify: Verify = Verify.COUNTS
    transfer_timeout_s: float = 5.0
    quarantine_limit: float = QUARANTINE_LIMIT
    request_timeout_s: float = 45.0


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Complete input of a run. Two runs of one scenario are identical."""

    seed: int
    shape: Shape
    requests: tuple[ClientRequest, ...]
    faults: tuple[Fault, ...] = ()
    hazards: Hazards = Hazards()

    @property
    def is_calm(self) -> bool:
        """Return whether at most observers stall. Every request must then be answered, whatever an operator does."""
        return self.hazards == Hazards() and all(
            fault.kind in COMMANDS or (fault.kind is FaultKind.STALL and fault.member in OBSERVERS)
            for fault in self.faults
        )

    @cached_property
    def is_mild(self) -> bool:
        """Return whether faults spare the router, the network and a replica of each role.

        Every request must then be answered.
        """
        faulty = {name for fault in self.faults for name in (fault.member, fault.other)} - {*OBSERVERS, "home"}
        healthy = set(self.members) - faulty
        return (
            self.hazards == Hazards()
            and all(fault.kind in MILD for fault in self.faults)
            and len(self.faults) <= _MAX_MILD_FAULTS
            and "router" in healthy
            and all(any(name.startswith(role) for name in healthy) for role in Role)
        )

    @property
    def is_lossy(self) -> bool:
        """Return whether lost messages are the only faults. No deadline may then end a request."""
        others = replace(self.hazards, drop=0.0, duplicate=0.0, reorder=0.0, stale=0.0)
        return self.hazards.drop > 0 and not self.faults and others == Hazards()

    @property
    def request_timeout_s(self) -> float:
        return _LOSSY_TIMEOUT_S if self.is_lossy else self.shape.request_timeout_s

    @property
    def members(self) -> list[str]:
        prefill = [f"prefill-{index}" for index in range(self.shape.num_prefill)]
        return ["bootstrap", "router", *prefill, *(f"decode-{index}" for index in range(self.shape.num_decode))]
