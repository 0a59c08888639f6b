"""Sparse attention in bf16: log-probabilities are near those of transformers in fp32, and layouts agree.

A key or an expert chosen otherwise, because of rounding, changes an answer at once, so that single prompts may differ.
"""

from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.spec.config import DeployConfig
from cluster.spec.strategy import Collectives
from tests.fakes.checkpoints import INDEXED, SMALL
from tests.fakes.local_engine import KV_WAYS, KvWay, LocalEngine, Models, asked, prompts_of

pytestmark = pytest.mark.integration

PROMPTS = prompts_of((60, 130, 33, 97, 41, 75, 110, 52))
SHAPE: dict[str, Any] = {"index_topk": 16}
GATHER_RANK0, GATHER, PASS_KV, PASS_Q = KV_WAYS
ALIKE = [(GATHER_RANK0, Collectives.AUTO), (GATHER, Collectives.TCP), (PASS_KV, Collectives.AUTO)]
"""Ways that give every rank the same work: its queries, and the selected keys in order of position."""


def config_of(cp: int, kv: KvWay, collectives: Collectives, chunk_tokens: int = 4096) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "model": {"dtype": "bfloat16"},
            "kv": {"page_size": 8, "memory_gib": 0.02},
            "prefill": {
                "parallel": {"cp": cp},
                "strategy": "zigzag",
                "mode": kv.mode,
                "passing": kv.passing,
                "chunk_tokens": chunk_tokens,
            },
            "resources": {"collectives": collectives},
            "transfer": {"mode": kv.sends},
        }
    )


def first_logprobs(models: Models, engine: LocalEngine, family: str, config: DeployConfig) -> Tensor:
    """Return the vocabulary's log-probabilities of each prompt's first token, ``[prompts, vocabulary]``."""
    result = torch.empty(len(PROMPTS), SMALL["vocab_size"])
    with engine.running(models.folder(family, **SHAPE), config) as cluster:
        answers = cluster.answer(asked(PROMPTS, 3, SMALL["vocab_size"]))
    for row, answer in zip(result, answers, strict=True):
        row[torch.tensor(answer.logprobs[0].top_ids)] = torch.tensor(answer.logprobs[0].top_logprobs)
    return result


def distances(found: Tensor, expected: Tensor) -> list[float]:
    """Return the total variation distance of each prompt's distributions."""
    return ((found.exp() - expected.exp()).abs().sum(-1) / 2).tolist()


@pytest.mark.parametrize("family", INDEXED)
def test_log_probabilities_are_near_those_in_fp32(models: Models, engine: LocalEngine, family: str) -> None:
    oracle = models.oracle(models.folder(family, **SHAPE), 1)
    expected = torch.stack([oracle.logprobs(prompt)[0] for prompt in PROMPTS])
    unlike = median(distances(expected, expected.roll(1, dims=0)))
    for cp, kv, chunk_tokens in ((1, GATHER, 4096), (1, GATHER, 37), (3, GATHER, 4096), (2, PASS_Q, 64)):
        found = first_logprobs(models, engine, family, config_of(cp, kv, Collectives.AUTO, chunk_tokens))
        assert median(distances(found, expected)) < 0.15 < unlike / 3, (cp, kv)


@pytest.mark.parametrize("family", INDEXED)
def test_layouts_that_compute_alike_agree(models: Models, engine: LocalEngine, family: str) -> None:
    first, *others = (first_logprobs(models, engine, family, config_of(2, *way)) for way in ALIKE)
    for found in others:
        torch.testing.assert_close(found, first, atol=1e-3, rtol=0)
