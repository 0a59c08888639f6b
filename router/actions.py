"""What ``router.dispatch`` asks to be done about open requests, and why one failed."""

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.spec.ids import Room
from cluster.spec.messages import Cancel, PhaseTimes, Submit
from cluster.spec.sampling import FinishReason, TokenLogprobs
from cluster.spec.tiers import CachedTokens
from router.flight import Pair


class Cause(StrEnum):
    """Why a request failed."""

    REFUSED = "refused"
    """A leg cannot do it; another attempt would fail too."""
    REPLICA_FAILED = "replica_failed"
    """A leg failed; another attempt may succeed."""
    REPLICA_LOST = "replica_lost"
    """A leg's replica is gone."""
    NO_REPLICA = "no_replica"
    """An attempt failed, and no replica of a role is left for another."""
    TIMED_OUT = "timed_out"
    """The request's deadline passed."""
    STOPPED = "stopped"
    """The router stops."""
    SLOW_READER = "slow_reader"
    """The client left too much of its stream unread."""
    BROKEN_OUTPUT = "broken_output"
    """The tokens that came are not one answer: one is missing, or there are too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An attempt begins."""

    room: Room
    attempt: Room
    """Its own room."""
    pair: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Call ``expire`` then."""

    until_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message."""

    address: str
    message: Submit | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Give tokens to the client."""

    room: Room
    """Of the request, whichever attempt gave them."""
    token_ids: list[int]
    finish: FinishReason | None
    """Set with the last tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of every token, where they were asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of every token of the prompt but the first, where they were asked for; with the first tokens."""
    cached: CachedTokens = field(default_factory=CachedTokens)
    """Set with the first tokens."""
    phases: PhaseTimes | None = None
    """What the replicas say of the time before the first tokens; set with those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Tell the client that there will be no (more) answer."""

    room: Room
    cause: Cause
    reason: str


Action = Place | Wait | Send | Emit | Fail
