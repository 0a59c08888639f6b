"""Bindings of the compiled library's functions to torch tensors."""

import ctypes
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from cluster.compilation import CannotCompileError
from workers.native.compile import Compiler, compiled_library, find_compiler
from workers.native.products import Products
from workers.native.threads import LEAST_SHARED, Function, Threads

MOST_DIMS = 1024
"""Maximum head size."""
MOST_INDEX_HEADS = 96
"""Maximum number of an indexer's heads: the rows of the smallest tile."""
NUM_ITEM_FIELDS = 7
"""Number of fields of Item in attention.h."""

_FIELDS = (
    *("query", "key", "value", "out", "lse", "tables", "items", "next_tile"),
    *("overwrites", "num_items", "page_size", "kv_heads", "groups", "key_dim", "value_dim"),
    *("query_stride", "query_head_stride"),
    *(f"{what}_{axis}_stride" for what in ("key", "value") for axis in ("page", "head", "slot")),
)


class _Arguments(ctypes.Structure):
    """Attention struct of attention.h: pointers and 64-bit numbers, then the scale."""

    _fields_ = (*((name, ctypes.c_int64) for name in _FIELDS), ("scale", ctypes.c_float))


class _Selection(ctypes.Structure):
    """Selection struct of select.h."""

    _fields_ = (
        ("attention", _Arguments),
        *((name, ctypes.c_int64) for name in ("weights", "visible", "scores", "keys", "top_k")),
    )


class _Pages(ctypes.Structure):
    """Pages struct of elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("pages", "slots", "page_size")),
        *((f"{axis}_stride", ctypes.c_int64) for axis in ("page", "head", "which", "slot")),
    )

    @classmethod
    def of(cls, layer_pages: Tensor, slots: Tensor) -> "_Pages":
        """Return the struct for ``layer_pages [page, H, 2, slot, D]``."""
        assert layer_pages.stride(4) == 1, f"strides {layer_pages.stride()}"
        assert slots.dtype == torch.int64, f"slots have dtype {slots.dtype}"
        assert slots.is_contiguous(), f"strides {slots.stride()}"
        return cls(layer_pages.data_ptr(), slots.data_ptr(), layer_pages.shape[3], *layer_pages.stride()[:4])


_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class _Functions:
    """Functions of the compiled library for one dtype."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        def find(name: str, *types: object) -> Function:
            function = getattr(library, f"baton_{name}_{suffix}")
            function.argtypes = types
            return cast(Function, function)

        self.attend = find("attend", _POINTER)
        self.select = find("select", _POINTER)
        self.rms_norm = find("rms_norm", *[_POINTER] * 5, *[_SIZE] * 3, _FLOAT, *[_SIZE] * 2)
        self.rotate = find("rotate", *[_POINTER] * 5, *[_SIZE] * 5, _FLOAT, *[_SIZE] * 2)
        self.swiglu = find("swiglu", *[_POINTER] * 2, *[_SIZE] * 4)
        self.rotate_storing = find("rotate_storing", *[_POINTER] * 7, *[_SIZE] * 5, _FLOAT, *[_SIZE] * 2)
        self.store_kv = find("store_kv", *[_POINTER] * 2, *[_SIZE] * 7)


class Library:
    """Attention and ElementwiseKernels in bf16 and fp32 on ``num_threads`` threads, including the caller's.

    All tensors of a call have one dtype. The elements of a row must be adjacent in memory.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {dtype: _Functions(library, name) for dtype, name in DTYPES.items()}
        self._start_helpers = library.baton_start_helpers
        self._start_helpers.argtypes = (_SIZE, _POINTER, _SIZE)
        self._num_helped = library.baton_num_helped
        self._num_helped.restype = ctypes.c_int64
        self._threads = Threads(num_threads)
        self.products = Products(library, self._threads)

    @classmethod
    def load(cls, compiler: Compiler | None = None) -> "Library":
        """Load the library for as many threads as torch uses. Compile it if necessary. Raises CannotCompileError."""
        path = compiled_library(compiler or find_compiler())
        try:
            return cls(path, torch.get_num_threads())
        except OSError as error:
            raise CannotCompileError(f"cannot load {error}") from error

    def start_helpers(self, count: int, lasting: Tensor) -> bool:
        """Let ``count`` threads of the lowest priority share this thread's work while cores are idle.

        Returns False if none run, since the system refuses. They read weights, and keys and values in the memory of
        ``lasting``, until they are stopped, even after the calls whose work they share.
        """
        return bool(self._start_helpers(count, lasting.data_ptr(), lasting.nbytes))

    def stop_helpers(self) -> None:
        """Stop all helpers, so that what they read may be freed."""
        self._start_helpers(0, None, 0)

    @property
    def num_helped(self) -> int:
        """Number of parts of the work whose results came from helpers since they were started."""
        return int(self._num_helped())

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
        overwrites: bool = False,
    ) -> None:
        """Merge into a partial attention of ``query [tokens, heads, D]`` to ``key`` and ``value [page, H, slot, dim]``,
        or with ``overwrites``, write the partial, in which there may be anything.

        ``items [n, 7]`` are rows of Item in attention.h, no two of which have a query in common. ``tables`` holds
        their page numbers. Both are int64. Indices are not checked against the tensors' sizes. Elements of a head must
        be adjacent in memory, and ``out`` and ``lse``, the partial, must be contiguous.
        """
        if not len(items):
            return
        functions = self._functions_for(query, key, value, out)
        for x in (query, key, value):
            assert x.shape[-1] <= MOST_DIMS, f"head size {x.shape[-1]} is above {MOST_DIMS}"
            assert x.stride(-1) == 1, f"strides {x.stride()}"
        assert scale > 0, f"scale {scale} is not positive"
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        next_tile = ctypes.c_int64(0)
        arguments = _Arguments(
            *(x.data_ptr() for x in (query, key, value, out, lse, tables, items)),
            ctypes.addressof(next_tile),
            *(overwrites, len(items), page_size, num_kv_heads, num_heads // num_kv_heads),
            *(query.shape[2], value.shape[3], *query.stride()[:2], *key.stride()[:3], *value.stride()[:3]),
            scale,
        )
        self._threads.take_turns(functions.attend, arguments, next_tile)

    def select(
        self, query: Tensor, weights: Tensor, keys: Tensor, table: Tensor, visible: Tensor, top_k: int
    ) -> tuple[Tensor, Tensor]:
        """Return scores and numbers of each query's best keys, ``[queries, top_k]``, fp32 and int64.

        ``query [queries, heads, dim]`` are an indexer's queries, with ``weights [queries, heads]`` fp32, contiguous,
        and ``keys [page, 1, slot, dim]`` its keys. ``table`` holds the page numbers of the request, and ``visible`` the
        number of keys that each query sees, in ascending order, both int64. Keys that do not count have the score -inf.
        """
        num_queries, num_heads, dim = query.shape
        assert num_heads <= MOST_INDEX_HEADS, f"{num_heads} heads are above {MOST_INDEX_HEADS}"
        assert dim <= MOST_DIMS, f"head size {dim} is above {MOST_DIMS}"
        assert query.stride(2) == keys.stride(3) == 1, f"strides {query.stride()}, {keys.stride()}"
        assert weights.is_contiguous(), f"strides {weights.stride()}"
        scores, numbers = (torch.empty(num_queries, top_k, dtype=dtype) for dtype in (torch.float32, torch.int64))
        most = int(visible[-1])
        if not most:
            return scores.fill_(-torch.inf), numbers.zero_()
        items = torch.tensor([[0, num_queries, 0, 0, most, most - 1, 1]])
        next_tile = ctypes.c_int64(0)
        arguments = _Arguments(
            *(x.data_ptr() for x in (query, keys, keys)),
            *(0, 0, table.data_ptr(), items.data_ptr(), ctypes.addressof(next_tile)),
            *(False, 1, keys.shape[2], 1, num_heads, dim, 0),
            *(*query.stride()[:2], *keys.stride()[:3], *keys.stride()[:3]),
            1.0,
        )
        pointers = (x.data_ptr() for x in (weights, visible, scores, numbers))
        function = self._functions_for(query, keys).select
        self._threads.take_turns(function, _Selection(arguments, *pointers, top_k), next_tile)
        return scores, numbers

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._norm(rows, None, weight, eps, out, out)
        return out.view(x.shape)

    def add_rms_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(2))
        self._norm(x, y, weight, eps, total, out)
        return total, out

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
        num_tokens, num_heads, head_dim = x.shape
        assert head_dim <= MOST_DIMS, f"head size {head_dim} is above {MOST_DIMS}"
        assert x.stride(2) == 1, f"strides {x.stride()}"
        assert cos.is_contiguous(), f"strides {cos.stride()}"
        assert sin.is_contiguous(), f"strides {sin.stride()}"
        function = self._functions_for(x, cos, sin, *() if weight is None else (weight,)).rotate
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        pointers = [part.data_ptr() for part in (x, cos, sin)]
        scale = None if weight is None else weight.data_ptr()
        sizes = (num_heads, head_dim, cos.shape[2], x.stride(0), x.stride(1))
        given = (*pointers, scale, out.data_ptr(), *sizes, eps)
        self._share(function, given, num_tokens, num_heads * head_dim)
        return out

    def swiglu(self, gate_up: Tensor) -> Tensor:
        num_rows, size = len(gate_up), gate_up.shape[1] // 2
        assert gate_up.stride(1) == 1, f"strides {gate_up.stride()}"
        out = gate_up.new_empty(num_rows, size)
        given = (gate_up.data_ptr(), out.data_ptr(), size, gate_up.stride(0))
        self._share(self._functions_for(gate_up).swiglu, given, num_rows, 2 * size)
        return out

    def rotate_storing(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        weights: tuple[Tensor, Tensor] | None,
        eps: float,
        layer_pages: Tensor,
        slots: Tensor,
    ) -> Tensor:
        (num_tokens, num_heads, head_dim), num_kv_heads = heads.shape, layer_pages.shape[1]
        assert head_dim <= MOST_DIMS, f"head size {head_dim} is above {MOST_DIMS}"
        assert heads.stride()[1:] == (head_dim, 1), f"strides {heads.stride()}"
        assert cos.is_contiguous(), f"strides {cos.stride()}"
        assert sin.is_contiguous(), f"strides {sin.stride()}"
        assert len(slots) == num_tokens, f"{len(slots)} slots for {num_tokens} rows"
        num_query_heads, scales = num_heads - 2 * num_kv_heads, weights or ()
        function = self._functions_for(heads, cos, sin, layer_pages, *scales).rotate_storing
        out = heads.new_empty(num_tokens, num_query_heads, head_dim)
        q_scale, k_scale = (each.data_ptr() for each in scales) if scales else (None, None)
        pointers = (heads.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_scale, k_scale, out.data_ptr())
        pages = _Pages.of(layer_pages, slots)
        sizes = (num_query_heads, num_kv_heads, head_dim, cos.shape[2], heads.stride(0))
        self._share(function, (*pointers, ctypes.byref(pages), *sizes, eps), num_tokens, num_heads * head_dim)
        return out

    def store_kv(self, layer_pages: Tensor, slots: Tensor, kv: Tensor) -> None:
        num_rows, _, num_heads, head_dim = kv.shape
        assert kv.stride(3) == 1, f"strides {kv.stride()}"
        assert len(slots) == num_rows, f"{len(slots)} slots for {num_rows} rows"
        given = (kv.data_ptr(), num_heads, head_dim, *kv.stride()[:3])
        function, pages = self._functions_for(layer_pages, kv).store_kv, _Pages.of(layer_pages, slots)
        self._share(function, (ctypes.byref(pages), *given), num_rows, 2 * num_heads * head_dim)

    def _norm(self, x: Tensor, y: Tensor | None, weight: Tensor, eps: float, total: Tensor, out: Tensor) -> None:
        num_rows, size = x.shape
        assert x.stride(1) == 1, f"strides {x.stride()}"
        assert y is None or y.stride(1) == 1, f"strides {y.stride()}"
        added, y_stride = (None, 0) if y is None else (y.data_ptr(), y.stride(0))
        pointers = (x.data_ptr(), added, weight.data_ptr(), total.data_ptr(), out.data_ptr())
        function = self._functions_for(x, weight, *() if y is None else (y,)).rms_norm
        self._share(function, (*pointers, size, x.stride(0), y_stride, eps), num_rows, size)

    def _functions_for(self, x: Tensor, *others: Tensor) -> _Functions:
        for other in others:
            assert other.dtype == x.dtype, f"tensors have dtypes {x.dtype} and {other.dtype}"
        return self._functions[x.dtype]

    def _share(self, function: Function, given: tuple[object, ...], num_rows: int, row_size: int) -> None:
        self._threads.share(function, given, num_rows, is_large=num_rows * row_size >= LEAST_SHARED)
