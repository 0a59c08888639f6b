"""Attention by the flash_attn package, for the calls that it supports; others use the Triton backend."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from workers.attention.interface import AttentionParams, GraphShape, RowAttention, StepAttention
from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.attention.triton.backend import TritonAttention, row_items
from workers.device import on_device

PAGE_MULTIPLE = 256
"""Divisor of the page sizes that the package's paged kernels take."""


class FlashAttention:
    """Attention in bf16, for positions in steps of one and for runs whose keys are one range up to the last query.

    Layers with a window, or whose values and keys differ in width, use Triton.
    """

    def __init__(self) -> None:
        self._triton = TritonAttention()

    def prepare(
        self,
        runs: Sequence[Run],
        page_tables: Sequence[Tensor],
        page_size: int,
        key_lens: Sequence[int] | None = None,
    ) -> StepAttention:
        num_keys = [run.last_position + 1 if key_lens is None else key_lens[run.request] for run in runs]
        is_regular = all(run.count and (run.step == 1 or key_lens is not None) for run in runs) and all(num_keys)
        if not runs or not is_regular or page_size % PAGE_MULTIPLE:
            return self._triton.prepare(runs, page_tables, page_size, key_lens)
        tables = pad_sequence([page_tables[run.request] for run in runs], batch_first=True).int()
        ranges = _Ranges([run.count for run in runs], num_keys, is_causal=key_lens is None)
        return _FlashStep(ranges, tables, partial(self._triton.prepare, runs, page_tables, page_size, key_lens))

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        items = row_items(query_runs, key_runs)
        segments = [item.segments[0] for item in items if len(item.segments) == 1]
        next_keys = list(accumulate((segment.stop for segment in segments), initial=0))
        is_regular = items and len(segments) == len(items) and all(item.num_queries for item in items)
        if is_regular and all(
            segment.first_key == first
            and (segment.step == 1 or item.num_queries == 1)
            and segment.ahead + item.num_queries == segment.stop
            for item, segment, first in zip(items, segments, next_keys, strict=False)
        ):
            lens = [item.num_queries for item in items], [segment.stop for segment in segments]
            prepare_triton = partial(self._triton.prepare_rows, query_runs, key_runs)
            return _FlashRows(_Ranges(*lens, is_causal=True), prepare_triton)
        return self._triton.prepare_rows(query_runs, key_runs)

    def prepare_graph(self, shape: GraphShape) -> None:
        """Return None: the package's launches depend on the requests' lengths."""


class _Ranges:
    """Queries and keys of each run; causal ones end with the same token."""

    def __init__(self, num_queries: Sequence[int], num_keys: Sequence[int], *, is_causal: bool) -> None:
        self.num_keys = sum(num_keys)
        self._most = max(num_queries), max(num_keys)
        self._is_causal = is_causal
        # Calibration makes a GPU the default device, but only host memory can be pinned.
        self._ends = [
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cpu") for lens in (num_queries, num_keys)
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, tables: Tensor | None = None) -> Partial:
        if self._ends[0].device != query.device:  # in the first layer
            self._ends = [on_device(ends, query.device) for ends in self._ends]
        out, lse, _ = flash_attn_varlen_func(
            query,
            key,
            value,
            *self._ends,
            *self._most,
            softmax_scale=scale,
            causal=self._is_causal,
            block_table=tables,
            return_attn_probs=True,
        )
        return Partial(out, lse.T.contiguous())


class _FlashStep:
    def __init__(self, ranges: _Ranges, tables: Tensor, prepare_triton: Callable[[], StepAttention]) -> None:
        self._ranges, self._tables, self._triton = ranges, tables, cache(prepare_triton)

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        if _is_tritons(key_pages, value_pages, params):
            return self._triton().attend(query, key_pages, value_pages, params)
        key, value = (pages.transpose(1, 2) for pages in (key_pages, value_pages))
        return self._ranges.attend(query, key, value, params.scale, self._tables)


class _FlashRows:
    def __init__(self, ranges: _Ranges, prepare_triton: Callable[[], RowAttention]) -> None:
        self._ranges, self._triton = ranges, cache(prepare_triton)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Partial:
        if _is_tritons(key, value, params):
            return self._triton().attend(query, key, value, params)
        num_keys = self._ranges.num_keys
        return self._ranges.attend(query, key[:num_keys], value[:num_keys], params.scale)


def _is_tritons(key: Tensor, value: Tensor, params: AttentionParams) -> bool:
    return params.window is not None or key.shape[-1] != value.shape[-1]
