"""Cases of `baton bench kernels` for latent attention, and for the selection of keys."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cluster.spec.kv import pages_for
from workers.attention.interface import AttentionParams, GraphShape
from workers.attention.runs import Run
from workers.attention.selection import QueryRun
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.decode import DecodeAttention
from workers.bench.kernel_case import DTYPE, PAGE_SIZE, KernelCase, Sizes, random
from workers.bench.results import Limit
from workers.bench.shapes import LatentShape
from workers.device import device_of
from workers.kernels.selection import VisibleKeys, choose, score_run, score_tokens

_SCORED_QUERIES = 128
_SCALE = 0.1


def latent_cases(shape: LatentShape, sizes: Sizes, device: torch.device) -> Iterator[KernelCase]:
    """Yield one kernel at a time, like ``kernel_cases``."""
    yield _expanded(shape, sizes.prompt_len, device)
    yield _stored(shape, sizes, device)
    num_requests = max(1, sizes.decode_kv_bytes // (sizes.decode_len * shape.stored_dim * DTYPE.itemsize))
    for count, length in ((num_requests, sizes.decode_len), (1, sizes.long_len)):
        yield _decode(shape, count, length, device)
    yield _scores_of_run(shape, sizes.long_len, device)
    yield _scores_of_tokens(shape, num_requests, sizes.decode_len, device)
    yield _choice(shape, sizes.long_len, device)
    yield _selected(shape, sizes.chunk_len, sizes.long_len, Limit.FLOPS, device)
    yield _selected(shape, num_requests, sizes.long_len, Limit.BYTES, device)


def _expanded(shape: LatentShape, num_tokens: int, device: torch.device) -> KernelCase:
    query, key = (random(device, num_tokens, shape.heads, shape.plain_dim + shape.rope_dim) for _ in range(2))
    value, run = random(device, num_tokens, shape.heads, shape.value_dim), Run(0, 0, num_tokens, 1)
    step = TritonAttention().prepare_rows([run], [run])

    def in_torch() -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=_SCALE)

    return KernelCase(
        f"expanded prefill {num_tokens}",
        Limit.FLOPS,
        2.0 * shape.heads * (shape.plain_dim + shape.rope_dim + shape.value_dim) * run.num_pairs,
        lambda: step.attend(query, key, value, AttentionParams(_SCALE)),
        {"torch": in_torch},
    )


def _stored(shape: LatentShape, sizes: Sizes, device: torch.device) -> KernelCase:
    num_tokens, prefix_len = sizes.chunk_len, sizes.prefix_len
    keys, table = _pages(prefix_len + num_tokens, shape.stored_dim, device)
    query, params = random(device, num_tokens, shape.heads, shape.stored_dim), _params(shape)
    run = Run(0, prefix_len, num_tokens, 1)
    step = TritonAttention().prepare([run], [table], PAGE_SIZE)
    return KernelCase(
        f"stored prefill {num_tokens} after {prefix_len}",
        Limit.FLOPS,
        shape.pair_flops * run.num_pairs,
        lambda: step.attend(query, *params.key_and_value([keys]), params),
    )


def _decode(shape: LatentShape, count: int, length: int, device: torch.device) -> KernelCase:
    keys, table = _pages(count * pages_for(length, PAGE_SIZE) * PAGE_SIZE, shape.stored_dim, device)
    query, params = random(device, count, shape.heads, shape.stored_dim), _params(shape)
    step = DecodeAttention(
        GraphShape(
            num_requests=count,
            most_pages=len(table) // count,
            page_size=PAGE_SIZE,
            num_heads=shape.heads,
            num_kv_heads=1,
            head_dim=shape.stored_dim,
            value_dim=shape.kv_rank,
            dtype=DTYPE,
            device=device_of(keys),
        )
    )
    step.fill([length] * count, np.split(table.cpu().numpy(), count))
    return KernelCase(
        f"decode {count} x {length}",
        Limit.BYTES,
        float(count * length * shape.stored_dim * DTYPE.itemsize),
        lambda: step.attend(query, *params.key_and_value([keys]), params),
    )


def _scores_of_run(shape: LatentShape, num_keys: int, device: torch.device) -> KernelCase:
    keys, table = _pages(num_keys, shape.index_dim, device)
    visible = _all_visible(keys, table, _SCORED_QUERIES, num_keys)
    q, weights, scores = _index(shape, _SCORED_QUERIES, num_keys, device)
    work = 2.0 * shape.index_heads * shape.index_dim * _SCORED_QUERIES * num_keys
    name = f"scores of {_SCORED_QUERIES} x {num_keys}"
    return KernelCase(name, Limit.FLOPS, work, lambda: score_run(q, weights, visible, scores))


def _scores_of_tokens(shape: LatentShape, count: int, length: int, device: torch.device) -> KernelCase:
    keys, table = _pages(count * pages_for(length, PAGE_SIZE) * PAGE_SIZE, shape.index_dim, device)
    first_pages = torch.arange(count, dtype=torch.int32, device=device) * (len(table) // count)
    visible = _all_visible(keys, table, count, length)._replace(first_pages=first_pages)
    q, weights, scores = _index(shape, count, length, device)
    work = float(count * length * shape.index_dim * DTYPE.itemsize)
    name = f"scores in decode {count} x {length}"
    return KernelCase(name, Limit.BYTES, work, lambda: score_tokens(q, weights, visible, scores))


def _choice(shape: LatentShape, num_keys: int, device: torch.device) -> KernelCase:
    scores = torch.randn(_SCORED_QUERIES, num_keys, device=device)
    counts = torch.full((_SCORED_QUERIES,), num_keys, dtype=torch.int32, device=device)
    return KernelCase(
        f"best of {_SCORED_QUERIES} x {num_keys}",
        Limit.BYTES,
        float(scores.nbytes),
        lambda: choose(scores, counts, shape.top_k),
        {"torch": lambda: scores.topk(shape.top_k)},
    )


def _selected(shape: LatentShape, count: int, num_keys: int, limit: Limit, device: torch.device) -> KernelCase:
    keys, table = _pages(num_keys, shape.stored_dim, device)
    query, params = random(device, count, shape.heads, shape.stored_dim), _params(shape)
    num_selected = min(shape.top_k, num_keys)
    selected = torch.rand(count, num_keys, device=device).topk(num_selected).indices.int()
    step = TritonAttention().prepare_selection([QueryRun(slice(0, count), table, np.full(count, num_keys))])
    is_bound_by_memory = limit is Limit.BYTES
    work = shape.stored_dim * DTYPE.itemsize if is_bound_by_memory else shape.pair_flops
    return KernelCase(
        f"{num_selected} selected keys of {count}",
        limit,
        float(count * num_selected * work),
        lambda: step.attend(query, keys, selected, params),
    )


def _params(shape: LatentShape) -> AttentionParams:
    return AttentionParams(_SCALE, value_dim=shape.kv_rank)


def _index(shape: LatentShape, count: int, num_keys: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return an indexer's queries and weights, and memory for scores."""
    weights = torch.randn(count, shape.index_heads, device=device)
    return random(device, count, shape.index_heads, shape.index_dim), weights, weights.new_empty(count, num_keys)


def _pages(num_tokens: int, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return pages ``[page, 1, slot, dim]``, and their numbers in random order."""
    num_pages = pages_for(num_tokens, PAGE_SIZE)
    return random(device, num_pages, 1, PAGE_SIZE, dim), torch.randperm(num_pages, device=device)


def _all_visible(keys: Tensor, table: Tensor, count: int, num_keys: int) -> VisibleKeys:
    first_pages = torch.zeros(count, dtype=torch.int32, device=keys.device)
    return VisibleKeys(keys, table, first_pages, torch.full_like(first_pages, num_keys))
