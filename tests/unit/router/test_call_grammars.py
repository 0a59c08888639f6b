"""Grammars of calls between tags: what templates write is accepted, whether or not markers are tokens."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import tokenizers

from cluster.grammar import Grammars
from router.errors import ApiError
from router.preprocess.chat import chat_request
from router.preprocess.model import ServedModel, read_model
from router.preprocess.requests import ChatRequest
from router.tool_calls.dialects import DIALECTS
from tests.fakes.model_folder import VOCAB_SIZE, write_json, write_model_folder
from tests.fakes.router_cluster import config_of
from tests.unit.router.test_tagged_calls import MARKERS, WRITERS, every_dialect

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}},
        "unit": {"enum": ["celsius", "kelvin", 5]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "$defs": {"day": {"type": "integer"}},
}
FULL: dict[str, Any] = {"city": "Zürich <b>\n", "days": [1, 2], "unit": "kelvin", "note": "x"}
SHORT: dict[str, Any] = {"city": "", "days": []}
GOOD = [FULL, SHORT, SHORT | {"unit": 5}, SHORT | {"note": None}]
WRONG: list[dict[str, Any]] = [
    {},
    {"city": "a"},
    SHORT | {"days": "a"},
    SHORT | {"days": ["a"]},
    SHORT | {"unit": "f"},
    SHORT | {"other": 1},
]
TOOLS = [("get", PARAMETERS), ("stop", None), ("free", {"type": "object"})]


def tool(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name} | ({"parameters": parameters} if parameters else {})}


@pytest.fixture(scope="module", params=["bytes", "tokens", "special"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedModel]:
    """Model whose markers are written in bytes, or are tokens, special or not."""
    folder = write_model_folder(tmp_path_factory.mktemp("model"))
    size = VOCAB_SIZE
    if request.param != "bytes":
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        markers = [marker for marker in MARKERS if marker != "<｜DSML｜function_calls>"]
        # No text can match special tokens, and one without angle brackets has no name in a grammar.
        tokenizer.add_tokens(
            [
                tokenizers.AddedToken(marker, special=request.param == "special" and marker[0] == "<")
                for marker in markers
            ]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        size += len(markers)
    write_json(folder / "config.json", {"max_position_embeddings": 512, "vocab_size": size})
    grammars = Grammars(folder, size)
    yield replace(read_model(config_of(), folder), grammars=grammars)
    grammars.close()


def taken(model: ServedModel, dialect: str, texts: list[str], **fields: Any) -> list[bool]:
    """Return which complete answers the request's grammar accepts."""
    body = {
        "model": "echo",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [tool(*each) for each in TOOLS],
    } | fields
    request, _ = chat_request(replace(model, dialect=DIALECTS[dialect]), ChatRequest.model_validate(body), 512)
    assert model.grammars is not None
    found = []
    for text in texts:
        matcher = model.grammars.matcher(request.sampling.grammar)
        matcher.advance(model.tokenizer.encode(text, add_special_tokens=False))
        found.append(matcher.is_whole and not matcher.problem)
    return found


@every_dialect
def test_required_calls(model: ServedModel, dialect: str) -> None:
    write = WRITERS[dialect]
    good = [write([("get", arguments)]) for arguments in GOOD]
    good += [write([("stop", {})]), write([("get", FULL), ("stop", {}), ("free", {"a": "b"})])]
    assert all(taken(model, dialect, good, tool_choice="required"))
    wrong = ["", "hi", write([("put", {})]), write([("stop", {"a": "b"})]), f"hi {write([('stop', {})])}"]
    # As in JSON, a schema that does not close its object allows other members.
    writes_objects = DIALECTS[dialect].form.parameter is None
    wrong += [write([("get", each)]) for each in WRONG if not (writes_objects and "other" in each)]
    assert not any(taken(model, dialect, wrong, tool_choice="required"))


@every_dialect
def test_text_before_calls(model: ServedModel, dialect: str) -> None:
    write, some = WRITERS[dialect], [tool(*each) for each in TOOLS[:2]]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": some}}
    calls = write([("get", SHORT), ("stop", {})])
    assert all(taken(model, dialect, ["", "hi < there", calls, f"So:\n{calls}"], tool_choice=choice))
    assert not any(taken(model, dialect, [write([("free", {})]), f"{calls} x"], tool_choice=choice))
    one, two = write([("get", {"any": "thing"})]), write([("stop", {}), ("stop", {})])
    assert taken(model, dialect, ["", one, f"So: {one}", two], parallel_tool_calls=False) == [True, True, True, False]


def test_the_number_of_a_call_ends(model: ServedModel) -> None:
    call = WRITERS["kimi_k2"]([("stop", {})])
    assert "functions.stop:0" in call
    numbered = [call.replace(":0", f":{number}") for number in (12, 3456, 34567)]
    assert taken(model, "kimi_k2", numbered, tool_choice="required") == [True, True, False]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"anyOf": [{}]}, "anyOf: not supported at the top of a schema in this model's format of calls; allowed: "),
        ({"type": "array"}, "must be an object's schema, with an object of properties"),
        ({"properties": []}, "must be an object's schema, with an object of properties"),
        ({"required": "a"}, "must be a list of names"),
        ({"properties": {"a": {"type": "objec"}}}, "Invalid type: objec"),
        ({"properties": {"a": {"enum": []}}}, "Unsatisfiable schema"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused(
    model: ServedModel, parameters: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError, match=r"^tools\[0\]\.function\.parameters.*: ") as refused:
        taken(model, "glm47", [], tools=[tool("get", parameters)], tool_choice="required")
    assert message in str(refused.value)
    best_effort = {"tools": [tool("get", parameters)], "parallel_tool_calls": False}
    assert taken(model, "glm47", ["<tool_call>get</tool_call>"], **best_effort) == [True]
