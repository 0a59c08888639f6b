"""Binding of attention.cpp's one function to torch tensors."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

MOST_DIMS = 1024
"""Largest size of a head."""

_FIELDS = (
    *("query", "key", "value", "out", "lse", "tables", "items", "next_tile"),
    *("num_items", "page_size", "kv_heads", "groups", "head_dim", "query_stride", "query_head_stride"),
    *(f"{what}_{axis}_stride" for what in ("key", "value") for axis in ("page", "head", "slot")),
)


class _Arguments(ctypes.Structure):
    """Attention in attention.cpp: pointers and 64-bit numbers, then the scale."""

    _fields_ = (*((name, ctypes.c_int64) for name in _FIELDS), ("scale", ctypes.c_float))


class Library:
    """Attention on ``num_threads`` threads, including the caller's."""

    def __init__(self, path: Path, num_threads: int) -> None:
        self._attend = ctypes.CDLL(str(path)).baton_attend
        self._num_helpers = num_threads - 1
        self._helpers = ThreadPoolExecutor(num_threads, "attention")

    def attend(
        self,
        items: Tensor,
        tables: Tensor,
        page_size: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        scale: float,
    ) -> None:
        """Merge attention of queries ``[tokens, heads, D]`` over ``key``, ``value [page, H, slot, D]`` into a
        partial.

        ``items [n, 7]`` are rows of Item in attention.cpp, of which no two share a query, and ``tables`` their page
        numbers, both int64. Nothing is checked against the tensors' sizes. Strides are any, but adjacent elements of
        a head are adjacent in memory, and ``out`` and ``lse`` are contiguous.
        """
        if not len(items):
            return
        for x in (query, key, value):
            assert x.dtype == torch.bfloat16, f"the native backend is for bf16, not {x.dtype}"
            assert x.shape[-1] <= MOST_DIMS, f"a head of {x.shape[-1]} dims"
            assert x.stride(-1) == 1, f"strides {x.stride()}"
        assert scale > 0, f"a scale of {scale}"
        num_heads, num_kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[2]
        next_tile = ctypes.c_int64(0)
        arguments = _Arguments(
            *(x.data_ptr() for x in (query, key, value, out, lse, tables, items)),
            ctypes.addressof(next_tile),
            *(len(items), page_size, num_kv_heads, num_heads // num_kv_heads, head_dim),
            *(*query.stride()[:2], *key.stride()[:3], *value.stride()[:3]),
            scale,
        )
        calls = [self._helpers.submit(self._attend, ctypes.byref(arguments)) for _ in range(self._num_helpers)]
        if any([self._attend(ctypes.byref(arguments)), *(call.result() for call in calls)]):
            raise MemoryError("no memory for a tile of attention")
