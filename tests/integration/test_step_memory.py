"""Peak memory of a prefill step compared with `baton plan`, for a prompt of 131,072 tokens among others."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cluster.planner.memory import kv_plan
from cluster.planner.model import facts_of
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.kv import pages_for
from cluster.spec.memory import GIB
from tests.fakes.checkpoints import make_checkpoint
from tests.readme import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.native]

CHUNK = 8192
LONG = 131_072
PAGE_SIZE = 64
TOLERANCE = 0.05
SLACK = 48 << 20
"""Memory of Python and torch in addition to tensors."""

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": LONG,
}
LATENT: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 512,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "index_n_heads": 2,
    "index_head_dim": 64,
    "index_topk": 512,
}
WIDE: dict[str, Any] = {**LATENT, "intermediate_size": 1024, "num_attention_heads": 32, "num_key_value_heads": 32}
"""Sizes with which attention takes more memory than MLPs."""


class Measured(NamedTuple):
    """Measured bytes, and the same according to `baton plan`."""

    held: int
    """Weights and pages, and what libraries take."""
    step: int
    planned_held: float
    planned_step: float


def measure(folder: Path, family: str, sizes: dict[str, Any], extend_lens: list[int], prefix_len: int) -> Measured:
    """Run a step in a process of its own, with just enough pages."""
    path = make_checkpoint(folder, family, **sizes)
    num_pages = sum(pages_for(length + prefix_len, PAGE_SIZE) for length in extend_lens) + 2
    page_gib = PAGE_SIZE * facts_of(DeployConfig(), path).geometry.bytes_per_token / GIB
    settings = {
        "model": {"path": str(path)},
        "kv": {"page_size": PAGE_SIZE, "memory_gib": num_pages * page_gib},
        "prefill": {"chunk_tokens": sum(extend_lens)},
    }
    given = {"folder": str(path), "settings": settings, "extend_lens": extend_lens, "prefix_len": prefix_len}
    command = [sys.executable, "-m", "tests.fakes.measured_step", json.dumps(given)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    config = DeployConfig.model_validate(settings)
    memory = kv_plan(config, facts_of(config, path)).roles[Role.PREFILL].host
    step = memory.activations * GIB
    return Measured(**json.loads(done.stdout), planned_held=memory.total * GIB - step, planned_step=step)


def check(measured: Measured) -> None:
    assert 0 <= measured.held - measured.planned_held < SLACK, measured
    assert measured.planned_step == pytest.approx(measured.step, rel=TOLERANCE), measured


@pytest.mark.parametrize(
    ("family", "sizes", "extend_lens", "prefix_len"),
    [
        ("llama", SIZES, [CHUNK], 0),
        ("deepseek_v32", WIDE, [CHUNK], 0),
        # Short extends of long prefixes meet latents as stored, with wider queries than those of expanded keys.
        ("deepseek_v3", WIDE, [64] * 128, 512),
    ],
)
def test_short_prompts(
    tmp_path: Path, family: str, sizes: dict[str, Any], extend_lens: list[int], prefix_len: int
) -> None:
    check(measure(tmp_path, family, sizes, extend_lens, prefix_len))


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "sizes"), [("deepseek_v3", LATENT), ("deepseek_v32", LATENT), ("deepseek_v32", WIDE)]
)
def test_the_last_chunk_of_a_long_prompt(tmp_path: Path, family: str, sizes: dict[str, Any]) -> None:
    check(measure(tmp_path, family, sizes, [CHUNK], LONG - CHUNK))
