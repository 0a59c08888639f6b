"""Packed weights and fp32 products give the same results as plain ones, for any call."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.fakes.checkpoints import make_checkpoint
from workers.device import CPU
from workers.engine.weights import load_model
from workers.layers import matmul
from workers.layers.config import MoeConfig
from workers.layers.feed_forward import MoeBlock
from workers.layers.linear import Embedding, FusedLinear
from workers.layers.matmul import PackedMatrix, multiply, packed
from workers.layers.shard import replicated
from workers.parallel.model_groups import ModelGroups


class Twin:
    """First of two TP ranks with equal data."""

    rank, size = 0, 2

    def all_gather(self, out: torch.Tensor, tensor: torch.Tensor) -> None:
        out.copy_(torch.cat([tensor, tensor]))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


@pytest.fixture(params=[True, False], ids=["bf16", "fp32"], autouse=True)
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Processor that multiplies bf16, as far as oneDNN does on this one, and one that does not."""
    has_bf16 = request.param and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    for name in ("multiplies_bf16", "packs_bf16"):
        monkeypatch.setattr(CPU, name, has_bf16)
    return has_bf16


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 64, 300])
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_way_gives_the_same_product(
    num_rows: int, has_bias: bool, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "_PART", 160 * 20)
    weight, bias, x = draw(96, 160), draw(96) if has_bias else None, draw(num_rows, 2, 160)[:, 1]
    kept = packed(weight)
    assert isinstance(kept, PackedMatrix) == has_bf16
    product = multiply(x, kept, bias)
    torch.testing.assert_close(product, functional.linear(x, weight, bias))
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=1e-4)


def test_fp32_stays_as_it_is() -> None:
    weight = draw(8, 4).float()
    kept = packed(weight)
    assert isinstance(kept, torch.Tensor)
    assert kept.data_ptr() == weight.data_ptr()


def test_parts_of_a_packed_projection_are_those_of_the_plain_one() -> None:
    projection = FusedLinear(64, {"q": replicated(32), "k": replicated(16)}, bias=True)
    projection.weight = torch.nn.Parameter(draw(48, 64), requires_grad=False)
    projection.bias = torch.nn.Parameter(draw(48), requires_grad=False)
    x, parts = draw(5, 64), (slice(32), slice(32, None), slice(32))
    plain = [projection.project(x, part) for part in parts]
    projection.pack(None)
    for part, expected in zip(parts, plain, strict=True):
        torch.testing.assert_close(projection.project(x, part), expected)


def test_packed_experts_answer_as_plain_ones_do(has_bf16: bool) -> None:
    moe = MoeConfig(num_experts=5, top_k=2, intermediate_size=32, renormalize=True)
    block = MoeBlock(64, moe, ModelGroups()).bfloat16()
    for parameter in block.parameters():
        parameter.copy_(draw(*parameter.shape) / 8)
    steps = [draw(num_tokens, 64) for num_tokens in (0, 1, 3, 40)]
    plain = [block(x, None) for x in steps]
    block.experts.pack(None)
    assert isinstance(block.experts.down, list) == has_bf16
    assert not has_bf16 or {name for name, _ in block.named_parameters()} == {"router.weight"}
    for x, expected in zip(steps, plain, strict=True):
        torch.testing.assert_close(block(x, None), expected)


def test_a_tied_table_is_read_and_multiplied_with(tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tie_word_embeddings=True))
    model.pack()
    token_ids = torch.arange(3)
    hidden = model.embed_tokens(token_ids)
    torch.testing.assert_close(model.logits(hidden), (hidden @ model.embed_tokens.weight.T).float())


def test_a_table_that_nobody_reads_is_kept_once(tmp_path: Path, has_bf16: bool) -> None:
    model = load_model(make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16, tie_word_embeddings=False))
    model.pack()
    assert hasattr(model.lm_head, "weight") != has_bf16
    hidden, head = draw(3, model.config.hidden_size), model.lm_head.packed
    plain = head.rows(slice(None)) if isinstance(head, PackedMatrix) else head
    assert isinstance(plain, torch.Tensor)
    torch.testing.assert_close(model.logits(hidden), (hidden @ plain.T).float())


@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("num_rows", [0, 3])
def test_ranks_score_as_many_rows_as_there_are(num_rows: int, is_read: bool) -> None:
    twin: Any = Twin()
    table, weight, hidden = Embedding(7, 16, twin), draw(4, 16), draw(num_rows, 16)
    table.weight = torch.nn.Parameter(weight, requires_grad=False)
    table.pack(None, is_read=is_read)
    torch.testing.assert_close(table.scores(hidden), (hidden @ weight.T).repeat(1, 2)[:, :7])
