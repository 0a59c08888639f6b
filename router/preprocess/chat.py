"""Conversion of a chat body to a request: template, tools, reasoning, structured output."""

from collections.abc import Mapping, Sequence
from typing import Any

from cluster.spec.errors import UserError
from router.errors import bad_request
from router.message import CLOSING, OPENING, Thinking, reasoning_after
from router.preprocess.call_grammar import Callee, call_constraint
from router.preprocess.constrain import Constraint, grammar_of, wanted_answer
from router.preprocess.intake import check, given_or, make_requests, token_ids_of
from router.preprocess.job import AnswerForm
from router.preprocess.model import ServedModel
from router.preprocess.requests import AllowedTools, ChatMessage, ChatRequest, NamedTool, TemplateBody, Tool
from router.request import GenerateRequest
from router.tool_calls.arguments import types_of_parameters
from router.tool_calls.dialects import Dialect

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def chat_request(model: ServedModel, body: ChatRequest, max_tokens: int) -> tuple[GenerateRequest, AnswerForm]:
    check(model, body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: only allowed with logprobs=true", "top_logprobs")
    if body.reasoning_effort not in (None, "none") and not model.has_reasoning:
        known = "this model's chat template does not support reasoning, or router.reasoning_parser is none"
        given = f'got "{body.reasoning_effort}", allowed: null or "none"'
        raise bad_request(f"reasoning_effort: not supported here: {known}; {given}", "reasoning_effort")
    dialect = _dialect(model, body)
    prompt_ids, prompt = chat_prompt(model, body.messages, body)
    thinking = reasoning_after(prompt) if model.has_reasoning else Thinking.NONE
    grammar = grammar_of(model, lambda: _constraint(model, body, dialect), thinking)
    markers = [OPENING, CLOSING] if model.has_reasoning else []
    markers += dialect.markers if dialect is not None else ()
    functions = None if dialect is None else _functions(body, dialect)
    (request,) = make_requests(model, body, [prompt_ids], max_tokens, grammar, markers)
    return request, AnswerForm(thinking, functions)


def chat_prompt(model: ServedModel, messages: Sequence[ChatMessage], options: TemplateBody) -> tuple[list[int], str]:
    """Render and tokenize a conversation. By default, no special tokens are added, because most templates write them.

    Templates that do not know ``developer``, OpenAI's newer name for ``system``, get ``system``.
    """
    given = _with_names([message.for_template() for message in messages])
    if "developer" not in (model.tokenizer.chat_template or ""):
        # Most templates skip unknown roles, so the message would be lost.
        given = [message | {"role": "system"} if message["role"] == "developer" else message for message in given]
    if "['content'] is none" in (model.tokenizer.chat_template or ""):
        # DeepSeek's first templates skip the calls of messages that have content, even an empty one.
        given = [message | {"content": None} if _only_calls(message) else message for message in given]
    try:
        opens_answer = options.add_generation_prompt is not False
        text = model.tokenizer.apply_chat_template(given, opens_answer, options.variables)
    except UserError as error:
        raise bad_request(str(error), "messages") from error
    return token_ids_of(model, text, "messages", add_special_tokens=bool(options.add_special_tokens)), text


def _only_calls(message: Mapping[str, Any]) -> bool:
    return "tool_calls" in message and not message["content"]


def _with_names(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the function's name to each call's result: OpenAI's clients omit it, but Hermes' templates require it."""
    names: dict[str, str] = {}
    named = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            match call:
                case {"id": str(call_id), "function": {"name": str(name)}}:
                    names[call_id] = name
        match message:
            case {"role": "tool", "tool_call_id": str(call_id)} if call_id in names:
                message = {"name": names[call_id], **message}
        named.append(message)
    return named


def _dialect(model: ServedModel, body: ChatRequest) -> Dialect | None:
    """Return the format of tool calls, or None if the model must not call tools."""
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise bad_request("tool_choice: there are no tools to choose from", "tool_choice")
    if not body.tools or body.tool_choice == "none":
        return None
    if model.dialect is None:
        known = "this model's chat template has no tool calls in a known format, or router.tool_parser is none"
        raise bad_request(f'tools: not supported here: {known}; allowed with "tool_choice": "none"', "tools")
    return model.dialect


def _constraint(model: ServedModel, body: ChatRequest, dialect: Dialect | None) -> Constraint | None:
    """Return the required form of the answer and its calls, or None if any form is allowed."""
    answer = wanted_answer(body)
    if dialect is None or (_is_best_effort(body) and body.parallel_tool_calls is not False and answer is None):
        return answer
    choice = body.tool_choice
    is_free = (choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice) in (None, "none", "auto")
    calls = _calls(model, body, dialect, with_text=is_free and answer is None)
    if answer is None:
        return calls
    if is_free:
        return Constraint(
            rules=(*calls.rules, *answer.rules),
            starts=(*calls.starts, *answer.starts),
            parts={**calls.parts, **answer.parts},
        )
    if answer.parts["answer"].field.startswith("response_format"):
        return calls  # like OpenAI's API: agents repeat the format of their last answer in every request
    raise bad_request("tool_choice: a required call cannot be combined with a structured answer", "tool_choice")


def _is_best_effort(body: ChatRequest) -> bool:
    """Return whether tool calls and their arguments are not enforced."""
    return body.tool_choice in (None, "auto")


def _calls(model: ServedModel, body: ChatRequest, dialect: Dialect, *, with_text: bool) -> Constraint:
    """Return the grammar of tool calls. With ``with_text``, any text may precede or replace them."""
    # Best-effort tool calls need no schema, so one that cannot be enforced is no reason to refuse the request.
    holds_schemas = not (with_text and _is_best_effort(body))
    callees = [
        Callee(
            tool.function.name,
            given_or(tool.function.parameters, _NO_PARAMETERS) if holds_schemas else None,
            f"tools[{index}].function.parameters",
        )
        for index, tool in _callable(body)
    ]
    several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
    # Llama 3's template would reject the conversation that has the calls.
    several = several and "only supports single tool-calls" not in (model.tokenizer.tool_template or "")
    return call_constraint(dialect, callees, model.tokenizer.whole_texts, several=several, with_text=with_text)


def _functions(body: ChatRequest, dialect: Dialect) -> dict[str, dict[str, list[str]]]:
    """Return the functions that may be called, with the types of parameters that are written one by one."""
    return {
        tool.function.name: types_of_parameters(tool.function.parameters or {}) if dialect.form.parameter else {}
        for _, tool in _callable(body)
    }


def _callable(body: ChatRequest) -> list[tuple[int, Tool]]:
    """Return the tools that ``tool_choice`` allows, with their indices."""
    tools = list(enumerate(body.tools or ()))
    match body.tool_choice:
        case NamedTool(function=function):
            chosen = [function.name]
        case AllowedTools(allowed_tools=allowed):
            chosen = [tool.function.name for tool in allowed.tools]
        case _:
            return tools
    known = [tool.function.name for _, tool in tools]
    for name in chosen:
        if name not in known:
            raise bad_request(f"tool_choice: there is no tool {name!r}; allowed: {', '.join(known)}", "tool_choice")
    return [(index, tool) for index, tool in tools if tool.function.name in chosen]
