"""Choices of one prompt give the tokens of as many requests with the same seeds; prefill computes the prompt once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from cluster.spec.config import DeployConfig
from cluster.spec.sampling import Sampling, Stopping
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_engine import LocalEngine
from tests.integration.test_engine_matrix import prompts_of
from workers.local import Prompt

pytestmark = pytest.mark.integration

PAGE_SIZE = 16
NUM_CHOICES, NUM_TOKENS = 4, 12
LENGTHS = (5, 2 * PAGE_SIZE, 5 * PAGE_SIZE + 7)
SAMPLINGS = [
    Sampling(temperature=1.2, seed=40, num_logprobs=1),
    Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.7, repetition_penalty=1.2, seed=2),
    Sampling(temperature=1.0, bad_words=[[7]], min_tokens=4, ending_ids=frozenset(range(100, 128)), seed=3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", seed=11)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    engine = LocalEngine()
    yield engine
    engine.close()


def config_of(prefix_cache: bool, memory_gib: float) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "model": {"served_name": "qwen3"},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": memory_gib, "prefix_cache": prefix_cache},
            "prefill": {"parallel": {"cp": 2}, "strategy": "zigzag", "chunk_tokens": 37},
        }
    )


def choices_of(prompt: list[int], sampling: Sampling) -> list[Prompt]:
    stopping = Stopping(max_tokens=NUM_TOKENS, stop_token_ids=sampling.ending_ids)
    return [
        Prompt(prompt, stopping, replace(sampling, seed=sampling.seed + choice), shares_prompt=choice > 0)
        for choice in range(NUM_CHOICES)
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_choices_are_as_many_requests(folder: Path, engine: LocalEngine, prefix_cache: bool) -> None:
    pairs = zip(prompts_of(LENGTHS), SAMPLINGS, strict=True)
    together = [choice for prompt, sampling in pairs for choice in choices_of(prompt, sampling)]
    with engine.running(folder, config_of(prefix_cache, 0.01)) as cluster:
        answers = cluster.answer(together, timeout_s=120)
        apart = [Prompt(choice.token_ids, choice.stopping, choice.sampling) for choice in together]
        expected = [cluster.answer([prompt], timeout_s=120)[0] for prompt in apart]
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers), "choices differ"
    for answer, alone in zip(answers, expected, strict=True):
        assert [told.logprob for told in answer.logprobs] == pytest.approx(
            [told.logprob for told in alone.logprobs], abs=1e-4
        )
