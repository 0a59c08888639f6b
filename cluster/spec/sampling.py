"""How tokens are drawn, when a request ends, and what is told of a drawn token."""

from enum import StrEnum

import msgspec


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How a token is drawn from the logits."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens that are in prompt or output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for every time it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output."""
    logit_bias: dict[int, float] = {}
    """Added to the logits of these tokens."""
    allowed_ids: frozenset[int] = frozenset()
    """Only these are drawn; none means all."""
    bad_words: list[list[int]] = []
    """Token sequences of which the last token is not drawn after the others."""
    min_tokens: int = 0
    """Output positions before this one draw none of ``ending_ids``."""
    ending_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; told where ``min_tokens`` or a grammar keeps them back."""
    grammar: str = ""
    """What the output's text must follow, as ``cluster.grammar`` reads it; empty for nothing."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens are told with each drawn one; None tells no log-probabilities at all."""
    num_prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The whole prompt is computed then, whatever is cached."""

    @property
    def has_penalties(self) -> bool:
        """Logits change with how often tokens came before."""
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def looks_back(self) -> bool:
        """A draw depends on the tokens before it."""
        return self.has_penalties or bool(self.bad_words or self.grammar)


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """When a request ends."""

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    """Ends with reason ``stop``; includes the model's end-of-sequence tokens unless they are ignored."""


class FinishReason(StrEnum):
    """Why a request ended well; the words of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """How likely the model found one token, before anything in Sampling; natural logarithms."""

    logprob: float
    rank: int = 0
    """1 for the likeliest; told of tokens of the prompt."""
    top_ids: list[int]
    """The likeliest tokens, best first."""
    top_logprobs: list[float]


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    """Where Sampling asks for them."""
    prompt_logprobs: list[TokenLogprobs] = []
    """With the first token: of every token of the prompt but the first, where they were asked for."""
    is_last: bool = False
    """The grammar allows nothing after it."""
    problem: str = ""
    """Why there is no answer: the grammar allowed no token, or grew too complex."""
