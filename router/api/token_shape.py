"""How ``/generate`` writes its answers: token ids and their log-probabilities, no text."""

import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cluster.spec.sampling import TokenLogprobs
from router.api.logprobs import finite
from router.api.requests import TokensRequest
from router.api.responses import Usage
from router.service import Service
from router.text import Piece

_encoder = msgspec.json.Encoder()


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token that the model might have said."""

    token_id: int
    logprob: float


class ChosenToken(TokenLogprob, frozen=True, kw_only=True):
    """The token that it said."""

    top_logprobs: list[TokenLogprob]


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or the next part of it."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: list[ChosenToken] | None
    """One entry a token; null where none were asked for."""
    prompt_logprobs: list[ChosenToken | None] | UnsetType = UNSET
    """The same for the prompt, with null for its first token."""
    finish_reason: str | None


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, or one chunk."""

    id: str
    object: Literal["generation"] = "generation"
    created: int
    model: str
    choices: list[TokenChoice]
    usage: Usage | UnsetType | None = UNSET


class TokenShape:
    """See ``router.api.shapes.Shape``."""

    def __init__(self, request_id: str, service: Service, body: TokensRequest) -> None:
        self._id = f"gen-{request_id}"
        self._model = service.model
        self._created = int(time.time())
        self._no_usage: UnsetType | None = None if body.include_usage else UNSET
        self._prompt_ids = body.prompt_ids
        self._num_prompt_logprobs = body.prompt_logprobs

    def opening(self, index: int, first: Piece) -> None:
        """Nothing."""

    def chunk(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """The next tokens."""
        return self._encode([_choice(index, piece)], usage)

    def closing(self, usage: Usage) -> bytes:
        """No choices, only the usage."""
        return self._encode([], usage)

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """All answers."""
        told = self._prompt_logprobs(choices[0].prompt_logprobs)
        made = [_choice(index, piece) for index, piece in enumerate(choices)]
        return self._encode([msgspec.structs.replace(choice, prompt_logprobs=told) for choice in made], usage)

    def _prompt_logprobs(self, told: Sequence[TokenLogprobs]) -> list[ChosenToken | None] | UnsetType:
        if self._num_prompt_logprobs is None:
            return UNSET
        return [None, *(_logprob(*both) for both in zip(self._prompt_ids[1:], told, strict=True))]

    def _encode(self, choices: list[TokenChoice], usage: Usage | None) -> bytes:
        written = self._no_usage if usage is None else usage
        return _encoder.encode(
            Generation(id=self._id, created=self._created, model=self._model, choices=choices, usage=written)
        )


def _choice(index: int, piece: Piece) -> TokenChoice:
    told = zip(piece.token_ids, piece.logprobs, strict=True) if piece.logprobs else ()
    logprobs = [_logprob(token_id, logprobs) for token_id, logprobs in told]
    return TokenChoice(index=index, token_ids=piece.token_ids, logprobs=logprobs or None, finish_reason=piece.finish)


def _logprob(token_id: int, told: TokenLogprobs) -> ChosenToken:
    top = zip(told.top_ids, told.top_logprobs, strict=True)
    return ChosenToken(
        token_id=token_id,
        logprob=finite(told.logprob),
        top_logprobs=[TokenLogprob(token_id=other, logprob=finite(logprob)) for other, logprob in top],
    )
