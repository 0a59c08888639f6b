"""Prompts of conversations: what templates get that clients do not send."""

from pathlib import Path
from typing import Any

import pytest

from router.preprocess.chat import chat_prompt
from router.preprocess.model import read_model
from router.preprocess.requests import ChatRequest
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import config_of

TEMPLATE = "{% for m in messages if m.role == 'tool' %}{{ m.name or 'unnamed' }}: {{ m.content }}. {% endfor %}"


def call(call_id: Any, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


@pytest.mark.parametrize(
    ("calls", "result", "expected"),
    [
        ([call("a", "get"), call("b", "put")], {"tool_call_id": "b"}, "put"),
        ([call("a", "get")], {"tool_call_id": "a", "name": None}, "get"),
        ([call("a", "get")], {"tool_call_id": "a", "name": "other"}, "other"),
        ([call("a", "get")], {"tool_call_id": "b"}, "unnamed"),
        ([call("a", "get")], {}, "unnamed"),
        ([call(7, "get"), "odd"], {"tool_call_id": 7}, "unnamed"),
        ("odd", {"tool_call_id": ["a"]}, "unnamed"),
    ],
)
def test_results_have_the_name_of_their_function(
    tmp_path: Path, calls: Any, result: dict[str, Any], expected: str
) -> None:
    model = read_model(config_of(), write_model_folder(tmp_path, template=TEMPLATE))
    messages = [{"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "x", **result}]
    body = ChatRequest.model_validate({"model": "m", "messages": messages})
    assert chat_prompt(model, body.messages, body)[1] == f"{expected}: x. "


@pytest.mark.parametrize(
    ("content", "expected"), [(None, "calls get {}."), ("", "calls get {}."), ("so", "so"), ([], "calls get {}.")]
)
def test_calls_are_shown_by_templates_that_ask_for_missing_content(
    tmp_path: Path, content: object, expected: str
) -> None:
    shown = "calls {{ m.tool_calls[0].function.name + ' ' + m.tool_calls[0].function.arguments }}."
    template = f"{{% for m in messages %}}{{% if m['content'] is none %}}{shown}{{% else %}}{{{{ m.content }}}}"
    model = read_model(config_of(), write_model_folder(tmp_path, template=template + "{% endif %}{% endfor %}"))
    message = {"role": "assistant", "content": content, "tool_calls": [call("a", "get")]}
    body = ChatRequest.model_validate({"model": "m", "messages": [message]})
    assert chat_prompt(model, body.messages, body)[1] == expected
