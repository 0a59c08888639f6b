"""Chat completions: templates, parts, and the shape of a stream."""

from pathlib import Path

import pytest

from tests.fakes.model_folder import BOS, write_model_folder
from tests.fakes.router_cluster import RouterCluster, run_cluster

pytestmark = pytest.mark.integration


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

    def test_a_template_sees_nothing_of_what_a_client_sends_back_as_null(self, tmp_path: Path) -> None:
        """Llama 3.1's asks whether there are calls, and then for their number."""
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
    def test_what_the_developer_says_reaches_templates_of_either_word(self, tmp_path: Path, role: str) -> None:
        shown = f"{{% if message.role == '{role}' %}}{{{{ message.content }}}}{{% endif %}}"
        template = f"{{% for message in messages %}}{shown}{{% endfor %}}"
        for plain in run_cluster(write_model_folder(tmp_path, template=template)):
            messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
            assert plain.post("/v1/chat/completions", messages=messages, max_tokens=1).status_code == 200
            assert bytes(plain.last_submit().prompt_ids) == b"a"
