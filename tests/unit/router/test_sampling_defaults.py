"""Fields that a request leaves out: the model's own file, where a request may say the same, or OpenAI's defaults."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cluster.spec.sampling import Sampling
from router.api.intake import make_sampling
from router.api.requests import CompletionRequest
from router.service import SamplingDefaults, Service, defaults_of

QWEN3 = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2]}


def sampling_of(defaults: SamplingDefaults, **fields: Any) -> Sampling:
    service = cast(
        "Service",
        SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=100), model=SimpleNamespace(sampling_defaults=defaults)),
    )
    return make_sampling(service, CompletionRequest(model="m", prompt="a", **fields), frozenset())


def test_the_file_of_the_model_says() -> None:
    assert defaults_of(QWEN3) == SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
    drawn = sampling_of(defaults_of(QWEN3))
    assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p) == (0.6, 20, 0.95, 0.0)


def test_the_request_has_the_last_word() -> None:
    drawn = sampling_of(defaults_of(QWEN3), temperature=1.0, top_k=0, top_p=1.0)
    assert (drawn.temperature, drawn.top_k, drawn.top_p) == (1.0, 0, 1.0)
    assert sampling_of(defaults_of(QWEN3), temperature=0).temperature == 0.0
    assert sampling_of(defaults_of(QWEN3), top_k=-1).top_k == 0
    assert sampling_of(defaults_of({"repetition_penalty": 1.1}), repetition_penalty=1.0).repetition_penalty == 1.0


def test_a_top_p_of_nothing_is_greedy_whoever_says_it() -> None:
    for drawn in (sampling_of(defaults_of({"top_p": 0.0})), sampling_of(defaults_of(QWEN3), top_p=0)):
        assert (drawn.temperature, drawn.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    "odd",
    [
        {"temperature": None, "top_k": 2.5, "top_p": "0.9"},
        {"temperature": -1, "top_k": -5, "top_p": 1.5, "min_p": float("nan"), "repetition_penalty": 0},
        {"temperature": True},
        {},
    ],
)
def test_what_no_request_may_say_is_passed_over(odd: dict[str, Any]) -> None:
    assert defaults_of(odd) == SamplingDefaults()
