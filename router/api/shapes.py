"""How answers are written as JSON: the two shapes of OpenAI's API behind one interface."""

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec
from msgspec import UNSET, UnsetType

from router.api.requests import GenerationRequest
from router.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    Delta,
    Message,
    Usage,
)
from router.text import Piece

_encoder = msgspec.json.Encoder()


class Shape(Protocol):
    """Called by ``router.api.generate``; every result is one JSON object."""

    def opening(self, index: int) -> bytes | None:
        """What a stream says of a choice before its text; None for nothing."""
        ...

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The next part of a choice."""
        ...

    def closing(self, usage: Usage) -> bytes:
        """The usage of the whole stream."""
        ...

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole answer at once."""
        ...


class CompletionShape:
    """``/v1/completions``."""

    def __init__(self, request_id: str, model: str, body: GenerationRequest) -> None:
        self._id = f"cmpl-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._no_usage: UnsetType | None = None if body.include_usage else UNSET
        self._with_token_ids = bool(body.return_token_ids)

    def opening(self, index: int) -> bytes | None:
        """Nothing comes before the text."""
        del index
        return None

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The next text."""
        return self._encode([self._choice(index, piece)], self._no_usage)

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return self._encode([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All texts."""
        return self._encode([self._choice(index, piece) for index, piece in enumerate(choices)], usage)

    def _choice(self, index: int, piece: Piece) -> CompletionChoice:
        token_ids = piece.token_ids if self._with_token_ids else UNSET
        return CompletionChoice(index=index, text=piece.text, finish_reason=piece.finish, token_ids=token_ids)

    def _encode(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> bytes:
        return _encoder.encode(
            Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=usage)
        )


class ChatShape:
    """``/v1/chat/completions``."""

    def __init__(self, request_id: str, model: str, body: GenerationRequest) -> None:
        self._id = f"chatcmpl-{request_id}"
        self._model = model
        self._created = int(time.time())
        self._no_usage: UnsetType | None = None if body.include_usage else UNSET
        self._with_token_ids = bool(body.return_token_ids)

    def opening(self, index: int) -> bytes | None:
        """Who speaks."""
        return self._encode(ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""), finish_reason=None))

    def chunk(self, index: int, piece: Piece) -> bytes:
        """The next text."""
        delta = Delta(content=piece.text) if piece.text else Delta()
        token_ids = self._token_ids(piece)
        return self._encode(ChatChunkChoice(index=index, delta=delta, finish_reason=piece.finish, token_ids=token_ids))

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return _encoder.encode(
            ChatChunk(id=self._id, created=self._created, model=self._model, choices=[], usage=usage)
        )

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All messages."""
        made = [
            ChatChoice(
                index=index,
                message=Message(content=piece.text),
                finish_reason=piece.finish,
                token_ids=self._token_ids(piece),
            )
            for index, piece in enumerate(choices)
        ]
        return _encoder.encode(
            ChatCompletion(id=self._id, created=self._created, model=self._model, choices=made, usage=usage)
        )

    def _token_ids(self, piece: Piece) -> tuple[int, ...] | UnsetType:
        return piece.token_ids if self._with_token_ids else UNSET

    def _encode(self, choice: ChatChunkChoice) -> bytes:
        return _encoder.encode(
            ChatChunk(id=self._id, created=self._created, model=self._model, choices=[choice], usage=self._no_usage)
        )
