"""One request inside the router: what it asks for, where it runs, its state, its output, and dispatch's actions."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import NewType

import msgspec

from cluster.spec.errors import Moves
from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.messages import Cancel, Inquire, Output, PhaseTimes, Submit
from cluster.spec.sampling import FinishReason, Sampling, Stopping, TokenLogprobs
from cluster.spec.tiers import CachedTokens
from cluster.spec.wire import TokenIds
from router.page_index import PromptKeys

RequestId = NewType("RequestId", int)
"""One choice of one prompt in this router: the room of its first attempt."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A validated, tokenized request for one choice of one prompt."""

    prompt_ids: TokenIds
    sampling: Sampling
    stopping: Stopping
    cache_salt: str = ""
    """Only requests with the same salt share cached pages."""
    priority: int = 0
    """Lower values are scheduled earlier."""
    traced: bool = False
    """Every rank records a trace of it."""
    dp_rank: int | None = None
    """The DP rank that the client wants; None for any."""
    session: str = ""
    """The client's name for the conversation; empty for none."""
    page_keys: PromptKeys | None = None
    """Keys of the prompt's pages; None where no cache may be used."""
    shares_prompt: bool = False
    """True if another choice, opened just before, brings the same prompt to decode."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a request on one replica of each role, in a room of its own."""

    room: Room
    prefill: Peer | None
    """None where decode computes what it lacks of the prompt."""
    decode: Peer
    cached_tokens: int = 0
    """Prompt tokens that prefill is expected to find in its cache."""
    prompt_of: Room | None = None
    """The attempt of another choice, on the same decode replica, that brings the prompt."""

    @property
    def computes(self) -> Peer | None:
        """The replica that computes the prompt; None where another choice brings it."""
        return (self.prefill or self.decode) if self.prompt_of is None else None

    @property
    def peers(self) -> list[Peer]:
        """Every replica at work, decode last."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


Pick = Callable[[GenerateRequest, Room, frozenset[Peer], float], Attempt | None]
"""(request, room of the attempt, replicas to avoid if others are ready, time) -> None if a role has no replica."""


class RequestPhase(StrEnum):
    BETWEEN = "between"
    """No attempt is under way: the last one failed, and the next one is due later."""
    WAITING = "waiting"
    """The replicas have the Submit; no token has come yet."""
    STREAMING = "streaming"
    """Decode sends tokens; prefill is done."""
    FINISHED = "finished"
    FAILED = "failed"
    """The answer will not be complete; the client gets the reason."""
    CANCELLED = "cancelled"


ENDS = frozenset({RequestPhase.FINISHED, RequestPhase.FAILED, RequestPhase.CANCELLED})

MOVES: Moves[RequestPhase] = {
    RequestPhase.BETWEEN: ENDS | {RequestPhase.WAITING},
    RequestPhase.WAITING: ENDS | {RequestPhase.STREAMING, RequestPhase.BETWEEN},
    RequestPhase.STREAMING: ENDS | {RequestPhase.BETWEEN},
    RequestPhase.FINISHED: frozenset(),
    RequestPhase.FAILED: frozenset(),
    RequestPhase.CANCELLED: frozenset(),
}


class RequestState(msgspec.Struct, kw_only=True, eq=False):
    """One open request and its current attempt."""

    request_id: RequestId
    request: GenerateRequest
    deadline_s: float
    phase: RequestPhase = RequestPhase.BETWEEN
    attempt: Attempt | None = None
    given: list[int] = msgspec.field(default_factory=list)
    """Tokens that the client has been given."""
    avoided: set[Peer] = msgspec.field(default_factory=set)
    num_retries: int = 0
    heard_s: float = 0.0
    """Time when the current attempt began, or gave its newest tokens."""
    due_s: float = 0.0
    """Time of the next attempt, in phase BETWEEN."""
    reason: str = ""

    @property
    def peers(self) -> list[Peer]:
        """Replicas of the current attempt."""
        return self.attempt.peers if self.attempt is not None else []

    @property
    def awaited(self) -> list[Peer]:
        """Replicas that have not done their part."""
        return self.peers if self.phase is RequestPhase.WAITING else self.peers[-1:]

    @property
    def prefill_len(self) -> int:
        """Tokens that prefill is expected to compute; known until the first one comes back."""
        assert self.attempt is not None
        return len(self.request.prompt_ids) + len(self.given) - self.attempt.cached_tokens

    @property
    def decode_len(self) -> int:
        """Most tokens that decode keeps for this request alone."""
        assert self.attempt is not None
        prompt_len = len(self.request.prompt_ids) if self.attempt.prompt_of is None else 0
        return self.request.stopping.max_tokens + prompt_len

    @property
    def awaits(self) -> str:
        """The event that is due next, and from whom, for an error message."""
        if self.attempt is None:
            return f"waited for another attempt after {self.reason}"
        names = " and ".join(peer.replica for peer in self.awaited)
        return f"waited for token {len(self.given)} from {names}"

    def is_decode(self, replica: ReplicaId, incarnation: Incarnation) -> bool:
        """Return whether this start of a replica decodes the request; asked for every token."""
        decode = self.attempt.decode if self.attempt is not None else None
        return decode is not None and decode.replica == replica and decode.incarnation == incarnation

    @property
    def wake_at_s(self) -> float:
        """Return when time alone changes something."""
        return min(self.due_s, self.deadline_s) if self.phase is RequestPhase.BETWEEN else self.deadline_s

    def submit(self, attempt: Attempt, router: Peer) -> Submit:
        request, sampling = self.request, self.request.sampling
        if self.given:  # the client got the prompt's log-probabilities with the first of them
            sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
        return Submit(
            room=attempt.room,
            prompt_ids=request.prompt_ids + self.given if self.given else request.prompt_ids,
            num_given=len(self.given),
            sampling=sampling,
            stopping=request.stopping,
            prefill=attempt.prefill,
            decode=attempt.decode,
            router=router,
            prompt_of=attempt.prompt_of,
            cache_salt=request.cache_salt,
            priority=request.priority,
            traced=request.traced,
            dp_rank=request.dp_rank,
        )

    def problem(self, output: Output) -> str | None:
        """Return why these tokens cannot follow the ones before; None when they can."""
        end, max_tokens = output.first_index + len(output.token_ids), self.request.stopping.max_tokens
        if output.first_index > len(self.given):
            return f"output {len(self.given)} is missing; {output.first_index} came next"
        if output.first_index < len(self.given):
            known = self.given[output.first_index : end]
            if known != output.token_ids[: len(known)]:
                return f"output {output.first_index} was sent again with other tokens"
        if end > max_tokens:
            return f"{end} tokens came, at most {max_tokens} were requested"
        if output.finish is not None and end < len(self.given):
            return f"the answer ended at {end} tokens, but {len(self.given)} came before"
        if self.request.sampling.num_logprobs is not None and len(output.logprobs) != len(output.token_ids):
            return f"{len(output.token_ids)} tokens came with log-probabilities of {len(output.logprobs)}"
        return None


class Cause(StrEnum):
    REFUSED = "refused"
    """A replica cannot do it; another attempt would fail too."""
    REPLICA_FAILED = "replica_failed"
    """A replica failed; another attempt may succeed."""
    REPLICA_LOST = "replica_lost"
    NO_REPLICA = "no_replica"
    """An attempt failed, and a role has no replica left for another one."""
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"
    BROKEN_OUTPUT = "broken_output"
    """Tokens are missing, repeated differently, or too many."""


class OutputChunk(msgspec.Struct):
    """Tokens of one choice on their way to its client: first a batch, then token by token with their text."""

    request_id: RequestId = RequestId(0)
    """Set until the chunk reaches its answer."""
    token_ids: Sequence[int] = ()
    finish: FinishReason | None = None
    """Set with the last tokens."""
    logprobs: Sequence[TokenLogprobs] = ()
    """One entry a token, where requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """One entry for every prompt token but the first, where requested; with the first tokens."""
    cached: CachedTokens = CachedTokens()
    """Set with the first tokens."""
    phases: PhaseTimes | None = None
    """The replicas' times before the first tokens; set with those."""
    index: int = 0
    """The choice of its response, from 0."""
    text: str = ""
    """May come later than its tokens, never earlier."""
    offsets: Sequence[int] = ()
    """Characters of the answer before each token."""
    stopped_by: str | int | None = None
    """The stop string, or the stop token named by the request, that ended the answer; with the last token."""

    def append(self, later: "OutputChunk") -> None:
        """Add the tokens that follow, before anything has text."""
        assert isinstance(self.token_ids, list)
        self.token_ids += later.token_ids
        self.finish = later.finish
        if later.logprobs:
            assert isinstance(self.logprobs, list)
            self.logprobs += later.logprobs
        if later.prompt_logprobs:
            self.prompt_logprobs = later.prompt_logprobs


class AttemptStarted(msgspec.Struct, frozen=True, kw_only=True):
    request_id: RequestId
    attempt: Attempt


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    until_s: float


class Send(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    message: Submit | Cancel | Inquire


class Fail(msgspec.Struct, frozen=True, kw_only=True):
    """Report to the client that there will be no (more) answer."""

    request_id: RequestId
    cause: Cause
    reason: str


Action = AttemptStarted | Wait | Send | OutputChunk | Fail
