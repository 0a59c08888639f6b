"""Tokens on their way from the router's inbox to one HTTP response, which may read more slowly than they come."""

import asyncio
from collections.abc import Sequence

import msgspec

from cluster.spec.messages import PhaseTimes
from cluster.spec.sampling import FinishReason, TokenLogprobs
from cluster.spec.tiers import CachedTokens
from router.actions import Fail
from router.errors import RequestFailedError


class Part(msgspec.Struct):
    """Tokens of one choice."""

    index: int
    token_ids: list[int]
    finish: FinishReason | None
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    """Of every token, where they were asked for."""
    prompt_logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    """With the choice's first tokens, where they were asked for."""


class Stream:
    """What came for the choices of one response and was not read yet.

    Writing never waits: what a slow reader leaves is joined, and a choice has at most max_tokens tokens.
    """

    def __init__(self, num_choices: int) -> None:
        self.cached = [CachedTokens()] * num_choices
        """Prompt tokens of every choice that prefill did not compute."""
        self.phases: PhaseTimes | None = None
        """Of the first choice whose first token came."""
        self.first_s: float | None = None
        """When the first token of all came."""
        self.num_tokens = 0
        """Of all choices, read or not."""
        self._num_unfinished = num_choices
        self._parts: dict[int, Part] = {}
        self._failure: Fail | None = None
        self._reader: asyncio.Future[None] | None = None
        """Who waits for news."""

    def push(
        self,
        index: int,
        token_ids: Sequence[int],
        finish: FinishReason | None,
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """Tokens came for a choice."""
        part = self._parts.get(index)
        if part is None:
            part = self._parts[index] = Part(index, [], None)
        part.token_ids += token_ids
        part.logprobs += logprobs
        part.prompt_logprobs += prompt_logprobs
        part.finish = finish
        self.num_tokens += len(token_ids)
        self._wake()

    def num_unread(self, index: int) -> int:
        """Tokens of a choice that wait to be read."""
        part = self._parts.get(index)
        return len(part.token_ids) if part else 0

    def fail(self, failure: Fail) -> None:
        """Nothing more will come."""
        self._failure = failure
        self._wake()

    def finish(self, index: int) -> None:
        """The reader wants no more of a choice."""
        self._parts.pop(index, None)
        self._num_unfinished -= 1

    async def receive(self) -> list[Part]:
        """What came since the last call, at most one part per choice; empty when every choice has finished.

        Raises:
            RequestFailedError: the answer will not be whole.
        """
        if not self._num_unfinished:
            return []
        if not self._parts and self._failure is None:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._failure is not None:
            raise RequestFailedError(self._failure.cause, self._failure.reason)
        parts, self._parts = list(self._parts.values()), {}
        self._num_unfinished -= sum(part.finish is not None for part in parts)
        return parts

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
