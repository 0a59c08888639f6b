"""Complete models with every kernel compared with the same models in plain torch."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.devices import kernels_on_cpu
from tests.fakes.kv import kv_pool
from tests.fakes.steps import Request, step_of
from workers.attention.interface import AttentionBackend
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton.backend import TritonAttention
from workers.device import CPU
from workers.engine.attention_context import make_context
from workers.engine.batch import build_step_batch
from workers.engine.step_context import CpExchange
from workers.engine.weights import load_model
from workers.models.decoder import DecoderModel
from workers.parallel.communicator import Communicator

PAGE_SIZE = 16


def hidden_states(model: DecoderModel, backend: AttentionBackend) -> Tensor:
    """Return the hidden states of a prompt in two chunks, with another prompt's first token next to the second."""
    config = model.config
    pool = kv_pool(
        4, config.attention.num_kv_heads, config.num_layers, PAGE_SIZE, config.attention.head_dim, torch.float32
    )
    exchange = CpExchange(Communicator("cp"))
    outs = []
    for requests in ([(range(3, 24), 0, [2, 0])], [(range(30, 36), 21, [2, 0]), ([7], 0, [3])]):
        batch = build_step_batch(
            step_of([Request(tokens, prefix, pages, scored=True) for tokens, prefix, pages in requests]),
            cp=1,
            cp_rank=0,
            page_size=PAGE_SIZE,
            null_slot=pool.null_slot,
            device=CPU,
        )
        outs.append(model(batch.token_ids, batch.positions, make_context(batch, pool, backend, exchange)))
    return torch.cat(outs)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_hidden_states(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(make_checkpoint(tmp_path, family))
    with torch.inference_mode():
        expected = hidden_states(model, TorchAttention())
        kernels_on_cpu(monkeypatch)
        found = hidden_states(model, TritonAttention())
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
