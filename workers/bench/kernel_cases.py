"""Kernels of `baton bench kernels` at the shapes of a model, with the least FLOPs or bytes of each."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from cluster.spec.kv import FULL_ATTENTION, KvGeometry, key_value_group, pages_for
from workers.attention.interface import AttentionParams, GraphShape
from workers.attention.runs import Run
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.decode import DecodeAttention
from workers.bench.kernels import Launch
from workers.bench.results import Limit
from workers.bench.shapes import BenchShape
from workers.kernels.experts import grouped_matmul, tiles_of
from workers.kernels.triton_elementwise import add_rms_norm, rotate_storing, swiglu
from workers.memory.page_pool import PagePool

PAGE_SIZE = 64
NUM_EXPERTS = 8
"""Number of experts, each as wide as the shape's MLP, that share the tokens evenly."""
_DTYPE = torch.bfloat16
_Batch = Sequence[tuple[int, int]]
"""Number of requests and their length."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    kernel: str
    limit: Limit
    work: float
    """FLOPs, or bytes read and written, at least."""
    run: Launch
    peers: Mapping[str, Launch] = field(default_factory=dict)
    """Other implementations: torch, flash_attn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    prompt_len: int = 8192
    prefix_len: int = 30_720
    chunk_len: int = 2048
    decode_len: int = 32_768
    decode_kv_bytes: int = 2 << 30
    """KV of a batch of requests of ``decode_len``."""
    long_len: int = 131_072
    """Length of a request that is decoded alone, and then in a batch of short ones."""
    short_len: int = 2000
    num_short: int = 63
    least_bytes: int = 512 << 20
    """Memory that is timed together: far more than a cache holds."""


def kernel_cases(shape: BenchShape, sizes: Sizes, device: torch.device) -> Iterator[list[KernelCase]]:
    """Yield the kernels one by one, so that the memory of each can be released before the next.

    A short kernel comes as several copies over different memory: launched in a row they find nothing in a cache, and
    launch overhead counts little.
    """
    for make in (
        partial(_prefill, num_tokens=sizes.prompt_len, prefix_len=0),
        partial(_prefill, num_tokens=sizes.chunk_len, prefix_len=sizes.prefix_len),
        *(partial(_decode, batch=batch) for batch in _decode_batches(shape, sizes)),
        *(partial(make, num=sizes.prompt_len) for make in (_rotate, _norm, _swiglu, _experts)),
    ):
        cases = [make(shape, device)]
        if cases[0].limit is Limit.BYTES:
            cases += [make(shape, device) for _ in range(1, math.ceil(sizes.least_bytes / cases[0].work))]
        yield cases


def _prefill(shape: BenchShape, device: torch.device, *, num_tokens: int, prefix_len: int) -> KernelCase:
    total = prefix_len + num_tokens
    pool, table = _pages(shape, device, total)
    kv, params = pool.layer_view(0), AttentionParams(shape.head_dim**-0.5)
    query = _random(device, num_tokens, shape.heads, shape.head_dim)
    step = TritonAttention().prepare([Run(0, prefix_len, num_tokens, 1)], [table], PAGE_SIZE)
    key, value = _random(device, 2, 1, total, shape.kv_heads, shape.head_dim)
    pairs = num_tokens * prefix_len + num_tokens * (num_tokens + 1) / 2
    return KernelCase(
        f"prefill {num_tokens}" + (f" after {prefix_len}" if prefix_len else ""),
        Limit.FLOPS,
        4.0 * shape.heads * shape.head_dim * pairs,
        lambda: step.attend(query, *kv, params),
        _attention_peers([(query[None], key, value)], is_causal=True),
    )


def _decode_batches(shape: BenchShape, sizes: Sizes) -> list[_Batch]:
    request_bytes = sizes.decode_len * shape.kv_row_len * _DTYPE.itemsize
    long = (1, sizes.long_len)
    return [
        [(max(1, sizes.decode_kv_bytes // request_bytes), sizes.decode_len)],
        [long],
        [(sizes.num_short, sizes.short_len), long],
    ]


def _decode(shape: BenchShape, device: torch.device, *, batch: _Batch) -> KernelCase:
    lens = [length for count, length in batch for _ in range(count)]
    num_pages = [pages_for(length, PAGE_SIZE) for length in lens]
    pool, pages = _pages(shape, device, sum(num_pages) * PAGE_SIZE)
    kv, params = pool.layer_view(0), AttentionParams(shape.head_dim**-0.5)
    query = _random(device, len(lens), shape.heads, shape.head_dim)
    step = DecodeAttention(
        GraphShape(
            num_requests=len(lens),
            most_pages=max(num_pages),
            page_size=PAGE_SIZE,
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=query.dtype,
            device=device,
        )
    )
    step.fill(lens, [table.numpy() for table in torch.split(pages.cpu(), num_pages)])
    contiguous = []
    for queries, (count, length) in zip(torch.split(query, [count for count, _ in batch]), batch, strict=True):
        key, value = _random(device, 2, count, shape.kv_heads, length, shape.head_dim).transpose(2, 3)
        contiguous.append((queries[:, None], key, value))
    return KernelCase(
        "decode " + " + ".join(f"{count} x {length}" for count, length in batch),
        Limit.BYTES,
        float(sum(lens) * shape.kv_row_len * _DTYPE.itemsize),
        lambda: step.attend(query, *kv, params),
        _attention_peers(contiguous, is_causal=False),
    )


def _attention_peers(batches: Sequence[tuple[Tensor, Tensor, Tensor]], *, is_causal: bool) -> dict[str, Launch]:
    """Return attention of ``[request, token, head, D]``, one call per batch; causal ones end with the same token."""
    peers: dict[str, Launch] = {"torch": lambda: [_sdpa(*batch, is_causal=is_causal) for batch in batches]}
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return peers
    return peers | {"flash_attn": lambda: [flash_attn_func(*batch, causal=is_causal) for batch in batches]}


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = causal_lower_right(q.shape[2], k.shape[2]) if is_causal else None
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def _rotate(shape: BenchShape, device: torch.device, *, num: int) -> KernelCase:
    heads = _random(device, num, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    angles = _random(device, num, 1, shape.head_dim)
    layer, slots = _slots(shape, device, num)
    run = partial(rotate_storing, heads, angles, angles, None, 0.0, layer, slots)
    return KernelCase("rotate and store", Limit.BYTES, 2.0 * heads.nbytes, run)


def _norm(shape: BenchShape, device: torch.device, *, num: int) -> KernelCase:
    (hidden, added), weight = _random(device, 2, num, shape.hidden), _random(device, shape.hidden)
    run = partial(add_rms_norm, hidden, added, weight, 1e-6)
    return KernelCase("add and normalize", Limit.BYTES, 4.0 * hidden.nbytes, run)


def _swiglu(shape: BenchShape, device: torch.device, *, num: int) -> KernelCase:
    gate_up = _random(device, num, 2 * shape.inner)
    return KernelCase("swiglu", Limit.BYTES, 1.5 * gate_up.nbytes, lambda: swiglu(gate_up))


def _experts(shape: BenchShape, device: torch.device, *, num: int) -> KernelCase:
    counts = [num // NUM_EXPERTS + (expert < num % NUM_EXPERTS) for expert in range(NUM_EXPERTS)]
    x, weights = _random(device, num, shape.hidden), _random(device, NUM_EXPERTS, shape.inner, shape.hidden)
    tiles = tiles_of(counts, x.itemsize, device)
    work = 2.0 * num * shape.hidden * shape.inner
    return KernelCase(f"{NUM_EXPERTS} experts", Limit.FLOPS, work, lambda: grouped_matmul(x, weights, tiles))


def _pages(shape: BenchShape, device: torch.device, num_tokens: int) -> tuple[PagePool, Tensor]:
    """Return a pool and all of its pages in random order."""
    num_pages = pages_for(num_tokens, PAGE_SIZE)
    dtype = str(_DTYPE).removeprefix("torch.")
    group = key_value_group(range(1), shape.kv_heads, shape.head_dim, dtype)
    geometry = KvGeometry(model="bench", num_layers=1, groups=(group,), page_size=PAGE_SIZE)
    pool = PagePool.of_one_rank(geometry, num_pages, device)
    pool.group(FULL_ATTENTION).normal_()
    return pool, torch.randperm(num_pages, device=device)


def _slots(shape: BenchShape, device: torch.device, num_tokens: int) -> tuple[Tensor, Tensor]:
    pool, pages = _pages(shape, device, num_tokens)
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten()[:num_tokens]
    layer_pages = pool.layer_pages(0)
    assert layer_pages is not None, "keys and values of different widths"
    return layer_pages, slots


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(_DTYPE)
