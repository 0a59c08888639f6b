"""One request as the step scheduler sees it: tokens, how many of them have KV, and the pages that hold it."""

from dataclasses import dataclass, field

from cluster.spec.ids import Room
from cluster.spec.page_key import extend_page_keys
from cluster.spec.sampling import FinishReason, Sampling, Stopping
from cluster.spec.step_messages import Target
from cluster.spec.tiers import CachedTokens


@dataclass(frozen=True, slots=True, eq=False)
class PageLoad:
    """Pages of a sequence that are being filled from host memory."""

    joins: bool
    """Its first step reads them as they come; otherwise nothing is computed before they are there."""


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens [0, computed_len) have KV in ``pages``, those up to planned_len are in steps under way, others pending."""

    room: Room
    tokens: list[int]
    """Prompt, then output."""
    prompt_len: int
    sampling: Sampling
    stopping: Stopping
    max_len: int
    """Most tokens this sequence may reach."""
    owner_base: int = 0
    """Owner of page 0 where pages are divided over CP ranks."""
    target: Target | None = None
    """Where KV is sent while it is computed."""
    priority: int = 0
    """Lower values have their turn earlier."""
    arrival: int = 0
    """Number of this sequence in the order in which the scheduler got them."""
    first_step: int = 0
    """The newest step when the scheduler got it."""
    cache_salt: str = ""
    """Only sequences with the same one share pages."""
    page_keys: list[bytes] = field(default_factory=list)
    """Keys of the leading full pages, as far as they were asked for."""
    cached_len: int = 0
    """Leading tokens whose KV was there when the sequence started."""
    host_len: int = 0
    """Those of them that came from host memory."""
    storage_len: int = 0
    """Those of them that came from storage."""
    load: PageLoad | None = None
    """Until every rank is done with it, or a token was drawn behind it."""
    computed_len: int = 0
    planned_len: int = 0
    """Never less than ``computed_len``."""
    pages: list[int] = field(default_factory=list)
    num_announced_pages: int = 0
    """Leading pages that the ranks already know of; 0 again after a preemption."""
    num_shared_pages: int = 0
    """Leading pages that were left to the cache, or came from it, as far as it was told."""
    told_step: int = 0
    """The step with which the ranks were told of this room; 0 while they do not know it."""
    num_coming: int = 0
    """Tokens that steps under way will draw, where the next step is planned before they are known."""
    timed: bool = False
    """The ranks keep a timeline of it."""
    is_whole: bool = False
    """Its grammar allows nothing more."""

    def __post_init__(self) -> None:
        self.planned_len = self.computed_len

    @property
    def pending_len(self) -> int:
        """Tokens that no step has computed or is to compute; those that come count while more may follow them."""
        num_tokens = len(self.tokens)
        if self.num_coming and self.num_outputs + self.num_coming < self.stopping.max_tokens:
            num_tokens = min(num_tokens + self.num_coming, self.max_len - 1)
        return max(0, num_tokens - self.planned_len)

    @property
    def is_loading(self) -> bool:
        """Copies to its pages may be on their way."""
        return self.load is not None

    @property
    def waits_for_pages(self) -> bool:
        """It can be computed no further before they are there."""
        return self.load is not None and not self.load.joins

    @property
    def cached(self) -> CachedTokens:
        """What need not be computed, by where it came from."""
        return CachedTokens(total=self.cached_len, host=self.host_len, storage=self.storage_len)

    @property
    def is_stream(self) -> bool:
        """It waits for one token that somebody is watching for."""
        return self.pending_len == 1 and len(self.tokens) + self.num_coming > self.prompt_len

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.prompt_len

    def keys_of(self, num_tokens: int, page_size: int) -> list[bytes]:
        """Keys of the full pages among the first tokens; none where the whole prompt must be computed."""
        if self.sampling.num_prompt_logprobs is not None:
            return []
        if len(self.page_keys) < num_tokens // page_size:
            extend_page_keys(self.page_keys, self.tokens, page_size, self.cache_salt)
        return self.page_keys[: num_tokens // page_size]

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with the token it has just got, if it does."""
        num_outputs = self.num_outputs
        if num_outputs == 0:
            return None
        if self.is_whole or self.tokens[-1] in self.stopping.stop_token_ids:
            return FinishReason.STOP
        if num_outputs >= self.stopping.max_tokens or len(self.tokens) >= self.max_len:
            return FinishReason.LENGTH
        return None
