"""The faster CPU backend for prompts and the faster one for decode, measured on this machine."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from workers.attention.interface import (
    AttentionBackend,
    AttentionShape,
    GraphShape,
    RowAttention,
    StepAttention,
    StepSelection,
)
from workers.attention.runs import Run
from workers.attention.selection import QueryRun

_PROMPT = [Run(0, 1792, 256, 1)]
_DECODE = [Run(request, 1023, 1, 1) for request in range(4)]
_PAGE_SIZE = 64
_REPEATS = 3
_LEAST_GAIN = 1.2
"""Minimum speedup for which a backend replaces the preferred one, so that noise rarely decides."""


class ByQueries:
    """Attention with one backend for decode steps, which have one query per request, with another for other steps, and
    with a third for selections.
    """

    def __init__(self, decode: AttentionBackend, prompts: AttentionBackend, selections: AttentionBackend) -> None:
        self._decode, self._prompts, self._selections = decode, prompts, selections

    def prepare(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None = None
    ) -> StepAttention:
        backend = self._decode if all(run.count == 1 for run in runs) else self._prompts
        return backend.prepare(runs, page_tables, page_size, key_lens)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        return self._prompts.prepare_rows(query_runs, key_runs)

    def prepare_graph(self, shape: GraphShape) -> None:
        """Return None, since a CPU has no graphs."""

    def prepare_selection(self, runs: Sequence[QueryRun], most_queries: int | None = None) -> StepSelection:
        return self._selections.prepare_selection(runs, most_queries)


def find_fastest(
    backends: Mapping[str, AttentionBackend], shape: AttentionShape, dtype: torch.dtype
) -> tuple[str, AttentionBackend, str]:
    """Time a prompt's chunk behind a prefix, and a decode step. The first backend is preferred, and makes selections.

    Returns the fastest backend's name, the backend, and all times, fastest first. The fastest may combine two.
    """
    names, reasons = [], []
    for work, runs in (("decode", _DECODE), ("prompts", _PROMPT)):
        times_s = {name: _least_s(backend, runs, shape, dtype) for name, backend in backends.items()}
        preferred = next(iter(times_s))
        names.append(min(times_s, key=lambda name: times_s[name] * (1 if name == preferred else _LEAST_GAIN)))
        times = (f"{name} {1e3 * times_s[name]:.3g} ms" for name in sorted(times_s, key=times_s.__getitem__))
        reasons.append(f"{work}: {', '.join(times)}")
    decode, prompts = (backends[name] for name in names)
    first = next(iter(backends.values()))
    backend = first if decode is prompts is first else ByQueries(decode, prompts, first)
    return " and ".join(dict.fromkeys(names)), backend, "; ".join(reasons)


def _least_s(backend: AttentionBackend, runs: Sequence[Run], shape: AttentionShape, dtype: torch.dtype) -> float:
    """Return the least time in seconds of a layer's attention."""
    num_pages = -(-(runs[0].last_position + 1) // _PAGE_SIZE)
    tables = torch.split(torch.arange(num_pages * len(runs)), num_pages)
    key, value = (
        torch.randn(num_pages * len(runs), shape.num_kv_heads, _PAGE_SIZE, dim).to(dtype)
        for dim in (shape.query_dim, shape.value_dim)
    )
    query = torch.randn(sum(run.count for run in runs), shape.num_heads, shape.query_dim).to(dtype)
    attend = partial(backend.prepare(runs, tables, _PAGE_SIZE).attend, query, key, value, shape.params)
    times_s = []
    for _ in range(_REPEATS):
        start_s = time.thread_time()
        attend()
        times_s.append(time.thread_time() - start_s)
    return min(times_s)
