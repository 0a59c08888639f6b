"""From a chat request to what replicas are asked, and to how its answer is read: tools, thoughts, structured output."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from router.api.constrain import checked_grammar, wanted_answer
from router.api.constraint_fields import AllowedTools, NamedTool, Tool, may_talk
from router.api.errors import bad_request
from router.api.intake import chat_prompt, check, make_ask
from router.api.requests import ChatRequest
from router.constraints import ANY_OBJECT, Constraint, either, json_part
from router.flight import Ask
from router.message import MessageReader, NewReader
from router.reasoning import CLOSING, OPENING, Thinking, thinking_after
from router.service import Service
from router.tool_calls.dialects import Dialect

_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


async def chat_ask(service: Service, body: ChatRequest) -> tuple[Ask, NewReader]:
    """The ask of a conversation, and what reads its answers.

    Raises:
        ApiError: 404 or 400.
    """
    check(service, body)
    if body.top_logprobs and not body.logprobs:
        raise bad_request("top_logprobs: only allowed when logprobs is true", "top_logprobs")
    _check_effort(service, body)
    dialect = _dialect(service, body)
    adds = body.add_generation_prompt is not False
    prompt_ids, prompt = await chat_prompt(service, body.messages, adds, body.variables, bool(body.add_special_tokens))
    thinking = thinking_after(prompt) if service.has_thoughts else Thinking.NONE
    grammar = await checked_grammar(service, _constraint(service, body, dialect), thinking)
    max_tokens = body.max_completion_tokens or body.max_tokens
    ask = make_ask(service, body, prompt_ids, max_tokens, service.max_tokens, "messages", grammar)
    return ask, partial(_reader, body, dialect, thinking)


def markers(service: Service, body: ChatRequest) -> tuple[str, ...]:
    """Texts that an answer's reader must see, even if they are special tokens."""
    dialect = _dialect(service, body)
    thoughts = (OPENING, CLOSING) if service.has_thoughts else ()
    return thoughts if dialect is None else (*thoughts, *dialect.markers)


def _reader(body: ChatRequest, dialect: Dialect | None, thinking: Thinking) -> MessageReader:
    parser = dialect.parser([tool.function.name for _, tool in _callable(body)]) if dialect is not None else None
    return MessageReader(thinking, parser)


def _check_effort(service: Service, body: ChatRequest) -> None:
    if body.reasoning_effort not in (None, "none") and not service.has_thoughts:
        known = "the chat template of this model shows no thoughts, or router.reasoning_parser is none"
        message = (
            f'reasoning_effort: not supported here: {known}; got "{body.reasoning_effort}", allowed: null or "none"'
        )
        raise bad_request(message, "reasoning_effort")


def _dialect(service: Service, body: ChatRequest) -> Dialect | None:
    """How calls are written, where the model may call something."""
    if not body.tools and body.tool_choice not in (None, "none", "auto"):
        raise bad_request("tool_choice: there are no tools to choose from", "tool_choice")
    if not body.tools or body.tool_choice == "none":
        return None
    if service.dialect is None:
        known = "the chat template of this model shows no way to call tools, or router.tool_parser is none"
        raise bad_request(f'tools: not supported here: {known}; allowed beside "tool_choice": "none"', "tools")
    return service.dialect


def _constraint(service: Service, body: ChatRequest, dialect: Dialect | None) -> Constraint | None:
    """What the answer must be: of the form that is asked for, or calls, where they must or may be."""
    answer = wanted_answer(body)
    if dialect is None or (_is_best_effort(body) and body.parallel_tool_calls is not False and answer is None):
        return answer
    is_free = may_talk(body.tool_choice)
    calls = _calls(body, dialect, service.tokenizer.special_texts, with_text=is_free and answer is None)
    if answer is None:
        return calls
    if is_free:
        return either(calls, answer)
    if answer.parts["answer"].field.startswith("response_format"):
        return calls  # as in OpenAI's API, where agents say at every turn what form their last words will have
    raise bad_request("tool_choice: a call that must come leaves no room for a structured answer", "tool_choice")


def _is_best_effort(body: ChatRequest) -> bool:
    """Calls are the model's own affair, and so are their arguments."""
    return body.tool_choice in (None, "auto")


def _calls(body: ChatRequest, dialect: Dialect, special_texts: frozenset[str], *, with_text: bool) -> Constraint:
    """Calls of what may be called, and, ``with_text``, any text before or instead of them."""
    tools = _callable(body)
    names = [tool.function.name for _, tool in tools]
    # A schema that cannot be followed is no reason to refuse what is only to be one call at most.
    holds_schemas = not (with_text and _is_best_effort(body))
    parts = {
        f"arguments_{place}": json_part(
            _schema_of(tool) if holds_schemas else ANY_OBJECT, f"tools[{index}].function.parameters"
        )
        for place, (index, tool) in enumerate(tools)
    }
    several = body.parallel_tool_calls is not False and not isinstance(body.tool_choice, NamedTool)
    rules = dialect.lark(names, special_texts, several=several)
    if with_text:
        rules += dialect.text_lark(names, special_texts, several=several)
    return Constraint(rules=rules, starts=("free" if with_text else "calls",), parts=parts)


def _schema_of(tool: Tool) -> Mapping[str, Any]:
    return _NO_PARAMETERS if tool.function.parameters is None else tool.function.parameters


def _callable(body: ChatRequest) -> list[tuple[int, Tool]]:
    """The tools that the choice leaves, with their places among all."""
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
            message = f"tool_choice: there is no tool {name!r}; allowed: {', '.join(known)}"
            raise bad_request(message, "tool_choice")
    return [(index, tool) for index, tool in tools if tool.function.name in chosen]
