"""Tools and reasoning as the openai client sees them, complete and streamed."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from cluster.grammar import Grammars
from tests.fakes.model_folder import VOCAB_SIZE, write_json, write_model_folder
from tests.fakes.router_cluster import MODEL, RouterCluster, run_cluster
from tests.unit.router.test_tagged_calls import CALLS, SCHEMA, WRITERS

pytestmark = pytest.mark.integration

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}</tool>{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}{# <tool_call> #}"
)
ARGUMENTS = '{"city": "Zürich {", "days": [1, 2]}'
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nThey ask\nfor weather.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterCluster]:
    yield from run_cluster(write_model_folder(tmp_path_factory.mktemp("tools"), template=TEMPLATE))


def test_whole(cluster: RouterCluster, client: openai.OpenAI) -> None:
    cluster.decode.says = ANSWER.encode()
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, n=2)
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        assert choice.message.model_extra == dict.fromkeys(("reasoning_content", "reasoning"), "They ask\nfor weather.")
        calls: Any = choice.message.tool_calls
        assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
            ("function", "weather", ARGUMENTS)
        ] * 2
    ids = [call.id for choice in whole.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 4
    assert bytes(cluster.last_submit().prompt_ids) == b"<tool>weather</tool><user>hi\n<assistant>"


def collect(chunks: list[Any]) -> tuple[str, str, list[dict[str, str]]]:
    """Return reasoning, content and calls, joined as clients do it."""
    reasoning = content = ""
    calls: list[dict[str, str]] = []
    for delta in [chunk.choices[0].delta for chunk in chunks if chunk.choices]:
        reasoning_text = (delta.model_extra or {}).get("reasoning_content") or ""
        assert reasoning_text == ((delta.model_extra or {}).get("reasoning") or "")
        reasoning += reasoning_text
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls)
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            else:
                assert call.function.name is None
            calls[call.index]["arguments"] += call.function.arguments or ""
    return reasoning, content, calls


def check_stream(chunks: list[Any]) -> None:
    reasoning, content, calls = collect(chunks)
    assert (reasoning, content) == ("They ask\nfor weather.", "Let me see.")
    assert [(call["name"], call["arguments"]) for call in calls] == [("weather", ARGUMENTS)] * 2
    assert calls[0]["id"] != calls[1]["id"]
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(ANSWER.encode())


def test_stream(cluster: RouterCluster, client: openai.OpenAI) -> None:
    cluster.decode.says = ANSWER.encode()
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=MESSAGES, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
    )
    check_stream(chunks)
    assert len(chunks) == len(ANSWER.encode()) + 2, "one chunk a token, the role before, the usage behind"


def test_without_tools_nothing_is_a_call(cluster: RouterCluster, client: openai.OpenAI) -> None:
    cluster.decode.says = CALL.encode()
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", CALL, None)


def test_thinking_can_be_switched_off(cluster: RouterCluster, client: openai.OpenAI) -> None:
    cluster.decode.says = b"plain"
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    message = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra).choices[0].message
    assert (message.content, message.model_extra) == ("plain", {})
    assert bytes(cluster.last_submit().prompt_ids).endswith(b"<think>\n\n</think>\n\n")


def test_reasoning_can_be_omitted(cluster: RouterCluster, client: openai.OpenAI) -> None:
    cluster.decode.says = ANSWER.encode()
    extra = {"include_reasoning": False}
    message = client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra).choices[0].message
    assert message.content is not None
    assert message.content.startswith("Let me see.")
    assert message.model_extra == {}
    stream: Any = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, extra_body=extra)
    assert collect(list(stream))[:2] == ("", message.content)


def test_parsers_can_be_switched_off(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, template=TEMPLATE)
    for plain in run_cluster(folder, tool_parser="none", reasoning_parser="none"):
        plain.decode.says = ANSWER.encode()
        reply = plain.post("/v1/chat/completions", messages=MESSAGES).json()
        assert reply["choices"][0]["message"]["content"] == ANSWER
        assert plain.post("/v1/chat/completions", messages=MESSAGES, tools=TOOLS).status_code == 400


@pytest.mark.parametrize("is_special", [True, False])
def test_markers_that_are_tokens(tmp_path: Path, is_special: bool) -> None:
    """Markers are visible although special tokens are hidden, and the grammar has them as one token.

    Qwen's are not special.
    """
    folder = write_model_folder(tmp_path, template=TEMPLATE + "{# </think> #}")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    markers = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    tokenizer.add_tokens([tokenizers.AddedToken(marker, special=is_special) for marker in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", {"max_position_embeddings": 512, "vocab_size": VOCAB_SIZE + len(markers)})
    call = tokenizer.encode(ANSWER, add_special_tokens=False).ids
    assert max(call) == VOCAB_SIZE + 3
    with closing(Grammars(folder, VOCAB_SIZE + len(markers))) as grammars:
        for special in run_cluster(folder):
            special.decode.says = call
            body = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": "required"}
            message = special.post("/v1/chat/completions", **body).json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["content"]) == ("They ask\nfor weather.", "Let me see.")
            assert [call["function"]["arguments"] for call in message["tool_calls"]] == [ARGUMENTS] * 2
            assert follows(
                grammars, special, tokenizer.encode(f"<think>so</think>{CALL}", add_special_tokens=False).ids
            )
            some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS}}
            assert special.post("/v1/chat/completions", **body | {"tool_choice": some}).status_code == 200
            assert follows(grammars, special, call)
            others = tokenizer.encode(ANSWER.replace('"weather"', '"other"'), add_special_tokens=False).ids
            assert not follows(grammars, special, others)


@pytest.mark.parametrize("dialect", WRITERS)
def test_calls_between_tags(tmp_path: Path, dialect: str) -> None:
    """The ids of Kimi's calls are its own, since its template shows them again."""
    tools: Any = [{"name": "get", "parameters": SCHEMA}, {"name": "put"}]
    own_ids = ["functions.get:0", "functions.put:1"] if dialect == "kimi_k2" else None
    for tagged in run_cluster(write_model_folder(tmp_path), tool_parser=dialect):
        tagged.decode.says = f"Let me see.\n{WRITERS[dialect](CALLS)}".encode()
        client = openai.OpenAI(base_url=f"{tagged.url}/v1", api_key="none")
        chat: Any = {
            "model": MODEL,
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": t} for t in tools],
        }
        message: Any = client.chat.completions.create(**chat).choices[0].message
        whole = [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in message.tool_calls
        ]
        _, content, streamed = collect(list(client.chat.completions.create(**chat, stream=True)))
        flat: Any = [{"type": "function", **tool} for tool in tools]
        response: Any = client.responses.create(model=MODEL, input="hi", tools=flat, store=False)
        text, *calls = response.output
        items = [{"id": call.call_id, "name": call.name, "arguments": call.arguments} for call in calls]
        assert message.content == content == text.content[0].text == "Let me see."
        for found in (whole, streamed, items):
            assert [(call["name"], json.loads(call["arguments"])) for call in found] == CALLS
            assert own_ids in (None, [call["id"] for call in found])
        client.close()


def follows(grammars: Grammars, cluster: RouterCluster, token_ids: list[int]) -> bool:
    """Return whether the last request's grammar accepts these tokens as a complete answer."""
    matcher = grammars.matcher(cluster.last_submit().sampling.grammar)
    matcher.advance(token_ids)
    return matcher.is_whole and not matcher.problem


@pytest.mark.parametrize("quiet", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}])
def test_tokenize_shows_the_same_prompt(
    cluster: RouterCluster, client: openai.OpenAI, quiet: dict[str, object]
) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, **quiet}
    tokens = cluster.http.post("/tokenize", json={"messages": MESSAGES, **fields}).json()["tokens"]
    client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1, extra_body=fields)
    assert [*cluster.last_submit().prompt_ids] == tokens
