"""``/generate``: tokens in, tokens out."""

import json
from typing import Any

import pytest

from tests.fakes.model_folder import BOS
from tests.fakes.router_cluster import CACHED_TOKENS, MODEL, RouterCluster

pytestmark = pytest.mark.integration

PROMPT = [BOS, *b"abc"]


def generate(cluster: RouterCluster, **body: Any) -> Any:
    reply = cluster.post("/generate", prompt_ids=PROMPT, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_tokens_come_back_without_text(shared: RouterCluster) -> None:
    answer = generate(shared, max_tokens=5)
    assert answer["object"] == "generation"
    assert answer["choices"] == [{"index": 0, "token_ids": list(b"abcab"), "logprobs": None, "finish_reason": "length"}]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 5)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == CACHED_TOKENS


def test_a_stream_joins_to_the_same(shared: RouterCluster) -> None:
    whole = generate(shared, max_tokens=7, n=2, logprobs=1)
    events = shared.events(
        "/generate", prompt_ids=PROMPT, max_tokens=7, n=2, logprobs=1, stream_options={"include_usage": True}
    )
    assert events.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [event["choices"][0] for event in events if event["choices"][0]["index"] == choice["index"]]
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [told for part in parts for told in part["logprobs"]] == choice["logprobs"]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
    first = whole["choices"][0]["logprobs"][0]
    assert first == {"token_id": 97, "logprob": -0.097, "top_logprobs": [{"token_id": 98, "logprob": -0.125}]}


def test_stop_strings_and_stop_tokens_end_it(shared: RouterCluster) -> None:
    assert generate(shared, max_tokens=9, stop="ca")["choices"][0]["finish_reason"] == "stop"
    answer = generate(shared, max_tokens=9, stop_token_ids=[98])
    assert answer["choices"][0]["token_ids"] == list(b"ab")


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], "prompt_ids"),
        ("abc", "prompt_ids"),
        ([1, 10**6], "prompt_ids: there is no token 1000000"),
        ([1] * 100 + [10**6], "prompt_ids: there is no token 1000000"),
        ([1] * 100 + [-1], "prompt_ids: there is no token -1"),
        ([1] * 100 + [2**40], f"prompt_ids: there is no token {2**40}"),
        ([1] * 600, "the prompt has 600 tokens"),
    ],
)
def test_prompts_that_cannot_be_used(shared: RouterCluster, prompt_ids: Any, message: str) -> None:
    reply = shared.post("/generate", prompt_ids=prompt_ids)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt_ids"
    assert message in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": [1]}, "input_ids: unknown here; /generate calls it prompt_ids"),
        ({"text": "abc"}, "text: unknown here; /v1/completions takes it as prompt"),
        (
            {"prompt_ids": [1], "sampling_params": {"max_new_tokens": 1}},
            "sampling_params: unknown here; its fields are given next to the prompt",
        ),
    ],
)
def test_the_names_of_others_are_told_ours(shared: RouterCluster, fields: Any, message: str) -> None:
    for body in (fields, {"model": MODEL, **fields}):
        reply = shared.http.post("/generate", json=body)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)


def test_the_response_names_replicas_and_request(shared: RouterCluster) -> None:
    body = json.dumps({"model": MODEL, "prompt_ids": PROMPT, "max_tokens": 1})
    reply = shared.http.post("/generate", content=body, headers={"x-request-id": "mine"})
    assert reply.json()["id"] == "gen-mine"
    assert (reply.headers["x-baton-prefill"], reply.headers["x-request-id"]) == ("prefill-0", "mine")
