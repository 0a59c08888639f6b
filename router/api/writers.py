"""Writers of responses: their interface, and those of ``/v1/chat/completions`` and ``/v1/completions``."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from cluster.spec.sampling import FinishReason
from cluster.tokenizer import Tokenizer
from router.api.completions import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    Delta,
    FunctionCall,
    PromptLogprobs,
    ShownPrompt,
    StopReason,
    ToolCallDelta,
    Usage,
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    prompt_logprobs,
    top_logprobs,
)
from router.api.gathered import GatheredChat, GatheredCompletion
from router.connection import event
from router.errors import RequestFailedError
from router.message import CallPart, MessagePart, MessageReader
from router.preprocess.job import AnswerForm, AnswerOptions, ChatOptions, CompletionOptions
from router.preprocess.model import ServedModel
from router.text import OutputChunk

_encode_json = msgspec.json.Encoder().encode


class Writer(Protocol):
    """Writer of one answer in the format of its route: as JSON, or as server-sent events."""

    async def prepare(self, chunk: OutputChunk) -> None:
        """Do the long part of writing a chunk, with breaks for other clients. Called once, before ``chunk``."""

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        """Return the events for a choice's next chunk, with the usage so far if requested."""

    def closing(self, usage: Usage) -> bytes:
        """Return the events that follow those of all choices."""

    def failed(self, error: RequestFailedError) -> bytes:
        """Return the events that end a stream without a complete answer."""

    def gather(self, chunk: OutputChunk) -> None:
        """Add a choice's next chunk to the complete answer."""

    def whole(self, usage: Usage) -> bytes:
        """Return the complete answer."""


class TextWriter(ABC):
    def __init__(
        self,
        response_id: str,
        model: ServedModel,
        options: AnswerOptions,
        prompts: Sequence[ShownPrompt],
        num_choices: int,
        write_logprobs: Callable[[Tokenizer, OutputChunk], Sequence[msgspec.Raw]],
    ) -> None:
        """Create a writer of ``num_choices`` choices for every prompt."""
        self._id = response_id
        self._prompts, self._num_choices = prompts, num_choices
        self._write_logprobs = write_logprobs
        self._model = model.name
        self._tokenizer = model.tokenizer
        self._created = int(time.time())
        self._no_usage: UnsetType | None = None if options.include_usage else UNSET
        self._with_token_ids = options.return_token_ids
        self._begun: set[int] = set()
        """Indices of the choices for which at least one event has been written."""
        self._num_prompt_logprobs = options.num_prompt_logprobs

    def closing(self, usage: Usage) -> bytes:
        return (self._frame([], usage) if self._no_usage is None else b"") + event(b"[DONE]")

    def failed(self, error: RequestFailedError) -> bytes:
        return event(error.body)

    @abstractmethod
    def _frame(self, choices: list[Any], usage: Usage | None) -> bytes: ...

    def _token_ids(self, chunk: OutputChunk) -> Sequence[int] | UnsetType:
        return chunk.token_ids if self._with_token_ids else UNSET

    def _prompt_token_ids(self, prompt_ids: Sequence[int]) -> list[int] | UnsetType:
        return [*prompt_ids] if self._with_token_ids else UNSET

    def _prompt_of(self, chunk: OutputChunk) -> ShownPrompt:
        return self._prompts[chunk.index // self._num_choices]

    async def prepare(self, chunk: OutputChunk) -> None:
        if chunk.logprobs:
            chunk.written_logprobs = self._write_logprobs(self._tokenizer, chunk)
        if (num_top := self._num_prompt_logprobs) is None:
            return
        prompt, given = self._prompt_of(chunk), chunk.prompt_logprobs
        if prompt.logprobs is None and len(given) == len(prompt.token_ids) - 1:
            prompt.logprobs = await prompt_logprobs(self._tokenizer, prompt.token_ids, given, num_top)


class ChatWriter(TextWriter):
    """Writer of ``/v1/chat/completions``, which separates reasoning and tool calls from the content."""

    def __init__(
        self, request_id: str, model: ServedModel, options: ChatOptions, prompt_ids: Sequence[int], num_choices: int
    ) -> None:
        self._prompt = ShownPrompt(prompt_ids)
        super().__init__(f"chatcmpl-{request_id}", model, options, [self._prompt], num_choices, chat_logprobs)
        self._with_thoughts = options.include_reasoning
        new = partial(new_reader, model, options.form)
        self._readers = None if options.form == AnswerForm() else defaultdict[int, MessageReader](new)
        """Readers of the choices; None if the text needs no parsing."""
        self._gathered = defaultdict[int, GatheredChat](GatheredChat)

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        opening = b""
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            role = ChatChunkChoice(index=chunk.index, delta=Delta(role="assistant", content=""), finish_reason=None)
            opening = self._frame([role], None, self._prompt_token_ids(self._prompt.token_ids))
        return opening + self._frame([self._choice(chunk)], usage)

    def gather(self, chunk: OutputChunk) -> None:
        self._gathered[chunk.index].add(self._choice(chunk))

    def whole(self, usage: Usage) -> bytes:
        return _encode_json(
            ChatCompletion(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=[gathered.choice() for _, gathered in sorted(self._gathered.items())],
                prompt_logprobs=_or_unset(self._prompt.logprobs),
                prompt_token_ids=self._prompt_token_ids(self._prompt.token_ids),
                usage=usage,
            )
        )

    def _choice(self, chunk: OutputChunk) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=chunk.index,
            delta=_delta(self._read(chunk)),
            logprobs=self._logprobs(chunk),
            finish_reason=self._finish_reason(chunk),
            stop_reason=_stop_reason(chunk),
            token_ids=self._token_ids(chunk),
        )

    def _read(self, chunk: OutputChunk) -> MessagePart:
        if self._readers is None:
            return MessagePart(content=chunk.text)
        part = self._readers[chunk.index].push(chunk.text, is_end=chunk.finish is not None)
        if not self._with_thoughts:
            part.reasoning = ""
        return part

    def _logprobs(self, chunk: OutputChunk) -> ChatLogprobs | None:
        return ChatLogprobs(content=[*chunk.written_logprobs]) if chunk.written_logprobs else None

    def _finish_reason(self, chunk: OutputChunk) -> str | None:
        """Return the reason why the choice ended; valid after ``_read``."""
        if self._readers is not None and chunk.finish is FinishReason.STOP and self._readers[chunk.index].has_called:
            return "tool_calls"
        return chunk.finish

    def _frame(
        self, choices: list[ChatChunkChoice], usage: Usage | None, prompt_token_ids: list[int] | UnsetType = UNSET
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
    def __init__(
        self,
        request_id: str,
        model: ServedModel,
        options: CompletionOptions,
        prompts: Sequence[Sequence[int]],
        num_choices: int,
    ) -> None:
        echoes: Sequence[str | None] = options.echoes or [None] * len(prompts)
        skip = options.skip_special_tokens
        shown = [ShownPrompt(ids, echo, skip) for ids, echo in zip(prompts, echoes, strict=True)]
        super().__init__(f"cmpl-{request_id}", model, options, shown, num_choices, top_logprobs)
        self._with_logprobs = options.with_logprobs
        self._gathered = defaultdict[int, GatheredCompletion](GatheredCompletion)

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        *opening, last = self._choices(chunk)
        return b"".join(self._frame([choice], None) for choice in opening) + self._frame([last], usage)

    def gather(self, chunk: OutputChunk) -> None:
        for choice in self._choices(chunk):
            self._gathered[chunk.index].add(choice)

    def whole(self, usage: Usage) -> bytes:
        return self._encode([gathered.choice() for _, gathered in sorted(self._gathered.items())], usage)

    async def prepare(self, chunk: OutputChunk) -> None:
        await super().prepare(chunk)
        if not self._with_logprobs:
            return
        prompt, given = self._prompt_of(chunk), chunk.prompt_logprobs
        is_new = prompt.echo_logprobs is None and len(given) == len(prompt.token_ids) - 1
        if prompt.echo is not None and is_new:
            prompt.echo_logprobs = await echo_logprobs(self._tokenizer, prompt, given)

    def _frame(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        return event(self._encode(choices, usage))

    def _choices(self, chunk: OutputChunk) -> list[CompletionChoice]:
        """Return a chunk's part of its choice, and before the first one the echo of the prompt."""
        prompt, is_first = self._prompt_of(chunk), chunk.index not in self._begun
        self._begun.add(chunk.index)
        prompt_token_ids = self._prompt_token_ids(prompt.token_ids) if is_first else UNSET
        if not is_first or prompt.echo is None:
            return [self._choice(chunk, prompt, prompt_token_ids)]
        echo = CompletionChoice(
            index=chunk.index,
            text=prompt.echo,
            logprobs=prompt.echo_logprobs,
            finish_reason=None,
            prompt_token_ids=prompt_token_ids,
        )
        return [echo, self._choice(chunk, prompt, UNSET)]

    def _choice(
        self, chunk: OutputChunk, prompt: ShownPrompt, prompt_token_ids: list[int] | UnsetType
    ) -> CompletionChoice:
        return CompletionChoice(
            index=chunk.index,
            text=chunk.text,
            logprobs=completion_logprobs(self._tokenizer, chunk, len(prompt.echo or "")),
            prompt_logprobs=_or_unset(prompt.logprobs),
            finish_reason=chunk.finish,
            stop_reason=_stop_reason(chunk),
            prompt_token_ids=prompt_token_ids,
            token_ids=self._token_ids(chunk),
        )

    def _encode(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        written = self._no_usage if usage is None else usage
        return _encode_json(
            Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=written)
        )


def new_reader(model: ServedModel, form: AnswerForm) -> MessageReader:
    """Return a reader that splits the text of one choice."""
    functions, dialect = form.functions, model.dialect
    return MessageReader(form.thinking, None if functions is None or dialect is None else dialect.parser(functions))


def _or_unset(logprobs: PromptLogprobs | None) -> PromptLogprobs | UnsetType:
    return UNSET if logprobs is None else logprobs


def _stop_reason(chunk: OutputChunk) -> StopReason:
    return UNSET if chunk.finish is None else chunk.stopped_by


def _delta(part: MessagePart) -> Delta:
    return Delta(
        content=part.content or UNSET,
        reasoning_content=part.reasoning or UNSET,
        reasoning=part.reasoning or UNSET,
        tool_calls=[_call_delta(call) for call in part.calls] if part.calls else UNSET,
    )


def _call_delta(call: CallPart) -> ToolCallDelta:
    if not call.id:
        return ToolCallDelta(index=call.index, function=FunctionCall(arguments=call.arguments))
    named = FunctionCall(name=call.name, arguments=call.arguments)
    return ToolCallDelta(index=call.index, id=call.id, type="function", function=named)
