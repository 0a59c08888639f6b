"""How answers are written as JSON: the two shapes of OpenAI's API behind one interface."""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from cluster.spec.sampling import FinishReason
from cluster.tokenizer import Tokenizer
from router.api.logprobs import chat_logprobs, completion_logprobs
from router.api.messages import delta, message
from router.api.requests import GenerationRequest
from router.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Delta,
    Usage,
)
from router.message import MessagePart, MessageReader, NewReader
from router.service import Service
from router.text import Piece

_encoder = msgspec.json.Encoder()


class Shape(Protocol):
    """Called by ``router.api.generate``; every result is one JSON object."""

    def opening(self, index: int) -> bytes | None:
        """What a stream says of a choice before its text; None for nothing."""
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

    def _token_ids(self, piece: Piece) -> tuple[int, ...] | UnsetType:
        return piece.token_ids if self._with_token_ids else UNSET


class CompletionShape(_Common):
    """``/v1/completions``."""

    def __init__(
        self, request_id: str, service: Service, body: GenerationRequest, echoes: Sequence[str] | None
    ) -> None:
        """``echoes``: for every choice the text before its answer; None where nothing is echoed."""
        super().__init__(f"cmpl-{request_id}", service, body)
        self._echoes = echoes

    def opening(self, index: int) -> bytes | None:
        """The prompt, where it is echoed."""
        if self._echoes is None:
            return None
        return self._encode([CompletionChoice(index=index, text=self._echoes[index], finish_reason=None)], None)

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """The next text."""
        return self._encode([self._choice(index, piece, piece.text)], usage)

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return self._encode([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All texts."""
        echoes = self._echoes or [""] * len(choices)
        made = [self._choice(index, piece, echoes[index] + piece.text) for index, piece in enumerate(choices)]
        return self._encode(made, usage)

    def _choice(self, index: int, piece: Piece, text: str) -> CompletionChoice:
        return CompletionChoice(
            index=index,
            text=text,
            logprobs=completion_logprobs(self._tokenizer, piece),
            finish_reason=piece.finish,
            token_ids=self._token_ids(piece),
        )

    def _encode(self, choices: list[CompletionChoice], usage: Usage | None) -> bytes:
        written = self._no_usage if usage is None else usage
        return _encoder.encode(
            Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=written)
        )


class ChatShape(_Common):
    """``/v1/chat/completions``."""

    def __init__(self, request_id: str, service: Service, body: GenerationRequest, new_reader: NewReader) -> None:
        super().__init__(f"chatcmpl-{request_id}", service, body)
        self._readers = defaultdict[int, MessageReader](new_reader)
        """Of every choice."""

    def opening(self, index: int) -> bytes | None:
        """Who speaks."""
        delta = Delta(role="assistant", content="")
        return self._encode([ChatChunkChoice(index=index, delta=delta, finish_reason=None)], None)

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """The next part of the message."""
        choice = ChatChunkChoice(
            index=index,
            delta=delta(self._read(index, piece)),
            logprobs=chat_logprobs(self._tokenizer, piece),
            finish_reason=self._finish_reason(index, piece),
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
                token_ids=self._token_ids(piece),
            )
            for index, piece in enumerate(choices)
        ]
        return _encoder.encode(
            ChatCompletion(id=self._id, created=self._created, model=self._model, choices=made, usage=usage)
        )

    def _read(self, index: int, piece: Piece) -> MessagePart:
        return self._readers[index].push(piece.text, is_end=piece.finish is not None)

    def _finish_reason(self, index: int, piece: Piece) -> str | None:
        """Of a piece that was read."""
        has_called = piece.finish is FinishReason.STOP and self._readers[index].has_called
        return "tool_calls" if has_called else piece.finish

    def _encode(self, choices: list[ChatChunkChoice], usage: Usage | None) -> bytes:
        written = self._no_usage if usage is None else usage
        return _encoder.encode(
            ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, usage=written)
        )
