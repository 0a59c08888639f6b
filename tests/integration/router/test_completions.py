"""Completions and chats: prompts, templates, stops, defaults, and the requests to replicas."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.model_folder import BOS, EOS, write_model_folder, write_sentence_piece
from tests.fakes.router_cluster import CACHED_TOKENS, CONTEXT, MODEL, RouterCluster, run_cluster

pytestmark = pytest.mark.integration

USAGE = {
    "prompt_tokens": 6,
    "completion_tokens": 7,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
}


class TestCompletions:
    def test_whole(self, shared: RouterCluster) -> None:
        reply = shared.complete("hello", max_tokens=7)
        (choice,) = reply["choices"]
        assert choice == {
            "index": 0,
            "text": "hellohe",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
        assert reply["usage"] == USAGE
        assert (reply["object"], reply["model"]) == ("text_completion", MODEL)

    def test_stream_with_usage(self, shared: RouterCluster) -> None:
        events = shared.events("/v1/completions", prompt="hello", max_tokens=7, stream_options={"include_usage": True})
        assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "hellohe"
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [
            *[None] * (len(events) - 2),
            "length",
        ]
        assert all(event["usage"] is None for event in events[:-1])
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == USAGE

    def test_stream_without_usage_has_no_such_key(self, shared: RouterCluster) -> None:
        assert all("usage" not in event for event in shared.events("/v1/completions", prompt="hello"))

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_every_token_has_its_own_chunk_even_in_batches(self, shared: RouterCluster, path: str) -> None:
        prompt = {"prompt": "€uro"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "€"}]}
        assert shared.decode.batch > 1
        choices = [event["choices"][0] for event in shared.events(path, max_tokens=10, return_token_ids=True, **prompt)]
        choices = [choice for choice in choices if choice.get("delta", {}).get("role") is None]
        assert [len(choice["token_ids"]) for choice in choices] == [1] * 10

    @pytest.mark.parametrize("echo", [False, True])
    def test_it_begins_with_the_space_before_its_first_word(self, tmp_path: Path, echo: bool) -> None:
        for cluster in run_cluster(write_sentence_piece(tmp_path)):
            fields = {"max_tokens": 4, "logprobs": 0, "return_token_ids": True, "echo": echo}
            (choice,) = cluster.complete([259, 258, 260, 259], **fields)["choices"]
            assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
            assert choice["text"].endswith("cat the  cat the" if echo else " the  cat the")

    @pytest.mark.parametrize("echo", [False, True])
    def test_prompt_token_ids_are_returned_once_per_choice(self, shared: RouterCluster, echo: bool) -> None:
        fields = {"prompt": ["ab", "cde"], "max_tokens": 4, "n": 2, "return_token_ids": True, "echo": echo}
        wanted = [[BOS, *b"ab"]] * 2 + [[BOS, *b"cde"]] * 2
        assert [choice["prompt_token_ids"] for choice in shared.complete(**fields)["choices"]] == wanted
        choices = [event["choices"][0] for event in shared.events("/v1/completions", **fields)]
        for index, prompt_ids in enumerate(wanted):
            first, *others = [choice.get("prompt_token_ids") for choice in choices if choice["index"] == index]
            assert (first, others) == (prompt_ids, [None] * (3 + echo))

    @pytest.mark.parametrize(
        ("param", "fields", "allowed"),
        [
            ("echo", {"echo": True, "return_token_ids": True}, 24),
            ("return_token_ids", {"return_token_ids": True}, 24),
            ("prompt_logprobs", {"prompt_logprobs": 1}, 12),
        ],
    )
    def test_a_response_does_not_repeat_many_prompt_tokens(
        self, shared: RouterCluster, monkeypatch: pytest.MonkeyPatch, param: str, fields: dict[str, Any], allowed: int
    ) -> None:
        monkeypatch.setattr("router.preprocess.intake.MAX_REPEATED_TOKENS", 24)
        num_tokens = allowed // 2  # one of each prompt begins the text
        prompts = ["a" * (num_tokens // 2 - 1)] * 2
        assert len(shared.complete(prompt=prompts, n=2, max_tokens=1, **fields)["choices"]) == 4
        reply = shared.post("/v1/completions", prompt=["a", prompts[0] + "a"], n=3, max_tokens=1, **fields)
        got = f"got {num_tokens // 2 + 3} prompt tokens with 3 choices each"
        most = f"at most {allowed} prompt tokens in all choices of a response together"
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, f"{param}: {got}; allowed: {most}")
        assert shared.post("/v1/completions", prompt="a" * 100, max_tokens=1).status_code == 200

    def test_token_ids_of_a_chats_prompt(self, shared: RouterCluster) -> None:
        fields: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        fields |= {"return_token_ids": True}
        prompt_ids = [BOS, *b"<user>a\n<assistant>"]
        assert shared.post("/v1/chat/completions", **fields).json()["prompt_token_ids"] == prompt_ids
        events = shared.events("/v1/chat/completions", **fields)
        assert [event.get("prompt_token_ids") for event in events] == [prompt_ids, None, None]

    def test_token_ids_are_taken_as_they_are(self, shared: RouterCluster) -> None:
        assert shared.complete([97, 98, 99], max_tokens=3)["choices"][0]["text"] == "bcb"
        assert [*shared.last_submit().prompt_ids] == [97, 98, 99]

    def test_default_is_sixteen_tokens_at_temperature_one(self, shared: RouterCluster) -> None:
        assert shared.complete("x")["usage"]["completion_tokens"] == 16
        assert shared.last_submit().sampling.temperature == 1.0

    def test_seeds_differ_when_none_is_given(self, shared: RouterCluster) -> None:
        shared.complete(["x", "y"])
        first, second = shared.decode.submits[-2:]
        assert first.sampling.seed != second.sampling.seed

    def test_eos_ends_the_answer_and_is_not_shown(self, shared: RouterCluster) -> None:
        choice = shared.complete([BOS, 97, EOS, 98], max_tokens=9)["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", None)

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_stop_token_ends_the_answer_and_is_reported(self, shared: RouterCluster, stream: bool) -> None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "xyz"}], "stop_token_ids": [121]}
        if stream:
            choice = shared.events("/v1/chat/completions", **body)[-1]["choices"][0]
        else:
            reply = shared.http.post("/v1/chat/completions", json={"model": MODEL, **body})
            choice = reply.json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 121)

    def test_ignore_eos(self, shared: RouterCluster) -> None:
        choice = shared.complete([BOS, 97, EOS, 98], max_tokens=6, ignore_eos=True)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abab", "length")

    @pytest.mark.parametrize("stream", [False, True])
    def test_stop_string_cuts_the_text_and_cancels_both_replicas(self, cluster: RouterCluster, stream: bool) -> None:
        body: dict[str, Any] = {"prompt": "abcdefgh", "max_tokens": 400, "stop": ["zz", "efg"]}
        cluster.decode.token_s = 0.01
        if stream:
            choices = [event["choices"][0] for event in cluster.events("/v1/completions", **body)]
            assert all("stop_reason" not in choice for choice in choices[:-1])
            text, choice = "".join(choice["text"] for choice in choices), choices[-1]
        else:
            choice = cluster.complete(**body)["choices"][0]
            text = choice["text"]
        assert (text, choice["finish_reason"], choice["stop_reason"]) == ("abcd", "stop", "efg")
        assert len(cluster.prefill.wait_cancels(1)) == len(cluster.decode.wait_cancels(1)) == 1
        cluster.assert_empty()

    def test_default_length_is_cut_to_the_context(self, shared: RouterCluster) -> None:
        assert shared.complete([97] * (CONTEXT - 3))["usage"]["completion_tokens"] == 3


class TestChat:
    def test_whole(self, shared: RouterCluster) -> None:
        reply = shared.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=8).json()
        assert reply["choices"][0]["message"] == {"role": "assistant", "content": "<user>hi", "refusal": None}
        assert [*shared.last_submit().prompt_ids] == [BOS, *b"<user>hi\n<assistant>"]

    def test_parts_are_joined(self, shared: RouterCluster) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        shared.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1)
        assert [*shared.last_submit().prompt_ids] == [BOS, *b"<user>a\nb\n<assistant>"]

    def test_a_template_sees_text_and_objects_where_a_client_sends_null_and_json(self, tmp_path: Path) -> None:
        template = (
            "{% for message in messages %}{{ message.content + '|' }}"
            "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }};{% endfor %}{% endfor %}"
        )
        calls = [{"type": "function", "function": {"name": "f", "arguments": text}} for text in ('{"a": 1}', "{a", "")]
        messages = [
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "assistant", "tool_calls": None},
            {"role": "tool", "content": "x", "tool_call_id": "1"},
        ]
        for plain in run_cluster(write_model_folder(tmp_path, template=template)):
            assert plain.post("/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200
            assert bytes(plain.last_submit().prompt_ids) == b'|{"a": 1};"{a";{};|x|'

    def test_templates_do_not_see_null_fields(self, tmp_path: Path) -> None:
        """Llama 3.1's template asks whether there are calls, and then for their number."""
        template = (
            "{% for message in messages %}{{ message.content }}{% if 'tool_calls' in message %}"
            "{{ message.tool_calls | length }} calls{% endif %}{{ message.reasoning_content }};{% endfor %}"
        )
        answer = {"role": "assistant", "content": "a", "refusal": None, "audio": None, "function_call": None}
        messages = [answer | {"tool_calls": None}, answer | {"tool_calls": []}, answer | {"reasoning": "b"}]
        for plain in run_cluster(write_model_folder(tmp_path, template=template)):
            assert plain.post("/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200
            assert bytes(plain.last_submit().prompt_ids) == b"a;a;ab;"

    @pytest.mark.parametrize("role", ["system", "developer"])
    def test_developer_messages_reach_templates_with_either_role(self, tmp_path: Path, role: str) -> None:
        shown = f"{{% if message.role == '{role}' %}}{{{{ message.content }}}}{{% endif %}}"
        template = f"{{% for message in messages %}}{shown}{{% endfor %}}"
        for plain in run_cluster(write_model_folder(tmp_path, template=template)):
            messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
            assert plain.post("/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200
            assert bytes(plain.last_submit().prompt_ids) == b"a"
