"""Constrained answers: replicas get a grammar that accepts exactly the valid texts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.grammar import Grammars
from tests.fakes.model_folder import EOS, TEMPLATE, VOCAB_SIZE, write_model_folder
from tests.fakes.router_cluster import RouterCluster, run_cluster

pytestmark = pytest.mark.integration

SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}},
    "$defs": {"n": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
TOOLS = [
    {"type": "function", "function": {"name": "get", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop"}},
]
NAMED = {"type": "function", "function": {"name": "stop"}}
VLLMS_DEFAULTS = {
    **dict.fromkeys(["regex", "choice", "grammar", "json_object", "whitespace_pattern", "structural_tag"]),
    **dict.fromkeys(["disable_any_whitespace", "disable_fallback", "disable_additional_properties"], False),
}
HERMES = TEMPLATE + "{# <tool_call> </think> #}"
LLAMA3 = TEMPLATE + "{# <|python_tag|> #}"
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Iterator[Grammars]:
    grammars = Grammars(folder, VOCAB_SIZE)
    yield grammars
    grammars.close()


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterCluster]:
    yield from run_cluster(write_model_folder(tmp_path_factory.mktemp("hermes"), template=HERMES))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterCluster]:
    yield from run_cluster(write_model_folder(tmp_path_factory.mktemp("llama3"), template=LLAMA3))


def check(grammars: Grammars, cluster: RouterCluster, good: list[str], bad: list[str]) -> None:
    """Check which complete texts the last request's grammar accepts."""
    sampling = cluster.last_submit().sampling
    assert sampling.ending_ids == {EOS}

    def is_taken(text: str) -> bool:
        matcher = grammars.matcher(sampling.grammar)
        matcher.advance(text.encode())
        return matcher.is_whole and not matcher.problem

    assert [text for text in good if not is_taken(text)] == []
    assert [text for text in bad if is_taken(text)] == []


JSON_CASES = (['{"a": 1}', '{\n  "a" : 22\n}'], ["", '{"a": 1.5}', "{}", 'x{"a": 1}', '{"a": 1} x'])
CASES: list[tuple[dict[str, Any], tuple[list[str], list[str]]]] = [
    ({"response_format": FORMAT}, JSON_CASES),
    ({"guided_json": SCHEMA}, JSON_CASES),
    ({"guided_json": json.dumps(SCHEMA)}, JSON_CASES),
    ({"structured_outputs": {"json": SCHEMA}}, JSON_CASES),
    ({"structured_outputs": {"json": SCHEMA} | VLLMS_DEFAULTS}, JSON_CASES),
    ({"json_schema": json.dumps(SCHEMA)}, JSON_CASES),
    ({"regex": "a|bc"}, (["a", "bc"], ["ab", "b", ""])),
    ({"ebnf": 'root ::= "a" [0-9]+'}, (["a12"], ["a"])),
    ({"response_format": {"type": "json_object"}}, (["{}", '{"b": [null, "é"]}'], ["[]", "1", "{"])),
    ({"structured_outputs": {"json_object": True}}, (["{}"], ["[]"])),
    ({"guided_regex": r'\d{2}/[a-z"\n]+'}, (["12/ab", '12/"\n'], ["12/", "1/a", "12/A"])),
    ({"structured_outputs": {"regex": "a|bc"}}, (["a", "bc"], ["ab", "b", ""])),
    ({"guided_choice": ["yes", 'n"o\n', "😀"]}, (["yes", 'n"o\n', "😀"], ["y", "no", "yesyes"])),
    ({"structured_outputs": {"choice": ["x"]}}, (["x"], ["y"])),
    ({"guided_grammar": 'start: "a" b\nb: "c"+'}, (["ac", "acc"], ["a"])),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9]+'}}, (["a12"], ["a"])),
]


@pytest.mark.parametrize(("fields", "texts"), CASES)
def test_every_form_in_both_apis(
    shared: RouterCluster, grammars: Grammars, fields: dict[str, Any], texts: tuple[list[str], list[str]]
) -> None:
    for path, prompt in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        reply = shared.post(path, max_tokens=2, **prompt, **fields)
        assert reply.status_code == 200, reply.text
        check(grammars, shared, *texts)


def test_reasoning_does_not_hide_an_unsatisfiable_grammar(hermes: RouterCluster) -> None:
    reply = hermes.post("/v1/chat/completions", messages=MESSAGES, guided_json={"$ref": "#"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "guided_json: no finite text matches it"


def test_no_format_means_no_grammar(shared: RouterCluster) -> None:
    shared.complete("x", response_format={"type": "text"}, structured_outputs={"json_object": False}, guided_json=None)
    assert shared.last_submit().sampling.grammar == ""


def ask(cluster: RouterCluster, **fields: Any) -> None:
    reply = cluster.post("/v1/chat/completions", messages=MESSAGES, max_tokens=2, **fields)
    assert reply.status_code == 200, reply.text


def hermes_call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_hermes_calls(hermes: RouterCluster, grammars: Grammars) -> None:
    get, stop = hermes_call("get", '{"a": 1}'), hermes_call("stop", "{}")
    ask(hermes, tools=TOOLS, tool_choice="required")
    reasoning_text = "<think>\nhm < </thin\n</think>\n\n"
    wrong = ["", "hi", hermes_call("get", "{}"), hermes_call("put", "{}"), f"{get} x", reasoning_text]
    check(grammars, hermes, [get, stop, f"{get}\n{stop}", reasoning_text + get], wrong)
    ask(hermes, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    check(grammars, hermes, [get], [f"{get}\n{get}"])
    ask(hermes, tools=TOOLS, tool_choice=NAMED)
    check(grammars, hermes, [stop], [get, f"{stop}\n{stop}"])
    ask(hermes, tools=TOOLS, response_format={"type": "json_object"})
    check(grammars, hermes, [get, "{}", f'{reasoning_text}{{"a": 1}}'], ["x", f"{get}{{}}"])
    ask(hermes, tools=TOOLS, tool_choice=NAMED, response_format=FORMAT)
    check(grammars, hermes, [stop], [get, '{"a": 1}'])
    ask(hermes, tools=TOOLS)
    assert hermes.last_submit().sampling.grammar == ""
    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "objec"}}}
    ask(hermes, tools=[*TOOLS, bad], parallel_tool_calls=False)
    free = ["", "hi", get, f"Let me see.\n{stop}", f"{reasoning_text}so: {get}", hermes_call("bad", '{"b": "c"}')]
    check(grammars, hermes, free, [f"{get}\n{stop}", f"{get}{get}", f"{get} x {get}"])


@pytest.mark.parametrize("parameters", [{}, {"properties": {"a": {"type": "integer"}}}])
def test_arguments_are_an_object_even_if_their_schema_does_not_say_so(
    hermes: RouterCluster, grammars: Grammars, parameters: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": parameters}}
    ask(hermes, tools=[tool], tool_choice="required")
    good, wrong = ("{}", '{"a": 1}'), ("1", '"x"', "null", "[1]")
    check(grammars, hermes, [hermes_call("get", each) for each in good], [hermes_call("get", each) for each in wrong])


def test_llama3_calls(llama3: RouterCluster, grammars: Grammars) -> None:
    get, stop = '{"name": "get", "parameters": {"a": 1}}', '{"name": "stop", "parameters": {}}'
    ask(llama3, tools=TOOLS, tool_choice="required")
    check(grammars, llama3, [get, f"{get}; {stop}"], ["", f"{get} {stop}", f"<think>x</think>{get}"])
    ask(llama3, tools=TOOLS, tool_choice=NAMED)
    check(grammars, llama3, [stop], [get])
    ask(llama3, tools=TOOLS, parallel_tool_calls=False)
    check(grammars, llama3, ["", "hi", get, stop], [f"{get}; {stop}"])


def test_one_call_if_the_template_takes_no_more(tmp_path: Path, grammars: Grammars) -> None:
    only_one = "{{ raise_exception('This model only supports single tool-calls at once!') if false }}"
    get = '{"name": "get", "parameters": {"a": 1}}'
    for llama3 in run_cluster(write_model_folder(tmp_path, template=LLAMA3 + only_one)):
        ask(llama3, tools=TOOLS, tool_choice="required")
        check(grammars, llama3, [get], [f"{get}; {get}"])


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_some_hermes_calls(hermes: RouterCluster, grammars: Grammars) -> None:
    get, stop, quick = hermes_call("get", '{"a": 1}'), hermes_call("stop", "{}"), hermes_call("quick", "{}")
    tools = [*TOOLS, {"type": "function", "function": {"name": "quick"}}]
    ask(hermes, tools=tools, tool_choice=allowed("required", "stop", "get"))
    check(grammars, hermes, [get, stop, f"{stop}\n{get}"], ["", "hi", quick, f"{get}\n{quick}", f"hi {get}"])
    ask(hermes, tools=tools, tool_choice=allowed("auto", "get", "stop"))
    reasoning_text = "<think>\nhm < </thin\n</think>\n\n"
    free = ["", "hi < <tool", get, f"Let me see.\n{get}\n{stop}", reasoning_text + stop, f"{reasoning_text}so"]
    check(grammars, hermes, free, [quick, f"so: {quick}", f"{get}\n{quick}", "<tool_call>x", f"{get}x"])
    shown = hermes.last_submit().prompt_ids
    ask(hermes, tools=tools, tool_choice=allowed("auto", "get"), parallel_tool_calls=False)
    check(grammars, hermes, [f"so: {get}"], [stop, f"{get}\n{get}"])
    ask(hermes, tools=tools, tool_choice=allowed("auto", "get"), response_format={"type": "json_object"})
    check(grammars, hermes, [get, "{}"], [stop, "hi"])
    ask(hermes, tools=tools)
    assert hermes.last_submit().prompt_ids == shown, "the prompt's beginning would not be found in the cache"


def test_errors_in_tools_are_named(hermes: RouterCluster) -> None:
    def refused(**fields: Any) -> tuple[str, str]:
        reply = hermes.post("/v1/chat/completions", messages=MESSAGES, **fields)
        assert reply.status_code == 400
        error = reply.json()["error"]
        return error["param"], error["message"]

    bad = {"type": "function", "function": {"name": "bad", "parameters": {"type": "objec"}}}
    param, message = refused(tools=[*TOOLS, bad], tool_choice="required")
    assert param == "tools[2].function.parameters"
    assert "Invalid type: objec" in message
    other = {"type": "function", "function": {"name": "other"}}
    assert refused(tools=TOOLS, tool_choice=other) == (
        "tool_choice",
        "tool_choice: there is no tool 'other'; allowed: get, stop",
    )
    assert refused(tools=TOOLS, tool_choice=allowed("auto", "get", "other"))[1] == (
        "tool_choice: there is no tool 'other'; allowed: get, stop"
    )
    assert refused(tools=TOOLS, tool_choice=allowed("auto"))[0] == "tool_choice"
    assert refused(tool_choice=allowed("auto", "get"))[1] == "tool_choice: there are no tools to choose from"
    param, message = refused(tools=TOOLS, tool_choice="required", guided_regex="x")
    assert (param, message.partition(":")[0]) == ("tool_choice", "tool_choice")
    ask(hermes, tools=[*TOOLS, bad])
