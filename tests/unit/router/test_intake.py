"""Sampling parameters of requests and their defaults, and the limit on prompt log-probabilities."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cluster.channel import MAX_FRAME_BYTES, encode
from cluster.spec.ids import Incarnation, ReplicaId, Room
from cluster.spec.messages import Output
from cluster.spec.sampling import Sampling, TokenLogprobs
from router.errors import ApiError
from router.preprocess.intake import (
    _LOGPROBS_BYTES,
    _TOP_LOGPROB_BYTES,
    _check_lengths,
    check_prompt_logprobs,
    make_sampling,
)
from router.preprocess.model import SamplingDefaults, ServedModel, defaults_of
from router.preprocess.requests import ChatMessage, ChatRequest, CompletionRequest, GenerationBody

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


def sampling_of(defaults: SamplingDefaults, **fields: Any) -> Sampling:
    model = cast("ServedModel", SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=100), sampling_defaults=defaults))
    return make_sampling(model, CompletionRequest(model="m", prompt="a", **fields), frozenset())


def test_a_request_overrides_the_models_defaults() -> None:
    assert defaults_of(QWEN3) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    sampling = sampling_of(defaults_of(QWEN3))
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.95, 0.0)
    sampling = sampling_of(defaults_of(QWEN3), temperature=1.0, top_k=0, top_p=1.0)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
    assert sampling_of(defaults_of(QWEN3), temperature=0).temperature == 0.0
    assert sampling_of(defaults_of(QWEN3), top_k=-1).top_k == 0
    assert sampling_of(defaults_of({"repetition_penalty": 1.1}), repetition_penalty=1.0).repetition_penalty == 1.0


def test_invalid_defaults_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert defaults_of({"temperature": "hot", "top_p": 0.5}) == SamplingDefaults(top_p=0.5)
    (record,) = caplog.records
    assert record.getMessage().startswith("generation_config.json: temperature: ignored 'hot': ")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({}, 40), ({"max_tokens": 60}, 60), ({"max_completion_tokens": 5}, 5), ({"min_tokens": 9}, 40)],
)
def test_default_length_of_a_chats_answer(fields: dict[str, Any], expected: int) -> None:
    assert defaults_of({"max_new_tokens": 40}).max_new_tokens == 40
    assert (
        _length_of(ChatRequest(model="m", messages=[ChatMessage(role="user", content="a")], **fields), 40) == expected
    )


def test_default_length_of_any_other_answer() -> None:
    chat = ChatRequest(model="m", messages=[ChatMessage(role="user", content="a")])
    assert (_length_of(chat, None), _length_of(chat, 400)) == (97, 97)
    assert _length_of(CompletionRequest(model="m", prompt="a"), 40) == 16


def _length_of(body: GenerationBody, max_new_tokens: int | None) -> int:
    """Return the maximum length of an answer to three tokens, where 100 fit."""
    defaults = SamplingDefaults(max_new_tokens=max_new_tokens)
    tokenizer = SimpleNamespace(vocab_size=100)
    model = cast("ServedModel", SimpleNamespace(tokenizer=tokenizer, sampling_defaults=defaults))
    return _check_lengths(model, body, [1, 2, 3], 100)[1]


def test_top_p_0_is_greedy() -> None:
    for sampling in (sampling_of(defaults_of({"top_p": 0.0})), sampling_of(defaults_of(QWEN3), top_p=0)):
        assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    "odd",
    [
        {"temperature": None, "top_k": 2.5, "top_p": "0.9"},
        {"temperature": -1, "top_k": -5, "top_p": 1.5, "min_p": float("nan"), "repetition_penalty": 0},
        {"temperature": True, "max_new_tokens": 0},
        {},
    ],
)
def test_invalid_defaults_are_ignored(odd: dict[str, Any]) -> None:
    assert defaults_of(odd) == SamplingDefaults()


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_maximum_size_of_prompt_log_probabilities(num_top: int) -> None:
    reported = TokenLogprobs(logprob=-1 / 3, rank=2**20, top_ids=[2**20] * num_top, top_logprobs=[-1 / 3] * num_top)
    empty = Output(room=Room(1), replica=ReplicaId("decode-0"), incarnation=Incarnation(1), first_index=0, token_ids=[])
    frames = [len(encode(msgspec.structs.replace(empty, prompt_logprobs=[reported] * num))) for num in (100, 200)]
    assert frames[1] - frames[0] <= 100 * (_LOGPROBS_BYTES + num_top * _TOP_LOGPROB_BYTES)


def test_prompts_too_long_for_log_probabilities_are_refused() -> None:
    allowed = MAX_FRAME_BYTES // 2 // (_LOGPROBS_BYTES + 20 * _TOP_LOGPROB_BYTES)
    check_prompt_logprobs(allowed, 20)
    check_prompt_logprobs(10**9, None)
    with pytest.raises(ApiError, match=f"of {allowed + 1} tokens; allowed: a prompt of at most {allowed} tokens"):
        check_prompt_logprobs(allowed + 1, 20)
