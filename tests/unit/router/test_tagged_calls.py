"""Calls between tags: what is read, in any pieces, and which JSON a value becomes."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.message import MessageReader
from router.tool_calls.arguments import to_json, types_of_parameters
from router.tool_calls.dialects import DIALECTS, find_dialect
from tests.unit.router.test_message import joined

SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array"},
        "count": {"type": "integer"},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
}
TYPES = {"get": types_of_parameters(SCHEMA), "put": {}}
ARGUMENTS = {"city": 'Zü"rich\n<b>', "days": [1, {"a": "b"}], "count": 3, "unit": None}
Calls = list[tuple[str, dict[str, Any]]]
CALLS: Calls = [("get", ARGUMENTS), ("put", {})]


def json_value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def written_by_qwen3_coder(calls: Calls) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(f"<parameter={key}>\n{json_value(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"

    return "\n".join(call(*each) for each in calls)


def written_by_glm47(calls: Calls) -> str:
    def call(name: str, arguments: dict[str, Any]) -> str:
        values = "".join(
            f"<arg_key>{key}</arg_key><arg_value>{json_value(value)}</arg_value>" for key, value in arguments.items()
        )
        return f"<tool_call>{name}{values}</tool_call>"

    return "".join(call(*each) for each in calls)


def written_by_deepseek_v3(calls: Calls) -> str:
    written = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json_value(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(written) + "<｜tool▁calls▁end｜>"


def written_by_deepseek_v31(calls: Calls) -> str:
    written = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json_value(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(written)}<｜tool▁calls▁end｜>"


def written_by_deepseek_v32(calls: Calls) -> str:
    def parameter(key: str, value: Any) -> str:
        is_text = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{is_text}">{json_value(value)}</｜DSML｜parameter>\n'

    written = [
        f'<｜DSML｜invoke name="{name}">\n{"".join(parameter(*each) for each in arguments.items())}</｜DSML｜invoke>\n'
        for name, arguments in calls
    ]
    return f"<｜DSML｜function_calls>\n{''.join(written)}</｜DSML｜function_calls>"


def written_by_kimi_k2(calls: Calls) -> str:
    written = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json_value(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(written)}<|tool_calls_section_end|>"


WRITERS: dict[str, Callable[[Calls], str]] = {
    "qwen3_coder": written_by_qwen3_coder,
    "glm47": written_by_glm47,
    "deepseek_v3": written_by_deepseek_v3,
    "deepseek_v31": written_by_deepseek_v31,
    "deepseek_v32": written_by_deepseek_v32,
    "kimi_k2": written_by_kimi_k2,
}
every_dialect = pytest.mark.parametrize("dialect", WRITERS)


def read(dialect: str, pieces: Sequence[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return content and calls, with arguments as JSON text."""
    reader = MessageReader(parser=DIALECTS[dialect].parser(TYPES))
    parts = [reader.push(piece, is_end=False) for piece in pieces]
    _, content, calls = joined([*parts, reader.push("", is_end=True)])
    return content, calls


def parsed(read: tuple[str, list[tuple[str, str]]]) -> tuple[str, Calls]:
    return read[0], [(name, json.loads(arguments)) for name, arguments in read[1]]


def test_every_dialect_between_tags_has_a_writer() -> None:
    assert [*WRITERS] == [name for name in DIALECTS if name not in ("hermes", "llama3")]


@every_dialect
@pytest.mark.parametrize("before", ["", "Let me see.\n\n"])
def test_calls_as_templates_write_them(dialect: str, before: str) -> None:
    text = before + WRITERS[dialect](CALLS)
    assert parsed(read(dialect, [text])) == (before.rstrip(), CALLS)
    assert read(dialect, [*text]) == read(dialect, [text])


KEYS = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5)
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-9, 9), st.lists, max_leaves=4)
TEXTS = st.text(st.sampled_from('ab 1"\\\n<>é|'), max_size=12)


@given(data=st.data(), values=st.dictionaries(KEYS, VALUES | TEXTS, max_size=4), cuts=st.sets(st.integers(1, 300)))
def test_arguments_come_back_however_the_text_is_cut(
    data: st.DataObject, values: dict[str, Any], cuts: set[int]
) -> None:
    dialect = data.draw(st.sampled_from(sorted(WRITERS)))
    properties = {key: {"type": "string"} for key, value in values.items() if isinstance(value, str)}
    text = WRITERS[dialect]([("get", values)])
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    reader = MessageReader(parser=DIALECTS[dialect].parser({"get": types_of_parameters({"properties": properties})}))
    parts = [reader.push(text[start:end], is_end=False) for start, end in itertools.pairwise(places)]
    _, content, calls = joined([*parts, reader.push("", is_end=True)])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get", values)]


MARKERS = sorted({marker for name in WRITERS for marker in DIALECTS[name].markers})
SCRAPS = [*MARKERS, "<function=", "get", "put", ">", "<parameter=", "city", "</parameter>", "</function>", *'\n a{}:1"']
SCRAPS += ['<｜DSML｜invoke name="', '">', '<｜DSML｜parameter name="city" string="true">', "</｜DSML｜parameter>"]
SCRAPS += [
    "</｜DSML｜invoke>",
    "</｜DSML｜function_calls>",
    "functions.",
    "function",
    "```json",
    "```",
    '{"city": "x"}',
]


@every_dialect
@given(scraps=st.lists(st.sampled_from(SCRAPS), max_size=14))
@example(
    scraps=[
        *('<｜DSML｜invoke name="', "</arg_key>", "</｜DSML｜invoke>"),
        '<｜DSML｜parameter name="city" string="true">',
    ]
)
def test_any_text_is_read_alike_in_pieces(dialect: str, scraps: list[str]) -> None:
    text = "".join(scraps)
    assert read(dialect, [*text]) == read(dialect, [text]) == read(dialect, scraps)


@pytest.mark.parametrize(
    ("dialect", "text", "content", "calls"),
    [
        ("qwen3_coder", "Use <tool_call> here", "Use <tool_call> here", []),
        ("qwen3_coder", "a <tool_call>\n", "a <tool_call>\n", []),
        ("qwen3_coder", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("qwen3_coder", "<function=put>\n</function>\n</tool_call>", "", [("put", "{}")]),
        ("qwen3_coder", "<tool_call>\n<function=put></tool_call>b", "b", [("put", "{}")]),
        ("qwen3_coder", "<tool_call>\n<function=get><parameter=city>\na", "", [("get", '{"city": "a')]),
        (
            "qwen3_coder",
            "<function=get><parameter=city>\n\n\n</parameter></function>",
            "",
            [("get", '{"city": "\\n"}')],
        ),
        ("qwen3_coder", "<function=get><parameter=unit>None</parameter></function>", "", [("get", '{"unit": null}')]),
        ("glm47", "In <tool_call>, one writes", "In <tool_call>, one writes", []),
        ("glm47", "<tool_call>a b <tool_call>put</tool_call>", "<tool_call>a b", [("put", "{}")]),
        ("glm47", "<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ("glm47", "<tool_call>other</tool_call>", "", [("other", "{}")]),
        ("glm47", "<tool_call>get\n<arg_key> count </arg_key>\n<arg_value>1", "", [("get", '{"count": ')]),
        ("deepseek_v31", "<｜tool▁calls▁begin｜>hm", "<｜tool▁calls▁begin｜>hm", []),
        ("deepseek_v31", "<｜tool▁call▁begin｜>put<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "", [("put", "{}")]),
        ("deepseek_v31", "<｜tool▁call▁begin｜>put<｜tool▁sep｜> <｜tool▁calls▁end｜>", "", [("put", "{}")]),
        ("deepseek_v31", '<｜tool▁call▁begin｜>put<｜tool▁sep｜>{"a": 1', "", [("put", '{"a": 1')]),
        ("kimi_k2", "<|tool_call_begin|>put:0<|tool_call_argument_begin|>{}<|tool_call_end|>", "", [("put", "{}")]),
    ],
)
def test_odd_answers(dialect: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert read(dialect, [text]) == (content, calls)
    assert read(dialect, [*text]) == (content, calls)


def test_a_text_is_streamed() -> None:
    reader = MessageReader(parser=DIALECTS["glm47"].parser(TYPES))
    reader.push("<tool_call>get<arg_key>city</arg_key><arg_value>Zü", is_end=False)
    part = reader.push('ri"ch', is_end=False)
    assert [call.arguments for call in part.calls] == ['ri\\"ch']


def test_kimi_names_its_calls() -> None:
    reader = MessageReader(parser=DIALECTS["kimi_k2"].parser(TYPES))
    part = reader.push(written_by_kimi_k2(CALLS), is_end=True)
    assert [call.id for call in part.calls] == ["functions.get:0", "functions.put:1"]


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", ["string"], '"5"'),
        ("5", ["integer"], "5"),
        ("5", ["number"], "5"),
        ("5", ["null", "string"], '"5"'),
        ("5", ["integer", "string"], "5"),
        ("five", ["integer"], '"five"'),
        ("null", ["null", "string"], "null"),
        ("None", ["null", "string"], "null"),
        ("None", None, '"None"'),
        ("True", ["boolean"], "true"),
        (" true\n", ["boolean"], "true"),
        ('{"a": "é"}', ["object"], '{"a": "é"}'),
        ('{"a": "é"}', ["string"], '"{\\"a\\": \\"é\\"}"'),
        ('"5"', ["integer"], '"5"'),
        ("[1", None, '"[1"'),
        ("[" * 5000, ["array"], json.dumps("[" * 5000)),
        ("NaN", ["number"], '"NaN"'),
        ("", None, '""'),
        (" a ", None, '" a "'),
    ],
)
def test_json_of_a_value(text: str, types: list[str] | None, expected: str) -> None:
    assert to_json(text, types) == expected


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, ["string"]),
        ({"type": ["integer", "null"]}, ["integer", "null"]),
        ({"enum": ["a", 1, None]}, ["integer", "null", "string"]),
        ({"const": True}, ["boolean"]),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/list"}]}, ["array", "string"]),
        ({"oneOf": [{"type": "string"}, {}]}, None),
        ({"allOf": [{"type": "object"}]}, ["object"]),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "#/$defs/none"}, None),
        ({"$ref": "elsewhere"}, None),
        ({"type": 7}, None),
        ({}, None),
        (True, None),
    ],
)
def test_types_of_a_parameter(schema: Any, types: list[str] | None) -> None:
    shared = {"list": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}}
    found = types_of_parameters({"properties": {"x": schema}, "$defs": shared})
    assert found == ({} if types is None else {"x": types})


@pytest.mark.parametrize(
    ("template", "dialect"),
    [
        ("<tool_call>\n<function=example>\n<parameter=one>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>", "glm47"),
        ("'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json\\n'", "deepseek_v3"),
        ("'<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments", "deepseek_v31"),
        ('{% set dsml_token = "｜DSML｜" %}<{{ dsml_token }}function_calls>', "deepseek_v32"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}", "kimi_k2"),
    ],
)
def test_dialect_of_a_template(template: str, dialect: str) -> None:
    assert find_dialect("auto", template) is DIALECTS[dialect]
    assert [name for name, each in DIALECTS.items() if each.fits(template)] == [dialect]
