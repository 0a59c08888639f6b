"""Native products with packed weights, compared with exact ones: any sizes and strides."""

import platform
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional

from tests.fakes.amx import kinds_to_test
from tests.fakes.checkpoints import make_checkpoint
from workers.device import CPU
from workers.engine import native_kernels
from workers.engine.native_kernels import use_native_products
from workers.engine.weights import load_model
from workers.expert_parallel.token_dispatcher import NO_EXPERT, RoutedTokens
from workers.layers.feed_forward import Experts
from workers.layers.latent_attention import LatentAttention
from workers.layers.matmul import (
    _ONEDNN_WIDTHS,
    NativeProducts,
    PackedMatrix,
    _find_blocks,
    _pack_for,
    packed,
)
from workers.layers.shard import even_shard
from workers.native.compile import find_compiler
from workers.native.library import Library
from workers.native.products import Blocks
from workers.native.threads import Threads
from workers.parallel.model_groups import Part

KINDS = [pytest.param(kind, id=kind.name, marks=pytest.mark.native) for kind in kinds_to_test()]


@pytest.fixture(scope="module", params=KINDS)
def library(request: pytest.FixtureRequest) -> Library:
    """Native code for a kind of processor that this one supports."""
    return Library.load(find_compiler()._replace(kind=request.param))


@pytest.fixture(params=[pytest.param(None, id="oneDNN", marks=pytest.mark.bf16), *KINDS])
def packer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Native code for which weights are packed, or which multiplies by what oneDNN has packed."""
    if request.param is not None:
        monkeypatch.setattr(CPU, "packs_bf16", False)
    return Library.load(None if request.param is None else find_compiler()._replace(kind=request.param))


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pack(weight: torch.Tensor, library: Library | None = None) -> PackedMatrix:
    matrix = packed(weight, library)
    assert isinstance(matrix, PackedMatrix)
    return matrix


def let_multiply(library: Library, matrices: Sequence[PackedMatrix]) -> None:
    """Let native code multiply by all matrices whose layout it knows."""
    for matrix in matrices:
        matrix.native = None if matrix.blocks is None else NativeProducts(library, sys.maxsize)


def in_blocks(weight: torch.Tensor, width: int, depth: int) -> torch.Tensor:
    """Return a weight in blocks of ``width`` outputs, with as many zeros as fill them and ``depth`` inputs."""
    num_outputs, num_inputs = weight.shape
    whole = functional.pad(weight, (0, depth - num_inputs, 0, -num_outputs % width))
    return whole.view(-1, width, depth // 2, 2).transpose(1, 2).flatten()


@given(
    num_rows=st.integers(0, 300),
    num_outputs=st.integers(1, 300),
    num_pairs=st.integers(1, 700),
    gap=st.integers(0, 5),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**30),
    which=st.sampled_from([0, 1, None]),
)
@example(num_rows=600, num_outputs=70, num_pairs=500, gap=0, has_bias=True, seed=0, which=None)
def test_products(
    library: Library,
    num_rows: int,
    num_outputs: int,
    num_pairs: int,
    gap: int,
    has_bias: bool,
    seed: int,
    which: int | None,
) -> None:
    """Multiply by a weight as it is packed on this CPU, or in any layout that native code knows, with surplus zeros, as
    oneDNN adds them.
    """
    weight, x = draw(seed, num_outputs, 2 * num_pairs), draw(seed + 1, num_rows, 2 * num_pairs + gap)[:, gap:]
    bias = draw(seed + 2, num_outputs) if has_bias else None
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    reads_onednn = CPU.packs_bf16 and set(library.products.block_widths) == set(_ONEDNN_WIDTHS)
    matrix = pack(weight) if reads_onednn else _pack_for(library, weight)
    if which is not None:
        width, depth = library.products.block_widths[which], 2 * num_pairs + 2 * (seed % 3)
        memory = in_blocks(weight, width, depth)
        matrix.address, matrix.blocks = memory.data_ptr(), Blocks(width, width * depth)
    product = matrix.multiply_natively(library, x, bias)
    assert product.shape == (num_rows, num_outputs)
    torch.testing.assert_close(product.double(), exact, rtol=2**-8, atol=num_pairs * 1e-6)


@given(
    num_rows=st.integers(0, 300),
    num_blocks=st.integers(1, 5),
    num_pairs=st.integers(1, 700),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**30),
)
@example(num_rows=1, num_blocks=60, num_pairs=4, has_bias=False, seed=0)
def test_gated_products(
    library: Library, num_rows: int, num_blocks: int, num_pairs: int, has_bias: bool, seed: int
) -> None:
    size = num_blocks * library.products.block_widths[-1]
    matrix, x = _pack_for(library, draw(seed, 2 * size, 2 * num_pairs)), draw(seed + 1, num_rows, 2 * num_pairs)
    bias = draw(seed + 2, 2 * size) if has_bias else None
    found = matrix.multiply_gated(x, bias)
    assert found is not None
    assert torch.equal(found, library.swiglu(matrix.multiply_natively(library, x, bias)))
    assert matrix.part(slice(2 * size - 2)).multiply_gated(x, None) is None


@pytest.mark.parametrize("num_outputs", [1088, 1090], ids=["rows begin with a cache line", "or anywhere"])
def test_large_products_are_those_of_fewer_rows(library: Library, num_outputs: int) -> None:
    """Large ones go past the caches."""
    matrix, x = _pack_for(library, draw(1, num_outputs, 50)), draw(2, 1300, 50)
    expected = [matrix.multiply_natively(library, rows) for rows in torch.split(x, 100)]
    assert torch.equal(matrix.multiply_natively(library, x), torch.cat(expected))
    gate_up = _pack_for(library, draw(3, 2 * 1088, 50))
    large, *small = (gate_up.multiply_gated(rows, None) for rows in (x, *torch.split(x, 100)))
    assert large is not None
    assert torch.equal(large, torch.cat([rows for rows in small if rows is not None]))


@given(
    num_outputs=st.integers(1, 300),
    num_pairs=st.integers(1, 700),
    surplus=st.integers(0, 2),
    seed=st.integers(0, 2**30),
    width=st.sampled_from(_ONEDNN_WIDTHS),
)
def test_layouts_of_onednn_are_found(num_outputs: int, num_pairs: int, surplus: int, seed: int, width: int) -> None:
    weight = draw(seed, num_outputs, 2 * num_pairs)
    memory = in_blocks(weight, width, 2 * (num_pairs + surplus))
    blocks = _find_blocks(memory, weight)
    assert blocks is not None
    assert blocks.stride * -(-num_outputs // blocks.width) == len(memory)


@given(num_outputs=st.integers(1, 300), num_inputs=st.integers(1, 50))
def test_a_packed_weight_is_the_plain_one(library: Library, num_outputs: int, num_inputs: int) -> None:
    weight = draw(1, num_outputs, 2 * num_inputs)
    matrix = _pack_for(library, weight)
    assert matrix.shape == weight.shape
    assert matrix.native == NativeProducts(library, sys.maxsize)
    assert torch.equal(matrix.rows(slice(None)), weight)
    assert torch.equal(matrix.rows(slice(1, 3)), weight[1:3])


@pytest.mark.parametrize("outputs", [slice(128), slice(128, None), slice(70), slice(70, None)])
def test_parts_need_no_memory_if_they_begin_with_a_block(library: Library, outputs: slice) -> None:
    weight, x, bias = draw(1, 200, 40), draw(2, 9, 40), draw(3, 200)
    matrix = _pack_for(library, weight)
    part = matrix.part(outputs)
    assert (part.matrix is matrix.matrix) == ((outputs.start or 0) % library.products.block_widths[-1] == 0)
    expected = functional.linear(x, weight, bias)[:, outputs]
    torch.testing.assert_close(part.multiply(x, bias[outputs]), expected)


@pytest.mark.bf16
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("most_rows", [4, sys.maxsize])
@pytest.mark.parametrize("outputs", [slice(128), slice(128, None), slice(70), slice(70, None)])
def test_parts_of_what_onednn_packed(outputs: slice, most_rows: int, which: int) -> None:
    """OneDNN chooses the width of blocks by the processor."""
    library = Library.load()
    weight, x, bias, width = draw(1, 200, 40), draw(2, 9, 40), draw(3, 200), library.products.block_widths[which]
    matrix, memory = pack(weight), in_blocks(weight, width, 40)
    matrix.address, matrix.blocks = memory.data_ptr(), _find_blocks(memory, weight)
    matrix.native = NativeProducts(library, most_rows)
    part = matrix.part(outputs)
    starts_block = (outputs.start or 0) % width == 0
    assert (part.matrix is matrix.matrix) == (most_rows == sys.maxsize and starts_block)
    for rows in (x[:3], x):
        expected = functional.linear(rows, weight, bias)[:, outputs]
        torch.testing.assert_close(part.multiply(rows, bias[outputs]), expected)
    assert part.native is matrix.native


def native_experts(packer: Library) -> Experts:
    """Return experts 2 to 6, all of which native code computes."""
    experts = Experts(64, even_shard(32, Part(0, 1)), range(2, 7))
    for parameter in experts.parameters():
        parameter.data = draw(len(parameter), *parameter.shape) / 8
    experts.pack(packer)
    assert isinstance(experts.gate_up, list)
    assert isinstance(experts.down, list)
    let_multiply(packer, experts.gate_up + experts.down)
    return experts


@pytest.mark.parametrize(("hidden", "width"), [(64, 32), (64, 31), (63, 32)])
def test_native_experts(packer: Library, monkeypatch: pytest.MonkeyPatch, hidden: int, width: int) -> None:
    """Native code does not multiply by weights with an odd number of inputs, but zeros can be added to inner ones."""
    experts = Experts(hidden, even_shard(width, Part(0, 1)), range(2, 7))
    for parameter in experts.parameters():
        parameter.data = draw(len(parameter), *parameter.shape) / 8
    cases = []
    for num_tokens in (0, 1, 5, 40, 400):
        chosen = torch.rand(num_tokens, 9).topk(3).indices.int()
        routed = RoutedTokens(draw(num_tokens, num_tokens, hidden), chosen, torch.rand(num_tokens, 3))
        cases.append((routed, experts(routed)))
    experts.pack(packer)
    assert isinstance(experts.down, list) == isinstance(experts.gate_up, list) == (hidden == 64 or CPU.packs_bf16)
    if isinstance(experts.gate_up, list) and isinstance(experts.down, list):
        let_multiply(packer, experts.gate_up + experts.down)
    for routed, expected in cases:
        native = Mock(wraps=packer.products.experts)
        monkeypatch.setattr(packer.products, "experts", native)
        # Answers are rounded before they are added up, and a sum can be small.
        torch.testing.assert_close(experts(routed), expected, rtol=2**-6, atol=2**-8)
        assert native.called == (hidden == 64 and len(routed.hidden) > 0)


@pytest.mark.parametrize("num_tokens", [1, 2, 40])
def test_all_chosen_experts_may_be_elsewhere(packer: Library, num_tokens: int) -> None:
    experts = native_experts(packer)
    chosen = torch.tensor([[0, 8, NO_EXPERT]], dtype=torch.int32).expand(num_tokens, 3).contiguous()
    routed = RoutedTokens(draw(1, num_tokens, 64), chosen, torch.rand(num_tokens, 3))
    assert not experts(routed).any()
    assert not experts.loads.any()


def test_threads_share_experts(packer: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = native_experts(packer)
    chosen = torch.rand(700, 9).topk(3).indices.int()
    routed = RoutedTokens(draw(1, 700, 64), chosen, torch.rand(700, 3))
    alone = experts(routed)
    loads = experts.loads.clone()
    assert loads.tolist() == [(chosen == number).sum().item() for number in experts.numbers]
    monkeypatch.setattr(packer.products, "_threads", Threads(3))
    monkeypatch.setattr("workers.native.products.LEAST_SHARED", 1)
    monkeypatch.setattr("workers.layers.feed_forward.MOST_ANSWER_BYTES", 100_000)
    assert torch.equal(experts(routed), alone)
    assert torch.equal(experts.loads, 2 * loads)


@given(
    num_tokens=st.integers(0, 9),
    num_experts=st.integers(1, 70),
    num_chosen=st.integers(1, 8),
    is_counted=st.sampled_from([None, True, False]),
    sum_to_one=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_native_choice_of_experts(
    library: Library,
    num_tokens: int,
    num_experts: int,
    num_chosen: int,
    is_counted: bool | None,
    sum_to_one: bool,
    seed: int,
) -> None:
    logits, num_chosen = draw(seed, num_tokens, num_experts), min(num_chosen, num_experts)
    logits[:, num_experts // 2 :] *= 10
    counted = None if is_counted is None else torch.rand(num_tokens, 1) < 0.5
    experts, factors = library.products.choose_experts(logits, num_chosen, counted, sum_to_one=sum_to_one)
    likelihoods = logits.float().softmax(-1)
    best, numbers = likelihoods.sort(dim=-1, descending=True, stable=True)
    best, numbers = best[:, :num_chosen], numbers[:, :num_chosen]
    torch.testing.assert_close(factors, best / best.sum(-1, keepdim=True) if sum_to_one else best)
    assert torch.equal(experts.long(), numbers if counted is None else numbers.masked_fill(~counted, NO_EXPERT))


def test_experts_chosen_by_nan_exist(library: Library) -> None:
    logits = torch.full((1, 5), torch.nan).bfloat16()
    chosen, _ = library.products.choose_experts(logits, 3, None, sum_to_one=True)
    assert chosen.tolist() == [[0, 1, 2]]


def test_native_heads_of_latents(packer: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = load_model(make_checkpoint(tmp_path, "deepseek_v3", dtype=torch.bfloat16)).layers["0"].self_attn
    assert isinstance(layer, LatentAttention)
    heads, config = layer.kv_b, layer._config
    cases = []
    for num_rows in (0, 1, 5, 40):
        queries = draw(num_rows, num_rows, config.num_heads, config.head_dim)
        latents = draw(num_rows + 1, num_rows, config.num_heads, config.kv_rank)
        cases.append((queries, latents, heads.absorb(queries), heads.values(latents)))
    heads.pack(packer)
    matrices = [*heads._absorbing, *heads._valuing]
    assert len(matrices) == 2 * config.num_heads
    for matrix in matrices:
        matrix.native = NativeProducts(packer, 5)
    linear = Mock(wraps=packer.products.linear_of_heads)
    monkeypatch.setattr(packer.products, "linear_of_heads", linear)
    for queries, latents, absorbed, values in cases:
        torch.testing.assert_close((heads.absorb(queries), heads.values(latents)), (absorbed, values))
    assert linear.call_count == 2 * len(cases)


def test_threads_share_a_large_weight(packer: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.native.products._LEAST_PRODUCTS", 1 << 10)
    matrix, x = pack(draw(1, 1000, 128), packer), draw(2, 9, 128)
    alone = matrix.multiply_natively(packer, x)
    monkeypatch.setattr(packer.products, "_threads", Threads(3))
    assert torch.equal(matrix.multiply_natively(packer, x), alone)


@pytest.mark.bf16
@pytest.mark.parametrize("shape", [(64, 63), (65, 2), (128, 512)])
def test_a_layout_is_known_only_if_it_is_the_expected_one(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = draw(3, *shape)
    is_known = shape[1] % 2 == 0 and platform.machine() in ("x86_64", "AMD64")
    assert (pack(weight).blocks is not None) == is_known
    reorder = torch.ops.mkldnn._reorder_linear_weight
    # As if oneDNN stored rows in another order.
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda plain: reorder(plain.flip(0)))
    assert pack(weight).blocks is None


@pytest.mark.bf16
@pytest.mark.parametrize("most", [0, 4, 64, 512, 2048])
def test_as_many_rows_as_are_faster(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, model = Library.load(), load_model(make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16))
    model.pack()
    x = model.embed_tokens(torch.arange(6))
    before = model.logits(x)
    measured: list[PackedMatrix] = []

    def is_fast(_device: object, _library: object, matrices: Sequence[PackedMatrix], num_rows: int, _: int) -> bool:
        measured[:] = matrices
        return num_rows <= most

    monkeypatch.setattr(native_kernels, "_is_fast", is_fast)
    use_native_products(model, library)
    matrices = model.packed_matrices()
    assert len(matrices) == 4 * len(model.layers) + 1
    assert {id(matrix) for matrix in matrices} - {id(matrix) for matrix in measured} == {id(model.lm_head.packed)}
    assert {matrix.native.most_rows for matrix in matrices if matrix.native} == {sys.maxsize if most == 2048 else most}
    torch.testing.assert_close(model.logits(x), before)
    linear = Mock(wraps=library.products.linear)
    monkeypatch.setattr(library.products, "linear", linear)
    model.logits(x)
    assert linear.call_count == (most >= 6)


@pytest.mark.bf16
@pytest.mark.parametrize(
    ("slowdown", "num_helpers", "most_rows"),
    [(1.04, 0, sys.maxsize), (1.06, 0, 0), (1.2, 1, sys.maxsize), (1.3, 1, 0)],
)
def test_native_code_may_be_slower_if_helpers_share_it(
    slowdown: float, num_helpers: int, most_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, model = Library.load(), load_model(make_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16))
    model.pack()
    monkeypatch.setattr(CPU, "least_s", Mock(side_effect=cycle([slowdown, 1.0])))
    use_native_products(model, library, num_helpers)
    assert {matrix.native.most_rows for matrix in model.packed_matrices() if matrix.native} == {most_rows}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_native_code_multiplies_by_all_weights(family: str, packer: Library, tmp_path: Path) -> None:
    model = load_model(make_checkpoint(tmp_path, family, dtype=torch.bfloat16))
    hidden = model.embed_tokens(torch.arange(6))
    before = model.logits(hidden)
    model.pack(packer)
    use_native_products(model, packer)
    num_mlp = 1 + 2 * model.config.moe.num_experts if model.config.moe else 2  # with the router
    assert len(model.packed_matrices()) == (2 + num_mlp) * len(model.layers) + 1
    assert all(matrix.native is not None for matrix in model.packed_matrices())
    torch.testing.assert_close(model.logits(hidden), before)
