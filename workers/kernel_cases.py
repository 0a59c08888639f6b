"""What `baton bench kernels` runs: each kernel at the shapes of a model, with the work that it cannot do without."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from cluster.spec.kv import pages_for
from workers.attention.interface import GraphShape
from workers.attention.params import AttentionParams
from workers.attention.runs import Run
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.decode import DecodeAttention
from workers.cache.page_pool import PagePool
from workers.engine.chances import plain_race
from workers.engine.cutoffs import ranked_cutoffs
from workers.kernel_result import HeadShape, Limit, Way
from workers.kernels.copy_pages import copy_pages
from workers.kernels.cutoffs import find_cutoffs
from workers.kernels.grouped_matmul import grouped_matmul, tiles_of
from workers.kernels.merge import merge_partials
from workers.kernels.race import win_race
from workers.kernels.rms_norm import add_rms_norm
from workers.kernels.rotate import rotate, rotate_storing
from workers.kernels.store_kv import store_kv
from workers.kernels.sum_choices import sum_choices
from workers.kernels.swiglu import swiglu

PAGE_SIZE = 64
NUM_EXPERTS = 8
"""As wide as the shape's MLP, each of which has its part of the tokens."""
NUM_CHOSEN = 2
"""Of them, by each token."""
NUM_LAYERS, PIECE_LAYERS = 32, 4
"""Of pages that go to the host or come from there, and of them those that do it together: in pieces so small that
workers.cache.page_copies has a kernel copy them. Whole pages it leaves to the copy engine, which sets the limit."""
_DTYPE = torch.bfloat16
_PAST_ALL = 1 << 30
"""Counters of parts that begin here never say of one that it is the last."""

_Launch = Callable[[], object]
_Batch = Sequence[tuple[int, int]]
"""How many requests there are, of each length."""


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One line of the output."""

    kernel: str
    limit: Limit
    work: float
    """FLOPs, or bytes read and written at least."""
    run: _Launch
    beside: Mapping[Way, _Launch] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is computed."""

    prompt_len: int = 8192
    prefix_len: int = 30_720
    chunk_len: int = 2048
    decode_len: int = 32_768
    decode_kv_bytes: int = 2 << 30
    """Of all requests of that length that are decoded together."""
    long_len: int = 131_072
    """Of a request that is decoded alone, and then beside short ones."""
    short_len: int = 2000
    num_short: int = 63
    num_drawn: int = 64
    """Tokens that are drawn together."""
    moved_kv_bytes: int = 1 << 30
    """That are stored and gathered: as many as are copied to measure the chip."""
    linked_kv_bytes: int = 1 << 30
    """Of the pages some of whose layers go to the host, or come from there."""
    least_bytes: int = 512 << 20
    """That are timed together: far more than a cache holds."""


def kernel_cases(shape: HeadShape, sizes: Sizes, device: torch.device) -> Iterator[list[KernelCase]]:
    """One kernel after another, so that each one's memory can be given back before the next.

    A short one comes several times, each over memory of its own: launched in a row they find nothing in a cache, and
    what launches take beside their kernels counts little.
    """
    num_moved = sizes.moved_kv_bytes // _row_bytes(shape)
    for make in (
        partial(_prefill, num_tokens=sizes.prompt_len, prefix_len=0),
        partial(_prefill, num_tokens=sizes.prefix_len + sizes.chunk_len, prefix_len=0),
        partial(_prefill, num_tokens=sizes.chunk_len, prefix_len=sizes.prefix_len),
        *(partial(_decode, batch=batch) for batch in _decoded(shape, sizes)),
        *(partial(make, num_tokens=sizes.prompt_len) for make in _OF_TOKENS),
        *(partial(make, num_rows=sizes.num_drawn) for make in (_draw, _top_p)),
        *(partial(make, num_tokens=num_moved) for make in (_store, _gather, _scatter)),
        *(partial(make, num_pages=sizes.linked_kv_bytes // _page_bytes(shape)) for make in (_save, _load)),
    ):
        cases = [make(shape, device)]
        if cases[0].limit is Limit.BYTES:
            cases += [make(shape, device) for _ in range(1, math.ceil(sizes.least_bytes / cases[0].work))]
        yield cases


def _prefill(shape: HeadShape, device: torch.device, *, num_tokens: int, prefix_len: int) -> KernelCase:
    total = prefix_len + num_tokens
    pool, table = _pages(shape, device, total)
    kv, params = pool.layer_view(0), AttentionParams(shape.head_dim**-0.5)
    query = _random(device, num_tokens, shape.heads, shape.head_dim)
    run = Run(0, prefix_len, num_tokens, 1)
    step, unjoined = (TritonAttention().prepare([run], [table], PAGE_SIZE) for _ in range(2))
    unjoined.attend(query, *kv, params)
    for counters in unjoined.arrived:
        counters.fill_(_PAST_ALL)
    key, value = _random(device, 2, 1, total, shape.kv_heads, shape.head_dim)
    beside = _by_others([(query[None], key, value)], is_causal=True)
    if unjoined.arrived:
        beside[Way.UNJOINED] = lambda: unjoined.attend(query, *kv, params)
    name = f"prefill {num_tokens}" + (f" behind {prefix_len}" if prefix_len else "")
    pairs = num_tokens * prefix_len + num_tokens * (num_tokens + 1) / 2
    work = 4.0 * shape.heads * shape.head_dim * pairs
    return KernelCase(name, Limit.FLOPS, work, lambda: step.attend(query, *kv, params), beside)


def _decoded(shape: HeadShape, sizes: Sizes) -> list[_Batch]:
    num_equal = max(1, sizes.decode_kv_bytes // (sizes.decode_len * _row_bytes(shape)))
    long = (1, sizes.long_len)
    return [[(num_equal, sizes.decode_len)], [long], [(sizes.num_short, sizes.short_len), long]]


def _decode(shape: HeadShape, device: torch.device, *, batch: _Batch) -> KernelCase:
    """Decode attention as captured steps compute it."""
    lens = [length for count, length in batch for _ in range(count)]
    num_pages = [pages_for(length, PAGE_SIZE) for length in lens]
    pool, pages = _pages(shape, device, sum(num_pages) * PAGE_SIZE)
    kv, params = pool.layer_view(0), AttentionParams(shape.head_dim**-0.5)
    query = _random(device, len(lens), shape.heads, shape.head_dim)
    step, unjoined = (
        DecodeAttention(
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
        for _ in range(2)
    )
    tables = [table.numpy() for table in torch.split(pages.cpu(), num_pages)]
    for each in (step, unjoined):
        each.fill(lens, tables)
    unjoined.arrived.fill_(_PAST_ALL)
    others = []
    for queries, (count, length) in zip(torch.split(query, [count for count, _ in batch]), batch, strict=True):
        key, value = _random(device, 2, count, shape.kv_heads, length, shape.head_dim).transpose(2, 3)
        others.append((queries[:, None], key, value))
    beside = _by_others(others, is_causal=False)
    beside[Way.UNJOINED] = lambda: unjoined.attend(query, *kv, params)
    name = "decode " + " + ".join(f"{count} x {length}" for count, length in batch)
    work = float(sum(lens) * _row_bytes(shape))
    return KernelCase(name, Limit.BYTES, work, lambda: step.attend(query, *kv, params), beside)


def _by_others(batches: Sequence[tuple[Tensor, Tensor, Tensor]], *, is_causal: bool) -> dict[Way, _Launch]:
    """Attention of ``[request, token, head, D]`` each, a call for each batch; causal ones end with the same token."""
    beside: dict[Way, _Launch] = {Way.TORCH: lambda: [_by_torch(*batch, is_causal=is_causal) for batch in batches]}
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return beside
    return beside | {Way.FLASH_ATTN: lambda: [flash_attn_func(*batch, causal=is_causal) for batch in batches]}


def _by_torch(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask = causal_lower_right(q.shape[2], k.shape[2]) if is_causal else None
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def _merge(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    outs = [_random(device, num_tokens, shape.heads, shape.head_dim) for _ in range(4)]
    lses = [torch.zeros(num_tokens, shape.heads, device=device) for _ in outs]
    work = 5.0 * (outs[0].nbytes + lses[0].nbytes)
    return KernelCase("merge 4 partials", Limit.BYTES, work, lambda: merge_partials(outs, lses))


def _rotate(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    heads = _random(device, num_tokens, shape.heads, shape.head_dim)
    turn = _random(device, num_tokens, 1, shape.head_dim)
    return KernelCase("rotate", Limit.BYTES, 2.0 * heads.nbytes, lambda: rotate(heads, turn, turn))


def _norm_heads(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    heads, weight = _random(device, num_tokens, shape.heads, shape.head_dim), _random(device, shape.head_dim)
    turn = _random(device, num_tokens, 1, shape.head_dim)
    return KernelCase(
        "normalise and rotate", Limit.BYTES, 2.0 * heads.nbytes, lambda: rotate(heads, turn, turn, weight, 1e-6)
    )


def _rotate_storing(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    heads = _random(device, num_tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
    turn = _random(device, num_tokens, 1, shape.head_dim)
    layer, slots = _slots(shape, device, num_tokens)
    return KernelCase(
        "rotate and store",
        Limit.BYTES,
        2.0 * heads.nbytes,
        lambda: rotate_storing(heads, turn, turn, None, 0.0, layer, slots),
    )


def _norm(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    (hidden, added), weight = _random(device, 2, num_tokens, shape.hidden), _random(device, shape.hidden)
    return KernelCase(
        "normalise a sum", Limit.BYTES, 4.0 * hidden.nbytes, lambda: add_rms_norm(hidden, added, weight, 1e-6)
    )


def _gate(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    gate_up = _random(device, num_tokens, 2 * shape.inner)
    return KernelCase("gate", Limit.BYTES, 1.5 * gate_up.nbytes, lambda: swiglu(gate_up))


def _experts(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    counts = [num_tokens // NUM_EXPERTS + (expert < num_tokens % NUM_EXPERTS) for expert in range(NUM_EXPERTS)]
    x, weights = _random(device, num_tokens, shape.hidden), _random(device, NUM_EXPERTS, shape.inner, shape.hidden)
    tiles = tiles_of(counts, x.itemsize, device)
    work = 2.0 * num_tokens * shape.hidden * shape.inner
    return KernelCase(f"{NUM_EXPERTS} experts", Limit.FLOPS, work, lambda: grouped_matmul(x, weights, tiles))


def _sum_choices(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    answers = _random(device, num_tokens * NUM_CHOSEN, shape.hidden)
    rows = torch.randperm(len(answers), device=device).to(torch.int32).view(num_tokens, NUM_CHOSEN)
    weights = torch.rand(num_tokens, NUM_CHOSEN, device=device)
    work = answers.nbytes * (1 + 1 / NUM_CHOSEN)
    return KernelCase("add up choices", Limit.BYTES, work, lambda: sum_choices(answers, rows, weights))


def _draw(shape: HeadShape, device: torch.device, *, num_rows: int) -> KernelCase:
    weights, keys = torch.rand(num_rows, shape.vocab, device=device), torch.arange(num_rows, device=device)
    beside = {Way.TORCH: lambda: plain_race(weights, keys)}
    return KernelCase("draw", Limit.BYTES, float(weights.nbytes), lambda: win_race(weights, keys), beside)


def _top_p(shape: HeadShape, device: torch.device, *, num_rows: int) -> KernelCase:
    scores = torch.rand(num_rows, shape.vocab, device=device)
    scores -= scores.amax(dim=-1, keepdim=True)
    top_k, top_p = torch.full((num_rows,), shape.vocab, device=device), torch.full((num_rows,), 0.9, device=device)
    limits = top_k, top_p.double()
    cutoffs, is_sure = scores[:, 0].clone(), torch.zeros(num_rows, dtype=torch.bool, device=device)
    return KernelCase(
        "top-p of likely many",
        Limit.BYTES,
        float(scores.nbytes),
        lambda: find_cutoffs(scores, *limits, is_sure, cutoffs),
        {Way.TORCH: lambda: ranked_cutoffs(scores, *limits, shape.vocab)},
    )


def _store(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    layer, slots = _slots(shape, device, num_tokens)
    kv = _random(device, num_tokens, 2, shape.kv_heads, shape.head_dim)
    return KernelCase("store K and V", Limit.BYTES, 2.0 * kv.nbytes, lambda: store_kv(layer, slots, kv))


def _gather(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    pool, pages, staged = _staged_pages(shape, device, num_tokens)
    places = torch.stack([pages, torch.arange(len(pages), device=device)])
    return KernelCase(
        "gather pages",
        Limit.BYTES,
        2.0 * staged.nbytes,
        lambda: copy_pages(pool.data, staged, places),
        {Way.TORCH: lambda: pool.data[pages]},
    )


def _scatter(shape: HeadShape, device: torch.device, *, num_tokens: int) -> KernelCase:
    pool, pages, staged = _staged_pages(shape, device, num_tokens)
    places = torch.stack([torch.arange(len(pages), device=device), pages])
    return KernelCase(
        "scatter pages",
        Limit.BYTES,
        2.0 * staged.nbytes,
        lambda: copy_pages(staged, pool.data, places),
        {Way.TORCH: lambda: pool.data.index_copy_(0, pages, staged)},
    )


def _save(shape: HeadShape, device: torch.device, *, num_pages: int) -> KernelCase:
    """Some layers of pages to the host, of which every head is a piece of its own."""
    layers, pages, on_host = _layers_of_pages(shape, device, num_pages)
    places = torch.stack([pages, torch.arange(len(pages), device=device)])
    return KernelCase(
        f"save {PIECE_LAYERS} of {NUM_LAYERS} layers",
        Limit.TO_HOST,
        1.0 * on_host.nbytes,
        lambda: copy_pages(layers, on_host, places),
        {Way.TORCH: lambda: on_host.copy_(layers[pages], non_blocking=True)},
    )


def _load(shape: HeadShape, device: torch.device, *, num_pages: int) -> KernelCase:
    """And from there."""
    layers, pages, on_host = _layers_of_pages(shape, device, num_pages)
    places = torch.stack([torch.arange(len(pages), device=device), pages])
    return KernelCase(
        f"load {PIECE_LAYERS} of {NUM_LAYERS} layers",
        Limit.FROM_HOST,
        1.0 * on_host.nbytes,
        lambda: copy_pages(on_host, layers, places),
        {Way.TORCH: lambda: layers.index_copy_(0, pages, on_host.to(device, non_blocking=True))},
    )


_OF_TOKENS = (_merge, _rotate, _norm_heads, _rotate_storing, _norm, _gate, _experts, _sum_choices)


def _row_bytes(shape: HeadShape) -> int:
    """K and V of a token."""
    return 2 * shape.kv_heads * shape.head_dim * _DTYPE.itemsize


def _page_bytes(shape: HeadShape) -> int:
    """Of all layers."""
    return NUM_LAYERS * PAGE_SIZE * _row_bytes(shape)


def _pages(shape: HeadShape, device: torch.device, num_tokens: int, num_layers: int = 1) -> tuple[PagePool, Tensor]:
    """A pool of one layer, or more, and all of its pages in no order."""
    num_pages = -(-num_tokens // PAGE_SIZE)
    pool = PagePool(num_pages, shape.kv_heads, num_layers, PAGE_SIZE, shape.head_dim, _DTYPE, device=device)
    pool.data.normal_()
    return pool, torch.randperm(num_pages, device=device)


def _slots(shape: HeadShape, device: torch.device, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Pages of a layer, and a slot for each token."""
    pool, pages = _pages(shape, device, num_tokens)
    slots = (pages[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=device)).flatten()[:num_tokens]
    return pool.data[:, :, 0], slots


def _staged_pages(shape: HeadShape, device: torch.device, num_tokens: int) -> tuple[PagePool, Tensor, Tensor]:
    """The same, and room for all of them in one piece."""
    pool, pages = _pages(shape, device, num_tokens)
    return pool, pages, torch.zeros_like(pool.data[: len(pages)])


def _layers_of_pages(shape: HeadShape, device: torch.device, num_pages: int) -> tuple[Tensor, Tensor, Tensor]:
    """Some layers of a pool of many, its pages in no order, and room for these layers of them on the host."""
    pool, pages = _pages(shape, device, num_pages * PAGE_SIZE, NUM_LAYERS)
    layers = pool.data[:, :, PIECE_LAYERS : 2 * PIECE_LAYERS]
    on_host = torch.zeros(layers[:num_pages].shape, dtype=_DTYPE, pin_memory=device.type == "cuda")
    return layers, pages, on_host


def _random(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.float32).to(_DTYPE)
