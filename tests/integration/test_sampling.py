"""Sampling parameters hold across the handoff: prefill samples the first token, and decode the others."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from cluster.spec.sampling import Sampling, Stopping
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import Answer, LocalCluster, Prompt, small_pool_cluster
from tests.fakes.local_engine import prompts_of

pytestmark = pytest.mark.integration

NUM_TOKENS = 24
"""Pool in which the prompts fill 27 pages, so that answers need more, and some requests are preempted."""
BIAS = {7: 4.0, 90: 6.5, 91: -100.0}
BAD_WORDS = [[90], [7, 7], [12, 13, 14]]
ALLOWED = frozenset(range(40, 80))

REQUESTS: dict[str, tuple[Sampling, dict[str, Any]]] = {
    "greedy": (Sampling(), {}),
    "repetition": (Sampling(repetition_penalty=1.8), {"repetition_penalty": 1.8}),
    "bias": (
        Sampling(logit_bias=BIAS, bad_words=BAD_WORDS),
        {"sequence_bias": [[[token_id], bias] for token_id, bias in BIAS.items()], "bad_words_ids": BAD_WORDS},
    ),
    "allowed": (
        Sampling(allowed_ids=ALLOWED, repetition_penalty=1.3),
        {"suppress_tokens": sorted(set(range(256)) - ALLOWED), "repetition_penalty": 1.3},
    ),
    "late": (
        Sampling(min_tokens=9, ending_ids=frozenset(range(128))),
        {"min_new_tokens": 9, "eos_token_id": list(range(128))},
    ),
}
"""Our settings, and the equivalent ones of transformers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=11)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[LocalCluster]:
    with small_pool_cluster(folder) as cluster:
        yield cluster


def stopping_of(sampling: Sampling) -> Stopping:
    return Stopping(max_tokens=NUM_TOKENS, stop_token_ids=sampling.ending_ids)


def test_tokens_and_logprobs_equal_transformers(folder: Path, cluster: LocalCluster) -> None:
    prompts = dict(zip(REQUESTS, prompts_of((90, 200, 33, 5, 64)), strict=True))
    asked = [
        Prompt(prompts[name], stopping_of(sampling), replace(sampling, num_logprobs=3))
        for name, (sampling, _) in REQUESTS.items()
    ]
    answers = dict(zip(REQUESTS, cluster.answer(asked, timeout_s=120), strict=True))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, (_, settings) in REQUESTS.items():
        compare(model, prompts[name], answers[name], settings)
    tokens = {name: answer.token_ids for name, answer in answers.items()}
    assert tokens["repetition"] != tokens["greedy"]
    assert 9 < len(tokens["late"]) < NUM_TOKENS


def compare(model: Any, prompt: list[int], answer: Answer, settings: dict[str, Any]) -> None:
    with torch.inference_mode():
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
            **settings,
        )
    assert answer.token_ids == theirs.sequences[0, len(prompt) :].tolist()
    assert len(answer.logprobs) == len(answer.token_ids)
    for token_id, entry, logits in zip(answer.token_ids, answer.logprobs, theirs.logits, strict=True):
        logprobs = logits[0].log_softmax(-1)
        assert entry.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-3)
        assert entry.top_ids == logprobs.topk(3).indices.tolist()
        assert entry.top_logprobs == pytest.approx(logprobs.topk(3).values.tolist(), abs=1e-3)


@pytest.mark.parametrize("num_given", [1, 7, 17])
def test_a_continued_answer_equals_an_uninterrupted_one(cluster: LocalCluster, num_given: int) -> None:
    """Random numbers, penalties, banned words, lengths and log-probabilities count earlier tokens as output."""
    sampled = Sampling(temperature=1.2, seed=9, frequency_penalty=0.4, presence_penalty=0.2, top_p=0.9)
    samplings = [*(sampling for sampling, _ in REQUESTS.values()), sampled]
    prompts = prompts_of((90, 60, 33, 5, 64, 47))
    asked = [
        Prompt(prompt, stopping_of(sampling), replace(sampling, num_logprobs=2))
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    wholes = cluster.answer(asked, timeout_s=120)
    going_on = [
        dataclasses.replace(ask, token_ids=[*ask.token_ids, *whole.token_ids[:num_given]], num_given=num_given)
        for ask, whole in zip(asked, wholes, strict=True)
        if len(whole.token_ids) > num_given
    ]
    assert len(going_on) >= len(asked) - 1
    rests = iter(cluster.answer(going_on, timeout_s=120))
    for whole in wholes:
        if len(whole.token_ids) > num_given:
            rest = next(rests)
            assert rest.token_ids == whole.token_ids[num_given:]
            for ours, theirs in zip(rest.logprobs, whole.logprobs[num_given:], strict=True):
                assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=1e-3)
