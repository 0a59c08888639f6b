"""What clients may send to ``/v1/responses``, and the same as a chat request, which is what replicas are asked."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from router.api.errors import bad_request
from router.api.requests import Body, ChatRequest, NumLogprobs, Positive
from router.api.unsupported import refuse_unsupported

_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([], ["message.output_text.logprobs"]),
    "max_tool_calls": (),
    "modalities": (["text"],),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "text": ({}, {"format": {"type": "text"}}),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncation": ("disabled",),
}
"""By undeclared field, the values besides null that ask for nothing."""

_CHAT_FIELDS = (
    "cache_salt",
    "ignore_eos",
    "min_p",
    "min_tokens",
    "priority",
    "seed",
    "stop",
    "stop_token_ids",
    "top_k",
)
"""Additions to OpenAI's API that mean what they mean in chat."""


class InputPart(Body):
    """A part of a message."""

    type: Literal["input_text", "output_text", "text"]
    text: str


class InputMessage(Body):
    """One message of the conversation so far."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[InputPart], Field(union_mode="left_to_right")]

    @property
    def text(self) -> str:
        """All parts together."""
        return self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)


class ResponseRequest(Body):
    """``POST /v1/responses``. Nothing is stored: the whole conversation is in ``input``."""

    model: str
    input: Annotated[
        str | Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)], Field(union_mode="left_to_right")
    ]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: NumLogprobs | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    stream: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Log-probabilities are asked for in one of the two ways that the API has."""
        return self.top_logprobs is not None or bool(self.others.get("include"))

    def as_chat(self) -> ChatRequest:
        """The chat request that has the same answer.

        Raises:
            ApiError: 400 that names a field which would change the answer and is not supported.
        """
        refuse_unsupported(self.others, _HARMLESS)
        given = self.input if isinstance(self.input, list) else [InputMessage(role="user", content=self.input)]
        messages = [{"role": message.role, "content": message.text} for message in given]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "stream": self.stream,
        }
        additions = {name: self.others[name] for name in _CHAT_FIELDS if name in self.others}
        try:
            return ChatRequest.model_validate(fields | additions)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            name = ".".join(str(step) for step in wrong["loc"][:1])
            raise bad_request(f"{name}: {wrong['msg']}", name) from None
