"""A response's items and events do not depend on how the answer is split."""

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseUsage

from router.api import response_writer
from router.api.completions import PromptTokensDetails, Usage
from router.api.response_writer import Event, OutputCall, OutputItem, OutputMessage, OutputReasoning
from router.message import MessageReader, Thinking
from router.preprocess.job import ResponseOptions
from router.preprocess.model import ServedModel
from router.tool_calls.json_parsers import HermesParser

CALLS = [("get", '{"a": [1, "}"]}'), ("stop", "{}")]
WRITTEN = [f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>' for name, arguments in CALLS]
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n{WRITTEN[0]}\n{WRITTEN[1]}\nThat is all."

_NAMES = "instructions max_output_tokens metadata parallel_tool_calls reasoning temperature text tool_choice tools"
REPEATED = json.dumps(dict.fromkeys([*_NAMES.split(), "top_p", "user"])).encode()


def run(pieces: list[str]) -> tuple[list[OutputItem], list[Event]]:
    reader = MessageReader(Thinking.OPTIONAL, HermesParser())
    items = response_writer.OutputItems("x")
    events: list[Event] = []
    for number, piece in enumerate(pieces, start=1):
        events += items.push(reader.read(piece, is_end=number == len(pieces)))
    whole, last = items.end("completed")
    return whole, events + last


def items_of(events: list[Event]) -> list[Any]:
    """Return the items that a client builds from the events."""
    growing: dict[int, Any] = {}
    ended: list[Any] = []
    for kind, fields in events:
        index: int = fields["output_index"]
        item: Any = growing.get(index)
        match kind.removeprefix("response."):
            case "output_item.added":
                assert index == len(growing), "items follow each other"
                growing[index] = msgspec.to_builtins(fields["item"])
            case "content_part.added":
                item["content"].append(msgspec.to_builtins(fields["part"]))
            case "output_text.delta" | "reasoning_text.delta":
                item["content"][fields["content_index"]]["text"] += fields["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += fields["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert item["content"][0]["text"] == fields["text"]
            case "function_call_arguments.done":
                assert item["arguments"] == fields["arguments"]
            case "content_part.done":
                assert item["content"][0] == msgspec.to_builtins(fields["part"])
            case "output_item.done":
                ended.append(msgspec.to_builtins(fields["item"]))
                assert item | {"status": "completed"} == ended[-1]
            case other:
                raise AssertionError(other)
    return ended


@given(st.lists(st.integers(0, len(ANSWER)), max_size=20))
def test_any_pieces_give_the_same_items(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(ANSWER)]
    items, events = run([ANSWER[start:end] for start, end in pairwise(edges)])
    assert items_of(events) == [msgspec.to_builtins(item) for item in items]
    reasoning, said, get, stop, end = items
    assert isinstance(reasoning, OutputReasoning)
    assert [part.text for part in reasoning.content] == ["Hm."]
    for item, text in ((said, "Let me see."), (end, "That is all.")):
        assert isinstance(item, OutputMessage)
        assert [part.text for part in item.content] == [text]
    for call, expected in ((get, CALLS[0]), (stop, CALLS[1])):
        assert isinstance(call, OutputCall)
        assert (call.name, call.arguments) == expected
        assert call.call_id.startswith("call_")
    assert len({item.id for item in items}) == 5


def test_an_empty_answer_is_an_empty_message() -> None:
    items, events = run([""])
    (message,) = items
    assert isinstance(message, OutputMessage)
    assert [part.text for part in message.content] == [""]
    assert items_of(events) == [msgspec.to_builtins(message)]


def test_log_probabilities_are_in_the_item_with_their_text() -> None:
    tokens = ["<think>", "Hm", "</think>", "<tool", "s>", "yes", '<tool_call>{"name": "f"', "}</tool_call>"]
    reader, items = MessageReader(Thinking.OPTIONAL, HermesParser()), response_writer.OutputItems("x")
    events: list[Event] = []
    for number, token in enumerate(tokens, start=1):
        logprob = msgspec.Raw(json.dumps({"token": token}).encode())
        events += items.push(reader.read(token, is_end=number == len(tokens)), [logprob])
    _, said, _ = items.end("completed")[0]
    assert isinstance(said, OutputMessage)
    (part,) = said.content
    assert part.text == "<tools>yes"
    assert [json.loads(bytes(entry))["token"] for entry in part.logprobs] == ["</think>", "<tool", "s>", "yes"]
    (begun,) = [
        fields["part"] for kind, fields in events if kind.endswith("part.added") and fields["output_index"] == 1
    ]
    assert (begun.text, begun.logprobs) == ("", [])


@pytest.mark.parametrize("tiers", [{}, {"host_tokens": 16, "storage_tokens": 8}])
def test_the_usage_has_what_openais_client_requires_and_the_tiers_of_the_prompt(tiers: dict[str, int]) -> None:
    model = cast("ServedModel", SimpleNamespace(name="m", tokenizer=None, dialect=None))
    options = ResponseOptions(fields=REPEATED)
    details = PromptTokensDetails(cached_tokens=32, **tiers)
    usage = Usage(prompt_tokens=40, completion_tokens=2, total_tokens=42, prompt_tokens_details=details)
    written = json.loads(response_writer.ResponseWriter("x", model, options).whole(usage))["usage"]
    assert written["input_tokens_details"] == {"cached_tokens": 32, "cache_write_tokens": 0} | tiers
    assert ResponseUsage.model_validate(written, strict=True).output_tokens_details.reasoning_tokens == 0
