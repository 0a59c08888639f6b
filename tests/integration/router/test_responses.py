"""``/v1/responses``, checked by OpenAI's own client."""

from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseOutputMessage, ResponseStreamEvent

from tests.fakes.bootstrap import entry_of, table_of
from tests.fakes.model_folder import BOS
from tests.fakes.router_cluster import MODEL, RouterCluster

pytestmark = pytest.mark.integration


def create(cluster: RouterCluster, **body: Any) -> Response:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        response: Response = client.responses.create(model=MODEL, **body)
        return response


def events_of(cluster: RouterCluster, **body: Any) -> list[ResponseStreamEvent]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        return list(client.responses.create(model=MODEL, stream=True, **body))


def test_a_text_is_answered(shared: RouterCluster) -> None:
    response = create(shared, input="hello", max_output_tokens=8, user="me")
    assert (response.object, response.status, response.model) == ("response", "incomplete", MODEL)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text == "<user>he"
    assert response.usage is not None
    assert (response.usage.output_tokens, response.usage.total_tokens) == (8, response.usage.input_tokens + 8)
    assert response.error is None
    (message,) = response.output
    assert isinstance(message, ResponseOutputMessage)
    assert message.status == "incomplete"


def test_the_prompt_is_that_of_the_same_chat(shared: RouterCluster) -> None:
    conversation = [
        {"role": "user", "content": "a"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": "c"}]},
    ]
    reply = shared.post("/v1/responses", input=conversation, instructions="be brief", max_output_tokens=2, seed=7)
    assert reply.status_code == 200, reply.text
    submit = shared.last_submit()
    messages = [{"role": "system", "content": "be brief"}] + [
        {"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))
    ]
    shared.post("/v1/chat/completions", messages=messages, max_tokens=2, seed=7)
    same = shared.last_submit()
    assert submit.prompt_ids == same.prompt_ids
    assert submit.prompt_ids[0] == BOS
    assert (submit.sampling, submit.stopping) == (same.sampling, same.stopping)


def test_a_stream_has_openais_events(shared: RouterCluster) -> None:
    events = events_of(shared, input="hello", max_output_tokens=8)
    kinds = [event.type for event in events]
    num_deltas = kinds.count("response.output_text.delta")
    assert num_deltas > 1
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == text == "<user>he"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "bad_words": [""]}, "bad_words"),
        ({"input": "x", "max_output_tokens": 10**6}, "max_output_tokens"),
        ({"input": "x" * 600}, "input"),
        ({}, "input"),
    ],
)
def test_unsupported_features_are_refused_by_name(shared: RouterCluster, body: Any, param: str) -> None:
    reply = shared.post("/v1/responses", **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"].split(".")[0].split("[")[0] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("name", "value", "own"),
    [("max_tokens", 3, "max_output_tokens"), ("verbosity", "low", "text.verbosity")],
)
def test_the_names_of_chat_completions_are_refused_with_the_right_ones(
    shared: RouterCluster, name: str, value: Any, own: str
) -> None:
    reply = shared.post("/v1/responses", input="x", **{name: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == f"{name}: not a field of this API; use {own}"


def test_item_references_are_refused_with_an_alternative(shared: RouterCluster) -> None:
    reply = shared.post(
        "/v1/responses", input=[{"role": "user", "content": "a"}, {"type": "item_reference", "id": "b"}]
    )
    assert reply.status_code == 400
    known = 'nothing is stored here: send the item itself, as clients do with "store": false'
    assert reply.json()["error"]["message"] == f"input: item_reference 'b': {known}"


@pytest.mark.parametrize(
    "harmless",
    [
        {"store": True},
        {"include": ["file_search_call.results", "reasoning.encrypted_content"]},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
    ],
)
def test_fields_without_effect_are_ignored(shared: RouterCluster, harmless: Any) -> None:
    reply = shared.post("/v1/responses", input="x", max_output_tokens=1, **harmless)
    assert (reply.status_code, reply.json()["store"]) == (200, False)


def test_earlier_refusals_stay_in_the_conversation(shared: RouterCluster) -> None:
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]}
    asked = {"role": "user", "content": "why"}
    for path, field in (("/v1/responses", "input"), ("/v1/chat/completions", "messages")):
        assert shared.post(path, **{field: [said, asked]}).status_code == 200
        assert b"never" in bytes(token for token in shared.last_submit().prompt_ids if token < 256)


def test_a_failure_before_the_first_token_is_a_status_and_later_an_event(cluster: RouterCluster) -> None:
    cluster.prefill.fails = "no memory"
    cluster.decode.flow.clear()
    assert cluster.post("/v1/responses", input="x", stream=True).status_code == 503
    cluster.prefill.fails = None
    cluster.decode.fails_after, cluster.decode.token_s = 5, 0.1
    cluster.decode.flow.set()
    events = events_of(cluster, input="hello", max_output_tokens=50)
    last = events[-1]
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert "out of memory" in last.response.error.message
    cluster.assert_empty()


def test_a_stream_that_fails_while_it_waits_still_begins_with_created(cluster: RouterCluster) -> None:
    cluster.decode.flow.clear()
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    with client, client.responses.stream(model=MODEL, input="hello") as stream:
        cluster.table.show(table_of(entry_of(cluster.prefill.peer), version=2))
        events = list(stream)
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]
    assert [event.sequence_number for event in events] == [0, 1, 2]
