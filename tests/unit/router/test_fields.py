"""No field of a request is dropped in silence: each is passed on, refused by name, or known to change nothing."""

import json
from typing import Any

import pytest

from router.api.body import HARMLESS, refuse_unsupported
from router.api.requests import ChatRequest
from router.api.response_request import ResponseRequest, chat_of
from router.errors import ApiError

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}
OTHERWISE: dict[str, Any] = {
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "allowed_token_ids": [1],
    "background": True,
    "bad_words": ["x"],
    "cache_salt": "x",
    "chat_template_kwargs": {"x": 1},
    "conversation": "x",
    "ebnf": 'root ::= "x"',
    "extra_key": "x",
    "frequency_penalty": 1.0,
    "guided_choice": ["x"],
    "guided_grammar": 'start: "x"',
    "guided_json": {"type": "integer"},
    "guided_regex": "x",
    "ignore_eos": True,
    "include_reasoning": False,
    "include_stop_str_in_output": True,
    "input": "y",
    "instructions": "x",
    "json_schema": {"type": "integer"},
    "logit_bias": {"1": 2.0},
    "logprobs": True,
    "max_completion_tokens": 3,
    "max_output_tokens": 3,
    "max_tokens": 3,
    "max_tool_calls": 1,
    "messages": MESSAGES,
    "min_p": 0.5,
    "min_tokens": 1,
    "model": "n",
    "n": 2,
    "no_stop_trim": True,
    "parallel_tool_calls": False,
    "presence_penalty": 1.0,
    "previous_response_id": "x",
    "priority": 1,
    "prompt_logprobs": 1,
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "regex": "x",
    "repetition_penalty": 2.0,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "routed_dp_rank": 1,
    "seed": 1,
    "skip_special_tokens": False,
    "stop": ["x"],
    "stop_token_ids": [1],
    "stream": True,
    "stream_options": {"continuous_usage_stats": True},
    "structured_outputs": {"regex": "x"},
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "trace": True,
    "tool_choice": "required",
    "tools": [TOOL],
    "top_k": 3,
    "top_logprobs": 3,
    "top_p": 0.5,
    "truncation": "auto",
}
"""A value of each field that asks for another answer than none does."""

IN_A_RESPONSE = {"tools": [{"type": "function", "name": "f"}]}
"""Those that are written otherwise there."""

SAME_IN_A_CHAT = {"include", "metadata", "user"}
"""Fields of a response that the chat has no part in: returned as they are, or names."""


def refused(fields: dict[str, Any]) -> str | None:
    """The field that a response is refused for."""
    try:
        chat_of(ResponseRequest.model_validate({"model": "m", "input": "x"} | fields))
    except ApiError as error:
        return error.param
    return None


def chat_with(fields: dict[str, Any]) -> ChatRequest:
    return chat_of(ResponseRequest.model_validate({"model": "m", "input": "x"} | fields))


@pytest.mark.parametrize("name", sorted(ChatRequest.model_fields.keys() - ResponseRequest.model_fields.keys()))
def test_a_field_of_chat_means_the_same_in_a_response_or_is_refused(name: str) -> None:
    fields = {name: OTHERWISE[name]}
    assert refused({name: None}) is None
    if refused(fields) is None:
        same = ChatRequest.model_validate_json(json.dumps({"model": "m", "messages": MESSAGES} | fields))
        assert getattr(chat_with(fields), name) == getattr(same, name)
        assert getattr(same, name) != getattr(chat_with({}), name)
    else:
        assert refused(fields) == name


@pytest.mark.parametrize("name", sorted(ResponseRequest.model_fields.keys() - SAME_IN_A_CHAT))
def test_every_field_of_a_response_is_asked_of_the_chat(name: str) -> None:
    fields = {name: (OTHERWISE | IN_A_RESPONSE)[name]}
    assert chat_with(fields) != chat_with({})


@pytest.mark.parametrize("name", ["background", "conversation", "max_tool_calls", "previous_response_id", "truncation"])
def test_what_a_response_cannot_have_is_refused(name: str) -> None:
    assert refused({name: OTHERWISE[name]}) == name


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_a_field_that_is_not_supported_is_refused_unless_it_changes_nothing(name: str) -> None:
    for neutral in (None, *HARMLESS[name]):
        refuse_unsupported({name: neutral})
    with pytest.raises(ApiError, match=f"^{name}: not supported, got .*; allowed: null") as raised:
        refuse_unsupported({name: {"x": 1}})
    assert raised.value.param == name
