"""Routes about the model, the router and the cluster."""

from collections.abc import Iterator
from typing import Any

import pytest
import zmq

from tests.fakes.model_folder import BOS
from tests.fakes.replica import PHASES, PREFILL_S
from tests.fakes.router_cluster import CACHED_TOKENS, CONTEXT, MODEL, RouterCluster
from tests.fakes.waits import wait_until

pytestmark = pytest.mark.integration


def references_in(part: Any) -> Iterator[str]:
    """Yield every ``$ref`` in a JSON document."""
    if isinstance(part, dict):
        if isinstance(reference := part.get("$ref"), str):
            yield reference
        part = list(part.values())
    if isinstance(part, list):
        for child in part:
            yield from references_in(child)


class TestStatusRoutes:
    def test_cluster_is_the_table(self, shared: RouterCluster) -> None:
        table = shared.http.get("/cluster").json()
        assert [entry["replica"] for entry in table["replicas"]] == ["prefill-0", "decode-0"]

    def test_models(self, shared: RouterCluster) -> None:
        card = shared.http.get("/v1/models").json()["data"][0]
        assert (card["id"], card["max_model_len"], card["object"]) == (MODEL, CONTEXT, "model")
        assert shared.http.get("/v1/models/other").status_code == 404

    def test_tokenize_and_back(self, shared: RouterCluster) -> None:
        assert shared.post("/tokenize", prompt="ab").json() == {
            "count": 3,
            "max_model_len": CONTEXT,
            "tokens": [BOS, 97, 98],
        }
        assert shared.post("/tokenize", prompt="ab", add_special_tokens=False).json()["tokens"] == [97, 98]
        assert shared.post("/tokenize", prompt="a ", return_token_strs=True).json()["token_strs"] == ["<s>", "a", "Ġ"]
        chat = shared.post("/tokenize", messages=[{"role": "user", "content": "a"}], add_generation_prompt=False).json()
        assert chat["tokens"] == [BOS, *b"<user>a\n"]
        assert shared.post("/detokenize", tokens=[BOS, 97]).json() == {"prompt": "<s>a"}

    def test_version_and_health(self, shared: RouterCluster) -> None:
        assert shared.http.get("/version").json()["version"]
        for path in ("/health", "/ping"):
            assert shared.http.get(path).json() == {"status": "ok"}
        assert shared.http.get("/load").json() == {"server_load": 0}

    def test_head_is_answered_where_get_is(self, shared: RouterCluster) -> None:
        for path in ("/", "/health", "/v1/models", "/metrics", "/nowhere"):
            got, head = shared.http.get(path), shared.http.head(path)
            assert (head.status_code, head.headers["content-length"], head.content) == (
                got.status_code,
                got.headers["content-length"],
                b"",
            )
        assert shared.http.head("/v1/completions").status_code == 405

    def test_openapi_document_is_whole(self, shared: RouterCluster) -> None:
        document = shared.http.get("/openapi.json").json()
        bodies = [route["post"]["requestBody"] for route in document["paths"].values() if "post" in route]
        references = list(references_in(document))
        assert len(references) >= len(bodies) == 12
        for reference in references:
            found = document
            for step in reference.removeprefix("#/").split("/"):
                found = found[step]
        content = document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]
        assert list(content) == ["text/plain"]

    def test_request_id_and_replicas_in_the_headers(self, shared: RouterCluster) -> None:
        reply = shared.http.post(
            "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"X-Request-Id": "mine"}
        )
        assert reply.headers["x-request-id"] == "mine"
        assert reply.json()["id"] == "cmpl-mine"
        assert (reply.headers["x-baton-prefill"], reply.headers["x-baton-decode"]) == ("prefill-0", "decode-0")
        assert len(shared.http.get("/health").headers["x-request-id"]) == 32

    def test_metrics(self, cluster: RouterCluster) -> None:
        cluster.complete("abc", max_tokens=9)
        cluster.post("/v1/completions", prompt=5)
        assert cluster.metric('baton_request_ended_total{outcome="finished"}') == 1
        assert cluster.metric('baton_request_refused_total{status="400"}') == 1
        assert cluster.metric("baton_generation_tokens_total") == 9
        assert cluster.metric("baton_prompt_tokens_total") == 4
        assert cluster.metric("baton_time_to_first_token_seconds_count") == 1
        assert cluster.metric("baton_inter_token_latency_seconds_count") == 2
        assert cluster.metric('baton_ready_replicas{role="decode"}') == 1

    def test_invalid_messages_are_counted(self, cluster: RouterCluster) -> None:
        cluster.complete("abc", max_tokens=1)
        with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
            pusher.connect(cluster.last_submit().router.address)
            pusher.send(b"nonsense")
            counted = 'baton_message_dropped_total{reason="malformed"} 1.0'
            wait_until(lambda: counted in cluster.http.get("/metrics").text)

    def test_phases_by_replica(self, cluster: RouterCluster) -> None:
        for stream in (False, True):
            headers = cluster.post("/v1/completions", prompt="abc", max_tokens=9, stream=stream).headers
            texts = dict(entry.split(";dur=") for entry in headers["server-timing"].split(", "))
            times = {name: float(text) for name, text in texts.items()}
            ttft = times.pop("ttft")
            assert [*times] == PHASES[:-1]
            assert sum(times.values()) == pytest.approx(ttft, abs=0.01)
            assert times["transfer"] == pytest.approx(0.005, abs=0.002)
        prefill_s = cluster.metric('baton_request_prefill_time_seconds_sum{replica="prefill-0"}')
        assert prefill_s == pytest.approx(2 * PREFILL_S, rel=0.01)
        for name, replica in (
            *(("storage", "prefill-0"), ("bootstrap", "prefill-0"), ("prefill_queue", "prefill-0")),
            *(("communication", "prefill-0"), ("transfer", "decode-0")),
            *(("decode_queue", "decode-0"), ("delivery", "decode-0")),
        ):
            assert cluster.metric(f'baton_request_{name}_time_seconds_count{{replica="{replica}"}}') == 2
        assert cluster.metric("baton_request_preprocess_time_seconds_count") == 2
        assert cluster.metric("baton_request_queue_time_seconds_count") == 2

    def test_requests_by_size_and_end(self, cluster: RouterCluster) -> None:
        cluster.complete("abc", max_tokens=9, n=2)
        assert cluster.metric('baton_request_success_total{finished_reason="length"}') == 2
        assert cluster.metric("baton_request_prompt_tokens_sum") == 4
        assert cluster.metric("baton_request_generation_tokens_sum") == 18
        assert cluster.metric("baton_prefix_cache_queries_total") == 4
        assert cluster.metric("baton_prefix_cache_hits_total") == CACHED_TOKENS
        assert cluster.metric('baton_prefix_cache_missed_total{reason="unknown"}') == 4 - CACHED_TOKENS
        assert cluster.metric('baton_prefix_cache_missed_total{reason="evicted"}') == 0
        assert cluster.metric("baton_request_prefill_kv_computed_tokens_sum") == 4 - CACHED_TOKENS
        assert cluster.metric("baton_request_inference_time_seconds_count") == 2
        decode_s = cluster.metric("baton_request_decode_time_seconds_sum")
        assert cluster.metric("baton_request_inference_time_seconds_sum") == pytest.approx(2 * PREFILL_S + decode_s)
        assert cluster.metric("baton_request_params_max_tokens_sum") == 18
        assert cluster.metric("baton_request_params_n_sum") == 2
        cluster.complete(["a", "b", "c", "d"], max_tokens=1)
        assert cluster.metric("baton_request_params_n_sum") == 2 + 1
        assert cluster.metric("baton_request_params_n_count") == 2
        assert cluster.metric("baton_request_time_per_output_token_seconds_count") == 2
        cluster.decode.says = b"so"
        cluster.complete("abc")
        assert cluster.metric('baton_request_success_total{finished_reason="stop"}') == 1
