"""Shapes for attention kernels, and a comparison with reference attention on any device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.strategy import ON_ONE_RANK, Strategy
from tests.fakes.attention_params import params_for
from tests.fakes.kv import kv_pool, side_by_side
from tests.fakes.nearness import check_near
from tests.unit.workers.test_row_attention import Seen, masked_attention, seen_by_definition
from workers.attention.interface import AttentionBackend, AttentionParams
from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.context_parallel.shard_plan import make_shard_plan

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
_LSE_TOLERANCE = 2e-6
"""Tolerance like that of ``check_near``. No dtype rounds the terms of an LSE."""


class Wanted(NamedTuple):
    """Reference attention in fp64."""

    out: Tensor
    lse: Tensor
    rounded: Tensor
    """``out`` with its weights and then itself rounded to the dtype of the values."""

    @classmethod
    def of(
        cls,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Seen,
        part_lens: Sequence[int] | None = None,
        scale: float | None = None,
    ) -> Self:
        """Compute the reference. The weights are relative to the maximum of each part, or of all keys without parts."""
        scale = query.shape[2] ** -0.5 if scale is None else scale
        out, lse = masked_attention(query, key, value, seen, scale)
        lens = [len(key)] if part_lens is None else list(part_lens)
        rounded = out.new_zeros(out.shape)
        parts = (torch.split(x, lens) for x in (key, value, torch.from_numpy(seen).T))
        for part_key, part_value, part_seen in zip(*parts, strict=True):
            rounded += _rounded_terms(query.double() * scale, part_key, part_value, part_seen, lse)
        return cls(out, lse, rounded.to(value.dtype))


def _rounded_terms(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, lse: Tensor) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.double().repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->qhk", query, keys)
    scores = scores.masked_fill(~seen.T[:, None], -torch.inf)
    if not scores.numel():
        return values.new_zeros(*query.shape[:2], value.shape[2])
    peak = scores.amax(-1)
    weights = (scores - peak[..., None]).exp().to(value.dtype).double()
    return torch.einsum("qhk,khd->qhd", (weights * (peak - lse).exp()[..., None]).nan_to_num(), values)


@dataclass(frozen=True)
class PagedCase:
    """Runs of requests over pages in any order. ``key_lens`` has the same meaning as in ``prepare``."""

    runs: tuple[Run, ...]
    page_size: int = 16
    head_dim: int = 64
    groups: int = 2
    kv_heads: int = 1
    dtype: torch.dtype = torch.float32
    key_lens: tuple[int, ...] | None = None
    seed: int = 0
    params: AttentionParams | None = None
    """None means the usual scale and no window."""
    value_dim: int | None = None
    """None means the head's dimension."""
    are_in_keys: bool = False
    """True if values are the first elements of their keys, as in latent attention."""

    @property
    def value_part(self) -> int:
        return 0 if self.are_in_keys else 1

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of each request that are in pages."""
        num_requests = max((run.request for run in self.runs), default=-1) + 1
        if self.key_lens is not None:
            return list(self.key_lens)
        ends = [0] * num_requests
        for run in self.runs:
            ends[run.request] = max(ends[run.request], run.last_position + 1)
        return ends


COMPILED = (
    *((page_size, 128, groups, 2) for page_size in (16, 64, 128) for groups in (1, 4, 8)),
    *((64, head_dim, 2, 1) for head_dim in (64, 80, 96, 256)),
    *((16, 256, groups, 1) for groups in (1, 3, 16)),
    *((64, 64, groups, 1) for groups in (3, 16)),
    (128, 80, 5, 2),
)
"""Page sizes, head sizes, groups and KV heads. A GPU compiles a kernel for each of them."""


@st.composite
def compiled_cases(draw: st.DrawFn, most: int, dtype: torch.dtype) -> PagedCase:
    """Return cases like ``paged_cases`` and ``prompt_cases``, with a few shapes only."""
    page_size, head_dim, groups, kv_heads = draw(st.sampled_from(COMPILED))
    case = draw(st.one_of(paged_cases(most, dtype), prompt_cases(most, dtype)))
    return replace(case, page_size=page_size, head_dim=head_dim, groups=groups, kv_heads=kv_heads)


@st.composite
def paged_cases(draw: st.DrawFn, most: int, dtype: torch.dtype) -> PagedCase:
    """Return one to three requests with short runs, and up to ``most`` keys or prefix tokens each."""
    runs = []
    for request in range(draw(st.integers(1, 3))):
        count, step = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (5, 3), (33, 1), (0, 1)]))
        runs.append(Run(request, draw(st.integers(0, most - 1 - max(count - 1, 0) * step)), count, step))
    has_lens = draw(st.booleans())
    lens = tuple(draw(st.integers(0, most)) for _ in runs) if has_lens else None
    return PagedCase(
        runs=tuple(draw(st.permutations(runs))),
        page_size=draw(st.sampled_from([16, 64, 128])),
        head_dim=draw(st.sampled_from([64, 80, 96, 128, 256])),
        groups=draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        kv_heads=draw(st.sampled_from([1, 2])),
        dtype=dtype,
        key_lens=lens,
        seed=draw(st.integers(0, 99)),
    )


LATENT = ((64, 576, 512, 128), (64, 576, 512, 16), (128, 576, 512, 1), (16, 320, 256, 6), (64, 48, 32, 80))
"""Page sizes, widths of keys and of values, and groups, of models with latent attention."""


@st.composite
def latent_cases(draw: st.DrawFn, most: int, dtype: torch.dtype) -> PagedCase:
    """Return cases like ``paged_cases``, whose values are part of their keys."""
    page_size, head_dim, value_dim, groups = draw(st.sampled_from(LATENT))
    case = replace(draw(paged_cases(most, dtype)), page_size=page_size, head_dim=head_dim, groups=groups, kv_heads=1)
    return replace(case, value_dim=value_dim, are_in_keys=True)


SPLITTING = [strategy for strategy in Strategy if strategy not in ON_ONE_RANK]


@st.composite
def prompt_cases(draw: st.DrawFn, most: int, dtype: torch.dtype) -> PagedCase:
    """Return one rank's queries for a prompt of up to ``most`` tokens, at least half of them new, after a prefix.

    Heads are few and small, so that many queries can be interpreted quickly.
    """
    num_new = draw(st.integers(-(-most // 2), most))
    prefix = draw(st.integers(0, most - num_new))
    strategy, cp = draw(st.sampled_from([Strategy.NONE, *SPLITTING])), draw(st.integers(2, 3))
    plan = make_shard_plan(strategy, [num_new], [prefix], cp)
    runs = tuple(plan.runs[draw(st.integers(0, cp - 1))])
    assume(runs)
    return PagedCase(runs, draw(st.sampled_from([16, 64, 128])), groups=1, dtype=dtype, seed=draw(st.integers(0, 99)))


@st.composite
def any_params(draw: st.DrawFn, case: PagedCase) -> PagedCase:
    """Add a scale, and perhaps a window and narrower values, to a case. With a window, prefixes precede the queries."""
    window = draw(st.one_of(st.none(), st.integers(1, 100)))
    lens = case.key_lens
    if window is not None and lens is not None:
        lens = tuple(min(length, run.first_position + 1) for length, run in zip(lens, in_order(case), strict=True))
    value_dim = draw(st.sampled_from([None, case.head_dim // 2]))
    return replace(
        case, params=AttentionParams(draw(st.sampled_from([0.05, 0.3])), window), value_dim=value_dim, key_lens=lens
    )


def in_order(case: PagedCase) -> list[Run]:
    """Return the runs in order of request. Each request has one."""
    return sorted(case.runs, key=lambda run: run.request)


def check_paged(backend: AttentionBackend, case: PagedCase, device: str) -> None:
    """Check attention over a pool's pages. All other slots, and pages before all windows, are NaN."""
    torch.manual_seed(case.seed)
    counts = [-(-length // case.page_size) for length in case.lengths]
    pool = kv_pool(sum(counts) + 1, case.kv_heads, 2, case.page_size, case.head_dim, case.dtype)
    pool.group("full_attention").fill_(torch.nan)
    tables = torch.split(torch.randperm(pool.num_pages)[: sum(counts)], counts)
    params = case.params or AttentionParams(case.head_dim**-0.5)
    kvs = [torch.randn(length, 2, case.kv_heads, case.head_dim).to(case.dtype) for length in case.lengths]
    for table, kv in zip(tables, kvs, strict=True):
        positions = torch.arange(len(kv))
        pool.write(
            1, table[positions // case.page_size] * case.page_size + positions % case.page_size, side_by_side(kv)
        )
    if params.window is not None:
        for request, table in enumerate(tables):
            first = min((run.first_position for run in case.runs if run.request == request), default=0)
            num_unseen = max(first + 1 - params.window, 0)
            pool.group("full_attention")[table[: num_unseen // case.page_size]] = torch.nan
    num_queries = sum(run.count for run in case.runs)
    query = torch.randn(num_queries, case.kv_heads * case.groups, case.head_dim).to(case.dtype)
    expected = [
        _of_run(part, kvs[run.request], run, case, params)
        for run, part in zip(case.runs, torch.split(query, [run.count for run in case.runs]), strict=True)
    ]
    step = backend.prepare(case.runs, [table.to(device) for table in tables], case.page_size, case.key_lens)
    data = pool.group("full_attention").to(device)
    values = data[:, :, 1, case.value_part, :, : case.value_dim]
    result = step.attend(query.to(device), data[:, :, 1, 0], values, params)
    compare(result, Wanted(*(torch.cat(parts) for parts in zip(*expected, strict=True))), case.dtype)


def check_rows(
    backend: AttentionBackend,
    runs: tuple[list[Run], list[Run]],
    groups: int,
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
) -> None:
    """Check attention over contiguous keys and values, each with its own strides."""
    torch.manual_seed(0)
    num_queries, num_keys = (sum(run.count for run in part) for part in runs)
    query = torch.randn(num_queries, 2 * groups, 64).to(dtype)
    key, value = torch.randn(num_keys, 2, 64).to(dtype), torch.randn(num_keys, 3, 2, 64).to(dtype)[:, 1]
    result = backend.prepare_rows(*runs).attend(
        query.to(device), key.to(device), value.to(device), params_for(query, window)
    )
    compare(result, Wanted.of(query, key, value, seen_by_definition(*runs, window)), dtype)


def compare(result: Partial, wanted: Wanted, dtype: torch.dtype) -> None:
    """Check that rows without visible keys are exactly empty and the others are close."""
    assert (result.out.dtype, result.lse.dtype) == (dtype, torch.float32)
    out, lse = (x.cpu() for x in result)
    is_empty = wanted.lse == -torch.inf
    assert torch.equal(lse == -torch.inf, is_empty)
    assert not out[is_empty].any()
    seen = ~is_empty
    if seen.any():
        check_near(out[seen], wanted.out[seen], wanted.rounded[seen], num_rows=int(seen.sum()))
    off, size = (lse - wanted.lse)[seen].norm(), wanted.lse[seen].norm()
    assert off <= _LSE_TOLERANCE * max(size.item(), 1.0), f"{off}"


def _of_run(query: Tensor, kv: Tensor, run: Run, case: PagedCase, params: AttentionParams) -> Wanted:
    key_positions = np.arange(len(kv))
    positions = (run.first_position + np.arange(run.count) * run.step)[:, None]
    seen = np.full((run.count, len(kv)), True) if case.key_lens is not None else positions >= key_positions
    if params.window is not None:
        seen &= key_positions > positions - params.window
    return Wanted.of(query, kv[:, 0], kv[:, case.value_part, :, : case.value_dim], seen, scale=params.scale)
