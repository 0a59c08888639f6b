"""Peak memory of a prefill step compared with `baton plan`, for a prompt of 131,072 tokens among others."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cluster.planner.memory import kv_plan
from cluster.planner.model import facts_of
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.memory import GIB
from tests.fakes.checkpoints import make_checkpoint
from tests.readme import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.native]

CHUNK = 8192
LONG = 131_072
TOLERANCE = 0.05
SLACK = 80 << 20
"""Memory of Python, torch and oneDNN in addition to tensors, on one rank."""
CONNECTIONS = 24 << 20
"""Memory of a rank's groups."""

SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": LONG,
}
GROUPED: dict[str, Any] = {**SIZES, "intermediate_size": 1024, "num_attention_heads": 32, "head_dim": 128}
"""Sizes with which attention takes more memory than MLPs."""
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
EXPERTS: dict[str, Any] = {
    **SIZES,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 2048,
}
WIDE: dict[str, Any] = {**LATENT, "intermediate_size": 1024, "num_attention_heads": 32, "num_key_value_heads": 32}
"""Sizes with which attention takes more memory than MLPs."""
STORED: dict[str, Any] = {**WIDE, "kv_lora_rank": 256}
"""Sizes with which queries of latents as stored take more memory than expanded keys."""
INDEXED: dict[str, Any] = {**LATENT, "intermediate_size": 1024, "index_n_heads": 32, "index_head_dim": 128}
"""Sizes with which an indexer's queries take as much memory as attention."""
SELECTING: dict[str, Any] = {
    **INDEXED,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "index_n_heads": 64,
    "index_topk": 2048,
}
"""Sizes with which an indexer's queries and the selected keys' numbers take most memory."""


class Step(NamedTuple):
    """Step of equal requests, and settings under `prefill`."""

    extend_len: int = CHUNK
    prefix_len: int = 0
    num_requests: int = 1
    dtype: torch.dtype = torch.float32
    cp: int = 1
    tp: int = 1
    ep: int = 1
    mode: str = "gather"
    passing: str | None = None
    dispatch: str = "auto"

    @property
    def settings(self) -> dict[str, Any]:
        settings = {
            "chunk_tokens": self.extend_len * self.num_requests,
            "strategy": "zigzag",
            "mode": self.mode,
            "parallel": {"cp": self.cp, "tp": self.tp, "ep": self.ep},
        }
        return settings | ({"passing": self.passing} if self.passing else {})


BF16_CP = Step(dtype=torch.bfloat16, cp=2, prefix_len=CHUNK)
PASS_KV = BF16_CP._replace(mode="ring", passing="pass_kv")
PASS_Q = BF16_CP._replace(mode="ring", passing="pass_q")
SHORT_EXTENDS = Step(extend_len=64, prefix_len=512, num_requests=128)
"""Short extends of long prefixes, which meet latents as stored, with wider queries than those of expanded keys."""
SHORT_PASS_Q = SHORT_EXTENDS._replace(cp=2, mode="ring", passing="pass_q")


def check(folder: Path, family: str, sizes: dict[str, Any], step: Step) -> None:
    """Run a step in a process per rank, with as few pages as possible, and compare the fullest rank with the plan."""
    longest = step.prefix_len + step.extend_len
    path = make_checkpoint(folder, family, dtype=step.dtype, **{**sizes, "max_position_embeddings": longest})
    settings = {
        "model": {"path": str(path)},
        "kv": {"page_size": 64, "memory_gib": 0.1},
        "prefill": step.settings,
        # Shared memory would count on every rank that reads it.
        "resources": {"collectives": "tcp", "moe_dispatch": step.dispatch},
    }
    config = DeployConfig.model_validate(settings)
    memory = kv_plan(config, facts_of(config, path)).roles[Role.PREFILL].host
    planned_step, planned_held = memory.activations * GIB, (memory.total - memory.activations) * GIB
    ranks = _measure(path, settings, step)
    slack = SLACK + (len(ranks) > 1) * CONNECTIONS
    for rank in ranks:
        assert 0 <= rank["held"] - planned_held < slack, (rank, planned_held)
    assert planned_step == pytest.approx(max(rank["step"] for rank in ranks), rel=TOLERANCE), ranks


def _measure(folder: Path, settings: dict[str, Any], step: Step) -> list[dict[str, int]]:
    processes = list[subprocess.Popen[str]]()
    given: dict[str, Any] = {"folder": str(folder), "settings": settings, "store": "", "passing": step.passing}
    given |= {"num_requests": step.num_requests, "extend_len": step.extend_len, "prefix_len": step.prefix_len}
    try:
        for rank in range(step.cp * step.tp):
            command = [sys.executable, "-m", "tests.fakes.measured_step", json.dumps({**given, "rank": rank})]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT))
            if not rank:
                stdout = processes[0].stdout
                assert stdout is not None
                given["store"] = stdout.readline().strip()
        return [json.loads(process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("family", "sizes", "step"),
    [
        ("llama", GROUPED, BF16_CP),
        ("deepseek_v32", INDEXED, Step(dtype=torch.bfloat16, prefix_len=CHUNK)),
        ("deepseek_v3", STORED, SHORT_EXTENDS),
        ("qwen3_moe", EXPERTS, Step(cp=2, ep=2)),
    ],
)
def test_short_prompts(tmp_path: Path, family: str, sizes: dict[str, Any], step: Step) -> None:
    check(tmp_path, family, sizes, step)


@pytest.mark.full
@pytest.mark.parametrize(
    ("family", "sizes", "step"),
    [
        ("llama", SIZES, Step()),
        ("llama", GROUPED, BF16_CP._replace(cp=4, dtype=torch.float32)),
        ("llama", GROUPED, PASS_KV._replace(dtype=torch.float32)),
        ("llama", GROUPED, PASS_KV),
        ("llama", GROUPED, PASS_Q._replace(dtype=torch.float32)),
        ("llama", GROUPED, PASS_Q),
        ("deepseek_v3", WIDE, Step(dtype=torch.bfloat16, prefix_len=3 * CHUNK)),
        ("deepseek_v3", WIDE, BF16_CP._replace(dtype=torch.float32)),
        ("deepseek_v3", WIDE, SHORT_EXTENDS._replace(dtype=torch.bfloat16, cp=2)),
        ("deepseek_v3", WIDE, SHORT_PASS_Q._replace(dtype=torch.bfloat16)),
        ("deepseek_v3", WIDE, SHORT_PASS_Q),
        ("deepseek_v32", WIDE, SHORT_PASS_Q._replace(prefix_len=448)),
        ("deepseek_v32", WIDE, SHORT_PASS_Q._replace(prefix_len=448, dtype=torch.bfloat16)),
        ("deepseek_v32", WIDE, SHORT_EXTENDS._replace(prefix_len=448, cp=2, dtype=torch.bfloat16)),
        ("deepseek_v32", WIDE, Step(256, 256, 32, torch.bfloat16)),
        ("deepseek_v32", WIDE, Step(dtype=torch.bfloat16, prefix_len=CHUNK, tp=2)),
        ("deepseek_v32", {**WIDE, "index_topk": 2048}, Step(dtype=torch.bfloat16, prefix_len=CHUNK)),
        ("deepseek_v32", INDEXED, Step(prefix_len=CHUNK)),
        ("deepseek_v32", SELECTING, Step(dtype=torch.bfloat16, prefix_len=CHUNK)),
        ("qwen3_moe", EXPERTS, Step()),
        ("qwen3_moe", EXPERTS, Step(dtype=torch.bfloat16)),
        ("qwen3_moe", EXPERTS, Step(cp=2, dispatch="gather")),
        ("qwen3_moe", EXPERTS, Step(cp=2, ep=2, dispatch="gather", dtype=torch.bfloat16)),
    ],
)
def test_ranks_and_dtypes(tmp_path: Path, family: str, sizes: dict[str, Any], step: Step) -> None:
    check(tmp_path, family, sizes, step)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "sizes", "dtype"),
    [
        ("deepseek_v3", LATENT, torch.float32),
        ("deepseek_v32", LATENT, torch.float32),
        ("deepseek_v32", WIDE, torch.float32),
        ("deepseek_v32", WIDE, torch.bfloat16),
        ("glm_moe_dsa", {**WIDE, "indexer_types": ["full", "shared", "shared"]}, torch.bfloat16),
    ],
)
def test_the_last_chunk_of_a_long_prompt(
    tmp_path: Path, family: str, sizes: dict[str, Any], dtype: torch.dtype
) -> None:
    check(tmp_path, family, sizes, Step(prefix_len=LONG - CHUNK, dtype=dtype))
