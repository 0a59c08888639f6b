"""One open request: its stages and legal moves, and what ``router.dispatch`` asks to be done about it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from cluster.spec.ids import Room
from cluster.spec.lifecycle import Moves
from cluster.spec.messages import Cancel, Output, Peer, Submit
from cluster.spec.sampling import FinishReason, Sampling, Stopping, TokenLogprobs
from cluster.spec.tiers import CachedTokens


class Stage(Enum):
    """Where an open request stands."""

    WAITING = "waiting"
    """Both legs have the Submit; no token came yet."""
    STREAMING = "streaming"
    """The decode leg sends tokens; the prefill leg is done."""
    FINISHED = "finished"
    """The answer is whole."""
    FAILED = "failed"
    """The answer will not be whole; the client is told why."""
    CANCELLED = "cancelled"
    """Nobody waits for the answer."""


ENDS = frozenset({Stage.FINISHED, Stage.FAILED, Stage.CANCELLED})
"""Stages of a request that is not open any more."""

MOVES: Moves[Stage] = {
    Stage.WAITING: ENDS | {Stage.STREAMING},
    Stage.STREAMING: ENDS,
    Stage.FINISHED: frozenset(),
    Stage.FAILED: frozenset(),
    Stage.CANCELLED: frozenset(),
}


class Cause(StrEnum):
    """Why a request failed."""

    REFUSED = "refused"
    """A leg cannot do it; another attempt would fail too."""
    REPLICA_FAILED = "replica_failed"
    """A leg failed; another attempt may succeed."""
    REPLICA_LOST = "replica_lost"
    """A leg's replica is gone."""
    TIMED_OUT = "timed_out"
    """The request's deadline passed."""
    STOPPED = "stopped"
    """The router stops."""
    SLOW_READER = "slow_reader"
    """The client left too much of its stream unread."""
    BROKEN_OUTPUT = "broken_output"
    """The tokens that came are not one answer: one is missing, or there are too many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send a message."""

    address: str
    message: Submit | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Give tokens to the client."""

    room: Room
    token_ids: list[int]
    finish: FinishReason | None
    """Set with the last tokens."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of every token, where they were asked for."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Of every token of the prompt but the first, where they were asked for; with the first tokens."""
    cached: CachedTokens = field(default_factory=CachedTokens)
    """Set with the first tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Tell the client that there will be no (more) answer."""

    room: Room
    cause: Cause
    reason: str


Action = Send | Emit | Fail


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client wants to have generated."""

    prompt_ids: list[int]
    sampling: Sampling
    stopping: Stopping
    cache_salt: str = ""
    """Only requests with the same salt share cached pages."""
    priority: int = 0
    """Lower values have their turn earlier."""
    timed: bool = False
    """Every rank keeps a timeline of it."""
    dp_rank: int | None = None
    """The DP rank that the client wants; None for any."""
    session: str = ""
    """What the client calls the conversation it belongs to; empty for none."""
    page_keys: Sequence[bytes] = ()
    """Of the pages that may come from a cache, where a policy wants to know."""
    shares_prompt: bool = False
    """Another choice of the prompt before it, which alone is sent to prefill."""


@dataclass(slots=True, kw_only=True)
class Flight:
    """One open request."""

    room: Room
    prefill: Peer | None
    decode: Peer
    prompt_len: int
    """Prompt tokens that decode keeps for it alone."""
    prefill_len: int
    """Prompt tokens that prefill is expected to compute."""
    max_tokens: int
    has_logprobs: bool
    """Every token must come with them."""
    deadline_s: float
    stage: Stage = Stage.WAITING
    num_received: int = 0
    """Tokens given to the client."""

    @property
    def legs(self) -> list[Peer]:
        """The replicas that work on it."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]

    @property
    def decode_tokens(self) -> int:
        """The longest that prompt and answer can become."""
        return self.prompt_len + self.max_tokens

    def problem(self, output: Output) -> str | None:
        """Why these tokens cannot follow the ones before; None when they can."""
        end = output.first_index + len(output.token_ids)
        if output.first_index > self.num_received:
            return f"output {self.num_received} is missing; {output.first_index} came next"
        if end > self.max_tokens:
            return f"{end} tokens came, {self.max_tokens} were asked for"
        if output.finish is not None and end < self.num_received:
            return f"the answer ended at {end} tokens, but {self.num_received} came before"
        if self.has_logprobs and len(output.logprobs) != len(output.token_ids):
            return f"{len(output.token_ids)} tokens came with log-probabilities of {len(output.logprobs)}"
        return None
