"""Tools, structured output and reasoning in ``/v1/responses``, as the openai client sees them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.shared_params import FunctionDefinition

from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import MODEL, RouterCluster, run_cluster
from tests.integration.router.test_tool_calls import ANSWER, ARGUMENTS, CALL, TEMPLATE

pytestmark = pytest.mark.integration

TOOLS: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": None}]
CALLS_BEFORE_IT = "{% for call in message.tool_calls or [] %}[{{ call.function.arguments | tojson }}]{% endfor %}"
REASONING_BEFORE_IT = "({{ message.reasoning_content or '' }})"
SHOWN = TEMPLATE.replace("{{ message.content }}", f"{REASONING_BEFORE_IT}{{{{ message.content }}}}{CALLS_BEFORE_IT}")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("forms"), template=SHOWN, max_context=1024)


@pytest.fixture(scope="module")
def cluster(model_folder: Path) -> Iterator[RouterCluster]:
    yield from run_cluster(model_folder)


def check_answer(response: Any) -> None:
    reasoning, said, *calls = response.output
    assert (response.status, [item.status for item in response.output]) == ("completed", ["completed"] * 4)
    assert [part.text for part in reasoning.content] == ["They ask\nfor weather."]
    assert said.content[0].text == response.output_text == "Let me see."
    assert [(call.type, call.name, call.arguments) for call in calls] == [("function_call", "weather", ARGUMENTS)] * 2
    assert calls[0].call_id != calls[1].call_id
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    assert (response.tool_choice, response.tools[0].name) == ("auto", "weather")


def test_thoughts_text_and_calls_are_items(cluster: RouterCluster, client: openai.OpenAI) -> None:
    cluster.decode.says = ANSWER.encode()
    check_answer(client.responses.create(model=MODEL, input="hi", tools=TOOLS))


def test_the_clients_own_accumulator_builds_the_same(cluster: RouterCluster, client: openai.OpenAI) -> None:
    cluster.decode.says = ANSWER.encode()
    with client.responses.stream(model=MODEL, input="hi", tools=TOOLS) as stream:
        kinds = {event.type for event in stream}
        check_answer(stream.get_final_response())
    assert {
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
    } <= kinds


def test_the_items_go_back_into_the_conversation(cluster: RouterCluster, client: openai.OpenAI) -> None:
    cluster.decode.says = ANSWER.encode()
    answer = client.responses.create(model=MODEL, input="hi", tools=TOOLS)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "rain"}
        for item in answer.output
        if item.type == "function_call"
    ]
    conversation: Any = [{"role": "user", "content": "hi"}, *answer.output, *results]
    cluster.decode.says = b"It rains."
    assert client.responses.create(model=MODEL, input=conversation, tools=TOOLS).output_text == "It rains."
    parsed = json.dumps(json.loads(ARGUMENTS), ensure_ascii=False)
    expected = f"<assistant>(They ask\nfor weather.)Let me see.[{parsed}][{parsed}]<tool>()rain<tool>()rain<assistant>"
    assert bytes(cluster.last_submit().prompt_ids).decode().endswith(expected)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_reasoning_is_sealed_for_stateless_clients(
    cluster: RouterCluster, client: openai.OpenAI, is_streamed: bool
) -> None:
    asked: Any = {"model": MODEL, "input": "hi", "tools": TOOLS, "store": False}
    asked |= {"include": ["reasoning.encrypted_content"]}
    cluster.decode.says = ANSWER.encode()
    if is_streamed:
        events = list(client.responses.create(**asked, stream=True))
        items: list[Any] = [event.item for event in events if event.type == "response.output_item.done"]
    else:
        items = [*client.responses.create(**asked).output]
    reasoning, *others = [item.model_dump() for item in items]
    assert reasoning["encrypted_content"]

    def prompt_after(*kept: Any) -> str:
        client.responses.create(model=MODEL, input=[{"role": "user", "content": "hi"}, *kept, *others], tools=TOOLS)
        return bytes(cluster.last_submit().prompt_ids).decode()

    assert prompt_after(reasoning | {"content": None}) == prompt_after(reasoning) != prompt_after()
    foreign = reasoning | {"content": None, "encrypted_content": "gAAAAABo"}
    assert prompt_after(foreign) == prompt_after(), "what only others can read"


@pytest.mark.parametrize("is_allowed", [False, True])
def test_the_prompt_and_the_grammar_are_those_of_the_same_chat(
    cluster: RouterCluster, client: openai.OpenAI, is_allowed: bool
) -> None:
    cluster.decode.says = CALL.encode()
    name: Any = {"type": "function", "name": "weather"}
    chosen: Any = {"type": "allowed_tools", "mode": "auto", "tools": [name]} if is_allowed else name
    answer = client.responses.create(
        model=MODEL, input="hi", tools=TOOLS, tool_choice=chosen, parallel_tool_calls=False
    )
    assert isinstance(answer.tool_choice, openai.BaseModel)
    assert answer.tool_choice.to_dict() == chosen
    submit = cluster.last_submit()
    function: FunctionDefinition = {"name": "weather", "parameters": {"type": "object"}}
    named: Any = {"type": "function", "function": {"name": "weather"}}
    if is_allowed:
        named = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        tools=[{"type": "function", "function": function}],
        tool_choice=named,
        parallel_tool_calls=False,
    )
    same = cluster.last_submit()
    assert submit.sampling.grammar
    assert (submit.prompt_ids, submit.sampling.grammar) == (same.prompt_ids, same.sampling.grammar)


@pytest.mark.parametrize(("effort", "is_off"), [("none", True), ("high", False)])
def test_effort_switches_thoughts(cluster: RouterCluster, client: openai.OpenAI, effort: Any, is_off: bool) -> None:
    cluster.decode.says = b"plain"
    response = client.responses.create(model=MODEL, input="hi", reasoning={"effort": effort})
    assert response.output_text == "plain"
    assert response.reasoning is not None
    assert response.reasoning.effort == effort
    assert bytes(cluster.last_submit().prompt_ids).endswith(b"<think>\n\n</think>\n\n") is is_off
    messages: Any = [{"role": "user", "content": "hi"}]
    client.chat.completions.create(model=MODEL, messages=messages, reasoning_effort=effort)
    assert bytes(cluster.last_submit().prompt_ids).endswith(b"<think>\n\n</think>\n\n") is is_off
