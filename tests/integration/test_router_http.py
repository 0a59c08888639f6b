"""The router over real sockets: HTTP and the channel are real, only the replicas are fake."""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from cluster.bootstrap.client import BootstrapClient
from cluster.bootstrap.service import BootstrapServer
from cluster.bootstrap.table import rows_digest
from cluster.spec.config import DeployConfig, ModelConfig, RouterConfig
from cluster.spec.errors import UserError
from cluster.spec.ids import Incarnation
from cluster.spec.messages import Submit
from cluster.spec.registry import Heartbeat, ReplicaLoad, StepTimes
from cluster.spec.strategy import Strategy
from cluster.spec.worker_spec import Rendezvous
from router.server import RouterServer
from tests.fakes.bootstrap import FakeTable, entry_of, row_of, table_of
from tests.fakes.model_folder import BOS, EOS, write_model_folder
from tests.fakes.replica import FakeReplica

pytestmark = pytest.mark.integration

MODEL = "echo"
CONTEXT = 512
CACHED_TOKENS = 4
USAGE = {
    "prompt_tokens": 6,
    "completion_tokens": 7,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
}


@dataclass
class Cluster:
    url: str
    server: RouterServer
    table: FakeTable
    prefill: FakeReplica
    decode: FakeReplica
    http: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json={"model": MODEL, **body})

    def complete(self, prompt: Any, **body: Any) -> Any:
        reply = self.post("/v1/completions", prompt=prompt, **body)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """The data of a stream's events, without [DONE]."""
        reply = self.post(path, stream=True, **body)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("text/event-stream")
        data = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
        assert data.pop() == "[DONE]"
        return [json.loads(line) for line in data]

    def metric(self, line: str) -> float:
        text = self.http.get("/metrics").text
        values = [float(found.rsplit(" ", 1)[1]) for found in text.splitlines() if found.startswith(line + " ")]
        assert len(values) == 1, f"{line}: {values} in\n{text}"
        return values[0]

    def last_submit(self) -> Submit:
        return self.decode.submits[-1]

    def assert_empty(self) -> None:
        deadline_s = time.monotonic() + 60
        while self.metric("baton_num_requests_running") or self.decode.num_open:
            assert time.monotonic() < deadline_s, "requests are left open"
            time.sleep(0.01)


def config_of(**router: Any) -> DeployConfig:
    return DeployConfig(
        model=ModelConfig(path=f"somewhere/{MODEL}"), router=RouterConfig(host="127.0.0.1", **{"port": 0, **router})
    )


def make_server(folder: Path, table: FakeTable, **router: Any) -> RouterServer:
    rendezvous = Rendezvous(bootstrap_url="http://nowhere", token="token")
    return RouterServer(config_of(**router), folder, rendezvous, "127.0.0.1", Incarnation(1), watch=table.watch)


def run_cluster(folder: Path, **router: Any) -> Iterator[Cluster]:
    table = FakeTable()
    with FakeReplica("prefill-0") as prefill, FakeReplica("decode-0", cached_tokens=CACHED_TOKENS) as decode:
        server = make_server(folder, table, **router)
        table.show(table_of(entry_of(prefill.peer), entry_of(decode.peer)))
        url = server.start()
        try:
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
                wait_ready(http)
                yield Cluster(url, server, table, prefill, decode, http)
        finally:
            server.stop()
        server.run()


def wait_ready(http: httpx.Client) -> None:
    deadline_s = time.monotonic() + 60
    while http.get("/ready").status_code != 200:
        assert time.monotonic() < deadline_s, http.get("/ready").text
        time.sleep(0.01)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), max_context=CONTEXT)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Cluster]:
    """For tests that leave replicas and table as they are."""
    yield from run_cluster(folder)


@pytest.fixture
def cluster(folder: Path) -> Iterator[Cluster]:
    """For tests that change them."""
    yield from run_cluster(folder, sse_comment_s=0.05)


class TestCompletions:
    def test_whole(self, shared: Cluster) -> None:
        reply = shared.complete("hello", max_tokens=7)
        assert reply["choices"] == [{"index": 0, "text": "hellohe", "logprobs": None, "finish_reason": "length"}]
        assert reply["usage"] == USAGE
        assert (reply["object"], reply["model"]) == ("text_completion", MODEL)

    def test_stream_with_usage(self, shared: Cluster) -> None:
        events = shared.events("/v1/completions", prompt="hello", max_tokens=7, stream_options={"include_usage": True})
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hellohe"
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [
            *[None] * (len(events) - 2),
            "length",
        ]
        assert all(event["usage"] is None for event in events[:-1])
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == USAGE

    def test_stream_without_usage_has_no_such_key(self, shared: Cluster) -> None:
        assert all("usage" not in event for event in shared.events("/v1/completions", prompt="hello"))

    @pytest.mark.parametrize("prompt", [["ab", "cde"], [[BOS, 97, 98], [BOS, 99, 100, 101]]])
    def test_several_prompts(self, shared: Cluster, prompt: Any) -> None:
        reply = shared.complete(prompt, max_tokens=4)
        assert [choice["text"] for choice in reply["choices"]] == ["abab", "cdec"]
        assert [choice["index"] for choice in reply["choices"]] == [0, 1]
        assert reply["usage"]["completion_tokens"] == 8

    def test_several_prompts_as_a_stream(self, shared: Cluster) -> None:
        texts = {0: "", 1: ""}
        for event in shared.events("/v1/completions", prompt=["ab", "cde"], max_tokens=8):
            texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
        assert texts == {0: "abababab", 1: "cdecdecd"}

    def test_token_ids_are_taken_as_they_are(self, shared: Cluster) -> None:
        assert shared.complete([97, 98, 99], max_tokens=3)["choices"][0]["text"] == "bcb"
        assert shared.last_submit().prompt_ids == [97, 98, 99]

    def test_default_is_sixteen_tokens_at_temperature_one(self, shared: Cluster) -> None:
        assert shared.complete("x")["usage"]["completion_tokens"] == 16
        assert shared.last_submit().sampling.temperature == 1.0

    def test_sampling_reaches_both_replicas(self, shared: Cluster) -> None:
        shared.complete("x", temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-1, stop_token_ids=[7])
        sampling = shared.last_submit().sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
        assert sampling.seed == 2**63 - 1
        assert shared.last_submit().stopping.stop_token_ids == {7, EOS}
        room = shared.last_submit().room
        assert any(submit.room == room for submit in shared.prefill.wait_submits(1))

    def test_seeds_differ_when_none_is_given(self, shared: Cluster) -> None:
        shared.complete(["x", "y"])
        first, second = shared.decode.submits[-2:]
        assert first.sampling.seed != second.sampling.seed

    def test_eos_ends_the_answer_and_is_not_shown(self, shared: Cluster) -> None:
        choice = shared.complete([BOS, 97, EOS, 98], max_tokens=9)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("a", "stop")

    def test_ignore_eos(self, shared: Cluster) -> None:
        choice = shared.complete([BOS, 97, EOS, 98], max_tokens=6, ignore_eos=True)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abab", "length")

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_string_cuts_the_text_and_cancels_both_legs(self, cluster: Cluster, stream: bool) -> None:
        body: dict[str, Any] = {"prompt": "abcdefgh", "max_tokens": 400, "stop": ["zz", "efg"]}
        cluster.decode.token_s = 0.01
        if stream:
            choices = [event["choices"][0] for event in cluster.events("/v1/completions", **body)]
            text, finish = "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]
        else:
            choice = cluster.complete(**body)["choices"][0]
            text, finish = choice["text"], choice["finish_reason"]
        assert (text, finish) == ("abcd", "stop")
        assert len(cluster.prefill.wait_cancels(1)) == len(cluster.decode.wait_cancels(1)) == 1
        cluster.assert_empty()

    def test_characters_of_several_bytes_are_never_cut(self, shared: Cluster) -> None:
        events = shared.events("/v1/completions", prompt="€🙂é", max_tokens=9)
        assert "".join(event["choices"][0]["text"] for event in events) == "€🙂é"

    def test_default_length_is_cut_to_the_context(self, shared: Cluster) -> None:
        assert shared.complete([97] * (CONTEXT - 3))["usage"]["completion_tokens"] == 3

    def test_harmless_and_unknown_fields_are_taken(self, shared: Cluster) -> None:
        shared.complete(
            "x",
            n=1,
            best_of=1,
            logprobs=None,
            echo=False,
            presence_penalty=0.0,
            repetition_penalty=1.0,
            user="me",
            zz=1,
        )


class TestChat:
    def test_whole(self, shared: Cluster) -> None:
        reply = shared.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=8).json()
        assert reply["choices"][0]["message"] == {"role": "assistant", "content": "<user>hi", "refusal": None}
        assert shared.last_submit().prompt_ids == [BOS, *b"<user>hi\n<assistant>"]

    def test_parts_are_joined(self, shared: Cluster) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        shared.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1)
        assert shared.last_submit().prompt_ids == [BOS, *b"<user>a\nb\n<assistant>"]

    def test_default_length_is_the_rest_of_the_context(self, shared: Cluster) -> None:
        shared.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        submit = shared.last_submit()
        assert submit.stopping.max_tokens == CONTEXT - len(submit.prompt_ids)

    def test_stream_begins_with_the_role(self, shared: Cluster) -> None:
        events = shared.events("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=8)
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "<user>hi"
        assert events[0]["object"] == "chat.completion.chunk"
        assert events[-1]["choices"][0]["finish_reason"] == "length"


class TestOpenAiClient:
    def test_everything_it_offers_here(self, shared: Cluster) -> None:
        with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            assert client.models.retrieve(MODEL).id == MODEL
            assert client.completions.create(model=MODEL, prompt="hey", max_tokens=3).choices[0].text == "hey"
            messages: Any = [{"role": "user", "content": "hi"}]
            whole = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8)
            assert whole.choices[0].message.content == "<user>hi"
            stream = client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=8, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            assert text == "<user>hi"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.completion_tokens == 8
            assert chunks[-1].usage.prompt_tokens_details is not None
            assert chunks[-1].usage.prompt_tokens_details.cached_tokens == CACHED_TOKENS

    def test_errors_are_its_own(self, shared: Cluster) -> None:
        with openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError) as caught:
                client.completions.create(model="other", prompt="x")
            assert caught.value.code == "model_not_found"
            with pytest.raises(openai.BadRequestError) as refused:
                client.completions.create(model=MODEL, prompt="x", n=2)
            assert refused.value.param == "n"

    def test_failure_in_the_middle_of_a_stream(self, cluster: Cluster) -> None:
        cluster.decode.fails_after, cluster.decode.token_s = 5, 0.1
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            stream = client.completions.create(model=MODEL, prompt="abcdef", max_tokens=50, stream=True)
            text = ""
            with pytest.raises(openai.APIError, match="decode-0: out of memory"):  # noqa: PT012
                for chunk in stream:
                    text += chunk.choices[0].text
            assert text == "abc"


MISSING = object()
"""Leaves a field out of a body that would be good with it."""

GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "x"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [97]},
}

WRONG_PROMPT = "must be a string, a list of strings, a list of token ids, or a list of such lists; no list may be empty"
WRONG_STOP = "must be a string, or a list of at most 16 strings; none of them empty"
WRONG_CONTENT = "must be a string, or a list of parts of type text; images, audio and files are not supported"
CONTEXT_IS = "this model's context is 512 tokens for prompt and answer together"
ROLES = "'system', 'developer', 'user', 'assistant', 'tool' or 'function'"

BAD_COMPLETIONS: list[tuple[str, Any, str]] = [
    ("model", MISSING, "field required"),
    ("prompt", MISSING, "field required"),
    ("prompt", 5, WRONG_PROMPT),
    ("prompt", [], WRONG_PROMPT),
    ("prompt", [[]], WRONG_PROMPT),
    ("prompt", [1, "a"], WRONG_PROMPT),
    ("prompt", [1, 258], "there is no token 258; allowed: 0 to 257"),
    ("prompt", [-1], "there is no token -1; allowed: 0 to 257"),
    ("prompt", ["x"] * 1025, "at most 1024 prompts in one request, got 1025"),
    ("prompt", [1] * 512, f"the prompt has 512 tokens; {CONTEXT_IS}"),
    ("max_tokens", 511, f"the prompt has 2 tokens and 511 more were asked for; {CONTEXT_IS}"),
    ("max_tokens", 0, "Input should be greater than or equal to 1, got 0"),
    ("max_tokens", "5", "Input should be a valid integer, got '5'"),
    ("temperature", -1, "Input should be greater than or equal to 0, got -1"),
    ("top_p", 0, "Input should be greater than 0, got 0"),
    ("top_p", 1.5, "Input should be less than or equal to 1, got 1.5"),
    ("top_k", -2, "Input should be greater than or equal to -1, got -2"),
    ("min_p", 2, "Input should be less than or equal to 1, got 2"),
    ("seed", 1.5, "Input should be a valid integer, got 1.5"),
    ("stop", [""], WRONG_STOP),
    ("stop", ["x"] * 17, WRONG_STOP),
    ("stream", "yes", "Input should be a valid boolean, got 'yes'"),
    ("stream_options", {}, "only allowed when stream is true"),
    ("n", 2, "not supported, got 2; allowed: null or 1"),
    ("n", True, "not supported, got true; allowed: null or 1"),
    ("best_of", 3, "not supported, got 3; allowed: null or 1"),
    ("logprobs", 0, "not supported, got 0; allowed: null or false"),
    ("echo", True, "not supported, got true; allowed: null or false"),
    ("presence_penalty", 0.5, "not supported, got 0.5; allowed: null or 0"),
    ("logit_bias", {"1": 2}, 'not supported, got {"1":2}; allowed: null or {}'),
]
BAD_CHATS: list[tuple[str, Any, str]] = [
    ("messages", MISSING, "field required"),
    ("messages", [], "List should have at least 1 item after validation, not 0, got []"),
    ("messages[0].role", [{"role": "king", "content": "x"}], f"Input should be {ROLES}, got 'king'"),
    ("messages[0].content", [{"role": "user", "content": [{"type": "image_url"}]}], WRONG_CONTENT),
    ("messages", [{"role": "user", "content": "x" * 600}], f"the prompt has 619 tokens; {CONTEXT_IS}"),
    ("tools", [{}], "not supported, got [{}]; allowed: null or []"),
    (
        "response_format",
        {"type": "json_object"},
        'not supported, got {"type":"json_object"}; allowed: null or {"type":"text"}',
    ),
]
BAD_OTHERS: list[tuple[str, str, Any, str]] = [
    ("/tokenize", "prompt", MISSING, "give either prompt or messages"),
    ("/detokenize", "tokens", [999], "there is no token 999; allowed: 0 to 257"),
    ("/detokenize", "tokens", "x", "Input should be a valid array, got 'x'"),
]
BAD = [
    *[("/v1/completions", *row) for row in BAD_COMPLETIONS],
    *[("/v1/chat/completions", *row) for row in BAD_CHATS],
    *BAD_OTHERS,
]


class TestBadInput:
    @pytest.mark.parametrize(("path", "param", "value", "message"), BAD)
    def test_field(self, shared: Cluster, path: str, param: str, value: Any, message: str) -> None:
        body = GOOD_BODIES[path] | {param.split("[")[0]: value}
        reply = shared.http.post(path, json={name: given for name, given in body.items() if given is not MISSING})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["message"]) == (400, param, f"{param}: {message}")
        assert error["type"] == "invalid_request_error"
        assert set(error) == {"message", "type", "param", "code"}

    @pytest.mark.parametrize("path", GOOD_BODIES)
    def test_unknown_model(self, shared: Cluster, path: str) -> None:
        reply = shared.http.post(path, json=GOOD_BODIES[path] | {"model": "other"})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")
        assert error["message"] == "the model 'other' does not exist; this endpoint serves 'echo'"

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"{", "body: Invalid JSON: EOF while parsing an object at line 1 column 1"),
            (b"", "body: Invalid JSON: EOF while parsing a value at line 1 column 0"),
            (b"[]", "body: must be a JSON object, got []"),
            (
                b'{"model": "echo", "prompt": "x", "temperature": NaN}',
                "temperature: Input should be a finite number, got nan",
            ),
        ],
    )
    def test_not_an_object(self, shared: Cluster, content: bytes, message: str) -> None:
        reply = shared.http.post("/v1/completions", content=content)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)

    def test_half_a_surrogate_pair_is_refused(self, shared: Cluster) -> None:
        reply = shared.http.post("/v1/completions", content=b'{"model": "echo", "prompt": "\\ud800"}')
        assert reply.status_code == 400

    def test_unknown_route(self, shared: Cluster) -> None:
        reply = shared.http.get("/v1/embeddings")
        assert (reply.status_code, reply.json()["error"]["message"]) == (404, "there is no route /v1/embeddings")

    def test_wrong_method(self, shared: Cluster) -> None:
        reply = shared.http.get("/v1/completions")
        assert (reply.status_code, reply.json()["error"]["message"]) == (405, "/v1/completions does not take GET")
        assert reply.headers["allow"] == "POST"

    def test_context_errors_have_openais_code(self, shared: Cluster) -> None:
        error = shared.post("/v1/completions", prompt=[1] * 600).json()["error"]
        assert error["code"] == "context_length_exceeded"

    def test_a_model_without_chat_template(self, tmp_path: Path) -> None:
        folder = write_model_folder(tmp_path / "plain", template=None)
        for plain in run_cluster(folder):
            reply = plain.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
            assert reply.status_code == 400
            assert "no chat template" in reply.json()["error"]["message"]


class TestStatusRoutes:
    def test_models(self, shared: Cluster) -> None:
        card = shared.http.get("/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"], card["object"]) == (MODEL, CONTEXT, "model")
        assert shared.http.get("/v1/models/other").status_code == 404

    def test_tokenize_and_back(self, shared: Cluster) -> None:
        assert shared.post("/tokenize", prompt="ab").json() == {
            "count": 3,
            "max_model_len": CONTEXT,
            "tokens": [BOS, 97, 98],
        }
        assert shared.post("/tokenize", prompt="ab", add_special_tokens=False).json()["tokens"] == [97, 98]
        chat = shared.post("/tokenize", messages=[{"role": "user", "content": "a"}], add_generation_prompt=False).json()
        assert chat["tokens"] == [BOS, *b"<user>a\n"]
        assert shared.post("/detokenize", tokens=[BOS, 97]).json() == {"prompt": "<s>a"}

    def test_version_health_and_docs(self, shared: Cluster) -> None:
        assert shared.http.get("/version").json()["version"]
        assert shared.http.get("/health").json() == {"status": "ok"}
        schema = shared.http.get("/openapi.json").json()
        assert "requestBody" in schema["paths"]["/v1/chat/completions"]["post"]

    def test_cluster_is_the_table(self, shared: Cluster) -> None:
        table = shared.http.get("/cluster").json()
        assert [entry["replica"] for entry in table["replicas"]] == ["prefill-0", "decode-0"]

    def test_request_id_and_replicas_in_the_headers(self, shared: Cluster) -> None:
        reply = shared.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"X-Request-Id": "mine"}
        )
        assert reply.headers["x-request-id"] == "mine"
        assert reply.json()["id"] == "cmpl-mine"
        assert (reply.headers["x-baton-prefill"], reply.headers["x-baton-decode"]) == ("prefill-0", "decode-0")
        assert len(shared.http.get("/health").headers["x-request-id"]) == 32

    def test_metrics(self, cluster: Cluster) -> None:
        cluster.complete("abc", max_tokens=9)
        cluster.post("/v1/completions", prompt=5)
        assert cluster.metric('baton_request_ended_total{outcome="finished"}') == 1
        assert cluster.metric('baton_request_refused_total{status="400"}') == 1
        assert cluster.metric("baton_generation_tokens_total") == 9
        assert cluster.metric("baton_prompt_tokens_total") == 4
        assert cluster.metric("baton_time_to_first_token_seconds_count") == 1
        assert cluster.metric("baton_inter_token_latency_seconds_count") == 2
        assert cluster.metric('baton_ready_replicas{role="decode"}') == 1

    def test_prefill_steps_by_strategy(self, cluster: Cluster) -> None:
        times = StepTimes(num_steps=3, total_s=1.5, total_estimate_s=1.25, last_s=0.5, last_estimate_s=0.25)
        prefill = msgspec.structs.replace(
            entry_of(cluster.prefill.peer), load=ReplicaLoad(steps={Strategy.ZIGZAG: times})
        )
        cluster.table.show(table_of(prefill, entry_of(cluster.decode.peer), version=2))
        labels = '{replica="prefill-0",strategy="zigzag"}'
        deadline_s = time.monotonic() + 60
        while f"baton_prefill_steps_total{labels}" not in cluster.http.get("/metrics").text:
            assert time.monotonic() < deadline_s
        assert cluster.metric(f"baton_prefill_steps_total{labels}") == 3
        assert cluster.metric(f"baton_prefill_step_seconds_total{labels}") == 1.5
        assert cluster.metric(f"baton_prefill_step_estimate_seconds_total{labels}") == 1.25
        assert cluster.metric(f"baton_prefill_last_step_seconds{labels}") == 0.5
        assert cluster.metric(f"baton_prefill_last_step_estimate_seconds{labels}") == 0.25


class TestReplicasComeAndGo:
    def test_nothing_ready(self, cluster: Cluster) -> None:
        cluster.table.show(table_of(entry_of(cluster.prefill.peer), version=2, reaped={"decode-0": 1}))
        deadline_s = time.monotonic() + 60
        while (reply := cluster.http.get("/ready")).status_code == 200:
            assert time.monotonic() < deadline_s
        assert reply.json()["error"]["message"] == "no decode replica is ready"
        for stream in (False, True):
            refused = cluster.post("/v1/completions", prompt="x", stream=stream)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "not_ready"

    @pytest.mark.parametrize("stream", [False, True])
    def test_prefill_fails(self, cluster: Cluster, stream: bool) -> None:
        cluster.decode.flow.clear()
        cluster.prefill.fails = "no memory"
        reply = cluster.post("/v1/completions", prompt="x", stream=stream)
        assert (reply.status_code, reply.json()["error"]["message"]) == (503, "prefill-0: no memory")
        assert cluster.decode.wait_cancels(1)[0].room == cluster.last_submit().room
        cluster.assert_empty()

    def test_replica_is_reaped_under_a_request(self, cluster: Cluster) -> None:
        cluster.decode.flow.clear()
        with cluster.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines) == ": waiting"
            cluster.table.show(table_of(entry_of(cluster.decode.peer), version=2, reaped={"prefill-0": 1}))
            error = next(line for line in lines if line.startswith("data: "))
        assert "prefill-0 was lost" in error
        cluster.decode.wait_cancels(1)

    def test_a_lost_token_fails_the_request(self, cluster: Cluster) -> None:
        cluster.decode.skips = True
        reply = cluster.post("/v1/completions", prompt="abcdef", max_tokens=12)
        assert (reply.status_code, reply.json()["error"]["code"]) == (500, "broken_output")
        assert reply.json()["error"]["message"] == "decode-0: output 3 is missing; 6 came next"
        cluster.decode.wait_cancels(1)

    def test_deadline(self, folder: Path) -> None:
        for cluster in run_cluster(folder, request_timeout_s=0.2):
            cluster.decode.flow.clear()
            reply = cluster.post("/v1/completions", prompt="x")
            assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timed_out")
            cluster.prefill.wait_cancels(1)
            cluster.decode.wait_cancels(1)


class TestClients:
    def test_comments_while_waiting(self, cluster: Cluster) -> None:
        cluster.decode.flow.clear()
        with cluster.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
            cluster.decode.flow.set()
            assert "data: [DONE]" in list(lines)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("after_first_token", [False, True])
    def test_leaving_cancels_both_legs_at_once(self, cluster: Cluster, stream: bool, after_first_token: bool) -> None:
        cluster.decode.token_s = 0.05
        if not after_first_token:
            cluster.decode.flow.clear()
        content = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 500, "stream": stream}).encode()
        host, port = cluster.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
            )
            room = cluster.decode.wait_submits(1)[0].room
            if after_first_token and stream:
                assert client.recv(100)
        assert cluster.prefill.wait_cancels(1, timeout_s=60.0)[0].room == room
        assert cluster.decode.wait_cancels(1, timeout_s=60.0)[0].room == room
        cluster.assert_empty()
        assert cluster.metric('baton_request_ended_total{outcome="cancelled"}') == 1

    async def test_many_streams_of_which_some_leave(self, cluster: Cluster) -> None:
        cluster.decode.token_s = 0.005

        async def run(http: httpx.AsyncClient, index: int) -> None:
            prompt = f"client {index:02d};" * (1 + index % 4)
            leaves = index % 10 == 3
            num_tokens = 450 if leaves else 40 + 5 * index
            body = {"model": MODEL, "prompt": prompt, "max_tokens": num_tokens, "stream": True}
            text = ""
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                    if leaves and len(text) > 20:
                        return
            assert text == (prompt * 40)[:num_tokens]

        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=60, limits=limits, trust_env=False) as http:
            await asyncio.gather(*(run(http, index) for index in range(32)))
        cluster.assert_empty()
        assert cluster.metric('baton_request_ended_total{outcome="finished"}') == 29
        assert cluster.metric('baton_request_ended_total{outcome="cancelled"}') == 3

    def test_a_slow_reader_holds_nobody_up(self, cluster: Cluster) -> None:
        body = {"model": MODEL, "prompt": "abc", "max_tokens": 500, "stream": True}
        with cluster.http.stream("POST", "/v1/completions", json=body) as slow:
            assert cluster.complete("hello", max_tokens=7)["choices"][0]["text"] == "hellohe"
            lines = [line for line in slow.iter_lines() if line.startswith("data: {")]
        assert "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines) == ("abc" * 200)[:500]


class TestLifeCycle:
    def test_port_taken(self, folder: Path, shared: Cluster) -> None:
        port = int(shared.url.rsplit(":", 1)[1])
        server = make_server(folder, FakeTable(), port=port)
        with pytest.raises(UserError, match=rf"router\.port: 127\.0\.0\.1:{port} is taken by another process"):
            server.start()

    def test_not_ready_before_the_table_is_known(self, folder: Path) -> None:
        server = make_server(folder, FakeTable())
        url = server.start()
        try:
            reply = httpx.get(f"{url}/ready", trust_env=False)
            assert reply.json()["error"]["message"] == "the bootstrap service has not answered yet"
            assert httpx.get(f"{url}/cluster", trust_env=False).status_code == 503
        finally:
            server.stop()

    def test_drain_waits_for_open_requests_and_refuses_new_ones(self, cluster: Cluster) -> None:
        cluster.decode.flow.clear()
        with cluster.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as reply:
            assert not cluster.server.drain(0.05)
            refused = cluster.post("/v1/completions", prompt="x")
            assert (refused.status_code, "draining" in refused.text) == (503, True)
            cluster.decode.flow.set()
            assert "data: [DONE]" in list(reply.iter_lines())
        assert cluster.server.drain(5.0)

    def test_stop_ends_open_streams_in_words(self, cluster: Cluster) -> None:
        cluster.decode.flow.clear()
        with cluster.http.stream(
            "POST", "/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}
        ) as reply:
            lines = reply.iter_lines()
            assert next(lines) == ": waiting"
            cluster.server.stop()
            assert "the router stops" in "".join(lines)
        cluster.decode.wait_cancels(1)
        cluster.prefill.wait_cancels(1)

    def test_an_error_of_the_watch_ends_the_router(self, folder: Path) -> None:
        async def broken(url: str, token: str) -> Any:
            raise PermissionError(f"{url} refuses {token}")
            yield

        rendezvous = Rendezvous(bootstrap_url="http://nowhere", token="token")
        server = RouterServer(config_of(), folder, rendezvous, "127.0.0.1", Incarnation(1), watch=broken)
        server.start()
        with pytest.raises(PermissionError, match="http://nowhere refuses token"):
            server.run()
        server.stop()

    def test_a_folder_without_tokenizer(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"has no tokenizer\.json"):
            make_server(tmp_path, FakeTable())


def test_with_the_real_bootstrap_service(folder: Path) -> None:
    bootstrap = BootstrapServer("127.0.0.1", 0, "secret", lease_s=30.0)
    url = bootstrap.start()
    try:
        server = RouterServer(
            config_of(), folder, Rendezvous(bootstrap_url=url, token="secret"), "127.0.0.1", Incarnation(1)
        )
        with FakeReplica("prefill-0") as prefill, FakeReplica("decode-0") as decode:
            client = BootstrapClient(url, "secret")
            for peer in (prefill.peer, decode.peer):
                row = row_of(peer)
                client.register(row)
                beat = Heartbeat(
                    replica=row.replica,
                    incarnation=row.incarnation,
                    rows_digest=rows_digest([row]),
                    load=ReplicaLoad(),
                )
                assert client.heartbeat(beat)
            client.close()
            with httpx.Client(base_url=server.start(), timeout=60, trust_env=False) as http:
                wait_ready(http)
                reply = http.post("/v1/completions", json={"model": MODEL, "prompt": "abc", "max_tokens": 3})
                assert reply.json()["choices"][0]["text"] == "abc"
            server.stop()
    finally:
        bootstrap.stop()
