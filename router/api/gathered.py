"""Choices of an answer that is not streamed, gathered from the chunks that a stream would send.

They grow with each token, because joining a million tokens at the end would make other clients wait.
"""

from array import array
from collections.abc import Sequence
from io import StringIO

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from router.api.completions import (
    ChatChoice,
    ChatChunkChoice,
    ChatLogprobs,
    CompletionChoice,
    CompletionLogprobs,
    FunctionCall,
    Message,
    ToolCall,
    ToolCallDelta,
)


class _TokenIds:
    """Token ids of a choice, if the response includes them."""

    def __init__(self) -> None:
        self._ids: array[int] | None = None

    def add(self, ids: Sequence[int] | UnsetType) -> None:
        if ids is not UNSET:
            self._ids = self._ids or array("I")
            self._ids.extend(ids)

    def all(self) -> list[int] | UnsetType:
        return UNSET if self._ids is None else self._ids.tolist()


class GatheredChat:
    """Choice of ``/v1/chat/completions``."""

    def __init__(self) -> None:
        self._content, self._reasoning = StringIO(), StringIO()
        self._calls: list[_GatheredCall] = []
        self._logprobs: list[msgspec.Raw] = []
        self._token_ids = _TokenIds()

    def add(self, choice: ChatChunkChoice) -> None:
        self._last = choice
        delta = choice.delta
        self._content.write(delta.content or "")
        self._reasoning.write(delta.reasoning or "")
        for call in delta.tool_calls or ():
            if call.id:
                self._calls.append(_GatheredCall(call))
            self._calls[-1].add(call)
        if choice.logprobs is not None:
            self._logprobs += choice.logprobs.content
        self._token_ids.add(choice.token_ids)

    def choice(self) -> ChatChoice:
        last = self._last
        return ChatChoice(
            index=last.index,
            message=self._message(),
            logprobs=ChatLogprobs(content=self._logprobs) if self._logprobs else None,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            token_ids=self._token_ids.all(),
        )

    def _message(self) -> Message:
        content, reasoning = self._content.getvalue(), self._reasoning.getvalue() or UNSET
        return Message(
            content=None if self._calls and not content else content,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=[call.call() for call in self._calls] or UNSET,
        )


class _GatheredCall:
    def __init__(self, first: ToolCallDelta) -> None:
        self._id, self._name = first.id or "", first.function.name
        self._arguments = StringIO()

    def add(self, part: ToolCallDelta) -> None:
        self._arguments.write(part.function.arguments or "")

    def call(self) -> ToolCall:
        return ToolCall(id=self._id, function=FunctionCall(name=self._name, arguments=self._arguments.getvalue()))


class GatheredCompletion:
    """Choice of ``/v1/completions``."""

    def __init__(self) -> None:
        self._text = StringIO()
        self._logprobs: CompletionLogprobs | None = None
        self._prompt_token_ids: list[int] | UnsetType = UNSET
        self._token_ids = _TokenIds()

    def add(self, choice: CompletionChoice) -> None:
        self._last = choice
        self._text.write(choice.text)
        if choice.logprobs is not None:
            self._add_logprobs(choice.logprobs)
        if choice.prompt_token_ids is not UNSET:
            self._prompt_token_ids = choice.prompt_token_ids
        self._token_ids.add(choice.token_ids)

    def choice(self) -> CompletionChoice:
        return replace(
            self._last,
            text=self._text.getvalue(),
            logprobs=self._logprobs,
            prompt_token_ids=self._prompt_token_ids,
            token_ids=self._token_ids.all(),
        )

    def _add_logprobs(self, more: CompletionLogprobs) -> None:
        if self._logprobs is None:
            self._logprobs = CompletionLogprobs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for name in CompletionLogprobs.__struct_fields__:
            getattr(self._logprobs, name).extend(getattr(more, name))
