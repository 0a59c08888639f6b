"""Sampling parameters, stop conditions, and data about sampled tokens."""

from enum import StrEnum

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request."""

    temperature: float = 0.0
    """Temperature; 0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to keep; 0 keeps all."""
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    """Penalty that divides the positive and multiplies the negative logits of tokens in prompt or output."""
    frequency_penalty: float = 0.0
    """Penalty subtracted from a token's logit for every time it is in the output."""
    presence_penalty: float = 0.0
    """Penalty subtracted from the logits of tokens that are in the output."""
    logit_bias: dict[int, float] = {}
    """Values added to the logits of these tokens."""
    allowed_ids: frozenset[int] = frozenset()
    """Tokens that can be sampled; empty means all."""
    bad_words: list[list[int]] = []
    """Token sequences whose last token is not sampled after the others."""
    min_tokens: int = 0
    """Output position before which none of ``ending_ids`` is sampled."""
    ending_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; set where ``min_tokens`` or a grammar keeps them back."""
    grammar: str = ""
    """Grammar of the output's text, as ``cluster.grammar`` reads it; empty for none."""
    num_logprobs: int | None = None
    """Number of likeliest tokens reported with each sampled one; None reports no log-probabilities."""
    num_prompt_logprobs: int | None = None
    """Number of likeliest tokens reported for each prompt token but the first. Caches are not used then."""

    @property
    def has_penalties(self) -> bool:
        """Return whether logits depend on the number of earlier occurrences."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def looks_back(self) -> bool:
        """Return whether sampling depends on earlier tokens."""
        return self.has_penalties or bool(self.bad_words or self.grammar)


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """Stop conditions of a request."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end with reason ``stop``; includes the model's end-of-sequence tokens unless they are ignored."""


class FinishReason(StrEnum):
    """Reason why a request ended normally, in the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Natural log-probabilities of one position, before anything in Sampling is applied."""

    logprob: float
    rank: int = 0
    """Rank of the token, 1 for the likeliest; set for tokens of the prompt."""
    top_ids: list[int]
    """Likeliest tokens, best first."""
    top_logprobs: list[float]


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Log-probabilities, if Sampling asks for them."""
    prompt_logprobs: list[TokenLogprobs] = []
    """Log-probabilities of every token of the prompt but the first, with the first token, if requested."""
    is_last: bool = False
    """True if the grammar allows nothing after it."""
    problem: str = ""
    """Reason why there is no answer: the grammar allowed no token, or grew too complex."""
