"""Bodies of requests to ``/v1/responses``, and their conversion to an equivalent chat request."""

import base64
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError
from pydantic_core import to_json

from router.errors import ApiError, bad_request
from router.preprocess.body import HARMLESS, Body, problem_of, refuse_unsupported
from router.preprocess.model import Temperature, TopP
from router.preprocess.requests import (
    ChatRequest,
    Effort,
    FunctionName,
    NumLogprobs,
    Positive,
    RefusalPart,
    SchemaObject,
    Verbosity,
)

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_SEAL = b"baton\0"
"""Prefix that identifies our own ``encrypted_content``."""
_OWN_WORDS = (
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("logprobs", "top_logprobs"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("verbosity", "text.verbosity"),
)
"""Pairs of names for the fields that chat completions and the Responses API name differently."""


class InputPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


TextContent = Annotated[str | list[InputPart | RefusalPart], Field(union_mode="left_to_right")]


class InputMessage(Body):
    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: TextContent


class InputCall(Body):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(Body):
    type: Literal["function_call_output"]
    call_id: str
    output: TextContent


class InputReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(Body):
    type: Literal["reasoning"]
    content: list[InputReasoningText] | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """Reasoning text; empty if another server encrypted it."""
        if self.content:
            return "\n".join(part.text for part in self.content)
        return _unsealed(self.encrypted_content or "")


class InputReference(Body):
    """Reference to a stored item; always rejected, because nothing is stored."""

    type: Literal["item_reference"]
    id: str


def _type_of(item: Any) -> str:
    given = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return given if isinstance(given, str) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
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


class ToolSubset(Body):
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
    verbosity: Verbosity | None = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    """Ignored, because reasoning is returned in full."""


class ResponseRequest(Body):
    """Body of ``POST /v1/responses``. Nothing is stored, so ``input`` holds the entire conversation."""

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
        Annotated[Literal["none", "auto", "required"] | ChosenTool | ToolSubset, Field(union_mode="left_to_right")]
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
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


def sealed(text: str) -> str:
    """Return reasoning as ``encrypted_content``, which clients send back unread. It is not actually encrypted."""
    return base64.b64encode(_SEAL + text.encode()).decode()


def _unsealed(content: str) -> str:
    with suppress(ValueError):
        raw = base64.b64decode(content, validate=True)
        if raw.startswith(_SEAL):
            return raw.removeprefix(_SEAL).decode()
    return ""


_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    **HARMLESS,
    "background": (False,),
    "conversation": (),
    "include_reasoning": (True,),
    "max_tool_calls": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "stream_options": ({}, {"include_usage": True}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "truncation": ("disabled",),
}
"""Undeclared fields, with the values that have no effect. Null never has an effect."""
_ADDITIONS = (
    ChatRequest.model_fields.keys() - ResponseRequest.model_fields.keys() - _HARMLESS.keys() - dict(_OWN_WORDS).keys()
)
"""Fields of chat completions that OpenAI's Responses API lacks; accepted with the same meaning."""


def chat_of(body: ResponseRequest) -> ChatRequest:
    for name, own in _OWN_WORDS:
        if body.others.get(name) is not None:
            raise bad_request(f"{name}: not a field of this API; use {own}", name, "unsupported")
    refuse_unsupported(body.others, _HARMLESS)
    fields = {
        "model": body.model,
        "messages": _messages(body),
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "logprobs": body.wants_logprobs,
        "top_logprobs": body.top_logprobs,
        "stream": body.stream,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text is not None else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning is not None else None,
        "verbosity": body.text.verbosity if body.text is not None else None,
    }
    additions = {name: body.others[name] for name in _ADDITIONS if name in body.others}
    try:
        # JSON, because the keys of logit_bias must be strings.
        return ChatRequest.model_validate_json(to_json(fields | additions, inf_nan_mode="constants"))
    except ValidationError as error:
        raise in_own_words(problem_of(error.errors(include_url=False)[0])) from None


def in_own_words(error: ApiError) -> ApiError:
    """Return a chat request's error with the Responses API's name for the field."""
    if error.param is None:
        return error
    param = error.param.replace(".function.", ".")
    own = next((own + param.removeprefix(name) for name, own in _OWN_WORDS if param.startswith(name)), param)
    message = str(error).replace(f"{error.param}:", f"{own}:", 1)
    return ApiError(error.status, message, own, error.code, error.headers)


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """Return the conversation, with consecutive reasoning, text and calls joined into one assistant message."""
    given = body.input if isinstance(body.input, list) else [InputMessage(role="user", content=body.input)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    reasoning = ""
    for item in given:
        if isinstance(item, InputReasoning):
            reasoning = item.text
            continue
        _add(messages, item, reasoning)
        reasoning = ""
    return messages


def _add(messages: list[dict[str, Any]], item: InputItem, reasoning: str) -> None:
    extra = {"reasoning_content": reasoning} if reasoning else {}
    match item:
        case InputReference(id=name):
            known = 'nothing is stored here: send the item itself, as clients do with "store": false'
            raise bad_request(f"input: item_reference {name!r}: {known}", "input", "unsupported")
        case InputMessage(role="assistant"):
            messages.append({"role": "assistant", "content": _text(item.content), **extra})
        case InputMessage():
            messages.append({"role": item.role, "content": _text(item.content)})
        case InputCallOutput():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        case InputCall():
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", **extra})
            function = {"name": item.name, "arguments": item.arguments}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})


def _text(content: str | Sequence[InputPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: FunctionTool | ChosenTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(body: ResponseRequest) -> Any:
    match body.tool_choice:
        case ChosenTool() as tool:
            return _tool(tool)
        case ToolSubset(mode=mode, tools=tools):
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_tool(tool) for tool in tools]}}
    return body.tool_choice


def _response_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None or wanted.type != "json_schema":
        return None if wanted is None else {"type": wanted.type}
    return {"type": wanted.type, "json_schema": {"name": wanted.name, "schema": wanted.schema_}}
