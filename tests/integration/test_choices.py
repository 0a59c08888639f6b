"""Choices of one prompt equal separate requests with the same seeds, and prefill computes the prompt once."""

from dataclasses import replace as replace_prompt

import pytest
from msgspec.structs import replace

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.sampling import Sampling, Stopping
from tests.fakes.local_cluster import Prompt
from tests.fakes.local_engine import LocalEngine, Models, prompts_of

pytestmark = pytest.mark.integration

WORKER = "tests.fakes.load_reporting_worker:LoadReportingWorker"
PAGE_SIZE = 16
NUM_CHOICES, NUM_TOKENS = 4, 12
LENGTHS = (5, 2 * PAGE_SIZE, 5 * PAGE_SIZE + 7)
SAMPLINGS = [
    Sampling(temperature=1.2, seed=40, num_logprobs=1),
    Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.7, repetition_penalty=1.2, seed=2),
    Sampling(temperature=1.0, bad_words=[[7]], min_tokens=4, ending_ids=frozenset(range(100, 128)), seed=3),
]


def config_of(prefix_cache: bool) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "model": {"served_name": "qwen3"},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01, "prefix_cache": prefix_cache},
            "prefill": {"parallel": {"cp": 2}, "strategy": "zigzag", "chunk_tokens": 37},
        }
    )


def choices_of(prompt: list[int], sampling: Sampling) -> list[Prompt]:
    stopping = Stopping(max_tokens=NUM_TOKENS, stop_token_ids=sampling.ending_ids)
    return [
        Prompt(prompt, stopping, replace(sampling, seed=sampling.seed + choice), shares_prompt=choice > 0)
        for choice in range(NUM_CHOICES)
    ]


def test_decode_computes_prompts_alone(models: Models, engine: LocalEngine) -> None:
    """Prompts are repeated, also with several choices. Their log-probabilities are the same."""
    prompts = dict(zip(LENGTHS, prompts_of(LENGTHS), strict=True))
    apart = [
        Prompt(prompt, Stopping(max_tokens=NUM_TOKENS), replace(sampling, num_prompt_logprobs=2))
        for prompt, sampling in zip(prompts.values(), SAMPLINGS, strict=True)
    ]
    alone = [replace_prompt(prompt, on_decode=True) for prompt in apart]
    plain = [replace_prompt(prompt, sampling=replace(prompt.sampling, num_prompt_logprobs=None)) for prompt in alone]
    with engine.running(models.folder("qwen3"), config_of(True)) as cluster:
        expected, scored, first, second = (
            cluster.answer(batch, timeout_s=120) for batch in (apart, alone, plain, plain)
        )
        choices = cluster.generate([plain[2], replace_prompt(plain[2], shares_prompt=True)], timeout_s=120)
    for answers in (scored, first, second):
        assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert choices == [expected[2].token_ids] * 2
    for ours, theirs in zip(scored, expected, strict=True):
        logprobs = [[logprob.logprob for logprob in answer.prompt_logprobs] for answer in (ours, theirs)]
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
    assert [answer.cached.total for answer in first] == [0, 0, 0]
    assert [answer.cached.total for answer in second] == [
        (len(p) - 1) // PAGE_SIZE * PAGE_SIZE for p in prompts.values()
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_are_as_many_requests(models: Models, engine: LocalEngine, prefix_cache: bool) -> None:
    pairs = zip(prompts_of(LENGTHS), SAMPLINGS, strict=True)
    together = [choice for prompt, sampling in pairs for choice in choices_of(prompt, sampling)]
    with engine.running(models.folder("qwen3"), config_of(prefix_cache)) as cluster:
        answers = cluster.answer(together, timeout_s=120)
        apart = [Prompt(choice.token_ids, choice.stopping, choice.sampling) for choice in together]
        expected = [cluster.answer([prompt], timeout_s=120)[0] for prompt in apart]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers), "choices differ"
    if not prefix_cache:
        num_computed = sum(times.num_tokens for times in engine.ask(Role.PREFILL, "last_load")[0].steps)
        assert num_computed == sum(LENGTHS) * (1 + NUM_CHOICES), "a prompt is computed once for all of its choices"
    for answer, alone in zip(answers, expected, strict=True):
        assert [scored.logprob for scored in answer.logprobs] == pytest.approx(
            [scored.logprob for scored in alone.logprobs], abs=1e-4
        )
