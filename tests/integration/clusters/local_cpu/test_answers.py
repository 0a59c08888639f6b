"""Answers of a whole cluster on real Ray, through its HTTP API: exact tokens, many clients, lost clients."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.clients import NEEDLE_TOKENS, crowd
from tests.fakes.cluster import RunningCluster
from tests.fakes.recall_prompts import chain_prompt, needle_prompt, recall_oracle
from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT, MAX_NEW_TOKENS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PAGE_SIZE = 64
LONG = 32_768


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
        yield client


def test_the_openai_client_works_unchanged(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="recall", messages=[{"role": "user", "content": DEMO_PROMPT}])
    assert answer.choices[0].message.content == DEMO_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    stream = client.completions.create(
        model="recall", prompt=DEMO_PROMPT, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == DEMO_ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


def test_the_demo_model_calls_a_function_and_reads_the_result(client: openai.OpenAI) -> None:
    floor = {"type": "integer", "minimum": 0, "maximum": 99}
    properties = {"code": {"enum": ["tango", "zulu"]}, "floor": floor}
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    given: Any = {
        "model": "recall",
        "tools": [{"type": "function", "function": {"name": "open_door", "parameters": parameters}}],
    }
    messages: list[Any] = [{"role": "user", "content": "Open the door with zulu."}]
    answer = client.chat.completions.create(messages=messages, tool_choice="required", temperature=1, seed=5, **given)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "open_door"
    arguments = json.loads(call.function.arguments)
    assert arguments["code"] in ("tango", "zulu")
    assert 0 <= arguments["floor"] <= 99
    # The text before it has a full stop too, so that the token after one is not certain.
    result = {"role": "tool", "tool_call_id": call.id, "content": DEMO_PROMPT.replace(".", "")}
    messages += [answer.choices[0].message, result]
    answer = client.chat.completions.create(messages=messages, **given)
    assert answer.choices[0].message.content == DEMO_ANSWER.removesuffix(".")


def test_sampled_json_has_little_white_space(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 5, "maxItems": 5}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="recall",
            messages=[{"role": "user", "content": "Count."}],
            response_format={"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
            temperature=2,
            seed=seed,
        )
        text = answer.choices[0].message.content or ""
        assert len(json.loads(text)) == 5
        assert re.fullmatch(r"\S(( |\n[ \t]{0,40})?\S)*", text), text


def test_an_answer_without_an_end_stops_at_the_models_default(cluster: RunningCluster) -> None:
    body = {"model": "recall", "messages": [{"role": "user", "content": "one two one two one"}]}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == MAX_NEW_TOKENS


def test_an_answer_of_a_given_form(client: openai.OpenAI) -> None:
    schema: dict[str, object] = {
        "properties": {"code": {"enum": ["tango", "zulu"]}, "sure": {"type": "boolean"}},
        "type": "object",
        "required": ["code", "sure"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="recall",
        messages=[{"role": "user", "content": DEMO_PROMPT}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
        max_tokens=400,
        seed=5,
    )
    assert answer.choices[0].finish_reason == "stop"
    said = json.loads(answer.choices[0].message.content or "")
    assert said["code"] in ("tango", "zulu")
    assert isinstance(said["sure"], bool)
    chosen = client.completions.create(
        model="recall", prompt="x", stream=True, extra_body={"guided_choice": ["yes", "maybe"]}
    )
    assert "".join(chunk.choices[0].text for chunk in chosen) in ("yes", "maybe")


@pytest.mark.parametrize(
    "depth", [0.5, *(pytest.param(depth, marks=pytest.mark.full) for depth in (0.0, 0.25, 0.75, 1.0))]
)
def test_a_needle_in_a_long_prompt_is_recalled(cluster: RunningCluster, depth: float) -> None:
    prompt = needle_prompt(LONG, depth)
    assert cluster.complete(prompt, NEEDLE_TOKENS) == recall_oracle(prompt, NEEDLE_TOKENS)


@pytest.mark.parametrize("length", [LONG // 4, pytest.param(LONG, marks=pytest.mark.full)])
def test_a_chain_through_every_page_is_followed(cluster: RunningCluster, length: int) -> None:
    prompt = chain_prompt(length, PAGE_SIZE)
    num_pages = (length - 1) // PAGE_SIZE
    assert cluster.complete(prompt, num_pages) == recall_oracle(prompt, num_pages)


def test_an_earlier_prompt_is_cached_and_counted(cluster: RunningCluster) -> None:
    prompt = needle_prompt(3000, 0.5, seed=99)
    body = {"model": "recall", "max_tokens": NEEDLE_TOKENS, "ignore_eos": True, "return_token_ids": True}
    for asked, num_cached in [(prompt, 0), (prompt, 2944), ([*prompt[:200], *prompt[300:]], 192)]:
        answer = httpx.post(
            f"{cluster.url}/v1/completions", json={**body, "prompt": asked, "temperature": 0}, timeout=300
        )
        assert answer.json()["choices"][0]["token_ids"] == recall_oracle(asked, NEEDLE_TOKENS)
        assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}


def test_many_clients_with_disconnects(cluster: RunningCluster) -> None:
    outcomes = asyncio.run(crowd(cluster.url, num_clients=32, seed=7, leavers=4))
    assert outcomes.count("left") >= 3
    assert outcomes.count("right") == 32 - outcomes.count("left")
    cluster.wait_until(cluster.is_empty, 60)


def test_a_client_that_leaves_during_prefill_frees_its_pages_on_both_sides(cluster: RunningCluster) -> None:
    body = {"model": "recall", "prompt": needle_prompt(LONG, 0.5, seed=98), "max_tokens": 10}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=1.5)
    cluster.wait_until(cluster.is_empty, 60)


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(cluster: RunningCluster) -> None:
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json={"model": "recall", "prompt": [5] * 140_000, "max_tokens": 1}, timeout=300
    )
    assert answer.status_code == 400
    assert "140000" in answer.json()["error"]["message"]
    assert "131072" in answer.json()["error"]["message"]
