"""How answers are written as JSON: the two shapes of OpenAI's API behind one interface."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from cluster.spec.sampling import FinishReason
from cluster.tokenizer import Tokenizer
from router.api.logprobs import chat_logprobs, completion_logprobs
from router.api.messages import delta, message
from router.api.prompt_logprobs import ShownPrompt, echo_logprobs, joined, prompt_logprobs
from router.api.requests import ChatRequest, GenerationRequest
from router.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Delta,
    PromptLogprobs,
    StopReason,
    Usage,
)
from router.message import MessagePart, MessageReader, NewReader
from router.service import Service
from router.text import Piece

_encoder = msgspec.json.Encoder()


class Shape(Protocol):
    """Called by ``router.api.generate``; every result is one JSON object."""

    def opening(self, index: int, first: Piece) -> bytes | None:
        """What a stream says of a choice before its text, of which ``first`` begins it; None for nothing."""
        ...

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """The next part of a choice, with the usage so far if there is to be one."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The usage of the whole stream."""
        ...

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer at once."""
        ...


class _Common:
    """What both shapes know of their request."""

    def __init__(self, response_id: str, service: Service, body: GenerationRequest) -> None:
        self._id = response_id
        self._model = service.model
        self._tokenizer: Tokenizer = service.tokenizer
        self._created = int(time.time())
        self._no_usage: UnsetType | None = None if body.include_usage else UNSET
        self._with_token_ids = bool(body.return_token_ids)
        self._num_choices = body.num_choices
        self._num_prompt_logprobs = body.prompt_logprobs

    def _token_ids(self, piece: Piece) -> tuple[int, ...] | UnsetType:
        return piece.token_ids if self._with_token_ids else UNSET

    def _prompt_token_ids(self, prompt_ids: Sequence[int]) -> list[int] | UnsetType:
        return [*prompt_ids] if self._with_token_ids else UNSET

    def _prompt_logprobs(self, prompt: ShownPrompt) -> PromptLogprobs | UnsetType:
        num_top = self._num_prompt_logprobs
        return UNSET if num_top is None else prompt_logprobs(self._tokenizer, prompt, num_top)


class CompletionShape(_Common):
    """``/v1/completions``."""

    def __init__(
        self, request_id: str, service: Service, body: GenerationRequest, prompts: Sequence[ShownPrompt]
    ) -> None:
        super().__init__(f"cmpl-{request_id}", service, body)
        self._prompts = prompts
        self._with_logprobs = body.num_logprobs is not None
        self._opened: set[int] = set()
        """Choices of which a part was written, where those differ from others."""

    def opening(self, index: int, first: Piece) -> bytes | None:
        """The prompt, where it is echoed."""
        prompt = self._prompt_of(index, first)
        if prompt.echo is None:
            return None
        choice = CompletionChoice(
            index=index,
            text=prompt.echo,
            logprobs=echo_logprobs(self._tokenizer, prompt) if self._with_logprobs else None,
            finish_reason=None,
            prompt_token_ids=self._first_prompt_token_ids(index, prompt),
        )
        return self._encode([choice], None)

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """The next text."""
        prompt = self._prompt_of(index, piece)
        choice = CompletionChoice(
            index=index,
            text=piece.text,
            logprobs=completion_logprobs(self._tokenizer, piece, len(prompt.echo or "")),
            finish_reason=piece.finish,
            stop_reason=_stop_reason(piece),
            prompt_token_ids=self._first_prompt_token_ids(index, prompt),
            token_ids=self._token_ids(piece),
        )
        return self._encode([choice], usage)

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return self._encode([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All texts."""
        return self._encode([self._choice(index, piece) for index, piece in enumerate(choices)], usage)

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        prompt = self._prompt_of(index, piece)
        echo = prompt.echo or ""
        logprobs = completion_logprobs(self._tokenizer, piece, len(echo))
        if prompt.echo is not None and self._with_logprobs:
            logprobs = joined(echo_logprobs(self._tokenizer, prompt), logprobs)
        return CompletionChoice(
            index=index,
            text=echo + piece.text,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs(prompt),
            finish_reason=piece.finish,
            stop_reason=_stop_reason(piece),
            prompt_token_ids=self._prompt_token_ids(prompt.token_ids),
            token_ids=self._token_ids(piece),
        )

    def _first_prompt_token_ids(self, index: int, prompt: ShownPrompt) -> list[int] | UnsetType:
        if not self._with_token_ids or index in self._opened:
            return UNSET
        self._opened.add(index)
        return self._prompt_token_ids(prompt.token_ids)

    def _prompt_of(self, index: int, piece: Piece) -> ShownPrompt:
        """The prompt of a choice; the first choice's first piece tells of it."""
        prompt = self._prompts[index // self._num_choices]
        prompt.logprobs = piece.prompt_logprobs or prompt.logprobs
        return prompt

    def _encode(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        written = self._no_usage if usage is None else usage
        return _encoder.encode(
            Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=written)
        )


class ChatShape(_Common):
    """``/v1/chat/completions``."""

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
        """Of every choice."""

    def opening(self, index: int, first: Piece) -> bytes | None:  # noqa: ARG002
        """Who speaks."""
        delta = Delta(role="assistant", content="")
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=None)
        return self._encode([choice], None, self._prompt_token_ids(self._prompt_ids))

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """The next part of the message."""
        choice = ChatChunkChoice(
            index=index,
            delta=delta(self._read(index, piece)),
            logprobs=chat_logprobs(self._tokenizer, piece),
            finish_reason=self._finish_reason(index, piece),
            stop_reason=_stop_reason(piece),
            token_ids=self._token_ids(piece),
        )
        return self._encode([choice], usage)

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return self._encode([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All messages."""
        made = [
            ChatChoice(
                index=index,
                message=message(self._read(index, piece)),
                logprobs=chat_logprobs(self._tokenizer, piece),
                finish_reason=self._finish_reason(index, piece),
                stop_reason=_stop_reason(piece),
                token_ids=self._token_ids(piece),
            )
            for index, piece in enumerate(choices)
        ]
        prompt = ShownPrompt(self._prompt_ids, logprobs=choices[0].prompt_logprobs)
        return _encoder.encode(
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

    def _read(self, index: int, piece: Piece) -> MessagePart:
        part = self._readers[index].push(piece.text, is_end=piece.finish is not None)
        return part if self._with_thoughts else replace(part, thoughts="")

    def _finish_reason(self, index: int, piece: Piece) -> str | None:
        """Of a piece that was read."""
        has_called = piece.finish is FinishReason.STOP and self._readers[index].has_called
        return "tool_calls" if has_called else piece.finish

    def _encode(
        self,
        choices: list[ChatChunkChoice],
        usage: Usage | None,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        return _encoder.encode(
            ChatChunk(
                id=self._id,
                created=self._created,
                model=self._model,
                choices=choices,
                prompt_token_ids=prompt_token_ids,
                usage=self._no_usage if usage is None else usage,
            )
        )


def _stop_reason(piece: Piece) -> StopReason:
    return UNSET if piece.finish is None else piece.stopped_by
