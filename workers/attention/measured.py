"""The fastest CPU backend for each kind of step, measured on this machine."""

import logging
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial

import torch
from torch import Tensor

from workers.attention.interface import (
    AttentionBackend,
    AttentionShape,
    GraphAttention,
    GraphShape,
    RowAttention,
    StepAttention,
    StepSelection,
)
from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.attention.selection import QueryRun
from workers.device import CPU

_PAGE_SIZE = 64
_LEAST_GAIN = 1.05
"""Minimum speedup for which a backend replaces the preferred one, so that noise rarely decides."""
_TOLERANCE = 0.03
"""Maximum difference from torch's results, which is more than rounding causes."""

_log = logging.getLogger(__name__)


class Work(StrEnum):
    """Kind of step."""

    ONE = "decode"
    MANY = "decode of many"
    PROMPT = "prompts"
    EXTEND = "prompts behind a prefix"


_RUNS = {
    Work.ONE: [Run(0, 1023, 1, 1)],
    Work.MANY: [Run(request, 1023, 1, 1) for request in range(8)],
    Work.PROMPT: [Run(0, 0, 512, 1)],
    Work.EXTEND: [Run(0, 1792, 256, 1)],
}


def work_of(runs: Sequence[Run]) -> Work:
    if any(run.count > 1 for run in runs):
        return Work.EXTEND if any(run.first_position for run in runs) else Work.PROMPT
    return Work.MANY if len(runs) > 1 else Work.ONE


class ByWork:
    """Attention with a backend for each kind of step, and with one for selections."""

    def __init__(self, backends: Mapping[Work, AttentionBackend], selections: AttentionBackend) -> None:
        self._backends, self._selections = backends, selections

    def prepare(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None = None
    ) -> StepAttention:
        return self._backends[work_of(runs)].prepare(runs, page_tables, page_size, key_lens)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        return self._backends[Work.EXTEND].prepare_rows(query_runs, key_runs)

    def prepare_graph(self, shape: GraphShape) -> GraphAttention | None:
        return self._backends[Work.MANY].prepare_graph(shape)

    def prepare_selection(self, runs: Sequence[QueryRun], most_queries: int | None = None) -> StepSelection:
        return self._selections.prepare_selection(runs, most_queries)


def find_fastest(
    backends: Mapping[str, AttentionBackend], shape: AttentionShape, dtype: torch.dtype
) -> tuple[str, AttentionBackend, str]:
    """Time each kind of step. The first backend is preferred, and makes selections. The last is the reference.

    Compiled code meets processors on which it has never run, so a backend whose results differ from the reference is
    not used. Returns the names of the fastest backends, one backend that combines them, and all times, fastest first.
    """
    trials = {work: _trial(runs, shape, dtype) for work, runs in _RUNS.items()}
    sound = _sound(backends, list(trials.values()))
    preferred = next(iter(sound))
    chosen, reasons = dict[Work, str](), []
    for work, trial in trials.items():
        times_s = {name: CPU.least_s(trial(backend)) for name, backend in sound.items()}
        chosen[work] = min(times_s, key=lambda name: times_s[name] * (1 if name == preferred else _LEAST_GAIN))
        times = (f"{name} {1e3 * times_s[name]:.3g} ms" for name in sorted(times_s, key=times_s.__getitem__))
        reasons.append(f"{work}: {', '.join(times)}")
    backend = first = sound[preferred]
    if set(chosen.values()) != {preferred}:
        backend = ByWork({work: sound[name] for work, name in chosen.items()}, first)
    return " and ".join(dict.fromkeys(chosen.values())), backend, "; ".join(reasons)


_Trial = Callable[[AttentionBackend], Callable[[], Partial]]


def _sound(backends: Mapping[str, AttentionBackend], trials: Sequence[_Trial]) -> dict[str, AttentionBackend]:
    """Return the backends whose results are those of the last one."""
    *_, reference = backends.values()
    expected = [trial(reference)() for trial in trials]
    sound = {}
    for name, backend in backends.items():
        results = (trial(backend)() for trial in trials)
        if all(map(_agree, results, expected)):
            sound[name] = backend
        else:
            _log.warning("%s attention gives wrong results on this CPU and is not used", name)
    return sound


def _agree(one: Partial, other: Partial) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.allclose(a.float(), b.float(), _TOLERANCE, _TOLERANCE) for a, b in pairs)


def _trial(runs: Sequence[Run], shape: AttentionShape, dtype: torch.dtype) -> _Trial:
    """Return a layer's attention in a step of some runs, for any backend."""
    num_pages = -(-(runs[0].last_position + 1) // _PAGE_SIZE)
    tables = torch.split(torch.arange(num_pages * len(runs)), num_pages)
    key, value = (
        torch.randn(num_pages * len(runs), shape.num_kv_heads, _PAGE_SIZE, dim).to(dtype)
        for dim in (shape.query_dim, shape.value_dim)
    )
    query = torch.randn(sum(run.count for run in runs), shape.num_heads, shape.query_dim).to(dtype)
    return lambda backend: partial(backend.prepare(runs, tables, _PAGE_SIZE).attend, query, key, value, shape.params)
