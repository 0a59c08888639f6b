"""Bodies of answers in OpenAI's API. msgspec structs, since a stream encodes one per token."""

from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Source of the prompt's KV."""

    cached_tokens: int
    """Tokens not computed, because an earlier request had the same prefix."""
    host_tokens: int = 0
    storage_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a choice of ``/v1/completions``: lists with one entry per token."""

    text_offset: tuple[int, ...]
    token_logprobs: list[float | None]
    """None for the first token of a prompt."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    """1 is the likeliest."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""vLLM's form: for each prompt token itself and the likeliest in its place, by token id; None for the first."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a choice of ``/v1/chat/completions``, one entry per token."""

    content: list[ChosenLogprob]
    refusal: None = None


StopReason = str | int | None | UnsetType
"""vLLM's field: the stop string or requested stop token that ended an answer, or null; only at its end."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    finish_reason: str | None
    stop_reason: StopReason = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt; only in the choice's first chunk."""
    token_ids: Sequence[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer of ``/v1/completions``, or one chunk."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """A called function, or the next part of the call."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    """JSON, as the model wrote it."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The next part of a call; the first has id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """None if there are only calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: StopReason = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    usage: Usage


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: StopReason = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of a stream of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt; only in the choice's first chunk."""
    usage: Usage | UnsetType | None = UNSET
