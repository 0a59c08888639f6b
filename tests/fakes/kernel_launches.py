"""Launches of every kernel with shapes from models. As a program, compile the named ones for an H200."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict

import numpy as np
import torch

from tests.fakes.attention_params import params_for, shape_for
from tests.fakes.kv import kv_pool
from workers.attention.interface import AttentionParams
from workers.attention.runs import Run
from workers.attention.selection import IndexQueries, QueryRun
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.decode import DecodeAttention
from workers.kernels.copy_pages import copy_pages
from workers.kernels.experts import choose_experts, expert_rows, grouped_matmul, sum_choices, tiles_of
from workers.kernels.fp8 import fp8_matmul, grouped_fp8_matmul
from workers.kernels.partials import merge_partial
from workers.kernels.sampling import find_cutoffs, win_race
from workers.kernels.selection import VisibleKeys, choose, locate, score_run, score_tokens
from workers.kernels.triton_elementwise import add_rms_norm, rms_norm, rotate, rotate_storing, store_kv, swiglu

MANY = 1 << 16
"""Rows of 8,192 tokens with eight experts each."""


def _attention(dtype: torch.dtype, head_dim: int, groups: int, page_size: int) -> Callable[[], object]:
    """Return a launch with a prompt after a prefix, and a decoded token."""
    runs, num_keys = [Run(0, 300, 700, 1), Run(1, 999, 1, 1)], 1000

    def launch() -> object:
        pool = kv_pool(-(-num_keys // page_size), 1, 1, page_size, head_dim, dtype)
        query = torch.zeros(701, groups, head_dim, dtype=dtype)
        step = TritonAttention().prepare(runs, [torch.arange(pool.num_pages)] * 2, page_size)
        return step.attend(query, *params_for(query).key_and_value(pool.layer_view(0)), params_for(query))

    return launch


def _rows(key_dim: int = 128, groups: int = 4) -> Callable[[], object]:
    """Return a launch with values of 128 elements."""

    def launch() -> object:
        run, key, value = [Run(0, 0, 700, 1)], _bf16(700, 2, key_dim), _bf16(700, 2, 128)
        return TritonAttention().prepare_rows(run, run).attend(key.repeat(1, groups, 1), key, value, params_for(key))

    return launch


def _latents(groups: int, page_size: int = 64, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    """Return launches with keys of 576 elements, of which the first 512 are values, for a prompt and for one token."""

    def launch() -> object:
        params = AttentionParams(0.1, value_dim=512)
        kv = params.key_and_value([torch.zeros(1024 // page_size, 1, page_size, 576, dtype=dtype)])
        table = torch.arange(len(kv[0]))
        for run in (Run(0, 300, 700, 1), Run(0, 999, 1, 1)):
            query = torch.zeros(run.count, groups, 576, dtype=dtype)
            launched = TritonAttention().prepare([run], [table], page_size).attend(query, *kv, params)
        return launched

    return launch


def _selection(num_queries: int) -> Callable[[], object]:
    """Return launches that choose from 200,000 keys in several tiles, and attend to what they chose."""

    def launch() -> object:
        num_keys, table = 200_000, torch.arange(3125)
        latents, keys = _bf16(3125, 1, 64, 576 + 128).split_with_sizes((576, 128), dim=-1)
        index = IndexQueries(_bf16(num_queries, 64, 128), torch.zeros(num_queries, 64))
        rows, query = slice(0, num_queries), _bf16(num_queries, 128, 576)
        step = TritonAttention().prepare_selection([QueryRun(rows, table, np.full(num_queries, num_keys))])
        best = step.best_keys(index, keys, rows, 2048)
        return step.attend(query, latents, best.keys.int(), AttentionParams(0.1, value_dim=512))

    return launch


def _selections_any() -> None:
    """Score, choose from and find any number of keys, of some of a step's queries."""
    first_pages = num_keys = torch.zeros(20, dtype=torch.int32)
    for first, count, width in ((0, 16, 4096), (1, 1, 99), (3, 17, 5001)):
        rows = slice(first, first + count)
        visible = VisibleKeys(_bf16(9, 1, 64, 128), torch.arange(9), first_pages[rows], num_keys[rows])
        scores = torch.zeros(count, width + 32)[:, 32:]
        for score in (score_run, score_tokens):
            score(_bf16(count, 64, 128), torch.zeros(count, 64), visible, scores, first)
        choose(scores, num_keys[rows], min(2048, width))
        for num_parts, part_len in ((1, 2048), (3, 700)):
            places, segments = torch.zeros(count, 2048, dtype=torch.int64), torch.zeros(count * num_parts, 6)
            locate(places.int(), visible, 64, places, segments.int(), part_len)


def _bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def _store() -> None:
    pool = kv_pool(4, 8, 2, 64, 128, torch.bfloat16)
    store_kv(pool.group("full_attention")[:, :, 0], torch.arange(100), _bf16(100, 2, 8, 128))


def _copy() -> None:
    pool = kv_pool(4, 8, 2, 64, 128, torch.bfloat16)
    copy_pages(
        pool.group("full_attention"), torch.zeros_like(pool.group("full_attention")), torch.arange(6).view(2, 3) % 4
    )
    # Other heads, and some layers.
    one_head = kv_pool(4, 1, 9, 64, 128, torch.bfloat16).group("full_attention")
    for layers in (slice(0, 4), slice(8, 9)):
        copy_pages(
            one_head[:, :, layers], torch.zeros_like(one_head)[:, :, layers], torch.zeros(2, 1, dtype=torch.int64)
        )


def _copy_most() -> None:
    """Copy a pool of tiny pages."""
    pool = kv_pool(MANY, 1, 1, 16, 64, torch.bfloat16)
    copy_pages(
        pool.group("full_attention"), torch.empty_like(pool.group("full_attention")), torch.arange(MANY).expand(2, MANY)
    )


def _norms() -> object:
    hidden, weight = _bf16(100, 4096), _bf16(4096)
    rms_norm(hidden, weight, 1e-6)
    return add_rms_norm(hidden, hidden, weight, 1e-6)


def _rotate() -> object:
    query, rotation = _bf16(100, 32, 128), _bf16(100, 1, 128)
    rotate(query, rotation, rotation)
    return rotate(query, rotation, rotation, _bf16(128), 1e-6)


def _rotate_storing() -> None:
    """Rotate and store the heads of a model, and those of a rank with tp 8."""
    for heads, kv_heads in ((32, 8), (4, 1)):
        pool, rotation = kv_pool(4, kv_heads, 2, 64, 128, torch.bfloat16), _bf16(100, 1, 128)
        layer, slots = pool.group("full_attention")[:, :, 1], torch.arange(100)
        for weights in (None, (_bf16(128), _bf16(128))):
            rotate_storing(_bf16(100, heads + 2 * kv_heads, 128), rotation, rotation, weights, 1e-6, layer, slots)


def _draws() -> object:
    weights, sure = torch.zeros(4, 128256), torch.zeros(4, dtype=torch.bool)
    find_cutoffs(weights, torch.ones(4, dtype=torch.int64), torch.ones(4, dtype=torch.float64), sure, torch.zeros(4))
    return win_race(weights, torch.arange(4))


def _draws_any() -> object:
    """Sample with an odd number of rows, whose settings have another offset in their table."""
    for num_rows in (3, 4):
        table = torch.zeros(3, num_rows, dtype=torch.int64)
        launched = win_race(torch.zeros(num_rows, 1024), table[1])
    return launched


def _experts() -> object:
    experts, loads = torch.zeros(20, 8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    for counted in (None, torch.zeros(20, 1, dtype=torch.bool)):
        choose_experts(_bf16(20, 128), 8, counted, sum_to_one=True)
    few = expert_rows(experts, 8, loads, 16)
    grouped_matmul(_bf16(20, 2048), _bf16(8, 768, 2048), few.tiles, few.tokens)
    x = _bf16(2000, 2048)
    answers = grouped_matmul(x, _bf16(2, 768, 2048), tiles_of([1000, 1000], x))
    return sum_choices(answers, few.rows, torch.zeros(20, 8))


def _choices_any() -> object:
    """Sum the choices of several tokens, and of one whose weights come after its experts in a row."""
    rows, answers = torch.zeros(4, 6, dtype=torch.int32), _bf16(24, 2048)
    for weights in (torch.zeros(4, 6), torch.zeros(1, 12)[:, 6:]):
        launched = sum_choices(answers, rows[: len(weights)], weights)
    return launched


def _fp8(*shape: int, width: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    return torch.zeros(shape, dtype=torch.float8_e4m3fn), torch.zeros(*shape[:-1], -(-shape[-1] // width)), width


def _fp8_products() -> None:
    """Multiply few and many rows, on one rank and with narrow groups on a rank with tp 8."""
    for num_rows in (16, 2000):
        fp8_matmul(_bf16(num_rows, 4096), *_fp8(6144, 4096, width=128), _bf16(6144))
        fp8_matmul(_bf16(num_rows, 96), *_fp8(2048, 96, width=32))


def _fp8_products_any() -> None:
    """Multiply other numbers of rows in tiles of the same size."""
    for num_rows in (17, 80, 1000):
        fp8_matmul(_bf16(num_rows, 1024), *_fp8(1024, 1024, width=128))


def _fp8_experts() -> None:
    few = expert_rows(torch.zeros(20, 8, dtype=torch.int32), 8, torch.zeros(8, dtype=torch.int64), 16)
    grouped_fp8_matmul(_bf16(20, 2048), *_fp8(8, 1536, 2048, width=128), few.tiles, few.tokens)
    x = _bf16(2000, 768)
    grouped_fp8_matmul(x, *_fp8(2, 2048, 768, width=128), tiles_of([1000, 1000], x))


def _merge() -> None:
    out, lse = torch.zeros(100, 8, 128), torch.zeros(100, 8)
    merge_partial(out, lse, out.bfloat16(), lse)


def _merge_any() -> None:
    """Merge one row, a multiple of 16 rows, and another number of rows."""
    for num_rows in (1, 16, 33):
        out, lse = torch.zeros(num_rows, 1, 128), torch.zeros(num_rows, 1)
        merge_partial(out, lse, out.bfloat16(), lse)


def _decode(head_dim: int, kv_heads: int, groups: int, page_size: int = 64) -> Callable[[], object]:
    """Return decode attention of captured steps: some requests, whose keys are split."""

    def launch() -> object:
        pool = kv_pool(4, kv_heads, 1, page_size, head_dim, torch.bfloat16)
        query = _bf16(3, kv_heads * groups, head_dim)
        attention = DecodeAttention(shape_for(query, kv_heads, 4, page_size))
        return attention.attend(query, *params_for(query).key_and_value(pool.layer_view(0)), params_for(query))

    return launch


LAUNCHES: Mapping[str, Callable[[], object]] = {
    "attention": _attention(torch.bfloat16, 128, 4, 64),
    "attention of wide heads": _attention(torch.bfloat16, 256, 16, 128),
    "attention of odd heads": _attention(torch.bfloat16, 80, 5, 16),
    "attention of five heads each": _attention(torch.bfloat16, 128, 5, 64),
    "attention in fp16": _attention(torch.float16, 128, 4, 64),
    "attention in fp32": _attention(torch.float32, 64, 1, 64),
    "attention of rows": _rows(),
    "attention of expanded latents": _rows(192, 1),
    "attention of latents": _latents(128),
    "attention of a rank's latents": _latents(16),
    "attention of latents in small pages": _latents(20, 16),
    "attention of latents in fp32": _latents(128, 64, torch.float32),
    "decode": _decode(128, 8, 4),
    "decode of one head": _decode(128, 1, 8),
    "decode of wide heads": _decode(256, 1, 16),
    "decode of odd heads": _decode(80, 2, 5),
    "decode of five heads each": _decode(128, 8, 5),
    "decode of narrow heads": _decode(64, 1, 4),
    "decode of pairs of wide heads": _decode(256, 1, 2),
    "decode of three wide heads each": _decode(256, 1, 3, 16),
    "decode without groups": _decode(64, 8, 1),
    "selection in decode": _selection(1),
    "selection in prefill": _selection(128),
    "merge": _merge,
    "merges of any length": _merge_any,
    "store": _store,
    "copy": _copy,
    "norms": _norms,
    "rotate": _rotate,
    "rotate and store": _rotate_storing,
    "gate": lambda: swiglu(_bf16(100, 2 * 12288)),
    "gate of experts": lambda: swiglu(torch.empty(MANY, 2 * 768, dtype=torch.bfloat16)),
    "copy of a pool": _copy_most,
    "experts": _experts,
    "sums of any choices": _choices_any,
    "FP8 products": _fp8_products,
    "FP8 products of any length": _fp8_products_any,
    "FP8 experts": _fp8_experts,
    "draws": _draws,
    "draws of any number": _draws_any,
    "selections of any size": _selections_any,
}

if __name__ == "__main__":
    from tests.fakes.kernel_compiler import compile_launches

    results = {name: [asdict(compiled) for compiled in compile_launches(LAUNCHES[name])] for name in sys.argv[1:]}
    print(json.dumps(results))
