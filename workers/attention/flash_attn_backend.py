"""Attention with the flash_attn package for the calls that the package supports, and with Triton for other calls."""

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
from workers.attention.triton.backend import TritonAttention
from workers.attention.triton.selection import TritonSelection
from workers.device import device_of


class FlashAttention(TritonSelection):
    """Attention in bf16 over pages, for runs of adjacent positions and for keys that every query sees.

    Page sizes are multiples of 256. The Triton backend handles rows, windows, and values whose width differs from the
    keys'.
    """

    def __init__(self) -> None:
        self._triton = TritonAttention()

    def prepare(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None = None
    ) -> StepAttention:
        prepare_triton = partial(self._triton.prepare, runs, page_tables, page_size, key_lens)
        num_keys = [run.last_position + 1 if key_lens is None else key_lens[run.request] for run in runs]
        is_regular = all(run.count and (run.step == 1 or key_lens is not None) for run in runs) and all(num_keys)
        if not runs or not is_regular:
            return prepare_triton()
        tables = pad_sequence([page_tables[run.request] for run in runs], batch_first=True).int()
        return _FlashStep([run.count for run in runs], num_keys, tables, prepare_triton, is_causal=key_lens is None)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> RowAttention:
        return self._triton.prepare_rows(query_runs, key_runs)

    def prepare_graph(self, shape: GraphShape) -> None:
        """Return None, since the package's launches depend on request lengths."""


class _FlashStep:
    """Attention of one step by the package. In causal runs, the last query and the last key are of the same token."""

    def __init__(
        self,
        num_queries: Sequence[int],
        num_keys: Sequence[int],
        tables: Tensor,
        prepare_triton: Callable[[], StepAttention],
        *,
        is_causal: bool,
    ) -> None:
        self._tables, self._triton, self._is_causal = tables, cache(prepare_triton), is_causal
        self._most = max(num_queries), max(num_keys)
        # Calibration makes a GPU the default device, but only host memory can be pinned.
        self._ends = [
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device="cpu") for lens in (num_queries, num_keys)
        ]

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        if params.window is not None or key_pages.shape[-1] != value_pages.shape[-1]:
            return self._triton().attend(query, key_pages, value_pages, params)
        if self._ends[0].device != query.device:  # True in the first layer
            self._ends = list(map(device_of(query).put, self._ends))
        out, lse, _ = flash_attn_varlen_func(
            query,
            key_pages.transpose(1, 2),
            value_pages.transpose(1, 2),
            *self._ends,
            *self._most,
            softmax_scale=params.scale,
            causal=self._is_causal,
            block_table=self._tables,
            return_attn_probs=True,
        )
        return Partial(out, lse.T.contiguous())
