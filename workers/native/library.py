"""Bindings of the compiled library's functions to torch tensors."""

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from cluster.compilation import CannotCompileError
from workers.native.compile import Compiler, compiled_library, find_compiler
from workers.native.recording import run

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
_LEAST_SHARED = 1 << 17
"""Minimum number of elements for which rows are divided among threads."""
_LEAST_SHARED_PRODUCTS = 1 << 22
"""Minimum number of products for which a weight's outputs are divided among threads."""


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


class Blocks(NamedTuple):
    """Layout ``[outputs / width, inputs / 2, width, 2]`` of a packed weight, padded with zeros."""

    width: int
    stride: int
    """Number of elements from one block of outputs to the next."""


class WeightRows(NamedTuple):
    """Packed weight, and the number of rows that it multiplies."""

    address: int
    blocks: Blocks
    num_rows: int


_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32"}


class _Functions:
    """Functions of the compiled library for one dtype."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        def find(name: str, *types: object) -> Callable[..., int]:
            function = getattr(library, f"baton_{name}_{suffix}")
            function.argtypes = types
            return cast(Callable[..., int], function)

        self.attend = find("attend", _POINTER)
        self.select = find("select", _POINTER)
        self.rms_norm = find("rms_norm", *[_POINTER] * 5, *[_SIZE] * 3, _FLOAT, *[_SIZE] * 2)
        self.rotate = find("rotate", *[_POINTER] * 5, *[_SIZE] * 5, _FLOAT, *[_SIZE] * 2)
        self.swiglu = find("swiglu", *[_POINTER] * 2, *[_SIZE] * 4)
        self.rotate_storing = find("rotate_storing", *[_POINTER] * 7, *[_SIZE] * 5, _FLOAT, *[_SIZE] * 2)
        self.store_kv = find("store_kv", *[_POINTER] * 2, *[_SIZE] * 7)


class _Products:
    """Functions of the compiled library that multiply by packed weights, which are in bf16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.linear, self.grouped_linear = library.baton_linear_bf16, library.baton_grouped_linear_bf16
        self.linear.argtypes = (*[_POINTER] * 4, *[_SIZE] * 8)
        self.grouped_linear.argtypes = (_POINTER, *[_SIZE] * 7)
        self.block_widths = tuple((_SIZE * 2).in_dll(library, "baton_block_widths_bf16"))


class Library:
    """Attention and ElementwiseKernels in bf16 and fp32 on ``num_threads`` threads, including the caller's.

    All tensors of a call have one dtype. The elements of a row must be adjacent in memory.
    """

    def __init__(self, path: Path, num_threads: int) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {dtype: _Functions(library, name) for dtype, name in DTYPES.items()}
        self._products = _Products(library)
        self._num_threads = num_threads
        self._helpers = ThreadPoolExecutor(num_threads, "native")

    @classmethod
    def load(cls, compiler: Compiler | None = None) -> "Library":
        """Load the library for as many threads as torch uses. Compile it if necessary. Raises CannotCompileError."""
        path = compiled_library(compiler or find_compiler())
        try:
            return cls(path, torch.get_num_threads())
        except OSError as error:
            raise CannotCompileError(f"cannot load {error}") from error

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
        run(partial(self._run_tiles, functions.attend, arguments, next_tile))

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
        run(partial(self._run_tiles, function, _Selection(arguments, *pointers, top_k), next_tile))
        return scores, numbers

    def _run_tiles(self, function: Callable[..., int], arguments: ctypes.Structure, next_tile: ctypes.c_int64) -> None:
        """Run a function that takes tiles until none is left on all threads."""
        next_tile.value = 0
        given = ctypes.byref(arguments)
        calls = [self._helpers.submit(function, given) for _ in range(self._num_threads - 1)]
        if any([function(given), *(call.result() for call in calls)]):
            raise MemoryError("out of memory for an attention tile")

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

    @property
    def block_widths(self) -> tuple[int, ...]:
        """Return the numbers of outputs per block of weights that ``linear`` takes, the fastest last."""
        return self._products.block_widths

    def linear(self, x: Tensor, address: int, num_outputs: int, blocks: Blocks, bias: Tensor | None = None) -> Tensor:
        """Return x [R, inputs] @ weight.T + bias in bf16. linear.h describes the weight."""
        assert bias is None or bias.dtype == x.dtype, f"tensors have dtypes {x.dtype} and {bias.dtype}"
        num_rows, num_inputs = x.shape
        out = x.new_empty(num_rows, num_outputs)
        pointers = (x.data_ptr(), address, None if bias is None else bias.data_ptr(), out.data_ptr())
        assert blocks.width in self.block_widths, f"blocks have {blocks.width} outputs"
        given = (*pointers, num_rows, num_inputs, num_outputs, x.stride(0), *blocks)
        self._share_products(self._products.linear, given, x, out, num_rows)
        return out

    def grouped_linear(self, x: Tensor, groups: Sequence[WeightRows], num_outputs: int) -> Tensor:
        """Return ``linear`` of each group of adjacent rows of ``x [R, inputs]`` with its own weight, without a bias."""
        assert sum(group.num_rows for group in groups) == len(x), f"{len(x)} rows for {groups}"
        out = x.new_empty(len(x), num_outputs)
        firsts = accumulate((group.num_rows for group in groups), initial=0)
        self._multiply_groups(x, groups, [(row * x.stride(0), row * num_outputs) for row in firsts][:-1], out)
        return out

    def linear_of_heads(self, x: Tensor, weights: Sequence[WeightRows], out: Tensor) -> None:
        """Write ``linear`` of ``x [R, heads, inputs]``, with a weight per head, into ``out [R, heads, outputs]``."""
        assert out.stride(2) == 1, f"strides {out.stride()}"
        offsets = [(head * x.stride(1), head * out.stride(1)) for head in range(x.shape[1])]
        self._multiply_groups(x[:, 0], weights, offsets, out[:, 0])

    def _multiply_groups(
        self, x: Tensor, groups: Sequence[WeightRows], offsets: Sequence[tuple[int, int]], out: Tensor
    ) -> None:
        """Multiply groups of rows that begin at offsets, in elements, from ``x`` and ``out``."""
        fields = list[int]()
        for (address, (width, stride), num_rows), (x_offset, out_offset) in zip(groups, offsets, strict=True):
            pointers = x.data_ptr() + x_offset * x.itemsize, address, out.data_ptr() + out_offset * out.itemsize
            fields += [*pointers, width, stride, num_rows]
        array = (ctypes.c_int64 * len(fields))(*fields)
        given = (array, len(groups), x.shape[1], out.shape[1], x.stride(0), out.stride(0))
        self._share_products(self._products.grouped_linear, given, x, out, sum(group.num_rows for group in groups))

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

    def _share(
        self,
        function: Callable[..., int],
        given: tuple[object, ...],
        num_rows: int,
        size: int,
        least: int = _LEAST_SHARED,
    ) -> None:
        """Call ``function`` for all rows, divided among the threads if there are at least ``least`` elements."""
        if self._num_threads == 1 or num_rows * size < least:
            run(partial(function, *given, 0, num_rows))
        else:
            run(partial(self._run_on_all, function, given, num_rows))

    def _share_products(
        self, function: Callable[..., int], given: tuple[object, ...], x: Tensor, out: Tensor, num_rows: int
    ) -> None:
        """Call ``function`` for all outputs of ``num_rows`` rows like those of ``x``, divided among threads if many."""
        num_inputs, num_outputs, num_together = x.shape[1], out.shape[1], self.block_widths[-1]
        assert x.dtype == out.dtype == torch.bfloat16, f"tensors have dtypes {x.dtype} and {out.dtype}"
        assert num_inputs % 2 == 0, f"{num_inputs} inputs do not form pairs"
        assert x.stride(1) == 1, f"strides {x.stride()}"
        num_parts, size = -(-num_outputs // num_together), num_together * num_inputs * num_rows
        self._share(function, given, num_parts, size, _LEAST_SHARED_PRODUCTS)

    def _run_on_all(self, function: Callable[..., int], given: tuple[object, ...], num_rows: int) -> None:
        ends = [num_rows * part // self._num_threads for part in range(self._num_threads + 1)]
        calls = [self._helpers.submit(function, *given, *part) for part in pairwise(ends[1:])]
        function(*given, 0, ends[1])
        for call in calls:
            call.result()
