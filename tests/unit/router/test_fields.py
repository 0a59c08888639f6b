"""No field of a request is silently ignored: each is passed on, refused by name, or known to have no effect."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.tokenizer import Tokenizer
from router.errors import ApiError
from router.preprocess.body import HARMLESS, refuse_unsupported
from router.preprocess.requests import ChatRequest
from router.preprocess.response_request import ResponseRequest, chat_of
from tests.fakes.model_folder import write_model_folder

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}
VALUES: list[tuple[Any, str]] = [
    (True, "add_special_tokens background ignore_eos include_stop_str_in_output logprobs no_stop_trim"),
    (True, "return_token_ids stream trace"),
    (False, "add_generation_prompt include_reasoning parallel_tool_calls skip_special_tokens"),
    ("y", "cache_salt conversation extra_key guided_regex input instructions model previous_response_id regex"),
    (3, "max_completion_tokens max_output_tokens max_tokens n top_k top_logprobs"),
    (1, "max_tool_calls min_tokens priority prompt_logprobs routed_dp_rank seed"),
    (1.5, "frequency_penalty presence_penalty repetition_penalty"),
    (0.5, "min_p temperature top_p"),
    ([1], "allowed_token_ids stop_token_ids"),
    (["x"], "bad_words guided_choice stop"),
    ({"type": "integer"}, "guided_json json_schema"),
    ({"x": 1}, "chat_template_kwargs"),
    ('root ::= "x"', "ebnf"),
    ('start: "x"', "guided_grammar"),
    ({"1": 2.0}, "logit_bias"),
    (MESSAGES, "messages"),
    ({"effort": "low"}, "reasoning"),
    ("low", "reasoning_effort verbosity"),
    ({"type": "json_object"}, "response_format"),
    ({"continuous_usage_stats": True}, "stream_options"),
    ({"regex": "x"}, "structured_outputs"),
    ({"format": {"type": "json_object"}}, "text"),
    ("required", "tool_choice"),
    ([TOOL], "tools"),
    ("auto", "truncation"),
]
OTHERWISE = {name: value for value, names in VALUES for name in names.split()}
"""Values that change the answer, by field."""

IN_A_RESPONSE = {"tools": [{"type": "function", "name": "f"}]}
"""Fields that have another form in the Responses API."""

SAME_IN_A_CHAT = {"include", "metadata", "user"}
"""Fields of the Responses API that chat requests do not have. They are returned unchanged or are names."""


def refused(fields: dict[str, Any]) -> str | None:
    """Return the field for which a Responses request is refused."""
    try:
        chat_with(fields)
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
def test_every_field_of_a_response_changes_the_chat_request(name: str) -> None:
    fields = {name: (OTHERWISE | IN_A_RESPONSE)[name]}
    assert chat_with(fields) != chat_with({})


@pytest.mark.parametrize("name", ["background", "conversation", "max_tool_calls", "previous_response_id", "truncation"])
def test_fields_that_a_response_does_not_support_are_refused(name: str) -> None:
    assert refused({name: OTHERWISE[name]}) == name


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_an_unsupported_field_is_refused_unless_it_has_no_effect(name: str) -> None:
    for neutral in (None, *HARMLESS[name]):
        refuse_unsupported({name: neutral})
    with pytest.raises(ApiError, match=f"^{name}: not supported, got .*; allowed: null") as raised:
        refuse_unsupported({name: {"x": 1}})
    assert raised.value.param == name


def test_a_template_gets_a_function_in_the_order_of_openais_fields() -> None:
    """Templates write tools as JSON, and the model has seen them in this order."""
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    tools = [{"type": "function", "function": function}]
    body = ChatRequest.model_validate_json(json.dumps({"model": "m", "messages": MESSAGES, "tools": tools}))
    assert json.dumps(body.variables["tools"]) == json.dumps(tools)


@pytest.mark.parametrize(("effort", "thinks"), [("none", False), ("high", True)])
def test_an_effort_switches_reasoning_under_either_name(effort: str, thinks: bool) -> None:
    fields = {"model": "m", "messages": MESSAGES, "reasoning_effort": effort}
    variables = ChatRequest.model_validate_json(json.dumps(fields)).variables
    assert variables == {"enable_thinking": thinks, "thinking": thinks, "reasoning_effort": effort}


def test_a_template_may_read_arguments_or_append_them(tmp_path: Path) -> None:
    template = "{% for m in messages if m.tool_calls %}{% set a = m.tool_calls[0].function.arguments %}"
    template += "{{ 'call:' + a + '.' }} {{ a | tojson }} {{ a.city }}{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Zürich"}'}}
    fields = {"model": "m", "messages": [{"role": "assistant", "content": None, "tool_calls": [call]}]}
    body = ChatRequest.model_validate_json(json.dumps(fields))
    tokenizer = Tokenizer(write_model_folder(tmp_path, template=template))
    prompt = tokenizer.apply_chat_template([message.for_template() for message in body.messages])
    assert prompt == 'call:{"city": "Zürich"}. {"city": "Zürich"} Zürich'
