"""What ``router.dispatch`` asks to be done about open requests, and why one failed."""

from enum import StrEnum

import msgspec

from cluster.spec.ids import Room
from cluster.spec.messages import Cancel, Inquire, PhaseTimes, Submit
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


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt begins."""

    room: Room
    attempt: Room
    """Its own room."""
    pair: Pair


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Call ``expire`` then."""

    until_s: float


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """Send a message."""

    address: str
    message: Submit | Cancel | Inquire


class Emit(msgspec.Struct, frozen=True, kw_only=True):
    """Give tokens to the client."""

    room: Room
    """Of the request, whichever attempt gave them."""
    token_ids: list[int]
    finish: FinishReason | None
    """Set with the last tokens."""
    logprobs: list[TokenLogprobs] = []
    """Of every token, where they were asked for."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Of every token of the prompt but the first, where they were asked for; with the first tokens."""
    cached: CachedTokens = CachedTokens()
    """Set with the first tokens."""
    phases: PhaseTimes | None = None
    """What the replicas say of the time before the first tokens; set with those."""


class Fail(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the client that there will be no (more) answer."""

    room: Room
    cause: Cause
    reason: str


Action = Place | Wait | Send | Emit | Fail
