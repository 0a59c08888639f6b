"""Client errors are answered with OpenAI's error objects and clear messages."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import MODEL, RouterCluster, run_cluster

pytestmark = pytest.mark.integration

MISSING = object()
"""Marker that removes a field from an otherwise valid body."""

GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": "x"},
    "/v1/chat/completions": {"model": MODEL, "messages": [{"role": "user", "content": "x"}]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [97]},
}

WRONG_PROMPT = "must be a string, a list of strings, a list of token ids, or a list of such lists; no list may be empty"
WRONG_STOP = "must be a string, or a list of at most 16 strings, each of 1 to 1024 characters"
WRONG_CONTENT = (
    "must be a string, or a list of parts of type text or refusal; images, audio and files are not supported"
)
CONTEXT_IS = "This model's maximum context length is 512 tokens, prompt and answer together. However, the prompt has"
ROLES = "'system', 'developer', 'user', 'assistant', 'tool' or 'function'"
NO_TOOLS = (
    "not supported here: this model's chat template has no tool calls in a known format, or router.tool_parser is none"
    '; allowed with "tool_choice": "none"'
)
NO_REASONING = (
    "not supported here: this model's chat template does not support reasoning, or router.reasoning_parser is none; "
    'got "low", allowed: null or "none"'
)
WRONG_FORMAT = (
    'must be an object of type "text", "json_object" or "json_schema"; the last with "json_schema": '
    '{"name": ..., "schema": {...}}'
)
LOOK_AHEAD = (
    'at 1(8): invalid regex "a(?=b)" (in regex): regex parse error: '
    "error: look-around, including look-ahead and look-behind, is not supported"
)
NO_TEXT = "no finite text matches it"
UNSATISFIABLE = "Unsatisfiable schema: minimum (2) is greater than maximum (1)"

BAD_COMPLETIONS: list[tuple[str, Any, str]] = [
    ("model", MISSING, "field required"),
    ("prompt", MISSING, "field required"),
    ("prompt", 5, WRONG_PROMPT),
    ("prompt", [1, "a"], WRONG_PROMPT),
    ("prompt", [1, 258], "there is no token 258; allowed: 0 to 257"),
    ("prompt", ["x"] * 1025, "at most 1024 prompts in one request, got 1025"),
    ("prompt", [1] * 512, f"{CONTEXT_IS} 512 tokens"),
    ("max_tokens", 511, f"{CONTEXT_IS} 2 tokens and 511 more were requested"),
    ("max_tokens", -1, "Input should be greater than or equal to 0, got -1"),
    ("max_tokens", 0, "0 is only allowed together with echo or prompt_logprobs"),
    ("temperature", -1, "Input should be greater than or equal to 0, got -1"),
    ("top_k", 2**70, "Input should be less than 2147483648, got 1180591620717411303424"),
    ("stop_token_ids[0]", [2**31], "Input should be less than 2147483648, got 2147483648"),
    ("seed", 1.5, "Input should be a valid integer, got 1.5"),
    ("priority", "high", "Input should be a valid integer, got 'high'"),
    ("stop", ["x"] * 17, WRONG_STOP),
    ("stream", "yes", "Input should be a valid boolean, got 'yes'"),
    ("stream_options", {}, "only allowed with stream=true"),
    ("n", 129, "Input should be less than or equal to 128, got 129"),
    ("max_new_tokens", 5, "not supported, got 5; allowed: null; use max_tokens"),
    ("length_penalty", 1.5, "not supported, got 1.5; allowed: null or 1"),
    ("logprobs", 21, "Input should be less than or equal to 20, got 21"),
    ("logit_bias", {"258": 2}, "there is no token 258; allowed: 0 to 257"),
    ("logit_bias.7", {"7": 101}, "Input should be less than or equal to 100, got 101"),
    (
        "logit_bias",
        dict.fromkeys(map(str, range(1025)), 1),
        "must have at most 1024 items, got {'0': 1, '1': 1, '2': 1, '3': 1, '4': 1, '5': 1, '6': 1, ...",
    ),
    ("logit_bias.x", {"x": 1}, "Input should be a valid integer, unable to parse string as an integer, got 'x'"),
    ("allowed_token_ids", [], "must have 1 or more items, got []"),
    ("allowed_token_ids", [1, 999], "there is no token 999; allowed: 0 to 257"),
    ("bad_words[0]", [""], "String should have at least 1 character, got ''"),
    ("guided_regex", "a(?=b)", LOOK_AHEAD),
    ("guided_choice", [], "must have 1 or more items, got []"),
    ("guided_json", 5, "must be a JSON schema, as an object or as text"),
    ("guided_json", "{", "not valid JSON: EOF while parsing an object at line 1 column 1"),
    ("guided_json", {"type": "integer", "minimum": 2, "maximum": 1}, UNSATISFIABLE),
    ("guided_json", {"items": {"uniqueItems": True}}, 'Unimplemented keys: ["uniqueItems"]'),
    ("guided_json", {"$ref": "#"}, NO_TEXT),
    ("guided_grammar", "nonsense ::", "Expected ::= at line 1, 'nonsense ' ^ '::'"),
    ("structured_outputs.colour", {"colour": 1}, "not supported, got 1; allowed: null or false"),
    (
        "structured_outputs.choice",
        {"choice": ["a"], "regex": "b"},
        "only one of these constraints may be given: structured_outputs.regex and structured_outputs.choice",
    ),
    ("min_tokens", 17, "must be at most max_tokens (16), got 17"),
]
BAD_CHATS: list[tuple[str, Any, str]] = [
    ("messages", MISSING, "field required"),
    ("messages", [], "must have 1 or more items, got []"),
    ("messages[0].role", [{"role": "king", "content": "x"}], f"Input should be {ROLES}, got 'king'"),
    ("messages[0].content", [{"role": "user", "content": [{"type": "image_url"}]}], WRONG_CONTENT),
    ("messages", [{"role": "user", "content": "x" * 600}], f"{CONTEXT_IS} 619 tokens"),
    ("tools[0].type", [{}], "field required"),
    ("tools", [{"type": "function", "function": {"name": "f"}}], NO_TOOLS),
    ("tool_choice", "required", "there are no tools to choose from"),
    ("verbosity", "loud", "Input should be 'low', 'medium' or 'high', got 'loud'"),
    ("top_logprobs", 2, "only allowed with logprobs=true"),
    ("reasoning_effort", "low", NO_REASONING),
    ("logprobs", 5, "Input should be a valid boolean, got 5"),
    ("response_format", {"type": "xml"}, WRONG_FORMAT),
    ("response_format.json_schema", {"type": "json_schema"}, 'field required when type is "json_schema"'),
    (
        "response_format.json_schema.schema",
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objec"}}},
        "Invalid type: objec",
    ),
]
BAD_OTHERS: list[tuple[str, str, Any, str]] = [
    ("/tokenize", "prompt", MISSING, "exactly one of prompt and messages is required"),
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
    def test_field(self, shared: RouterCluster, path: str, param: str, value: Any, message: str) -> None:
        body = GOOD_BODIES[path] | {re.split(r"[\[.]", param)[0]: value}
        reply = shared.http.post(path, json={name: given for name, given in body.items() if given is not MISSING})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"], error["message"]) == (400, param, f"{param}: {message}")
        assert error["type"] == "invalid_request_error"
        assert set(error) == {"message", "type", "param", "code"}

    def test_a_schema_as_text_that_is_nested_too_deeply(self, shared: RouterCluster) -> None:
        text = '{"items":' * 5000 + "{}" + "}" * 5000
        reply = shared.http.post("/v1/completions", json=GOOD_BODIES["/v1/completions"] | {"guided_json": text})
        assert reply.status_code == 400
        assert "guided_json: not valid JSON: recursion limit exceeded" in reply.json()["error"]["message"]

    @pytest.mark.parametrize("path", GOOD_BODIES)
    def test_unknown_model(self, shared: RouterCluster, path: str) -> None:
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
    def test_not_an_object(self, shared: RouterCluster, content: bytes, message: str) -> None:
        reply = shared.http.post("/v1/completions", content=content)
        assert (reply.status_code, reply.json()["error"]["message"]) == (400, message)

    def test_half_a_surrogate_pair_is_refused(self, shared: RouterCluster) -> None:
        reply = shared.http.post("/v1/completions", content=b'{"model": "echo", "prompt": "\\ud800"}')
        assert reply.status_code == 400

    def test_unknown_route(self, shared: RouterCluster) -> None:
        reply = shared.http.get("/v1/embeddings")
        assert (reply.status_code, reply.json()["error"]["message"]) == (404, "there is no route /v1/embeddings")

    def test_wrong_method(self, shared: RouterCluster) -> None:
        reply = shared.http.get("/v1/completions")
        assert (reply.status_code, reply.json()["error"]["message"]) == (405, "/v1/completions does not accept GET")
        assert reply.headers["allow"] == "POST"
        assert shared.http.post("/ready").headers["allow"] == "GET, HEAD"

    def test_choices_of_all_prompts_are_limited_together(self, shared: RouterCluster) -> None:
        error = shared.post("/v1/completions", prompt=["x"] * 103, n=10).json()["error"]
        assert error["message"] == "n: at most 1024 choices in one request, got 103 prompts with n = 10"

    def test_a_minimum_that_allows_only_ends(self, shared: RouterCluster) -> None:
        body = {"prompt": "x", "min_tokens": 2, "allowed_token_ids": [97], "stop_token_ids": [97, 98]}
        error = shared.post("/v1/completions", **body).json()["error"]
        assert error["message"] == "min_tokens: every one of allowed_token_ids would end the answer"

    @pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
    def test_a_stream_refuses_prompt_logprobs(self, shared: RouterCluster, path: str) -> None:
        body = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
        error = shared.post(path, **body, stream=True, prompt_logprobs=1).json()["error"]
        assert error["message"] == "prompt_logprobs: not supported with stream=true"

    def test_a_model_without_chat_template(self, tmp_path: Path) -> None:
        folder = write_model_folder(tmp_path / "plain", template=None)
        for plain in run_cluster(folder):
            reply = plain.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}])
            assert reply.status_code == 400
            assert "no chat template" in reply.json()["error"]["message"]
