"""Messages parsed from streamed text: the pieces do not change the result, and no part of a marker is shown."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.message import MessagePart, MessageReader, Thinking, has_reasoning, reasoning_after
from router.tool_calls.dialects import DIALECTS, find_dialect
from router.tool_calls.events import ToolParser
from workers.models.recall import CHAT_TEMPLATE

NAMES = ["get", "put"]


def reader(dialect: str | None = None, thinking: Thinking = Thinking.NONE) -> MessageReader:
    parser: ToolParser | None = DIALECTS[dialect].parser({name: {} for name in NAMES}) if dialect else None
    return MessageReader(thinking, parser)


def joined(parts: list[MessagePart]) -> tuple[str, str, list[tuple[str, str]]]:
    """Return reasoning, content, and calls with their arguments. Check that the parts are in OpenAI's order."""
    names: list[str] = []
    arguments: list[str] = []
    for part in parts:
        assert len({call.index for call in part.calls}) == len(part.calls)
        for call in part.calls:
            if call.id:
                assert call.index == len(names)
                names.append(call.name)
                arguments.append("")
            assert call.index == len(names) - 1
            arguments[call.index] += call.arguments
    return (
        "".join(part.reasoning for part in parts),
        "".join(part.content for part in parts),
        list(zip(names, arguments, strict=True)),
    )


def read(make: MessageReader, *pieces: str) -> tuple[str, str, list[tuple[str, str]]]:
    parts = [make.push(piece, is_end=False) for piece in pieces]
    return joined([*parts, make.push("", is_end=True)])


GET = '<tool_call>\n{"name": "get", "arguments": {"x": "a}\\"b", "y": [1, {"z": 2}]}}\n</tool_call>'
ARGS = '{"x": "a}\\"b", "y": [1, {"z": 2}]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("hello <b> ", "hello <b> ", []),
        (GET, "", [("get", ARGS)]),
        (f"Let me see.\n\n{GET}\n{GET}\n", "Let me see.", [("get", ARGS), ("get", ARGS)]),
        (f"{GET} done", "done", [("get", ARGS)]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "put"}</tool_call>', "", [("put", '{"a": 1}')]),
        ('<tool_call>{"name": "other"}</tool_call>', "", [("other", "{}")]),
        ('<tool_call>{"name": "get", "arguments": {"a": 1', "", [("get", '{"a": 1')]),
        (
            '<tool_call>{"name": "get", "arguments": {"a": 1}\n</tool_call>\n<tool_call>{"name": "put"}</tool_call>',
            "",
            [("get", '{"a": 1}'), ("put", "{}")],
        ),
        ('<tool_call>{"name": "get", "arguments": {"a": "<"\n</tool_call>ok', "ok", [("get", '{"a": "<"')]),
        ('<tool_call>{"name": "get", "arguments":}</tool_call>', "", [("get", "{}")]),
        ('<tool_call>{"name": "get", "arguments": {}, "arguments": {"a": 1}}</tool_call>', "", [("get", "{}")]),
        ('<tool_call>{"name": "get", "parameters": {}, "arguments": {"a": 1}}</tool_call>', "", [("get", "{}")]),
        ('<tool_call>{"name": "get"}\n<tool_call>{"name": "put"}</tool_call>', "", [("get", "{}"), ("put", "{}")]),
        (
            '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n{"name": "put", "arguments": {}}\n</tool_call>\nok',
            "ok",
            [("get", '{"a": 1}'), ("put", "{}")],
        ),
        ('<tool_call>{"name": "get"}, {"a": 1} {"name": "put"}}', "", [("get", "{}"), ("put", "{}")]),
        ('<tool_call>{"name": "get"}\n{"na', "", [("get", "{}")]),
        ('a <tool_call>{"na', 'a <tool_call>{"na', []),
        ("a <tool_call> [1] </tool_call>", "a <tool_call>[1] </tool_call>", []),
        ("a <tool_ca", "a <tool_ca", []),
        ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
        ('<tool_call>{"name": 7}</tool_call>', '<tool_call>{"name": 7}</tool_call>', []),
        (r'<tool_call>{"name": "\ud83d"}</tool_call>', r'<tool_call>{"name": "\ud83d"}</tool_call>', []),
    ],
)
def test_hermes(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(reader("hermes"), text) == ("", content, calls)
    assert read(reader("hermes"), *text) == ("", content, calls)


def test_deep_nesting_is_no_name() -> None:
    text = f'<tool_call>{{"name": {"[" * 5000}{"]" * 5000}}}</tool_call>'
    assert read(reader("hermes"), text) == ("", text, [])


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "get", "parameters": {"x": 1}}', "", [("get", '{"x": 1}')]),
        ('<|python_tag|>{"name": "get", "parameters": {"x": 1}}', "", [("get", '{"x": 1}')]),
        ('\n{"type": "function", "name": "get"} ; {"name": "put"}', "", [("get", "{}"), ("put", "{}")]),
        ('{"name": "get", "parameters": {}} and', "and", [("get", "{}")]),
        ('{"name": "Bob", "parameters": {}} is', '{"name": "Bob", "parameters": {}} is', []),
        (' {"age": 7}', ' {"age": 7}', []),
        ('It is {"name": "get", "parameters": {}}', 'It is {"name": "get", "parameters": {}}', []),
        ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
        ("<|pyth", "<|pyth", []),
        ('{"name": "get", "para', "", [("get", "")]),
        ('{"na', '{"na', []),
        ("", "", []),
    ],
)
def test_llama3(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(reader("llama3"), text) == ("", content, calls)
    assert read(reader("llama3"), *text) == ("", content, calls)


@pytest.mark.parametrize(
    ("thinking", "text", "reasoning", "content"),
    [
        (Thinking.OPTIONAL, "<think>\na < b\n</think>\n\nyes\n", "a < b", "yes\n"),
        (Thinking.OPTIONAL, "\n<think></think>yes", "", "yes"),
        (Thinking.OPTIONAL, " yes <think>no</think>", "", " yes <think>no</think>"),
        (Thinking.OPTIONAL, "<think>on and on </thin", "on and on </thin", ""),
        (Thinking.OPTIONAL, "<thi", "", "<thi"),
        (Thinking.BEGUN, "\nso\n</think>\n\nyes", "so", "yes"),
        (Thinking.BEGUN, "so on ", "so on ", ""),
        (Thinking.BEGUN, "<think>\nso\n</think>\n\nyes", "so", "yes"),
        (Thinking.BEGUN, "<thi", "<thi", ""),
        (Thinking.BEGUN, "</think>yes", "", "yes"),
        (Thinking.NONE, "<think>a</think>b", "", "<think>a</think>b"),
    ],
)
def test_reasoning(thinking: Thinking, text: str, reasoning: str, content: str) -> None:
    assert read(reader(None, thinking), text) == (reasoning, content, [])
    assert read(reader(None, thinking), *text) == (reasoning, content, [])


def test_a_call_after_thoughts() -> None:
    text = f"<think>\nI call <tool_call>\n</think>\n\n{GET}"
    assert read(reader("hermes", Thinking.OPTIONAL), *text) == ("I call <tool_call>", "", [("get", ARGS)])


SCRAPS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", '{"name": "get", "arguments": ']
SCRAPS += ['{"x": "}"}', '{"name": "put", "parameters": {"a": [1]}}', '{"b": 1}', *'\n a<;}"\\{,']
TEXTS = st.lists(st.sampled_from(SCRAPS), max_size=12).map("".join)


@given(text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=8), data=st.data())
@example(text='{"name": "get", "arguments": {"x": "}"}}', cuts=[20], data=None)
@example(text="<tool_call>a<", cuts=[12], data=None)
@example(text="<tool_call>{ <think>", cuts=[14], data=None)
def test_any_pieces_give_the_same_message(text: str, cuts: list[int], data: st.DataObject | None) -> None:
    dialects = [None, *DIALECTS] if data is None else [data.draw(st.sampled_from([None, *DIALECTS]))]
    for dialect in dialects:
        for thinking in Thinking:
            offsets = sorted({min(cut, len(text)) for cut in cuts})
            pieces = [text[start:end] for start, end in zip([0, *offsets], [*offsets, len(text)], strict=True)]
            whole = read(reader(dialect, thinking), text)
            assert read(reader(dialect, thinking), *pieces) == whole
            assert read(reader(dialect, thinking), *text) == whole


@given(
    arguments=st.dictionaries(
        st.text(), st.recursive(st.none() | st.floats(allow_nan=False) | st.text(), st.lists, max_leaves=5)
    ),
    before=st.text(alphabet="ab <{\n", max_size=9),
    indent=st.none() | st.integers(0, 3),
)
def test_arguments_are_passed_on_as_written(arguments: dict[str, object], before: str, indent: int | None) -> None:
    written = json.dumps({"name": "get", "arguments": arguments}, indent=indent)
    _, content, calls = read(reader("hermes"), *f"{before}<tool_call>{written}</tool_call>")
    assert content == before.rstrip()
    assert [(name, json.loads(text)) for name, text in calls] == [("get", arguments)]


def test_arguments_are_streamed() -> None:
    streaming = reader("hermes")
    streaming.push('<tool_call>{"name": "get", "arguments": {"text": "long', is_end=False)
    part = streaming.push(" and longer", is_end=False)
    assert [call.arguments for call in part.calls] == [" and longer"]


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("... return a json object within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\n<function=name>", None),
        ('{{ "<|python_tag|>" }} {"name": ..., "parameters": ...}', "llama3"),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and value}',
            "llama3",
        ),
        (CHAT_TEMPLATE, "llama3"),
    ],
)
def test_dialect_of_a_template(template: str | None, dialect: str | None) -> None:
    assert find_dialect("auto", template) is (DIALECTS[dialect] if dialect else None)
    assert find_dialect("none", template) is None
    assert find_dialect("llama3", template) is DIALECTS["llama3"]


def test_reasoning_of_a_template_and_a_prompt() -> None:
    assert has_reasoning("auto", "... </think> ...")
    assert not has_reasoning("auto", None)
    assert not has_reasoning("none", "</think>")
    assert has_reasoning("qwen3", None)
    assert reasoning_after("<|im_start|>assistant\n") is Thinking.OPTIONAL
    assert reasoning_after("<|im_start|>assistant\n<think>\n") is Thinking.BEGUN
    assert reasoning_after("<|im_start|>assistant\n<think>\n\n</think>\n\n") is Thinking.NONE
