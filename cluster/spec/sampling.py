"""Sampling parameters, stop conditions, and sampled tokens."""

from enum import StrEnum

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request."""

    temperature: float = 0.0
    """Temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all."""
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    """Divisor of positive logits and factor of negative logits, for tokens in the prompt or the output."""
    frequency_penalty: float = 0.0
    """Amount subtracted from a token's logit per occurrence in the output."""
    presence_penalty: float = 0.0
    """Amount subtracted from a token's logit if it occurs in the output."""
    logit_bias: dict[int, float] = {}
    """Amounts added to logits, by token."""
    allowed_ids: frozenset[int] = frozenset()
    """Tokens that may be sampled; empty means all."""
    bad_words: list[list[int]] = []
    """Token sequences that must not be generated."""
    min_tokens: int = 0
    """Number of output tokens before any of ``ending_ids`` may be sampled."""
    ending_ids: frozenset[int] = frozenset()
    """Stop tokens that the sampler may have to forbid, for ``min_tokens`` or a grammar; see ``Stopping``."""
    grammar: str = ""
    """Grammar of the output, in the format that ``cluster.grammar`` reads; empty for none."""
    num_logprobs: int | None = None
    """Number of most likely tokens to report with each sampled token; None reports no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """Number of most likely tokens to report with each prompt token but the first; bypasses the cache."""

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on how often tokens have occurred."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def looks_back(self) -> bool:
        """True if sampling depends on earlier tokens."""
        return self.has_penalties or bool(self.bad_words or self.grammar)

    @property
    def changes_logits(self) -> bool:
        """True if logits may have to be changed before sampling."""
        return self.looks_back or bool(self.logit_bias or self.allowed_ids or self.min_tokens)


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """Stop conditions of a request.

    The leader ends a sequence at any of ``stop_token_ids``. The sampler also gets them, as ``Sampling.ending_ids``. The
    router keeps the client's own stop tokens as ``TextRules.asked_stop_ids``, because the response reports them.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the answer with reason ``stop``, usually including end-of-sequence tokens."""


class FinishReason(StrEnum):
    """Reasons why a request ended normally, as the OpenAI API names them."""

    STOP = "stop"
    LENGTH = "length"


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural log-probabilities at one position, before sampling parameters apply."""

    logprob: float
    rank: int = 0
    """Rank of the token, 1 for the most likely; set for prompt tokens only."""
    top_ids: list[int]
    """Most likely tokens, best first."""
    top_logprobs: list[float]


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Log-probabilities of the token; None unless requested."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of all prompt tokens but the first; sent with the first token, if requested."""
    completes_grammar: bool = False
    """True if the grammar allows no further token."""
    problem: str = ""
    """Reason for an abort: the grammar allows no token, or has become too complex."""
    is_corrupted: bool = False
    """True if the model's logits were not finite, so that the token means nothing."""
