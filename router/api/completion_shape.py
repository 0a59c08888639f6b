"""JSON shape of ``/v1/completions`` responses, with their echoed prompts."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from router.api.connection import event
from router.api.logprobs import ShownPrompt, completion_logprobs, echo_logprobs, joined
from router.api.requests import GenerationBody
from router.api.responses import Completion, CompletionChoice, Usage
from router.api.shapes import TextShape, encode_json, stop_reason
from router.request import OutputChunk
from router.service import Service
from router.text import join


class CompletionShape(TextShape):
    """See ``router.api.shapes.Shape``."""

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
            stop_reason=stop_reason(chunk),
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
            stop_reason=stop_reason(chunk),
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
        return encode_json(
            Completion(id=self._id, created=self._created, model=self._model, choices=choices, usage=written)
        )
