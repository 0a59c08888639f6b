"""Native elementwise kernels equal plain torch bit by bit: any sizes and strides, for each kind of processor."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from tests.fakes.kv import kv_pool
from workers.device import CPU
from workers.kernels import elementwise
from workers.layers.attention import Rotation
from workers.layers.feed_forward import gated
from workers.layers.linear import RMSNorm
from workers.native.compile import Compiler, compiled_library, find_compiler, runnable_kinds
from workers.native.library import Library

pytestmark = pytest.mark.native

EPS = 1e-6
NAMES = {"rms_norm", "add_rms_norm", "rotate", "store_kv", "swiglu"}
SPECIAL = (0.0, -0.0, 1e-38, 1e-30, 90.0, -90.0, 3e38, float("inf"), float("-inf"), float("nan"))
ROWS, SIZES, SEEDS = st.integers(0, 5), st.integers(1, 150), st.integers(0, 2**30)


@pytest.fixture(scope="module", params=runnable_kinds(), ids=lambda kind: kind.name)
def library(request: pytest.FixtureRequest) -> Library:
    return Library(compiled_library(Compiler(find_compiler().path, request.param)), 1)


def draw(seed: int, *shape: int, gap: int = 0) -> torch.Tensor:
    """Return numbers of many magnitudes, with ``gap`` others between rows."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(*shape[:-1], shape[-1] + gap, generator=generator)
    return (wide * torch.exp(wide.flip(-1) * 2)).bfloat16()[..., : shape[-1]]


def norm(seed: int, size: int) -> RMSNorm:
    layer = RMSNorm(size, EPS)
    layer.weight = torch.nn.Parameter(draw(seed, size), requires_grad=False)
    return layer


def check_norm(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare bits. The last one may differ, because sums of squares may be computed in another order."""
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.0)
    assert (found != expected).sum() <= 0.02 * expected.numel() + 1


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


@given(num_rows=ROWS, size=SIZES, gap=st.integers(0, 3), seed=SEEDS)
def test_norms(library: Library, num_rows: int, size: int, gap: int, seed: int) -> None:
    layer = norm(seed, size)
    x, y = (draw(seed + number, num_rows, size, gap=gap) for number in (1, 2))
    check_norm(library.rms_norm(x, layer.weight, EPS), layer(x))
    total, normed = library.add_rms_norm(x, y, layer.weight, EPS)
    expected_total, expected = layer.of_sum(x, y)
    assert same_bits(total, expected_total)
    check_norm(normed, expected)


@given(num_tokens=ROWS, heads=st.integers(1, 3), half=st.integers(1, 75), gap=st.integers(0, 3), seed=SEEDS)
def test_rotations(library: Library, num_tokens: int, heads: int, half: int, gap: int, seed: int) -> None:
    x, layer = draw(seed, num_tokens, heads + 1, 2 * half, gap=gap)[:, :heads], norm(seed, 2 * half)
    rotation = Rotation(*(draw(seed + number, num_tokens, 1, 2 * half) for number in (1, 2)))
    assert same_bits(library.rotate(x, rotation.cos, rotation.sin), rotation.apply(x))
    normed = library.rotate(layer(x), rotation.cos, rotation.sin)
    found = library.rotate(x, rotation.cos, rotation.sin, layer.weight, EPS)
    torch.testing.assert_close(found, normed, rtol=2**-6, atol=2**-6 * float(normed.abs().max()) if x.numel() else 0.0)


@given(num_rows=ROWS, size=SIZES, gap=st.integers(0, 3), seed=SEEDS)
def test_gates(library: Library, num_rows: int, size: int, gap: int, seed: int) -> None:
    gate_up = draw(seed, num_rows, 2 * size, gap=gap)
    gate, up = gate_up.chunk(2, dim=-1)
    found, expected = library.swiglu(gate_up), functional.silu(gate) * up
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.0)


@given(
    num_rows=ROWS, heads=st.integers(1, 3), dim=st.integers(1, 70), page_size=st.integers(1, 4), seed=SEEDS, gap=SIZES
)
def test_rows_of_kv_go_only_to_their_slots(
    library: Library, num_rows: int, heads: int, dim: int, page_size: int, seed: int, gap: int
) -> None:
    found, expected = (kv_pool(6, heads, 2, page_size, dim, torch.bfloat16) for _ in range(2))
    slots = torch.randperm(6 * page_size, generator=torch.Generator().manual_seed(seed))[:num_rows]
    kv = draw(seed, len(slots), 3, heads, dim, gap=gap)[:, 1:]
    library.store_kv(found.group("full_attention")[:, :, 1], slots, kv)
    for row, slot in enumerate(slots.tolist()):
        expected.group("full_attention")[slot // page_size, :, 1, :, slot % page_size] = kv[row].transpose(0, 1)
    assert same_bits(found.group("full_attention"), expected.group("full_attention"))


def test_numbers_at_the_edge(library: Library) -> None:
    x = torch.tensor(SPECIAL * 7).bfloat16()[None]
    gate_up = torch.cat((x, torch.ones_like(x)), dim=1)
    found, expected = library.swiglu(gate_up), functional.silu(x)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=0.0, equal_nan=True)
    zeros = torch.zeros(1, 1, x.shape[1]).bfloat16()
    ones = torch.ones_like(zeros)
    turned = Rotation(ones, zeros).apply(x[None])
    torch.testing.assert_close(library.rotate(x[None], ones, zeros), turned, rtol=0.0, atol=0.0, equal_nan=True)
    assert library.rms_norm(x, torch.ones(x.shape[1]).bfloat16(), EPS).isnan().all()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_threads_share_many_rows(library: Library, num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.native.library._LEAST_SHARED", 64)
    shared = Library(compiled_library(find_compiler()), num_threads)
    x, y, layer = draw(1, 50, 64), draw(2, 50, 64), norm(3, 64)
    cos, sin = draw(4, 50, 1, 64), draw(5, 50, 1, 64)
    calls: list[Callable[[Library], torch.Tensor]] = [
        lambda kernels: kernels.rms_norm(x, layer.weight, EPS),
        lambda kernels: torch.cat(kernels.add_rms_norm(x, y, layer.weight, EPS)),
        lambda kernels: kernels.rotate(x[:, None], cos, sin, layer.weight, EPS),
        lambda kernels: kernels.swiglu(x),
    ]
    for call in calls:
        check_norm(call(shared), call(library))


def test_layers_use_them_only_for_bf16(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    class Noting(Library):
        def __getattribute__(self, name: str) -> object:
            used.append(name)
            return object.__getattribute__(library, name)

    monkeypatch.setitem(elementwise._REGISTERED, (CPU, torch.bfloat16), object.__new__(Noting))
    for dtype, expected in ((torch.float32, set()), (torch.bfloat16, NAMES)):
        used.clear()
        layer, x = RMSNorm(8, EPS), torch.ones(2, 8, dtype=dtype)
        layer.weight = torch.nn.Parameter(torch.ones(8, dtype=dtype), requires_grad=False)
        layer(x), layer.of_sum(x, x), gated(x), Rotation(x[:, None], x[:, None]).apply(x[:, None], layer)
        kv_pool(1, 1, 1, 2, 4, dtype).write(0, torch.arange(2), x.view(2, 1, 8))
        assert expected <= set(used)
        assert bool(used) == bool(expected)
