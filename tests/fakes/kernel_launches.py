"""Launches of every kernel at the shapes of models; run as a program, compiles those it is told of for an H200."""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict

import torch

from workers.attention.triton.backend import TritonAttention
from workers.cache.page_pool import PagePool
from workers.context_parallel.runs import Run
from workers.kernels.merge import merge_partials


def _attention(dtype: torch.dtype, head_dim: int, groups: int, page_size: int) -> Callable[[], object]:
    """A prompt behind a prefix, and a decoded token."""
    runs, num_keys = [Run(0, 300, 700, 1), Run(1, 999, 1, 1)], 1000

    def launch() -> object:
        pool = PagePool(-(-num_keys // page_size), 1, 1, page_size, head_dim, dtype)
        query = torch.zeros(701, groups, head_dim, dtype=dtype)
        step = TritonAttention().prepare(runs, [torch.arange(pool.num_pages)] * 2, page_size)
        return step.attend(query, *pool.layer_view(0))

    return launch


def _rows() -> object:
    run, kv = [Run(0, 0, 700, 1)], torch.zeros(700, 2, 128, dtype=torch.bfloat16)
    return TritonAttention().prepare_rows(run, run).attend(kv.repeat(1, 4, 1), kv, kv)


def _merge() -> object:
    out, lse = torch.zeros(100, 8, 128, dtype=torch.bfloat16), torch.zeros(100, 8)
    return merge_partials([out] * 3, [lse] * 3)


LAUNCHES: Mapping[str, Callable[[], object]] = {
    "attention": _attention(torch.bfloat16, 128, 4, 64),
    "attention of wide heads": _attention(torch.bfloat16, 256, 16, 128),
    "attention of odd heads": _attention(torch.bfloat16, 80, 5, 16),
    "attention in fp32": _attention(torch.float32, 64, 1, 64),
    "attention of rows": _rows,
    "merge": _merge,
}

if __name__ == "__main__":
    from tests.fakes.kernel_compiler import compile_launches

    told = {name: [asdict(compiled) for compiled in compile_launches(LAUNCHES[name])] for name in sys.argv[1:]}
    print(json.dumps(told))
