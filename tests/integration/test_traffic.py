"""Bytes that ranks move for one request: K and V once between CP ranks, and one copy of the KV in every handoff."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cluster.spec.config import DeployConfig, ParallelConfig
from cluster.spec.lifecycle import Role
from cluster.spec.registry import TransferMode
from cluster.spec.sampling import Stopping
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.local_cluster import LocalCluster, Prompt
from workers.parallel.traffic import HANDOFF, HEAD_COPIES, Traffic

pytestmark = pytest.mark.integration

PAGE_SIZE, PROMPT_LEN, NUM_LAYERS = 64, 768, 2
ROW_BYTES = 2 * 2 * 16 * 4
"""K and V of a token in a layer: two heads of 16 in fp32."""
KV_BYTES = PROMPT_LEN * NUM_LAYERS * ROW_BYTES


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with closing(LocalCluster()) as cluster:
        yield cluster


def moved(
    cluster: LocalCluster, folder: Path, prefill: ParallelConfig, decode: ParallelConfig, mode: TransferMode
) -> dict[Role, Traffic]:
    """Return the bytes over all ranks of each side, by traffic."""
    config = DeployConfig.model_validate(
        {
            "model": {"path": str(folder)},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.02},
            "prefill": {"parallel": prefill, "strategy": "zigzag", "chunk_tokens": PROMPT_LEN},
            "decode": {"parallel": decode},
            "transfer": {"mode": mode},
        }
    )
    cluster.load(config, folder)
    before = {side: sum(cluster.ask(side, "traffic"), Traffic()) for side in Role}
    with cluster.running():
        cluster.generate([Prompt([1 + i % 50 for i in range(PROMPT_LEN)], Stopping(max_tokens=4))])
    return {side: sum(cluster.ask(side, "traffic"), Traffic()) - before[side] for side in Role}


@pytest.mark.parametrize(
    ("prefill", "decode", "mode"),
    [
        (ParallelConfig(cp=2), ParallelConfig(), TransferMode.ALL_RANKS),
        (ParallelConfig(cp=2), ParallelConfig(), TransferMode.RANK0),
        (ParallelConfig(), ParallelConfig(tp=4), TransferMode.ALL_RANKS),
    ],
    ids=["cp2", "cp2-rank0", "tp1-to-tp4"],
)
def test_a_handoff_moves_one_copy(
    cluster: LocalCluster, tmp_path: Path, prefill: ParallelConfig, decode: ParallelConfig, mode: TransferMode
) -> None:
    folder = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=NUM_LAYERS)
    traffic = moved(cluster, folder, prefill, decode, mode)
    assert traffic[Role.PREFILL][HANDOFF] == KV_BYTES
    # Two of the four TP ranks have each head; one of them gives it to the other.
    assert traffic[Role.DECODE][HEAD_COPIES] == (KV_BYTES if decode.tp == 4 else 0)
    # Each of two CP ranks takes the other's half in every layer; the sampled token adds a row at most.
    expected = KV_BYTES if prefill.cp == 2 else 0
    assert expected <= traffic[Role.PREFILL]["attn_cp"] <= expected * 1.01
