"""Through the endpoint on real Ray, greedy fp32 tokens equal transformers': a sample of the engine's matrix."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.cluster import running_cluster
from tests.fakes.model_folder import write_model_folder
from tests.integration.test_engine_matrix import prompts_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

NUM_TOKENS = 64
LENGTHS = (1, 2, 33, 64, 130, 5, 300)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", ("prefill.strategy=interleave", "prefill.parallel.cp=3", "transfer.mode=rank0")),
        pytest.param(
            "llama",
            ("prefill.strategy=zigzag", "prefill.mode=ring", "prefill.chunk_tokens=100", "transfer.backend=mooncake"),
            marks=pytest.mark.mooncake,
        ),
    ],
)
def test_tokens_through_the_endpoint_equal_transformers(tmp_path: Path, family: str, settings: tuple[str, ...]) -> None:
    folder = make_checkpoint(write_model_folder(tmp_path / family), family, seed=5)
    prompts = prompts_of(LENGTHS)
    with running_cluster(
        "deploy/local-cpu.yaml", f"parity-{family}", f"model.path={folder}", "kv.page_size=16", *settings
    ) as cluster:
        with ThreadPoolExecutor(len(prompts)) as clients:
            ours = list(clients.map(lambda prompt: cluster.complete(prompt, NUM_TOKENS, model=family), prompts))
        cluster.wait_until(cluster.is_empty, 30)
    assert ours == [_oracle(folder, prompt) for prompt in prompts]


def _oracle(folder: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    with torch.inference_mode():
        tokens = model.generate(torch.tensor([prompt]), attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS)
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer
