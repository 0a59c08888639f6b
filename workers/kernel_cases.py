"""What `baton bench kernels` runs: each kernel at the shapes of a model, with the work that it cannot do without."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cluster.spec.sampling import Sampling
from workers.attention.triton.backend import TritonAttention, unwritten, unwritten_parts
from workers.attention.triton.tiling import PROGRAMS
from workers.cache.page_pool import PagePool
from workers.context_parallel.runs import Run
from workers.device import index_on
from workers.engine.chances import plain_race
from workers.engine.cutoffs import Limits, ranked_cutoffs
from workers.kernel_result import HeadShape, Limit
from workers.kernels.attention import attend, blocks_for
from workers.kernels.copy_pages import gather_pages, scatter_pages
from workers.kernels.cutoffs import find_cutoffs
from workers.kernels.grouped_matmul import grouped_matmul, tiles_of
from workers.kernels.merge import merge_partials
from workers.kernels.race import win_race
from workers.kernels.rms_norm import add_rms_norm
from workers.kernels.rotate import rotate
from workers.kernels.store_kv import store_kv
from workers.kernels.swiglu import swiglu

PAGE_SIZE = 64
NUM_EXPERTS = 8
"""As wide as the shape's MLP, each of which has its part of the tokens."""
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One line of the output."""

    kernel: str
    limit: Limit
    work: float
    """FLOPs, or bytes read and written at least."""
    run: Callable[[], object]
    peer: Callable[[], object] | None = None
    """The same by torch alone: its own attention, over as many keys that lie in rows, and draws."""
    flash: Callable[[], object] | None = None
    """The same by the flash_attn package, where that is installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is computed."""

    prompt_len: int = 8192
    prefix_len: int = 30_720
    chunk_len: int = 2048
    decode_len: int = 32_768
    decode_kv_bytes: int = 2 << 30
    """Of all requests that are decoded together."""
    num_drawn: int = 64
    """Tokens that are drawn together."""
    moved_kv_bytes: int = 512 << 20
    """That are stored and gathered: more than a cache holds."""


def kernel_cases(shape: HeadShape, sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    """One after another, so that each one's memory can be given back before the next."""
    yield _prefill(shape, device, sizes.prompt_len, 0)
    yield _prefill(shape, device, sizes.chunk_len, sizes.prefix_len)
    yield _decode(shape, device, sizes)
    yield _joined_parts(shape, device, _num_decoded(shape, sizes))
    yield from _of_rows(shape, device, sizes.prompt_len)
    yield _experts(shape, device, sizes.prompt_len)
    yield from _of_draws(shape, device, sizes.num_drawn)
    yield from _of_pages(shape, device, sizes.moved_kv_bytes // _row_bytes(shape))


def _prefill(shape: HeadShape, device: torch.device, num_tokens: int, prefix_len: int) -> KernelCase:
    total = prefix_len + num_tokens
    pool, table = _pages(shape, device, total)
    query = _random(device, num_tokens, shape.heads, shape.head_dim)
    step = TritonAttention().prepare([Run(0, prefix_len, num_tokens, 1)], [table], PAGE_SIZE)
    pairs = num_tokens * prefix_len + num_tokens * (num_tokens + 1) / 2
    key, value = _random(device, 2, total, shape.kv_heads, shape.head_dim)
    peer = None
    if not prefix_len:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))

        def peer() -> object:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    name = f"prefill {num_tokens}" + (f" behind {prefix_len}" if prefix_len else "")
    work = 4.0 * shape.heads * shape.head_dim * pairs
    flash = _flash(query[None], key[None], value[None], causal=True)
    return KernelCase(name, Limit.FLOPS, work, lambda: step.attend(query, *pool.layer_view(0)), peer, flash)


def _decode(shape: HeadShape, device: torch.device, sizes: Sizes) -> KernelCase:
    length, row_bytes, num_requests = sizes.decode_len, _row_bytes(shape), _num_decoded(shape, sizes)
    pages_each = -(-length // PAGE_SIZE)
    pool, pages = _pages(shape, device, num_requests * pages_each * PAGE_SIZE)
    tables = torch.split(pages, pages_each)
    query = _random(device, num_requests, shape.heads, shape.head_dim)
    runs = [Run(request, length - 1, 1, 1) for request in range(num_requests)]
    step = TritonAttention().prepare(runs, tables, PAGE_SIZE)
    k, v = _random(device, 2, num_requests, shape.kv_heads, length, shape.head_dim)

    def peer() -> object:
        return functional.scaled_dot_product_attention(query[:, :, None], k, v, enable_gqa=True)

    name = f"decode {num_requests} x {length}"
    work = float(num_requests * length * row_bytes)
    flash = _flash(query[:, None], k.transpose(1, 2), v.transpose(1, 2), causal=False)
    return KernelCase(name, Limit.BYTES, work, lambda: step.attend(query, *pool.layer_view(0)), peer, flash)


def _num_decoded(shape: HeadShape, sizes: Sizes) -> int:
    """Requests, of whose tokens so much KV is read."""
    return max(1, sizes.decode_kv_bytes // (sizes.decode_len * _row_bytes(shape)))


def _joined_parts(shape: HeadShape, device: torch.device, num_requests: int) -> KernelCase:
    """The case before without its keys: what it takes to leave and join as many parts as a recorded step may have."""
    each = (num_requests + PROGRAMS // shape.kv_heads) // num_requests
    pool, _ = _pages(shape, device, 1)
    query = _random(device, num_requests, shape.heads, shape.head_dim)
    result = unwritten(query)
    tile = torch.arange(num_requests * each, dtype=torch.int32, device=device)
    row, zero, one = tile // each, torch.zeros_like(tile), torch.ones_like(tile)
    tiles = torch.stack((row, one, zero, tile, one, tile % each, each * one, row * each, one), dim=1)
    segments = torch.stack((zero,) * 6, dim=1)
    tables, arrived = tile[:1].long(), torch.zeros(len(tile), shape.kv_heads, dtype=torch.int32, device=device)
    blocks = blocks_for(shape.heads // shape.kv_heads, shape.head_dim, _DTYPE.itemsize, PAGE_SIZE)

    def run() -> None:
        parts = unwritten_parts(query, arrived)
        where = {"tiles": tiles, "segments": segments, "tables": tables}
        attend(query, *pool.layer_view(0), *result, **where, page_size=PAGE_SIZE, blocks=blocks, parts=parts)

    # Each part is written and read.
    part_bytes = 4 * len(tile) * shape.heads * (shape.head_dim + 1)
    work = float(2 * part_bytes + query.nbytes + result.out.nbytes + result.lse.nbytes)
    return KernelCase(f"join {num_requests} x {each} parts", Limit.BYTES, work, run)


def _flash(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Callable[[], object] | None:
    """Of ``[request, token, head, D]``; causal ones end with the same token. None without the package."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None
    return lambda: flash_attn_func(query, key, value, causal=causal)


def _of_rows(shape: HeadShape, device: torch.device, num_tokens: int) -> Iterator[KernelCase]:
    outs = [_random(device, num_tokens, shape.heads, shape.head_dim) for _ in range(4)]
    lses = [torch.zeros(num_tokens, shape.heads, device=device) for _ in outs]
    out, partial_bytes = outs[0], outs[0].nbytes + lses[0].nbytes
    yield KernelCase("merge 4 partials", Limit.BYTES, 5.0 * partial_bytes, lambda: merge_partials(outs, lses))
    turn = _random(device, num_tokens, 1, shape.head_dim)
    yield KernelCase("rotate", Limit.BYTES, 2.0 * out.nbytes, lambda: rotate(out, turn, turn))
    (hidden, added), weight = _random(device, 2, num_tokens, shape.hidden), _random(device, shape.hidden)
    yield KernelCase(
        "normalise a sum", Limit.BYTES, 4.0 * hidden.nbytes, lambda: add_rms_norm(hidden, added, weight, 1e-6)
    )
    gate_up = _random(device, num_tokens, 2 * shape.inner)
    yield KernelCase("gate", Limit.BYTES, 1.5 * gate_up.nbytes, lambda: swiglu(gate_up))


def _experts(shape: HeadShape, device: torch.device, num_tokens: int) -> KernelCase:
    counts = [num_tokens // NUM_EXPERTS + (expert < num_tokens % NUM_EXPERTS) for expert in range(NUM_EXPERTS)]
    x, weights = _random(device, num_tokens, shape.hidden), _random(device, NUM_EXPERTS, shape.inner, shape.hidden)
    tiles = tiles_of(counts, x.itemsize, device)
    work = 2.0 * num_tokens * shape.hidden * shape.inner
    return KernelCase(f"{NUM_EXPERTS} experts", Limit.FLOPS, work, lambda: grouped_matmul(x, weights, tiles))


def _of_draws(shape: HeadShape, device: torch.device, num_rows: int) -> Iterator[KernelCase]:
    weights, keys = torch.rand(num_rows, shape.vocab, device=device), list(range(num_rows))
    keys_there = index_on(keys, device)
    yield KernelCase(
        "draw",
        Limit.BYTES,
        float(weights.nbytes),
        lambda: win_race(weights, keys_there),
        lambda: plain_race(weights, keys),
    )
    scores = weights - weights.amax(dim=-1, keepdim=True)
    limits = Limits.of([Sampling(top_p=0.9)] * num_rows, scores)
    cutoffs, is_sure = scores[:, 0].clone(), torch.zeros(num_rows, dtype=torch.bool, device=device)
    yield KernelCase(
        "top-p of likely many",
        Limit.BYTES,
        float(scores.nbytes),
        lambda: find_cutoffs(scores, *limits, is_sure, cutoffs),
        lambda: ranked_cutoffs(scores, limits, shape.vocab),
    )


def _of_pages(shape: HeadShape, device: torch.device, num_tokens: int) -> Iterator[KernelCase]:
    pool, pages = _pages(shape, device, num_tokens)
    kv = _random(device, num_tokens, 2, shape.kv_heads, shape.head_dim)
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten()[:num_tokens]
    yield KernelCase("store K and V", Limit.BYTES, 2.0 * kv.nbytes, lambda: store_kv(pool.data[:, :, 0], slots, kv))
    staged = torch.empty_like(pool.data[: len(pages)])
    yield KernelCase("gather pages", Limit.BYTES, 2.0 * staged.nbytes, lambda: gather_pages(pool.data, pages, staged))
    yield KernelCase("scatter pages", Limit.BYTES, 2.0 * staged.nbytes, lambda: scatter_pages(staged, pages, pool.data))


def _row_bytes(shape: HeadShape) -> int:
    """K and V of a token."""
    return 2 * shape.kv_heads * shape.head_dim * _DTYPE.itemsize


def _pages(shape: HeadShape, device: torch.device, num_tokens: int) -> tuple[PagePool, Tensor]:
    """A pool of one layer, and all of its pages in no order."""
    num_pages = -(-num_tokens // PAGE_SIZE)
    pool = PagePool(num_pages, shape.kv_heads, 1, PAGE_SIZE, shape.head_dim, _DTYPE, device=device)
    pool.data.normal_()
    return pool, torch.randperm(num_pages, device=device)


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(_DTYPE)
