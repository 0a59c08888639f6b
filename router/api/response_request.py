"""Bodies of requests to ``/v1/responses``."""

import base64
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from router.api.constraint_fields import FunctionName, SchemaObject
from router.api.requests import Body, Effort, NumLogprobs, Positive, RefusalPart
from router.sampling_defaults import Temperature, TopP

LOGPROBS = "message.output_text.logprobs"
SEALED_THOUGHTS = "reasoning.encrypted_content"
_SEAL = b"baton\0"
"""Begins what we call encrypted; nobody else's begins so."""


class InputPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


Texts = Annotated[str | list[InputPart | RefusalPart], Field(union_mode="left_to_right")]


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: Texts


class InputCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: Texts


class InputThought(Body):
    type: Literal["reasoning_text"]
    text: str


class InputThoughts(Body):
    """Thoughts before the model's next message or call."""

    type: Literal["reasoning"]
    content: list[InputThought] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The thoughts; empty where only others can read them."""
        if self.content:
            return "\n".join(thought.text for thought in self.content)
        return _unsealed(self.encrypted_content or "")


class InputReference(Body):
    """An item that a server with a store would know."""

    type: Literal["item_reference"]
    id: str


def _type_of(item: Any) -> str:
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return given if isinstance(given, str) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputThoughts, Tag("reasoning")]
    | Annotated[InputReference, Tag("item_reference")],
    Discriminator(_type_of),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenTool(FunctionName):
    type: Literal["function"]


class AllowedTools(Body):
    """The functions that may be called, and whether one of them must be."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1)]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: SchemaObject | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored: thoughts are given in full, as by models without summaries."""


class ResponseRequest(Body):
    """``POST /v1/responses``. Nothing is stored: the whole conversation is in ``input``."""

    model: str
    input: Annotated[
        str | Annotated[list[InputItem], Field(min_length=1, fail_fast=True)], Field(union_mode="left_to_right")
    ]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[str] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=1024)] | None = None
    tool_choice: (
        Annotated[Literal["none", "auto", "required"] | ChosenTool | AllowedTools, Field(union_mode="left_to_right")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    stream: bool | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Return whether log-probabilities are requested in one of the API's two ways."""
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


def sealed(text: str) -> str:
    """Return thoughts as ``encrypted_content``, which clients return unread; nothing here is secret."""
    return base64.b64encode(_SEAL + text.encode()).decode()


def _unsealed(content: str) -> str:
    with suppress(ValueError):
        raw = base64.b64decode(content, validate=True)
        if raw.startswith(_SEAL):
            return raw.removeprefix(_SEAL).decode()
    return ""
