"""Sampling parameters of requests, and log-probabilities in responses."""

from pathlib import Path
from typing import Any

import pytest

from cluster.spec.sampling import Sampling
from tests.fakes.model_folder import BOS, EOS, write_json, write_model_folder
from tests.fakes.router_cluster import CACHED_TOKENS, MODEL, RouterCluster, run_cluster

pytestmark = pytest.mark.integration


TOOLS = [{"type": "function", "function": {"name": "f"}}]


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


class TestRequestsToReplicas:
    def test_every_field(self, shared: RouterCluster) -> None:
        same: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 4, "min_tokens": 3}
        same |= {"repetition_penalty": 1.1, "frequency_penalty": -0.5, "presence_penalty": 0.25}
        shared.complete(
            "x",
            **same,
            logit_bias={"7": -100, "65": 1.5},
            allowed_token_ids=[97, 98, 98],
            bad_words=["ab", " c"],
            stop_token_ids=[9],
            logprobs=2,
        )
        assert shared.last_submit().sampling == Sampling(
            **same,
            logit_bias={7: -100.0, 65: 1.5},
            allowed_ids=frozenset({97, 98}),
            bad_words=[[97, 98], [32, 97, 98], [99], [32, 99]],
            ending_ids=frozenset({9, EOS}),
            num_logprobs=2,
        )

    def test_priority(self, shared: RouterCluster) -> None:
        for asked, priority in (({}, 0), ({"priority": None}, 0), ({"priority": -3}, -3)):
            shared.complete("x", **asked)
            assert shared.last_submit().priority == priority

    def test_unrequested_fields_are_absent(self, shared: RouterCluster) -> None:
        shared.complete("x", temperature=0, seed=0, min_tokens=0, repetition_penalty=1.0, logit_bias={}, bad_words=[])
        assert shared.last_submit().sampling == Sampling()

    def test_tokens_that_the_model_does_not_have(self, tmp_path: Path) -> None:
        folder = write_model_folder(tmp_path)
        write_json(folder / "config.json", {"max_position_embeddings": 512, "vocab_size": 100})
        for small in run_cluster(folder):
            small.complete([97], min_tokens=2, stop_token_ids=[5, 100, 10**9], bad_words=["a", "d", "ad"], max_tokens=2)
            sampling = small.last_submit().sampling
            assert sampling.ending_ids == {5}
            assert sampling.bad_words == [[97], [32, 97]]
            reply = small.post("/v1/completions", prompt="d")
            assert reply.json()["error"]["message"] == "prompt: there is no token 256; allowed: 0 to 99"

    def test_no_probability_mass_keeps_the_most_likely_token(self, shared: RouterCluster) -> None:
        shared.complete("x", temperature=1.5, top_p=0, seed=0)
        assert shared.last_submit().sampling == Sampling(temperature=0.0, top_p=1.0)

    def test_special_tokens_are_added_on_request(self, shared: RouterCluster) -> None:
        for adds, head in ((None, [BOS]), (True, [BOS]), (False, [])):
            shared.complete("x", add_special_tokens=adds)
            assert [*shared.last_submit().prompt_ids] == [*head, ord("x")]
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        for adds, num in ((None, 1), (False, 1), (True, 2)):
            shared.post("/v1/chat/completions", add_special_tokens=adds, **body)
            asked = shared.last_submit().prompt_ids
            assert asked.count(BOS) == num
            tokens = shared.post("/tokenize", add_special_tokens=adds, messages=body["messages"]).json()["tokens"]
            assert tokens == [*asked]

    def test_tools_that_must_not_be_called(self, shared: RouterCluster) -> None:
        body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "max_tokens": 1}
        assert shared.post("/v1/chat/completions", tool_choice="none", **body).status_code == 200


class TestText:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("name", ["include_stop_str_in_output", "no_stop_trim"])
    def test_the_stop_string_is_shown_on_request(self, shared: RouterCluster, stream: bool, name: str) -> None:
        body: dict[str, Any] = {"prompt": "abcdef", "max_tokens": 99, "stop": "cde", name: True}
        if stream:
            assert text_of(shared.events("/v1/completions", **body)) == "abcde"
        else:
            assert shared.complete(**body)["choices"][0]["text"] == "abcde"


class TestChoices:
    def test_of_two_prompts(self, shared: RouterCluster) -> None:
        reply = shared.complete(["ab", "cde"], max_tokens=4, n=3, seed=2**63 - 2)
        assert [choice["text"] for choice in reply["choices"]] == ["abab"] * 3 + ["cdec"] * 3
        assert [choice["index"] for choice in reply["choices"]] == list(range(6))
        submits = shared.decode.submits[-6:]
        assert [submit.sampling.seed for submit in submits] == [2**63 - 2, 2**63 - 1, 0] * 2
        assert reply["usage"] == {
            "prompt_tokens": 3 + 4,
            "completion_tokens": 24,
            "total_tokens": 31,
            "prompt_tokens_details": {"cached_tokens": 2 * CACHED_TOKENS},
        }

    def test_prefill_gets_one_choice_per_prompt(self, shared: RouterCluster) -> None:
        before = shared.metric("baton_prompt_tokens_total")
        shared.complete(["ab", "cde"], max_tokens=4, n=3)
        submits = shared.decode.submits[-6:]
        rooms = {submit.room for submit in submits}
        assert shared.prefill.wait_submits_of(rooms, 2) == [submits[0], submits[3]]
        firsts = [None, submits[0].room, submits[0].room, None, submits[3].room, submits[3].room]
        assert [submit.prompt_of for submit in submits] == firsts
        assert [submit.prefill is None for submit in submits] == [False, True, True] * 2
        assert shared.metric("baton_prompt_tokens_total") - before == 3 + 4


class TestEcho:
    def test_stream(self, shared: RouterCluster) -> None:
        events = shared.events("/v1/completions", prompt="xyz", max_tokens=3, echo=True)
        assert [event["choices"][0]["text"] for event in events] == ["xyz", "x", "y", "z"]

    def test_too_many_log_probabilities_are_refused_unless_streamed(
        self, shared: RouterCluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("router.api.generation.MAX_LOGPROBS", 7)
        body: dict[str, Any] = {"prompt": "ab", "max_tokens": 4, "logprobs": 1}
        reply = shared.post("/v1/completions", **body)
        assert reply.status_code == 400
        assert "logprobs: the answer has more log-probabilities; allowed: at most 7" in reply.text
        assert len(shared.events("/v1/completions", **body)) == 4

    def test_echo_with_logprobs_includes_the_prompt(self, shared: RouterCluster) -> None:
        choices = shared.complete(["ab", "c"], max_tokens=1, echo=True, n=2, logprobs=1)["choices"]
        assert [choice["text"] for choice in choices] == ["aba", "aba", "cc", "cc"]
        assert choices[0]["logprobs"] == {
            "text_offset": [0, 0, 1, 2],
            "token_logprobs": [None, -0.097, -0.098, -0.097],
            "tokens": ["<s>", "a", "b", "a"],
            "top_logprobs": [None, {"b": -0.125, "a": -0.097}, {"c": -0.125, "b": -0.098}, {"b": -0.125, "a": -0.097}],
        }
        assert choices[1]["logprobs"] == choices[0]["logprobs"]
        assert choices[3]["logprobs"]["tokens"] == ["<s>", "c", "c"]
        submits = shared.decode.submits[-4:]
        assert [submit.sampling.num_prompt_logprobs for submit in submits] == [1, None, 1, None]

    @pytest.mark.parametrize("skip", [True, False])
    def test_offsets_are_those_of_the_text(self, shared: RouterCluster, skip: bool) -> None:
        """A text is repeated as it is, with the special tokens that it spells, but without those added before it."""
        fields: dict[str, Any] = {"max_tokens": 1, "echo": True, "logprobs": 0, "skip_special_tokens": skip}
        choice = shared.complete("a</s>bc", **fields)["choices"][0]
        assert choice["text"] == "a</s>bca"
        assert choice["logprobs"]["tokens"] == ["<s>", "a", "</s>", "b", "c", "a"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 1, 5, 6, 7]
        choice = shared.complete([BOS, 97, EOS, 98], **fields)["choices"][0]
        assert choice["text"] == ("aba" if skip else "<s>a</s>ba")
        assert choice["logprobs"]["text_offset"] == ([0, 0, 1, 1, 2] if skip else [0, 3, 4, 8, 9])

    def test_alone(self, shared: RouterCluster) -> None:
        reply = shared.complete([[BOS, 97, 98], [BOS, 99]], max_tokens=0, echo=True, logprobs=1)
        assert [choice["text"] for choice in reply["choices"]] == ["ab", "c"]
        assert [choice["finish_reason"] for choice in reply["choices"]] == ["length"] * 2
        assert reply["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.097, -0.098]
        assert (reply["usage"]["completion_tokens"], reply["usage"]["prompt_tokens"]) == (0, 5)
        events = shared.events("/v1/completions", prompt="ab", max_tokens=0, echo=True)
        assert [event["choices"][0]["text"] for event in events] == ["ab", ""]


SECOND: Any = {
    "97": {"logprob": -0.097, "rank": 9, "decoded_token": "a"},
    "98": {"logprob": -0.125, "rank": 1, "decoded_token": "b"},
}
"""Prompt log-probabilities of an "a"."""


class TestPromptLogprobs:
    def test_of_completions(self, shared: RouterCluster) -> None:
        choices = shared.complete("ab", max_tokens=1, prompt_logprobs=1, n=2)["choices"]
        assert [choice["text"] for choice in choices] == ["a", "a"]
        assert choices[0]["prompt_logprobs"][:2] == [None, SECOND]
        assert len(choices[0]["prompt_logprobs"]) == 3
        assert choices[1]["prompt_logprobs"] == choices[0]["prompt_logprobs"]
        assert choices[0]["logprobs"] is None

    def test_of_chats(self, shared: RouterCluster) -> None:
        messages = [{"role": "user", "content": "a"}]
        reply = shared.post("/v1/chat/completions", messages=messages, max_tokens=1, prompt_logprobs=1).json()
        assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
        assert SECOND in reply["prompt_logprobs"]


def test_continuous_usage_is_on_every_chunk(shared: RouterCluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = shared.events("/v1/completions", prompt="abc", max_tokens=5, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 4, 5, 5]
    assert all(event["usage"]["prompt_tokens"] == 4 for event in events)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
}


@pytest.mark.parametrize("path", BODIES)
def test_an_existing_rank_reaches_the_leaders(shared: RouterCluster, path: str) -> None:
    reply = shared.http.post(path, json={"model": MODEL, **BODIES[path]}, headers={"X-data-parallel-rank": "0"})
    assert reply.status_code == 200, reply.text
    assert shared.last_submit().dp_rank == 0
    assert shared.post(path, **BODIES[path]).status_code == 200
    assert shared.last_submit().dp_rank is None
    reply = shared.http.post(path, json={"model": MODEL, **BODIES[path]}, headers={"X-data-parallel-rank": "1"})
    assert reply.json()["error"]["message"] == "X-data-parallel-rank: got '1'; allowed: 0 to 0"


@pytest.mark.parametrize("path", BODIES)
def test_a_field_of_the_body_asks_for_it_too(shared: RouterCluster, path: str) -> None:
    assert shared.post(path, routed_dp_rank=0, **BODIES[path]).status_code == 200
    assert shared.last_submit().dp_rank == 0
    reply = shared.post(path, routed_dp_rank=1, **BODIES[path])
    assert reply.json()["error"]["message"] == "routed_dp_rank: got 1; allowed: 0 to 0"
