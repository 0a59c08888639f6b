"""Writers of answers: the interface, and those of ``/v1/chat/completions`` and ``/v1/completions``."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from cluster.spec.sampling import FinishReason
from router.api.logprobs import (
    ShownPrompt,
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    joined,
    prompt_logprobs,
)
from router.api.requests import ChatRequest, GenerationBody
from router.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Delta,
    FunctionCall,
    Message,
    PromptLogprobs,
    StopReason,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from router.connection import event
from router.errors import RequestFailedError
from router.message import CallPart, MessagePart, MessageReader, NewReader
from router.service import Service
from router.text import OutputChunk, join

_encode_json = msgspec.json.Encoder().encode


class Writer(Protocol):
    """Writes one answer in the form of its route: whole as JSON, or as frames of server-sent events."""

    def opening(self, first: OutputChunk) -> bytes:
        """Return the frames of a choice before its text, which ``first`` begins; empty for none."""

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        """Return the frames of the next part of a choice, with the usage so far if it is requested."""

    def closing(self, usage: Usage) -> bytes:
        """Return the frames after all choices."""

    def failed(self, error: RequestFailedError) -> bytes:
        """Return the frames that end a stream without a complete answer."""

    def whole(self, choices: Sequence[Sequence[OutputChunk]], usage: Usage) -> bytes:
        """Return the whole answer, from the chunks of every choice."""


class TextWriter(ABC):
    """Common parts of chats and completions."""

    def __init__(self, response_id: str, service: Service, body: GenerationBody) -> None:
        self._id = response_id
        self._model = service.model.name
        self._tokenizer = service.tokenizer
        self._created = int(time.time())
        self._includes_usage = body.include_usage
        self._no_usage: UnsetType | None = None if body.include_usage else UNSET
        self._with_token_ids = bool(body.return_token_ids)
        self._num_choices = body.num_choices
        self._num_prompt_logprobs = body.prompt_logprobs

    def closing(self, usage: Usage) -> bytes:
        return (self._usage_frame(usage) if self._includes_usage else b"") + event(b"[DONE]")

    def failed(self, error: RequestFailedError) -> bytes:
        return event(error.body)

    @abstractmethod
    def _usage_frame(self, usage: Usage) -> bytes: ...

    def _token_ids(self, chunk: OutputChunk) -> Sequence[int] | UnsetType:
        return chunk.token_ids if self._with_token_ids else UNSET

    def _prompt_token_ids(self, prompt_ids: Sequence[int]) -> list[int] | UnsetType:
        return [*prompt_ids] if self._with_token_ids else UNSET

    def _prompt_logprobs(self, prompt: ShownPrompt) -> PromptLogprobs | UnsetType:
        num_top = self._num_prompt_logprobs
        return UNSET if num_top is None else prompt_logprobs(self._tokenizer, prompt, num_top)


class ChatWriter(TextWriter):
    def __init__(
        self,
        request_id: str,
        service: Service,
        body: ChatRequest,
        new_reader: NewReader,
        prompt_ids: Sequence[int],
    ) -> None:
        super().__init__(f"chatcmpl-{request_id}", service, body)
        self._prompt_ids = prompt_ids
        self._with_thoughts = body.include_reasoning is not False
        self._readers = defaultdict[int, MessageReader](new_reader)

    def opening(self, first: OutputChunk) -> bytes:
        """Return the role."""
        choice = ChatChunkChoice(index=first.index, delta=Delta(role="assistant", content=""), finish_reason=None)
        return self._frame([choice], None, self._prompt_token_ids(self._prompt_ids))

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        choice = ChatChunkChoice(
            index=chunk.index,
            delta=_delta(self._read(chunk)),
            logprobs=chat_logprobs(self._tokenizer, chunk) if chunk.logprobs else None,
            finish_reason=self._finish_reason(chunk),
            stop_reason=_stop_reason(chunk),
            token_ids=self._token_ids(chunk),
        )
        return self._frame([choice], usage)

    def whole(self, choices: Sequence[Sequence[OutputChunk]], usage: Usage) -> bytes:
        chunks = [join(chunks) for chunks in choices]
        made = [
            ChatChoice(
                index=index,
                message=_message(self._read(chunk)),
                logprobs=chat_logprobs(self._tokenizer, chunk) if chunk.logprobs else None,
                finish_reason=self._finish_reason(chunk),
                stop_reason=_stop_reason(chunk),
                token_ids=self._token_ids(chunk),
            )
            for index, chunk in enumerate(chunks)
        ]
        prompt = ShownPrompt(self._prompt_ids, logprobs=chunks[0].prompt_logprobs)
        return _encode_json(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=made,
                prompt_logprobs=self._prompt_logprobs(prompt),
                prompt_token_ids=self._prompt_token_ids(self._prompt_ids),
                usage=usage,
            )
        )

    def _read(self, chunk: OutputChunk) -> MessagePart:
        part = self._readers[chunk.index].push(chunk.text, is_end=chunk.finish is not None)
        if not self._with_thoughts:
            part.thoughts = ""
        return part

    def _finish_reason(self, chunk: OutputChunk) -> str | None:
        """Return why the choice ended; called after ``_read``."""
        has_called = chunk.finish is FinishReason.STOP and self._readers[chunk.index].has_called
        return "tool_calls" if has_called else chunk.finish

    def _usage_frame(self, usage: Usage) -> bytes:
        return self._frame([], usage)

    def _frame(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        chunk = ChatChunk(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=choices,
            prompt_token_ids=prompt_token_ids,
            usage=self._no_usage if usage is None else usage,
        )
        return event(_encode_json(chunk))


class CompletionWriter(TextWriter):
    """``/v1/completions``, with echoed prompts."""

    def __init__(self, request_id: str, service: Service, body: GenerationBody, prompts: Sequence[ShownPrompt]) -> None:
        super().__init__(f"cmpl-{request_id}", service, body)
        self._prompts = prompts
        self._with_logprobs = body.num_logprobs is not None
        self._begun: set[int] = set()
        """Choices whose prompt token ids were written."""

    def opening(self, first: OutputChunk) -> bytes:
        """Return the prompt, where it is echoed."""
        prompt = self._prompt_of(first.index, first)
        if prompt.echo is None:
            return b""
        choice = CompletionChoice(
            index=first.index,
            text=prompt.echo,
            logprobs=echo_logprobs(self._tokenizer, prompt) if self._with_logprobs else None,
            finish_reason=None,
            prompt_token_ids=self._first_prompt_token_ids(first.index, prompt),
        )
        return event(self._encode([choice], None))

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        prompt = self._prompt_of(chunk.index, chunk)
        choice = CompletionChoice(
            index=chunk.index,
            text=chunk.text,
            logprobs=completion_logprobs(self._tokenizer, chunk, len(prompt.echo or "")),
            finish_reason=chunk.finish,
            stop_reason=_stop_reason(chunk),
            prompt_token_ids=self._first_prompt_token_ids(chunk.index, prompt),
            token_ids=self._token_ids(chunk),
        )
        return event(self._encode([choice], usage))

    def whole(self, choices: Sequence[Sequence[OutputChunk]], usage: Usage) -> bytes:
        return self._encode([self._choice(index, join(chunks)) for index, chunks in enumerate(choices)], usage)

    def _usage_frame(self, usage: Usage) -> bytes:
        return event(self._encode([], usage))

    def _choice(self, index: int, chunk: OutputChunk) -> CompletionChoice:
        prompt = self._prompt_of(index, chunk)
        echo = prompt.echo or ""
        logprobs = completion_logprobs(self._tokenizer, chunk, len(echo))
        if prompt.echo is not None and self._with_logprobs:
            logprobs = joined(echo_logprobs(self._tokenizer, prompt), logprobs)
        return CompletionChoice(
            index=index,
            text=echo + chunk.text,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(prompt),
            finish_reason=chunk.finish,
            stop_reason=_stop_reason(chunk),
            prompt_token_ids=self._prompt_token_ids(prompt.token_ids),
            token_ids=self._token_ids(chunk),
        )

    def _first_prompt_token_ids(self, index: int, prompt: ShownPrompt) -> list[int] | UnsetType:
        if not self._with_token_ids or index in self._begun:
            return UNSET
        self._begun.add(index)
        return self._prompt_token_ids(prompt.token_ids)

    def _prompt_of(self, index: int, chunk: OutputChunk) -> ShownPrompt:
        """Return the prompt of a choice; the first chunk of its first choice has its log-probabilities."""
        prompt = self._prompts[index // self._num_choices]
        prompt.logprobs = chunk.prompt_logprobs or prompt.logprobs
        return prompt

    def _encode(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        written = self._no_usage if usage is None else usage
        return _encode_json(
            Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=written)
        )


def _stop_reason(chunk: OutputChunk) -> StopReason:
    return UNSET if chunk.finish is None else chunk.stopped_by


def _message(whole: MessagePart) -> Message:
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments)) for call in whole.calls
    ]
    return Message(
        content=None if calls and not whole.content else whole.content,
        reasoning_content=whole.thoughts or UNSET,
        reasoning=whole.thoughts or UNSET,
        tool_calls=calls or UNSET,
    )


def _delta(part: MessagePart) -> Delta:
    return Delta(
        content=part.content or UNSET,
        reasoning_content=part.thoughts or UNSET,
        reasoning=part.thoughts or UNSET,
        tool_calls=[_call_delta(call) for call in part.calls] if part.calls else UNSET,
    )


def _call_delta(call: CallPart) -> ToolCallDelta:
    if not call.id:
        return ToolCallDelta(index=call.index, function=FunctionCall(arguments=call.arguments))
    named = FunctionCall(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, type="function", function=named)
