"""Clusters find what a text says in a model with latent attention, to all keys and to selected ones."""

from pathlib import Path

import pytest

from cluster.spec.config import DeployConfig
from tests.fakes.local_engine import LocalEngine, asked
from tests.fakes.recall_prompts import chain_prompt, needle_prompt, recall_oracle
from workers.models.recall import build_recall_checkpoint
from workers.models.recall_weights import Variant

pytestmark = pytest.mark.integration

VARIANTS = [Variant.LATENT, Variant.SPARSE]
PAGE_SIZE = 64
NEEDLE_LEN = 11
LONG = 65_536


def config_of(mode: str, *, strategy: str = "zigzag", cp: int = 2, chunk_tokens: int = 8192) -> DeployConfig:
    return DeployConfig.model_validate(
        {
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.3},
            "prefill": {"parallel": {"cp": cp}, "mode": mode, "strategy": strategy, "chunk_tokens": chunk_tokens},
        }
    )


@pytest.mark.parametrize(("mode", "strategy"), [("gather", "interleave"), ("ring", "zigzag")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_page_is_read(tmp_path: Path, engine: LocalEngine, variant: Variant, mode: str, strategy: str) -> None:
    """Check a chain through all pages and a needle, in chunks that end inside of pages."""
    build_recall_checkpoint(tmp_path / "m", variant=variant)
    prompts = [chain_prompt(2000, PAGE_SIZE), needle_prompt(2000, 0.3, needle_len=31)]
    with engine.running(tmp_path / "m", config_of(mode, strategy=strategy, cp=3, chunk_tokens=700)) as cluster:
        answers = cluster.generate(asked(prompts, 31))
    assert answers == [recall_oracle(prompt, 31) for prompt in prompts]


@pytest.mark.full
@pytest.mark.native
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("mode", ["gather", "ring"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_needle_in_65536_tokens(tmp_path: Path, engine: LocalEngine, variant: Variant, mode: str) -> None:
    """Check needles at three depths, the later two behind a cached prefix."""
    build_recall_checkpoint(tmp_path / "m", variant=variant)
    with engine.running(tmp_path / "m", config_of(mode)) as cluster:
        for depth in (0.1, 0.5, 0.9):
            prompt = needle_prompt(LONG, depth)
            (answer,) = cluster.generate(asked([prompt], NEEDLE_LEN), timeout_s=1000)
            assert answer == recall_oracle(prompt, NEEDLE_LEN), depth
