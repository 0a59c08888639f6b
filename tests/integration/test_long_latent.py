"""Log-probabilities behind 16,384 tokens equal transformers', for latent attention to all keys and to selected ones."""

import random
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from cluster.spec.config import DeployConfig
from tests.fakes.local_engine import NUM_LOGPROBS, LocalEngine, Models, asked
from tests.fakes.stable_ties import break_ties_by_position

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(1200)]

LENGTH, CHUNK, NUM_TOKENS = 16_384, 1024, 4
TOLERANCE = 1e-4


def oracle_logprobs(folder: Path, prompt: list[int], answer: list[int]) -> Tensor:
    """Return log-probabilities of the answer's positions ``[tokens, vocabulary]``.

    The prompt is computed in chunks, since transformers' scores of a whole one do not fit in memory.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    break_ties_by_position(model)
    cache, logits = DynamicCache(config=model.config), list[Tensor]()
    with torch.inference_mode():
        for tokens in (*torch.split(torch.tensor(prompt), CHUNK), torch.tensor(answer[:-1])):
            found = model(tokens[None], past_key_values=cache, use_cache=True)
            logits.append(found.logits[0] if len(logits) == len(prompt) // CHUNK else found.logits[0, -1:])
    return torch.cat(logits[-2:]).log_softmax(-1)


@pytest.mark.parametrize(
    ("family", "mode", "strategy"),
    [
        *product(["deepseek_v2", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"], ["gather", "ring"], ["zigzag"]),
        *product(["deepseek_v32"], ["gather", "ring"], ["interleave", "auto"]),
    ],
)
def test_a_prompt_of_16384_tokens(models: Models, engine: LocalEngine, family: str, mode: str, strategy: str) -> None:
    folder = models.folder(family, max_position_embeddings=2 * LENGTH)
    config = DeployConfig.model_validate(
        {
            "kv": {"memory_gib": 0.1},
            "prefill": {"parallel": {"cp": 2}, "mode": mode, "chunk_tokens": 4096, "strategy": strategy},
        }
    )
    rng = random.Random(7)
    prompt = [rng.randrange(3, 250) for _ in range(LENGTH)]
    with engine.running(folder, config) as cluster:
        (answer,) = cluster.answer(asked([prompt], NUM_TOKENS, NUM_LOGPROBS))
    expected = oracle_logprobs(folder, prompt, answer.token_ids)
    top_ids = torch.tensor([entry.top_ids for entry in answer.logprobs])
    top_logprobs = torch.tensor([entry.top_logprobs for entry in answer.logprobs])
    torch.testing.assert_close(top_logprobs, expected.gather(1, top_ids), atol=TOLERANCE, rtol=0)
    assert answer.token_ids == expected.argmax(-1).tolist()
