"""What a GPU must compile is compiled before the first request."""

from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.spec.registry import KvOwnership
from tests.fakes.checkpoints import make_checkpoint
from workers.attention.triton import backend
from workers.attention.triton.backend import TritonAttention
from workers.cache.page_pool import PagePool
from workers.engine import runner
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model
from workers.kernels.attention import Blocks, attend, blocks_for
from workers.kernels.merge import merge_parts
from workers.parallel.collectives import Communicator


def test_attention_is_warm_in_blocks_of_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen3", num_hidden_layers=2))
    config = model.config
    pool = PagePool(2, config.num_kv_heads, config.num_layers, 64, config.head_dim, torch.float32)
    one = ModelRunner(model, pool, TritonAttention(), Communicator("cp"), KvOwnership.REPLICATED, None)
    seen: set[Blocks] = set()
    joined: list[int] = []

    def note_blocks(*tensors: Any, blocks: Blocks, **others: Any) -> None:
        seen.add(blocks)
        attend(*tensors, blocks=blocks, **others)

    def note_parts(found: Any, *tensors: Any) -> None:
        joined.append(len(found))
        merge_parts(found, *tensors)

    monkeypatch.setattr(backend, "attend", note_blocks)
    monkeypatch.setattr(backend, "merge_parts", note_parts)
    monkeypatch.setattr(runner, "has_kernels", lambda _: True)
    one.warm_up()
    assert seen == {blocks_for(rows, config.head_dim, 4, 64) for rows in range(1, 4096)}
    assert joined
