"""Chat completions: templates, parts, and the shape of a stream."""

import pytest

from tests.fakes.model_folder import BOS
from tests.fakes.router_cluster import CONTEXT, RouterCluster

pytestmark = pytest.mark.integration


class TestChat:
    def test_whole(self, shared: RouterCluster) -> None:
        reply = shared.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=8).json()
        assert reply["choices"][0]["message"] == {"role": "assistant", "content": "<user>hi", "refusal": None}
        assert shared.last_submit().prompt_ids == [BOS, *b"<user>hi\n<assistant>"]

    def test_parts_are_joined(self, shared: RouterCluster) -> None:
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        shared.post("/v1/chat/completions", messages=[{"role": "user", "content": parts}], max_tokens=1)
        assert shared.last_submit().prompt_ids == [BOS, *b"<user>a\nb\n<assistant>"]

    def test_default_length_is_the_rest_of_the_context(self, shared: RouterCluster) -> None:
        shared.post("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        submit = shared.last_submit()
        assert submit.stopping.max_tokens == CONTEXT - len(submit.prompt_ids)

    def test_stream_begins_with_the_role(self, shared: RouterCluster) -> None:
        events = shared.events("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=8)
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert "".join(delta.get("content", "") for delta in deltas) == "<user>hi"
        assert events[0]["object"] == "chat.completion.chunk"
        assert events[-1]["choices"][0]["finish_reason"] == "length"
