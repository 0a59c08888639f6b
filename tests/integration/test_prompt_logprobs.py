"""Prompt log-probabilities equal transformers' for any chunks and any amount of cached tokens."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.spec.config import DeployConfig
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.strategy import CpMode, PassingSetting, Strategy
from tests.fakes.local_cluster import Answer, Prompt
from tests.fakes.local_engine import KvWay, LocalEngine, Models, prompts_of
from tests.fakes.pairwise import Case, all_pairs

pytestmark = pytest.mark.integration

NUM_TOP = 5
LENGTHS = (1, 33, 130, 2)
FACTORS: dict[str, list[Any]] = {
    "strategy": list(Strategy),
    "kv": [KvWay(), KvWay(CpMode.RING, PassingSetting.PASS_KV), KvWay(CpMode.RING, PassingSetting.PASS_Q)],
    "chunk_tokens": [4096, 37],
}


def in_loading_order(cases: Sequence[Case]) -> list[Case]:
    return sorted(cases, key=lambda case: (case["layout"], case["kv"].mode))


def name_of(case: Case) -> str:
    cp, tp = case["layout"]
    return f"cp{cp}-tp{tp}-{case['strategy']}-{case['kv']}-{case['chunk_tokens']}"


def compare(answer: Answer, prompt: list[int], expected: Tensor) -> None:
    """Compare with ``expected [tokens, vocabulary]`` after each token."""
    assert len(answer.prompt_logprobs) == len(prompt) - 1
    for position, entry in enumerate(answer.prompt_logprobs):
        row = expected[position]
        own = row[prompt[position + 1]]
        assert entry.logprob == pytest.approx(float(own), abs=1e-3)
        assert entry.top_logprobs == pytest.approx(row[entry.top_ids].tolist(), abs=1e-3)
        assert entry.top_logprobs == pytest.approx(row.topk(NUM_TOP).values.tolist(), abs=1e-3)
        assert int((row > own + 1e-3).sum()) < entry.rank <= int((row >= own - 1e-3).sum())


def config_of(case: Case) -> DeployConfig:
    kv: KvWay = case["kv"]
    cp, tp = case["layout"]
    return DeployConfig.model_validate(
        {
            "model": {"served_name": "qwen3"},
            "kv": {"page_size": 16, "memory_gib": 0.01},
            "prefill": {
                "parallel": {"cp": cp, "tp": tp},
                "strategy": case["strategy"],
                "mode": kv.mode,
                "passing": kv.passing,
                "chunk_tokens": case["chunk_tokens"],
            },
        }
    )


SELECTION = [
    *({**case, "layout": (2, 1)} for case in all_pairs(FACTORS)),
    {"layout": (2, 2), "strategy": Strategy.ZIGZAG, "kv": KvWay(), "chunk_tokens": 37},
]


@pytest.mark.parametrize("case", in_loading_order(SELECTION), ids=name_of)
def test_prompt_logprobs_equal_transformers(models: Models, engine: LocalEngine, case: Case) -> None:
    """Each prompt is scored twice, the second time when cached, and answered without scores in between."""
    prompts, folder = prompts_of(LENGTHS), models.folder("qwen3")
    asked = [Prompt(prompt, Stopping(max_tokens=3), Sampling(num_prompt_logprobs=NUM_TOP)) for prompt in prompts]
    plain = [Prompt(prompt, Stopping(max_tokens=3)) for prompt in prompts]
    with engine.running(folder, config_of(case)) as cluster:
        first, between, second = (cluster.answer(batch, timeout_s=120) for batch in (asked, plain, asked))
    assert not any(answer.prompt_logprobs for answer in between)
    for prompt, answer, *others in zip(prompts, between, first, second, strict=True):
        with torch.inference_mode():
            expected = models.oracle(folder, 3).model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        for other in others:
            assert (other.token_ids, other.cached.total) == (answer.token_ids, 0)
            compare(other, prompt, expected)
