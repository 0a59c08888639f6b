"""Response bodies of ``/v1/completions`` and ``/v1/chat/completions``, and all routes' forms of log-probabilities.

They are msgspec structs because a stream encodes one per token.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cluster.spec.sampling import TokenLogprobs
from cluster.tokenizer import Tokenizer
from router.text import AnswerText, OutputChunk, TextRules, token_bytes, token_text

_LEAST = -9999.0
"""Substitute for minus infinity, which JSON cannot represent."""
_encode_json = msgspec.json.Encoder().encode
_MOST_AT_ONCE = 128
"""Number of prompt tokens that are written without a break, in a few milliseconds."""


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    cached_tokens: int
    """Prompt tokens found in the cache."""
    host_tokens: int = 0
    storage_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of a choice of ``/v1/completions``: lists with one entry per token."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    """Log-probability of each token; None for the first token of a prompt."""
    tokens: list[str]
    top_logprobs: list[msgspec.Raw | None]
    """JSON objects from text to log-probability; None for the first token of a prompt."""


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float
    rank: int
    """Rank of the token, 1 for the most likely."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""vLLM's form: log-probabilities by id, of each prompt token and of the most likely ones; None for the first token."""


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[msgspec.Raw]
    """JSON of a ChosenLogprob for each token."""
    refusal: None = None


StopReason = str | int | None | UnsetType
"""vLLM's field: the stop string or requested stop token that ended the answer, or null. Only in the last chunk."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    finish_reason: str | None
    stop_reason: StopReason = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt, only in the choice's first chunk."""
    token_ids: Sequence[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    """Arguments in JSON, as the model wrote them."""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Next part of a call. The first part has id, type and name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class Message(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    """Text of the answer; None if there are only calls."""
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: StopReason = UNSET
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChoice(_Choice, frozen=True, kw_only=True):
    message: Message


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
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


class ChatChunkChoice(_Choice, frozen=True, kw_only=True):
    delta: Delta


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | UnsetType = UNSET
    """Token ids of the prompt, only in the choice's first chunk."""
    usage: Usage | UnsetType | None = UNSET


@dataclass(slots=True)
class ShownPrompt:
    """Parts of a prompt that the response includes."""

    token_ids: Sequence[int]
    echo: str | None = None
    skip_special_tokens: bool = True
    """True if the echo lacks the special tokens."""
    echo_logprobs: CompletionLogprobs | None = None
    """Log-probabilities that precede the answer's. Like the next field, known with the first token of the answer."""
    logprobs: PromptLogprobs | None = None


def completion_logprobs(tokenizer: Tokenizer, chunk: OutputChunk, num_chars: int) -> CompletionLogprobs | None:
    """Return a chunk's log-probabilities, or None if not requested. ``num_chars`` characters precede its text."""
    if not chunk.logprobs:
        return None
    tokens = [token_text(tokenizer, token_id) for token_id in chunk.token_ids]
    return CompletionLogprobs(
        text_offset=[num_chars + offset for offset in chunk.offsets],
        token_logprobs=[_finite(given.logprob) for given in chunk.logprobs],
        tokens=tokens,
        top_logprobs=[*chunk.written_logprobs],
    )


def top_logprobs(tokenizer: Tokenizer, chunk: OutputChunk) -> list[msgspec.Raw]:
    """Return the most likely tokens at each position, for ``/v1/completions``."""
    tokens = (token_text(tokenizer, token_id) for token_id in chunk.token_ids)
    return [_by_text(tokenizer, token, given) for token, given in zip(tokens, chunk.logprobs, strict=True)]


def chat_logprobs(tokenizer: Tokenizer, chunk: OutputChunk) -> list[msgspec.Raw]:
    """Return each token's log-probabilities, for chats and responses."""

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        raw = list(token_bytes(tokenizer, token_id))
        return TokenLogprob(token=token_text(tokenizer, token_id), logprob=_finite(logprob), bytes=raw)

    content = []
    for token_id, given in zip(chunk.token_ids, chunk.logprobs, strict=True):
        top = [entry(*one) for one in zip(given.top_ids, given.top_logprobs, strict=True)]
        chosen = entry(token_id, given.logprob)
        content.append(_raw(ChosenLogprob(**msgspec.structs.asdict(chosen), top_logprobs=top)))
    return content


async def echo_logprobs(
    tokenizer: Tokenizer, prompt: ShownPrompt, logprobs: Sequence[TokenLogprobs]
) -> CompletionLogprobs:
    """Return the log-probabilities of a prompt's tokens, which may take seconds, with breaks for other clients.

    Args:
        logprobs: one entry for every prompt token but the first.
    """
    text = AnswerText(tokenizer, TextRules(skip_special_tokens=prompt.skip_special_tokens))
    offsets: list[int] = []
    for begin in range(0, len(prompt.token_ids), _MOST_AT_ONCE):
        chunks = text.push(prompt.token_ids[begin : begin + _MOST_AT_ONCE], None)
        offsets.extend(offset for chunk in chunks for offset in chunk.offsets)
        await asyncio.sleep(0)
    num_added = max(text.num_chars - len(prompt.echo or ""), 0)  # tokens before the text, which the echo lacks
    made = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
    given = [None, *logprobs]
    for begin in range(0, len(given), _MOST_AT_ONCE):
        end = begin + _MOST_AT_ONCE
        made.text_offset.extend(max(offset - num_added, 0) for offset in offsets[begin:end])
        for token_id, entry in zip(prompt.token_ids[begin:end], given[begin:end], strict=True):
            token = token_text(tokenizer, token_id)
            made.tokens.append(token)
            made.token_logprobs.append(None if entry is None else _finite(entry.logprob))
            made.top_logprobs.append(None if entry is None else _by_text(tokenizer, token, entry))
        await asyncio.sleep(0)
    return made


async def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> PromptLogprobs:
    """Return the log-probabilities of a prompt's tokens in vLLM's form, with breaks for other clients.

    Args:
        logprobs: one entry for every prompt token but the first.
    """

    def entry(token_id: int, logprob: float, rank: int) -> PromptLogprob:
        return PromptLogprob(logprob=_finite(logprob), rank=rank, decoded_token=token_text(tokenizer, token_id))

    made: PromptLogprobs = [None]
    for number, (token_id, given) in enumerate(zip(token_ids[1:], logprobs, strict=True)):
        here = {token_id: entry(token_id, given.logprob, given.rank)}
        top = zip(given.top_ids[:num_top], given.top_logprobs[:num_top], strict=True)
        for rank, (top_id, logprob) in enumerate(top, start=1):
            here.setdefault(top_id, entry(top_id, logprob, rank))
        made.append(here)
        if number % _MOST_AT_ONCE == 0:
            await asyncio.sleep(0)
    return made


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _by_text(tokenizer: Tokenizer, chosen: str, given: TokenLogprobs) -> msgspec.Raw:
    """Map token texts to log-probabilities, best first, plus the chosen token. Equal texts keep the best value."""
    logprobs: dict[str, float] = {}
    for token_id, logprob in zip(given.top_ids, given.top_logprobs, strict=True):
        logprobs.setdefault(token_text(tokenizer, token_id), _finite(logprob))
    logprobs.setdefault(chosen, _finite(given.logprob))
    return _raw(logprobs)


def _raw(part: ChosenLogprob | dict[str, float]) -> msgspec.Raw:
    return msgspec.Raw(_encode_json(part))
