"""The small kernels against what they stand for in plain torch, on any device."""

import torch
from hypothesis import strategies as st
from torch.nn import functional

from workers.cache.page_pool import PagePool
from workers.kernels.copy_pages import gather_pages, scatter_pages
from workers.kernels.grouped_matmul import grouped_matmul
from workers.kernels.rms_norm import add_rms_norm, rms_norm
from workers.kernels.rotate import rotate
from workers.kernels.store_kv import store_kv
from workers.kernels.swiglu import swiglu
from workers.layers.rms_norm import RMSNorm
from workers.layers.rotary import Rotation

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
NUM_ROWS = st.sampled_from([0, 1, 2, 5, 17])


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """``wanted`` is computed in fp64 from what the kernel was given."""
    tolerance = 5e-6 if found.dtype == torch.float32 else 4e-3
    assert found.shape == wanted.shape
    difference = (found.cpu().double() - wanted).norm()
    assert difference <= tolerance * max(wanted.norm().item(), 1e-3), f"{difference}"


def check_store(data: st.DataObject, device: str) -> None:
    page_size, heads, dim = data.draw(st.sampled_from([(16, 2, 64), (64, 1, 80), (5, 3, 16)]))
    num_rows, dtype = data.draw(NUM_ROWS), data.draw(DTYPES)
    pools = [PagePool(4, heads, 3, page_size, dim, dtype) for _ in range(2)]
    slots = torch.randperm(4 * page_size)[:num_rows]
    kv = torch.randn(num_rows, heads, 2, dim).to(dtype).transpose(1, 2)
    pools[0].write(1, slots, kv)
    written = pools[1].data.to(device)
    store_kv(written[:, :, 1], slots.to(device), kv.to(device))
    assert torch.equal(written.cpu(), pools[0].data)


def check_copy(data: st.DataObject, device: str) -> None:
    heads, layers = data.draw(
        st.sampled_from([(slice(0, 4), slice(0, 3)), (slice(1, 3), slice(0, 3)), (slice(2, 3), slice(1, 3))])
    )
    pool = PagePool(6, 4, 3, data.draw(st.sampled_from([4, 16])), 8, data.draw(DTYPES))
    pool.data.copy_(torch.randn(pool.data.shape))
    pages = torch.randperm(6)[: data.draw(st.integers(0, 6))]
    view = pool.data.to(device)[:, heads, layers]
    staged = torch.empty((len(pages), *view.shape[1:]), dtype=view.dtype, device=device)
    gather_pages(view, pages.to(device), staged)
    assert torch.equal(staged.cpu(), pool.data[pages][:, heads, layers])
    other = torch.zeros_like(pool.data).to(device)
    scatter_pages(staged, pages.to(device), other[:, heads, layers])
    expected = torch.zeros_like(pool.data)
    expected[:, heads, layers][pages] = pool.data[pages][:, heads, layers]
    assert torch.equal(other.cpu(), expected)


def check_norm(data: st.DataObject, device: str) -> None:
    dtype, size = data.draw(DTYPES), data.draw(st.sampled_from([1, 96, 128, 1000]))
    x, y = (torch.randn(data.draw(NUM_ROWS), 2 * size).to(dtype)[:, :size] for _ in range(2))
    y = x.flip(0) if len(x) != len(y) else y
    norm = RMSNorm(size, 1e-6)
    norm.weight.data = torch.randn(size).to(dtype)
    total = x + y
    x_, y_, weight = (tensor.to(device) for tensor in (x, y, norm.weight))
    near(rms_norm(x_, weight, norm.eps), norm.double()(x.double()))
    found_total, found = add_rms_norm(x_, y_, weight, norm.eps)
    assert torch.equal(found_total.cpu(), total)
    near(found, norm(total.double()))


def check_rotate(data: st.DataObject, device: str) -> None:
    dtype, dim = data.draw(DTYPES), data.draw(st.sampled_from([2, 64, 80, 128, 256]))
    num_tokens, heads = data.draw(NUM_ROWS), data.draw(st.sampled_from([1, 3, 9]))
    x = torch.randn(num_tokens, 2 * heads, dim).to(dtype)[:, :heads]
    cos, sin = (torch.randn(num_tokens, 1, dim).to(dtype) for _ in range(2))
    norm = RMSNorm(dim, 1e-6)
    norm.weight.data = torch.randn(dim).to(dtype)
    x_, cos_, sin_, weight_ = (tensor.to(device) for tensor in (x, cos, sin, norm.weight))
    rotation = Rotation(cos.double(), sin.double())
    near(rotate(x_, cos_, sin_), rotation.apply(x.double()))
    near(rotate(x_, cos_, sin_, weight_, norm.eps), rotation.apply(norm.double()(x.double())))


def check_swiglu(data: st.DataObject, device: str) -> None:
    gate_up = torch.randn(data.draw(NUM_ROWS), 2 * data.draw(st.sampled_from([1, 100, 1500]))).to(data.draw(DTYPES)) * 4
    gate, up = gate_up.double().chunk(2, dim=1)
    near(swiglu(gate_up.to(device)), functional.silu(gate) * up)


def check_grouped(data: st.DataObject, device: str) -> None:
    counts = data.draw(st.lists(st.sampled_from([0, 1, 3, 16, 70]), min_size=1, max_size=4))
    inner, cols, dtype = data.draw(st.sampled_from([8, 100])), data.draw(st.sampled_from([16, 130])), data.draw(DTYPES)
    x, weights = torch.randn(sum(counts), inner).to(dtype), torch.randn(len(counts), cols, inner).to(dtype)
    parts = [rows.double() @ matrix.double().T for rows, matrix in zip(torch.split(x, counts), weights, strict=True)]
    near(grouped_matmul(x.to(device), weights.to(device), counts), torch.cat(parts))


CHECKS = (check_store, check_copy, check_norm, check_rotate, check_swiglu, check_grouped)
