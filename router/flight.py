"""One open request: what is asked, its stages and legal moves, and its attempts."""

from collections.abc import Callable
from enum import StrEnum

import msgspec

from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.lifecycle import Moves
from cluster.spec.messages import Output, Submit
from cluster.spec.peer import Peer
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.token_ids import TokenIds
from router.prefix_keys import PromptKeys


class Stage(StrEnum):
    """Where an open request stands."""

    BETWEEN = "between"
    """No attempt is under way: the last one failed, and the next one waits for its time."""
    WAITING = "waiting"
    """Both legs of an attempt have the Submit; no token of it came yet."""
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
    Stage.BETWEEN: ENDS | {Stage.WAITING},
    Stage.WAITING: ENDS | {Stage.STREAMING, Stage.BETWEEN},
    Stage.STREAMING: ENDS | {Stage.BETWEEN},
    Stage.FINISHED: frozenset(),
    Stage.FAILED: frozenset(),
    Stage.CANCELLED: frozenset(),
}


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What a client wants to have generated."""

    prompt_ids: TokenIds
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
    page_keys: PromptKeys | None = None
    """Of the pages that may come from a cache; none where nobody is to look there."""
    shares_prompt: bool = False
    """Another choice of the prompt before it, which alone is sent to prefill."""


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas that an attempt runs on."""

    prefill: Peer | None
    """None where decode computes what it does not have of the prompt."""
    decode: Peer
    cached_tokens: int = 0
    """Of the prompt, that prefill is not expected to compute."""
    brings_prompt: bool = True
    """False where another choice brings the prompt to the decode replica."""

    @property
    def computes(self) -> Peer | None:
        """Who computes the prompt."""
        return (self.prefill or self.decode) if self.brings_prompt else None

    @property
    def legs(self) -> list[Peer]:
        """Those that work; decode is the last one."""
        return [self.decode] if self.prefill is None else [self.prefill, self.decode]


Pick = Callable[[Ask, Room, frozenset[Peer], float], Pair | None]
"""(request, room of the attempt, those to avoid if others are ready, clock time) -> None if a role has no replica."""


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One try of a request, in a room of its own."""

    room: Room
    pair: Pair
    prefill_len: int
    """Tokens that prefill is expected to compute."""
    decode_len: int
    """The most tokens that decode keeps for it alone."""
    prompt_of: Room | None = None
    """The attempt of another choice, on the same decode replica, that brings the prompt."""


class Flight(msgspec.Struct, kw_only=True, eq=False):
    """One open request, and the attempt that is under way."""

    room: Room
    """Its name, and the room of its first attempt."""
    ask: Ask
    deadline_s: float
    stage: Stage = Stage.BETWEEN
    attempt: Attempt | None = None
    given: list[int] = msgspec.field(default_factory=list)
    """Tokens that the client has been given."""
    avoided: set[Peer] = msgspec.field(default_factory=set)
    """Replicas that have failed it."""
    num_retries: int = 0
    """Attempts after the first one."""
    heard_s: float = 0.0
    """When the attempt under way began, or gave its newest tokens."""
    due_s: float = 0.0
    """While BETWEEN: when the next attempt is made."""
    reason: str = ""
    """Why the last attempt failed."""

    @property
    def legs(self) -> list[Peer]:
        """The replicas of the attempt under way."""
        return self.attempt.pair.legs if self.attempt is not None else []

    @property
    def awaited(self) -> list[Peer]:
        """Those of them that have not done their part."""
        return self.legs if self.stage is Stage.WAITING else self.legs[-1:]

    @property
    def awaits(self) -> str:
        """What has to come next, and from whom."""
        if self.attempt is None:
            return f"waited to be tried again after {self.reason}"
        names = " and ".join(peer.replica for peer in self.awaited)
        return f"waited for token {len(self.given)} from {names}"

    def is_decode(self, replica: ReplicaId, incarnation: Incarnation) -> bool:
        """Whether the decode leg is this start of a replica; asked for every token."""
        decode = self.attempt.pair.decode if self.attempt is not None else None
        return decode is not None and decode.replica == replica and decode.incarnation == incarnation

    def leg(self, replica: ReplicaId, incarnation: Incarnation) -> Peer | None:
        """The one of the legs that is this start of a replica."""
        return next((leg for leg in self.legs if (leg.replica, leg.incarnation) == (replica, incarnation)), None)

    @property
    def wake_at_s(self) -> float:
        """When time alone changes something."""
        return min(self.due_s, self.deadline_s) if self.stage is Stage.BETWEEN else self.deadline_s

    def begin(self, room: Room, pair: Pair, prompt_of: Room | None = None) -> Attempt:
        """The next attempt: prefill computes prompt and given tokens, but for what is cached."""
        prompt_len = len(self.ask.prompt_ids)
        self.attempt = Attempt(
            room=room,
            pair=pair,
            prefill_len=prompt_len + len(self.given) - pair.cached_tokens,
            decode_len=self.ask.stopping.max_tokens + (0 if prompt_of is not None else prompt_len),
            prompt_of=prompt_of,
        )
        return self.attempt

    def submit(self, attempt: Attempt, router: Peer) -> Submit:
        """What the legs of an attempt get."""
        ask, sampling = self.ask, self.ask.sampling
        if self.given:  # with the first of which the client has those of the prompt
            sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
        return Submit(
            room=attempt.room,
            prompt_ids=ask.prompt_ids + self.given if self.given else ask.prompt_ids,
            num_given=len(self.given),
            sampling=sampling,
            stopping=ask.stopping,
            prefill=attempt.pair.prefill,
            decode=attempt.pair.decode,
            router=router,
            prompt_of=attempt.prompt_of,
            cache_salt=ask.cache_salt,
            priority=ask.priority,
            timed=ask.timed,
            dp_rank=ask.dp_rank,
        )

    def problem(self, output: Output) -> str | None:
        """Why these tokens cannot follow the ones before; None when they can."""
        end, max_tokens = output.first_index + len(output.token_ids), self.ask.stopping.max_tokens
        if output.first_index > len(self.given):
            return f"output {len(self.given)} is missing; {output.first_index} came next"
        if output.first_index < len(self.given):
            known = self.given[output.first_index : end]
            if known != output.token_ids[: len(known)]:
                return f"output {output.first_index} came again with other tokens"
        if end > max_tokens:
            return f"{end} tokens came, {max_tokens} were asked for"
        if output.finish is not None and end < len(self.given):
            return f"the answer ended at {end} tokens, but {len(self.given)} came before"
        if self.ask.sampling.num_logprobs is not None and len(output.logprobs) != len(output.token_ids):
            return f"{len(output.token_ids)} tokens came with log-probabilities of {len(output.logprobs)}"
        return None
