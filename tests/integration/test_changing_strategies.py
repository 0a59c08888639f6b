"""One prompt's chunks with different CP strategies give the same tokens as the prompt in one piece."""

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.strategy import CpMode, Passing, Strategy
from tests.fakes.local_engine import NUM_LOGPROBS, LocalEngine, Models, asked, prompts_of

pytestmark = pytest.mark.integration

WORKER = "tests.fakes.choosing_worker:WorkerWithRotatingStrategies"
NUM_TOKENS = 24
CHUNK_TOKENS = 17
LONG, *OTHERS = prompts_of((203, 90, 33, 1))
"""Prompts. The first has twelve chunks, in which every strategy meets every way of passing and every other strategy."""


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("mode", CpMode)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)])
def test_a_prompt_may_change_its_strategy_from_chunk_to_chunk(
    cp: int, mode: CpMode, family: str, models: Models, engine: LocalEngine
) -> None:
    folder = models.folder(family)
    oracle = models.oracle(folder, NUM_TOKENS)
    config = DeployConfig.model_validate(
        {
            "kv": {"page_size": 16, "memory_gib": 0.01},
            "prefill": {"parallel": {"cp": cp}, "mode": mode, "chunk_tokens": CHUNK_TOKENS},
        }
    )
    with engine.running(folder, config) as cluster:
        (alone,) = cluster.answer(asked([LONG], NUM_TOKENS, NUM_LOGPROBS), timeout_s=120)
    steps = engine.ask(Role.PREFILL, "last_load")[0].steps
    assert {step.strategy for step in steps} == set(Strategy)
    assert {step.passing for step in steps} == (set(Passing) if mode is CpMode.RING else {None})
    oracle.check(LONG, alone)
    with engine.running(folder, config) as cluster:
        prompts = [*OTHERS, LONG]
        answers = cluster.answer(asked(prompts, NUM_TOKENS, NUM_LOGPROBS), timeout_s=120)
        for prompt, answer in zip(prompts, answers, strict=True):
            oracle.check(prompt, answer, f"{len(prompt)} tokens together with others")
