"""Request in a leader: its tokens, and the pages that hold their KV."""

from dataclasses import dataclass, field

from cluster.spec.ids import Room
from cluster.spec.kv import extend_page_keys
from cluster.spec.messages import Submit
from cluster.spec.phases import ComputedStep
from cluster.spec.sampling import FinishReason
from cluster.spec.step_messages import Destination, NewRequest, ScheduledRequest
from cluster.spec.tiers import CachedTokens
from workers.cache.lifetimes import PageLists

_UNKNOWN = 0
"""Placeholder for a token that has not been sampled yet."""


@dataclass(frozen=True, slots=True, eq=False)
class PageLoad:
    """Load of a sequence's pages from host memory."""

    is_layerwise: bool
    """True if the first step reads each layer as it arrives. Otherwise, the step waits for the entire load."""
    cached: CachedTokens
    """Number of leading tokens that have KV after the load."""


@dataclass(slots=True, eq=False)
class KvState:
    """Pages of a sequence, and how much KV they hold. A preempted sequence loses its pages."""

    pages: PageLists = field(default_factory=list)
    """Pages by lifetime. Empty while the sequence waits for pages."""
    num_computed_tokens: int = 0
    """Number of leading tokens that have KV."""
    num_planned_tokens: int = 0
    """Number of leading tokens that have KV or are being computed by steps under way."""
    cached: CachedTokens = field(default_factory=CachedTokens)
    """Number of leading tokens that were cached when the sequence started."""
    load: PageLoad | None = None
    """Load under way. A layerwise load also ends when a token is sampled."""
    announced_step: int = 0
    """Step that announced the request to the ranks. 0 before that."""
    num_announced_pages: int = 0
    """Number of leading pages announced to the ranks."""
    num_shared_pages: int = 0
    """Number of leading pages shared through the cache."""
    num_pending_samples: int = 0
    """Number of tokens that steps under way will sample, if steps run ahead."""

    @classmethod
    def after(cls, num_tokens: int, pages: PageLists) -> "KvState":
        """Return the state of a sequence that continues after this many cached tokens."""
        cached = CachedTokens(total=num_tokens)
        return cls(pages, num_computed_tokens=num_tokens, num_planned_tokens=num_tokens, cached=cached)

    @property
    def num_pages(self) -> int:
        return len(self.pages[0]) if self.pages else 0


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Request in a leader: its tokens, and the state of their KV."""

    submit: Submit
    max_len: int
    """Maximum number of tokens, including the prompt."""
    tokens: list[int] = field(default_factory=list)
    """Prompt followed by output. Empty until the step scheduler has the sequence."""
    prompt_len: int = field(init=False)
    """Number of prompt tokens, without the output of earlier attempts."""
    owner_base: int = 0
    """Owner of page 0 if pages are divided among CP ranks."""
    destination: Destination | None = None
    """Destination of the KV that prefill sends while it computes."""
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of the full pages, computed when first needed."""
    kv: KvState = field(default_factory=KvState)
    arrival_number: int = 0
    """Arrival number in the queue or the step scheduler that holds the sequence."""
    first_step: int = 0
    """Number of the newest step when the sequence was added to the step scheduler."""
    steps: list[ComputedStep] = field(default_factory=list)
    """Steps that have computed the prompt."""
    uses_host: bool = True
    """True if the sequence may load pages from host memory. False after a failed load."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.submit.prompt_ids) - self.submit.num_given

    @property
    def room(self) -> Room:
        return self.submit.room

    @property
    def priority(self) -> int:
        return self.submit.priority

    @property
    def tenant(self) -> str:
        return self.submit.tenant

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def num_pending_tokens(self) -> int:
        """Return the number of tokens that can be planned. An unsampled token counts unless it is the last one."""
        num_tokens, num_samples = len(self.tokens), self.kv.num_pending_samples
        if num_samples and self.num_outputs + num_samples < self.submit.stopping.max_tokens:
            num_tokens = min(num_tokens + num_samples, self.max_len - 1)
        return max(0, num_tokens - self.kv.num_planned_tokens)

    @property
    def is_loading(self) -> bool:
        return self.kv.load is not None

    @property
    def waits_for_load(self) -> bool:
        """Return whether the sequence must wait until all its pages are loaded."""
        return self.kv.load is not None and not self.kv.load.is_layerwise

    @property
    def is_stream(self) -> bool:
        """Return whether the sequence decodes, one token per step."""
        return self.num_pending_tokens == 1 and self.num_outputs + self.kv.num_pending_samples > 0

    def keys_of(self, num_tokens: int, page_size: int) -> list[bytes]:
        """Return the keys of the full pages among the first tokens. Empty if the entire prompt must be computed."""
        if self.submit.sampling.num_prompt_logprobs is not None:
            return []
        if len(self.page_keys) < num_tokens // page_size:
            tokens = self.tokens or self.submit.prompt_ids
            extend_page_keys(self.page_keys, tokens, page_size, self.submit.cache_salt)
        return self.page_keys[: num_tokens // page_size]

    def finish_reason(self, *, completes_grammar: bool = False) -> FinishReason | None:
        """Return why the sequence ends with its newest token, which may complete the grammar. None if it continues."""
        num_outputs, stopping = self.num_outputs, self.submit.stopping
        if num_outputs == 0:
            return None
        if completes_grammar or self.tokens[-1] in stopping.stop_token_ids:
            return FinishReason.STOP
        if num_outputs >= stopping.max_tokens or len(self.tokens) >= self.max_len:
            return FinishReason.LENGTH
        return None


def new_request(sequence: TokenSequence, step: int) -> NewRequest:
    """Return the message that announces a request to the ranks in this step."""
    submit, sequence.kv.announced_step = sequence.submit, step
    return NewRequest(
        room=sequence.room,
        prompt_len=sequence.prompt_len,
        owner_base=sequence.owner_base,
        sampling=submit.sampling,
        history=list(sequence.tokens) if submit.sampling.looks_back else [],
        destination=sequence.destination,
        traced=submit.traced,
    )


def schedule(sequence: TokenSequence, count: int) -> ScheduledRequest:
    """Plan the next ``count`` tokens of a sequence."""
    kv = sequence.kv
    start = kv.num_planned_tokens
    token_ids = sequence.tokens[start : start + count]
    kv.num_planned_tokens += count
    is_longer = kv.num_pages > kv.num_announced_pages
    new_pages = [pages[kv.num_announced_pages :] for pages in kv.pages] if is_longer else []
    kv.num_announced_pages = kv.num_pages
    # Prompt logprobs are not computed again after a preemption.
    is_scored = sequence.submit.sampling.num_prompt_logprobs is not None and not sequence.num_outputs
    return ScheduledRequest(
        room=sequence.room,
        first_position=start,
        token_ids=token_ids or [_UNKNOWN],
        input_from_previous_step=not token_ids,
        new_pages=new_pages,
        samples=kv.num_planned_tokens == len(sequence.tokens) + kv.num_pending_samples,
        output_position=sequence.num_outputs + kv.num_pending_samples,
        scored_ids=sequence.tokens[start + 1 : start + 1 + count] if is_scored else [],
    )


def urgency(sequence: TokenSequence) -> tuple[int, int]:
    """Return the key that sorts sequences by priority, then by arrival."""
    return sequence.priority, sequence.arrival_number
