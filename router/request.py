"""Parameters and state of one request in the router, and the actions that the request table returns."""

import math
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import NewType

import msgspec

from cluster.spec.errors import Moves
from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.messages import Cancel, Inquire, Output, Submit
from cluster.spec.phases import PhaseTimes
from cluster.spec.sampling import FinishReason, Sampling, Stopping, TokenLogprobs
from cluster.spec.tiers import CachedTokens
from cluster.spec.wire import TokenIds
from router.page_index import PromptKeys
from router.text import TextRules

ChoiceId = NewType("ChoiceId", int)
"""Id of one choice of one prompt in this router: the room of its first attempt."""


class KnownTokens(msgspec.Struct, frozen=True):
    """Number of prompt tokens that the router expects a replica to find in its caches."""

    total: int = 0
    in_memory: int = 0
    """Leading tokens of these that are in device or host memory."""


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas chosen for one attempt of a request."""

    prefill: Peer | None
    """Prefill replica; None if decode computes the uncached part of the prompt."""
    decode: Peer
    cached_tokens: int = 0
    """Prompt tokens that prefill is expected to find in its cache, weighted by tier."""
    known: KnownTokens = KnownTokens()
    """Prompt tokens that prefill is expected to find."""


class RequestPhase(StrEnum):
    PENDING = "pending"
    """No attempt is running: the first one has not started, or a retry is due later."""
    WAITING = "waiting"
    """The replicas have the Submit; no token has arrived."""
    STREAMING = "streaming"
    """Decode sends tokens; prefill is done."""
    FINISHED = "finished"
    FAILED = "failed"
    """The answer is incomplete, and the client gets an error."""
    CANCELLED = "cancelled"


ENDS = frozenset({RequestPhase.FINISHED, RequestPhase.FAILED, RequestPhase.CANCELLED})

MOVES: Moves[RequestPhase] = {
    RequestPhase.PENDING: ENDS | {RequestPhase.WAITING},
    RequestPhase.WAITING: ENDS | {RequestPhase.STREAMING, RequestPhase.PENDING},
    RequestPhase.STREAMING: ENDS | {RequestPhase.PENDING},
    RequestPhase.FINISHED: frozenset(),
    RequestPhase.FAILED: frozenset(),
    RequestPhase.CANCELLED: frozenset(),
}


ANYBODY = "anybody"
"""Name of the tenant to which all clients belong if no keys are configured."""


class GenerateRequest(msgspec.Struct, kw_only=True, eq=False, omit_defaults=True):
    """One choice of one prompt: a validated, tokenized request and its current attempt."""

    prompt_ids: TokenIds
    sampling: Sampling
    stopping: Stopping
    text_rules: TextRules = TextRules()
    cache_salt: str = ""
    """Salt of the page keys. Only requests with the same salt share cached pages."""
    priority: int = 0
    """Priority; lower values are scheduled earlier."""
    tenant: str = ANYBODY
    """Name of the API key whose share the request uses."""
    weight: float = 1.0
    """The API key's share, relative to those of other keys."""
    traced: bool = False
    """True if every rank records a trace of the request."""
    dp_rank: int | None = None
    """DP rank requested by the client; None for any."""
    session_id: str = ""
    """The client's name for the conversation; empty if not given."""
    page_keys: PromptKeys | None = None
    """Keys of the prompt's pages; None if no cache may be used."""
    shares_prompt: bool = False
    """True for every choice of a prompt but the first; its first attempt shares the first choice's KV in decode."""
    request_id: str = ""
    """Id of the HTTP request; empty if it has none."""
    arrived_s: float = 0.0
    is_probe: bool = False
    """True for a parity probe, which decode computes alone, and which counts in no metric of clients' requests."""

    choice_id: ChoiceId = ChoiceId(0)
    """Id of the choice; set when the request is opened, like the deadline."""
    deadline_s: float = math.inf
    phase: RequestPhase = RequestPhase.PENDING
    submit: Submit | None = None
    """Message that started the current attempt; None in phase PENDING."""
    cached_tokens: int = 0
    known: KnownTokens = KnownTokens()
    """Prompt tokens that prefill is expected to find in the current attempt; see ``Placement``."""
    output_ids: list[int] = msgspec.field(default_factory=list)
    """Tokens sent to the client, by all attempts."""
    avoided: frozenset[Peer] = frozenset()
    """Replicas to avoid if possible, such as those that failed an attempt."""
    num_retries: int = 0
    last_output_s: float = 0.0
    """Time of the current attempt's newest output or, before the first one, of the attempt's start."""
    num_unanswered: int = 0
    """Number of inquiries since decode's latest sign that it works on the current attempt."""
    due_s: float = 0.0
    """Time of the next attempt, in phase PENDING."""
    reason: str = ""
    """Reason why the last attempt failed."""

    @property
    def may_use_cache(self) -> bool:
        """False if every prompt token has to be computed, for its log-probabilities."""
        return self.sampling.num_prompt_logprobs is None

    @property
    def peers(self) -> list[Peer]:
        return peers_of(self.submit) if self.submit is not None else []

    @property
    def waiting_for(self) -> list[Peer]:
        """Replicas that have not finished their part of the attempt."""
        return self.peers if self.phase is RequestPhase.WAITING else self.peers[-1:]

    @property
    def prefill_len(self) -> int:
        """Number of tokens that prefill is expected to compute; valid until the first token arrives."""
        return len(self.prompt_ids) + len(self.output_ids) - self.cached_tokens

    @property
    def max_len(self) -> int:
        return len(self.prompt_ids) + self.stopping.max_tokens

    @property
    def decode_len(self) -> int:
        """Maximum number of tokens that decode stores for this request alone, in the current or next attempt."""
        is_sharing = self.shares_prompt if self.submit is None else self.submit.prompt_of is not None
        return self.stopping.max_tokens if is_sharing else self.max_len

    @property
    def status(self) -> str:
        """Description, for error messages, of what the request was waiting for."""
        if self.submit is None:
            return f"waited for another attempt after {self.reason}"
        names = " and ".join(peer.replica for peer in self.waiting_for)
        return f"waited for token {len(self.output_ids)} from {names}"

    def is_decode(self, replica: ReplicaId, incarnation: Incarnation) -> bool:
        """Return whether this incarnation of a replica decodes the request; called for every token."""
        decode = self.submit.decode if self.submit is not None else None
        return decode is not None and decode.replica == replica and decode.incarnation == incarnation

    @property
    def wake_at_s(self) -> float:
        return min(self.due_s, self.deadline_s) if self.phase is RequestPhase.PENDING else self.deadline_s

    def make_submit(self, room: Room, placement: Placement, prompt_of: Room | None, router: Peer) -> Submit:
        sampling = self.sampling
        if self.output_ids:  # the client received the prompt's log-probabilities with the first token
            sampling = msgspec.structs.replace(sampling, num_prompt_logprobs=None)
        return Submit(
            room=room,
            prompt_ids=self.prompt_ids + self.output_ids if self.output_ids else self.prompt_ids,
            num_given=len(self.output_ids),
            sampling=sampling,
            stopping=self.stopping,
            prefill=placement.prefill,
            decode=placement.decode,
            router=router,
            prompt_of=prompt_of,
            cache_salt=self.cache_salt,
            priority=self.priority,
            tenant=self.tenant,
            weight=self.weight,
            traced=self.traced,
            dp_rank=self.dp_rank,
        )

    def problem(self, output: Output) -> str | None:
        """Return the reason why an output cannot follow the earlier ones, or None if it is valid."""
        num_sent, max_tokens = len(self.output_ids), self.stopping.max_tokens
        end = output.first_index + len(output.token_ids)
        if output.first_index > num_sent:
            return f"output {num_sent} is missing; {output.first_index} arrived instead"
        known = self.output_ids[output.first_index : end]
        if known != output.token_ids[: len(known)]:
            return f"output {output.first_index} was sent again with different tokens"
        if end > max_tokens:
            return f"got {end} tokens, but at most {max_tokens} were requested"
        if output.finish is not None and end < num_sent:
            return f"the answer ended at {end} tokens, but {num_sent} had arrived"
        if self.sampling.num_logprobs is not None and len(output.logprobs) != len(output.token_ids):
            return f"{len(output.token_ids)} tokens arrived with log-probabilities for {len(output.logprobs)}"
        return None


Pick = Callable[[GenerateRequest, Room, frozenset[Peer], float], Placement | None]
"""Function (request, room, replicas to avoid if possible, time) that chooses; None if a role has no replica."""


def peers_of(submit: Submit) -> list[Peer]:
    """Return the replicas that get this message, the decode replica last."""
    return [submit.decode] if submit.prefill is None else [submit.prefill, submit.decode]


class Cause(StrEnum):
    REFUSED = "refused"
    """A replica cannot serve the request; another attempt would fail too."""
    CORRUPTED = "corrupted"
    """The model's logits were not finite."""
    REPLICA_FAILED = "replica_failed"
    """A replica failed; another attempt may succeed."""
    REPLICA_LOST = "replica_lost"
    NO_REPLICA = "no_replica"
    """An attempt failed, and no replica of a role is left for another one."""
    TIMED_OUT = "timed_out"
    STOPPED = "stopped"
    UNREAD = "unread"
    """The client did not read what had been generated."""
    BROKEN_OUTPUT = "broken_output"
    """Tokens are missing, differ when sent again, or exceed the requested number."""


class StartAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """Send a Submit to its replicas."""

    choice_id: ChoiceId
    submit: Submit


class SendMessage(msgspec.Struct, frozen=True, kw_only=True):
    address: str
    message: Cancel | Inquire


class OutputBatch(msgspec.Struct, kw_only=True):
    """Pass the next tokens of one choice on to the client."""

    choice_id: ChoiceId
    token_ids: list[int]
    finish: FinishReason | None = None
    """Finish reason; set with the last tokens."""
    logprobs: list[TokenLogprobs] = []
    """One entry per token, if requested."""
    prompt_logprobs: list[TokenLogprobs] = []
    """One entry for every prompt token but the first, if requested; set with the first tokens."""
    cached: CachedTokens = CachedTokens()
    """Cached prompt tokens; set with the first tokens."""
    phases: PhaseTimes | None = None
    """Time of each phase up to the first tokens; set when they arrive."""

    def parts(self, most: int) -> Iterator["OutputBatch"]:
        """Yield the batch in parts of at most ``most`` tokens."""
        num = len(self.token_ids)
        if num <= most:
            yield self
            return
        for begin in range(0, num, most):
            end = begin + most
            yield OutputBatch(
                choice_id=self.choice_id,
                token_ids=self.token_ids[begin:end],
                finish=self.finish if end >= num else None,
                logprobs=self.logprobs[begin:end],
                prompt_logprobs=self.prompt_logprobs if begin == 0 else [],
            )

    def append(self, later: "OutputBatch") -> None:
        self.token_ids += later.token_ids
        self.finish = later.finish
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs


class FailRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Report to the client that its answer will not be complete."""

    choice_id: ChoiceId
    cause: Cause
    reason: str


class WakeAt(msgspec.Struct, frozen=True, kw_only=True):
    """Call ``RequestTable.expire`` at this time."""

    time_s: float


Action = StartAttempt | SendMessage | OutputBatch | FailRequest | WakeAt
"""Instruction from a ``RequestTable`` to the loop around it."""
