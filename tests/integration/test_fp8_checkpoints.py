"""Clusters that load a checkpoint in FP8 blocks answer as transformers does with the dequantized weights."""

from pathlib import Path

import pytest

from cluster.spec.config import DeployConfig, ParallelConfig
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.fp8_checkpoints import to_fp8_blocks, to_plain
from tests.fakes.local_engine import LocalEngine, Oracle, asked, prompts_of
from tests.unit.workers.test_fp8_blocks import BLOCK, RAGGED

pytestmark = pytest.mark.integration

NUM_TOKENS = 12
LENGTHS = (1, 33, 90)


@pytest.mark.parametrize(
    ("family", "prefill", "decode"),
    [
        ("qwen3", ParallelConfig(cp=2), ParallelConfig(tp=2)),
        ("qwen3_moe", ParallelConfig(tp=2, ep=2), ParallelConfig()),
        ("deepseek_v3", ParallelConfig(tp=2), ParallelConfig(tp=2, ep=2)),
    ],
)
def test_tokens_equal_transformers(
    tmp_path: Path, engine: LocalEngine, family: str, prefill: ParallelConfig, decode: ParallelConfig
) -> None:
    folder = to_fp8_blocks(make_checkpoint(tmp_path / family, family, **RAGGED[family]), BLOCK, num_files=2)
    oracle, prompts = Oracle(to_plain(folder, tmp_path / "plain", BLOCK), NUM_TOKENS), prompts_of(LENGTHS)
    config = DeployConfig.model_validate(
        {
            "model": {"served_name": family},
            "kv": {"page_size": 16, "memory_gib": 0.01},
            "prefill": {"parallel": prefill},
            "decode": {"parallel": decode.model_dump(exclude={"cp", "moe_dp"})},
        }
    )
    with engine.running(folder, config) as cluster:
        answers = cluster.generate(asked(prompts, NUM_TOKENS), timeout_s=120)
    assert answers == [oracle.tokens(prompt) for prompt in prompts]
