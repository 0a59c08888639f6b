"""JSON shape of ``/generate`` responses: token ids and their log-probabilities, no text."""

import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cluster.spec.sampling import TokenLogprobs
from router.api.logprobs import finite
from router.api.requests import TokensRequest
from router.api.responses import Usage
from router.api.shapes import encode_json
from router.request import OutputChunk
from router.service import Service


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    token_id: int
    logprob: float


class ChosenToken(TokenLogprob, frozen=True, kw_only=True):
    top_logprobs: list[TokenLogprob]


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer, or the next part of it."""

    index: int
    token_ids: Sequence[int]
    logprobs: list[ChosenToken] | None
    """One entry per token; null if not requested."""
    prompt_logprobs: list[ChosenToken | None] | UnsetType = UNSET
    """Log-probabilities of the prompt, with null for its first token."""
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
        self._model = service.model.name
        self._created = int(time.time())
        self._no_usage: UnsetType | None = None if body.include_usage else UNSET
        self._prompt_ids = body.prompt_ids
        self._num_prompt_logprobs = body.prompt_logprobs

    def opening(self, first: OutputChunk) -> None:
        """Return nothing."""

    def chunk(self, chunk: OutputChunk, usage: Usage | None) -> bytes:
        return self._encode([_choice(chunk.index, chunk)], usage)

    def closing(self, usage: Usage) -> bytes:
        return self._encode([], usage)

    def whole(self, choices: Sequence[OutputChunk], usage: Usage) -> bytes:
        prompt_logprobs = self._prompt_logprobs(choices[0].prompt_logprobs)
        made = [_choice(index, chunk) for index, chunk in enumerate(choices)]
        return self._encode(
            [msgspec.structs.replace(choice, prompt_logprobs=prompt_logprobs) for choice in made], usage
        )

    def _prompt_logprobs(self, given: Sequence[TokenLogprobs]) -> list[ChosenToken | None] | UnsetType:
        if self._num_prompt_logprobs is None:
            return UNSET
        return [None, *(_logprob(*both) for both in zip(self._prompt_ids[1:], given, strict=True))]

    def _encode(self, choices: list[TokenChoice], usage: Usage | None) -> bytes:
        written = self._no_usage if usage is None else usage
        return encode_json(
            Generation(id=self._id, created=self._created, model=self._model, choices=choices, usage=written)
        )


def _choice(index: int, chunk: OutputChunk) -> TokenChoice:
    given = zip(chunk.token_ids, chunk.logprobs, strict=True) if chunk.logprobs else ()
    logprobs = [_logprob(token_id, logprobs) for token_id, logprobs in given]
    return TokenChoice(index=index, token_ids=chunk.token_ids, logprobs=logprobs or None, finish_reason=chunk.finish)


def _logprob(token_id: int, given: TokenLogprobs) -> ChosenToken:
    top = zip(given.top_ids, given.top_logprobs, strict=True)
    return ChosenToken(
        token_id=token_id,
        logprob=finite(given.logprob),
        top_logprobs=[TokenLogprob(token_id=other, logprob=finite(logprob)) for other, logprob in top],
    )
