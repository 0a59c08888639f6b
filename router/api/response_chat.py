"""Conversion of a ``/v1/responses`` body to the chat request with the same answer."""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import to_json

from router.api.body import problem_of
from router.api.requests import ChatRequest, RefusalPart
from router.api.response_request import (
    AllowedTools,
    ChosenTool,
    FunctionTool,
    InputCall,
    InputCallOutput,
    InputItem,
    InputMessage,
    InputPart,
    InputReference,
    InputThoughts,
    ResponseRequest,
    TextFormat,
)
from router.api.unsupported import HARMLESS, refuse_unsupported
from router.errors import ApiError, bad_request

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
"""Neutral values besides null, by undeclared field."""

_OWN_WORDS = (
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
    ("max_completion_tokens", "max_output_tokens"),
    ("logprobs", "top_logprobs"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
)
"""Fields of chat, and their names here."""

_ADDITIONS = (
    ChatRequest.model_fields.keys() - ResponseRequest.model_fields.keys() - _HARMLESS.keys() - dict(_OWN_WORDS).keys()
)
"""Fields of chat that OpenAI's API does not have here; they have the same meaning."""


def chat_of(body: ResponseRequest) -> ChatRequest:
    """Return the chat request."""
    refuse_unsupported(body.others, _HARMLESS)
    for name, own in _OWN_WORDS:
        if body.others.get(name) is not None:
            raise bad_request(f"{name}: is called {own} here", name, "unsupported")
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
    }
    additions = {name: body.others[name] for name in _ADDITIONS if name in body.others}
    try:
        # As JSON, in which numbers as keys are strings.
        return ChatRequest.model_validate_json(to_json(fields | additions, inf_nan_mode="constants"))
    except ValidationError as error:
        raise in_own_words(problem_of(error.errors(include_url=False)[0])) from None


def in_own_words(error: ApiError) -> ApiError:
    """Rewrite an error of a chat request to name this API's field."""
    if error.param is None:
        return error
    param = error.param.replace(".function.", ".")
    own = next((own + param.removeprefix(name) for name, own in _OWN_WORDS if param.startswith(name)), param)
    message = str(error).replace(f"{error.param}:", f"{own}:", 1)
    return ApiError(error.status, message, own, error.code, error.headers)


def _messages(body: ResponseRequest) -> list[dict[str, Any]]:
    """Return the conversation; consecutive thoughts, text and calls are one message of the assistant."""
    given = body.input if isinstance(body.input, list) else [InputMessage(role="user", content=body.input)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    thoughts = ""
    for item in given:
        if isinstance(item, InputThoughts):
            thoughts = item.text
            continue
        _add(messages, item, thoughts)
        thoughts = ""
    return messages


def _add(messages: list[dict[str, Any]], item: InputItem, thoughts: str) -> None:
    thought = {"reasoning_content": thoughts} if thoughts else {}
    match item:
        case InputReference(id=name):
            known = 'nothing is stored here: send the item itself, as clients do with "store": false'
            raise bad_request(f"input: item_reference {name!r}: {known}", "input", "unsupported")
        case InputMessage(role="assistant"):
            messages.append({"role": "assistant", "content": _text(item.content), **thought})
        case InputMessage():
            messages.append({"role": item.role, "content": _text(item.content)})
        case InputCallOutput():
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        case InputCall():
            if thoughts or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", **thought})
            function = {"name": item.name, "arguments": item.arguments}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.call_id, "type": "function", "function": function})


def _text(content: str | Sequence[InputPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _tool(tool: FunctionTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _tool_choice(body: ResponseRequest) -> Any:
    match body.tool_choice:
        case ChosenTool() as tool:
            return _named(tool)
        case AllowedTools(mode=mode, tools=tools):
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [_named(tool) for tool in tools]}}
    return body.tool_choice


def _named(tool: ChosenTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.name}}


def _response_format(wanted: TextFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": wanted.type, "json_schema": {"name": wanted.name, "schema": wanted.schema_}}
