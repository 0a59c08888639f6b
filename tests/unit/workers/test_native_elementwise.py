"""Native elementwise kernels compared with plain torch: any sizes and strides, for each kind of processor.

In bf16, they are equal bit by bit.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from tests.fakes.kv import kv_pool
from workers.device import CPU
from workers.kernels import elementwise
from workers.layers.feed_forward import gated
from workers.layers.linear import RMSNorm
from workers.layers.rotary import Rotation
from workers.native.compile import Compiler, compiled_library, find_compiler, runnable_kinds
from workers.native.library import Library

pytestmark = pytest.mark.native

EPS = 1e-6
NAMES = {"rms_norm", "add_rms_norm", "rotate", "rotate_storing", "store_kv", "swiglu"}
SPECIAL = (
    *(0.0, -0.0, 1e-37, 1e-30, 2.0, 88.8, -88.8, 90.0, -90.0, 3e38, -3e38),
    *(float("inf"), float("-inf"), float("nan")),
)
ROWS, SIZES, SEEDS = st.integers(0, 5), st.integers(1, 150), st.integers(0, 2**30)
HEADS = st.sampled_from([1, 2, 3, 17, 33])
"""Numbers of heads, also more than fit into a vector."""
REST = st.sampled_from([0, 0, 2, 7, 40])
"""Elements of a head that are not rotated."""


@pytest.fixture(scope="module", params=runnable_kinds(), ids=lambda kind: kind.name)
def library(request: pytest.FixtureRequest) -> Library:
    return Library(compiled_library(Compiler(find_compiler().path, request.param)), 1)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def draw(dtype: torch.dtype, seed: int, *shape: int, gap: int = 0) -> torch.Tensor:
    """Return numbers of many magnitudes, with ``gap`` others between rows."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + gap, generator=generator)
    return (wide * torch.exp(wide.flip(-1) * 2)).to(dtype)[..., : shape[-1]]


def norm(dtype: torch.dtype, seed: int, size: int) -> RMSNorm:
    layer = RMSNorm(size, EPS)
    layer.weight = torch.nn.Parameter(draw(dtype, seed, size), requires_grad=False)
    return layer


def check_close(found: torch.Tensor, expected: torch.Tensor, rtol: float = 2**-7) -> None:
    """Check the relative error: ``rtol`` in bf16, 2e-6 in fp32, where it may also be that of a sum.

    Some processors round to zero what is below the smallest normal number in bf16.
    """
    if found.dtype == torch.bfloat16:
        torch.testing.assert_close(found, expected, rtol=rtol, atol=torch.finfo(found.dtype).tiny, equal_nan=True)
    else:
        size = expected.abs().nan_to_num(0.0, 0.0).max() if expected.numel() else 0.0
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6 * float(size), equal_nan=True)


def check_norm(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare. In bf16, only the last bit may differ, because sums of squares may be computed in another order."""
    assert found.shape == expected.shape
    check_close(found, expected)
    assert found.dtype == torch.float32 or (found != expected).sum() <= 0.02 * expected.numel() + 1


def check_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    if found.dtype == torch.bfloat16:
        assert torch.equal(found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))
    else:
        check_close(found, expected)


@given(num_rows=ROWS, size=SIZES, gap=st.integers(0, 3), seed=SEEDS)
def test_norms(library: Library, dtype: torch.dtype, num_rows: int, size: int, gap: int, seed: int) -> None:
    layer = norm(dtype, seed, size)
    x, y = (draw(dtype, seed + number, num_rows, size, gap=gap) for number in (1, 2))
    check_norm(library.rms_norm(x, layer.weight, EPS), layer(x))
    total, normed = library.add_rms_norm(x, y, layer.weight, EPS)
    expected_total, expected = layer.of_sum(x, y)
    check_same(total, expected_total)
    check_norm(normed, expected)


@given(num_tokens=ROWS, heads=HEADS, half=st.integers(1, 75), rest=REST, gap=st.integers(0, 3), seed=SEEDS)
def test_rotations(
    library: Library, dtype: torch.dtype, num_tokens: int, heads: int, half: int, rest: int, gap: int, seed: int
) -> None:
    dim = 2 * half + rest
    x, layer = draw(dtype, seed, num_tokens, heads + 1, dim, gap=gap)[:, :heads], norm(dtype, seed, dim)
    rotation = Rotation(*(draw(dtype, seed + number, num_tokens, 1, 2 * half) for number in (1, 2)))
    check_same(library.rotate(x, rotation.cos, rotation.sin), rotation.apply(x))
    normed = library.rotate(layer(x), rotation.cos, rotation.sin)
    found = library.rotate(x, rotation.cos, rotation.sin, layer.weight, EPS)
    torch.testing.assert_close(found, normed, rtol=2**-6, atol=2**-6 * float(normed.abs().max()) if x.numel() else 0.0)


@given(num_rows=ROWS, size=SIZES, gap=st.integers(0, 3), seed=SEEDS)
def test_gates(library: Library, dtype: torch.dtype, num_rows: int, size: int, gap: int, seed: int) -> None:
    gate_up = draw(dtype, seed, num_rows, 2 * size, gap=gap)
    gate, up = gate_up.chunk(2, dim=-1)
    found, expected = library.swiglu(gate_up), functional.silu(gate) * up
    check_close(found, expected)


@given(
    num_rows=ROWS, heads=st.integers(1, 3), dim=st.integers(1, 70), page_size=st.integers(1, 4), seed=SEEDS, gap=SIZES
)
def test_rows_of_kv_go_only_to_their_slots(
    library: Library, dtype: torch.dtype, num_rows: int, heads: int, dim: int, page_size: int, seed: int, gap: int
) -> None:
    found, expected = (kv_pool(6, heads, 2, page_size, dim, dtype) for _ in range(2))
    slots = torch.randperm(6 * page_size, generator=torch.Generator().manual_seed(seed))[:num_rows]
    kv = draw(dtype, seed, len(slots), 3, heads, dim, gap=gap)[:, 1:]
    library.store_kv(found.group("full_attention")[:, :, 1], slots, kv)
    for row, slot in enumerate(slots.tolist()):
        expected.group("full_attention")[slot // page_size, :, 1, :, slot % page_size] = kv[row].transpose(0, 1)
    check_same(found.group("full_attention"), expected.group("full_attention"))


@given(
    num_tokens=ROWS,
    heads=st.tuples(st.integers(1, 5), st.integers(1, 2)),
    half=st.integers(1, 40),
    rest=REST,
    has_norms=st.booleans(),
    seed=SEEDS,
    gap=SIZES,
)
def test_heads_are_rotated_into_their_slots(
    library: Library,
    dtype: torch.dtype,
    num_tokens: int,
    heads: tuple[int, int],
    half: int,
    rest: int,
    has_norms: bool,
    seed: int,
    gap: int,
) -> None:
    (num_queries, num_kv), dim, page_size = heads, 2 * half + rest, 3
    found, expected = (kv_pool(6, num_kv, 2, page_size, dim, dtype) for _ in range(2))
    of_layer = [pool.group("full_attention")[:, :, 1] for pool in (found, expected)]
    slots = torch.randperm(6 * page_size, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    num_heads = num_queries + 2 * num_kv
    row = draw(dtype, seed, num_tokens, num_heads * dim, gap=gap).view(num_tokens, num_heads, dim)
    q, k, v = torch.split(row, [num_queries, num_kv, num_kv], dim=1)
    cos, sin = (draw(dtype, seed + number, num_tokens, 1, 2 * half) for number in (1, 2))
    weights = (draw(dtype, seed + 3, dim), draw(dtype, seed + 4, dim)) if has_norms else None
    turned = library.rotate_storing(row, cos, sin, weights, EPS, of_layer[0], slots)
    q_weight, k_weight = weights or (None, None)
    library.store_kv(of_layer[1], slots, torch.stack((library.rotate(k, cos, sin, k_weight, EPS), v), dim=1))
    check_same(turned, library.rotate(q, cos, sin, q_weight, EPS))
    check_same(found.group("full_attention"), expected.group("full_attention"))


def test_numbers_at_the_edge(library: Library, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL * 7).to(dtype)[None]
    gate_up = torch.cat((x, torch.ones_like(x)), dim=1)
    found, expected = library.swiglu(gate_up), functional.silu(x)
    check_close(found, expected)
    zeros = torch.zeros(1, 1, x.shape[1], dtype=dtype)
    ones = torch.ones_like(zeros)
    turned = Rotation(ones, zeros).apply(x[None])
    torch.testing.assert_close(library.rotate(x[None], ones, zeros), turned, rtol=0.0, atol=0.0, equal_nan=True)
    assert library.rms_norm(x, torch.ones(x.shape[1], dtype=dtype), EPS).isnan().all()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_share_many_rows(
    library: Library, dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.native.library.LEAST_SHARED", 64)
    shared = Library(compiled_library(find_compiler()), num_threads)
    x, y, layer = draw(dtype, 1, 50, 64), draw(dtype, 2, 50, 64), norm(dtype, 3, 64)
    cos, sin = draw(dtype, 4, 50, 1, 64), draw(dtype, 5, 50, 1, 64)
    calls: list[Callable[[Library], torch.Tensor]] = [
        lambda kernels: kernels.rms_norm(x, layer.weight, EPS),
        lambda kernels: torch.cat(kernels.add_rms_norm(x, y, layer.weight, EPS)),
        lambda kernels: kernels.rotate(x[:, None], cos, sin, layer.weight, EPS),
        lambda kernels: kernels.swiglu(x),
    ]
    for call in calls:
        check_norm(call(shared), call(library))


def test_layers_use_them(library: Library, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    class Noting(Library):
        def __getattribute__(self, name: str) -> object:
            used.append(name)
            return object.__getattribute__(library, name)

    monkeypatch.setitem(elementwise._REGISTERED, (CPU, dtype), object.__new__(Noting))
    layer, x = RMSNorm(8, EPS), torch.ones(2, 8, dtype=dtype)
    layer.weight = torch.nn.Parameter(torch.ones(8, dtype=dtype), requires_grad=False)
    rotation, pool = Rotation(x[:, None], x[:, None]), kv_pool(1, 1, 1, 2, 8, dtype)
    layer(x), layer.of_sum(x, x), gated(x), rotation.apply(x[:, None], layer)
    slots = pool.kv_slots(0, torch.arange(2))
    assert slots is not None
    rotation.apply_storing(torch.ones(2, 3, 8, dtype=dtype), layer, layer, slots)
    for num_rows in (2, 0):
        kv_pool(1, 1, 1, 2, 4, dtype).write(0, torch.arange(num_rows), x[:num_rows, None])
    assert set(used) == NAMES
