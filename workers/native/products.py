"""Bindings of the compiled library's products with packed weights, which are in bf16, and of layers of experts."""

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from workers.native.recording import run
from workers.native.threads import LEAST_SHARED, Function, Threads

_LEAST_PRODUCTS = 1 << 22
"""Minimum number of products for which a weight's outputs are divided among threads."""

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64


class _Experts(ctypes.Structure):
    """Experts struct of experts.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("hidden", "chosen", "factors", "answers", "out")),
        *((name, ctypes.POINTER(ctypes.c_int64)) for name in ("gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("loads", "ends", "order", "next_part", "num_tokens", "top_k")),
        *((name, ctypes.c_int64) for name in ("first_expert", "num_experts", "hidden_size", "inner_size")),
        *((name, ctypes.c_int64) for name in ("hidden_stride", "gate_up_width", "gate_up_stride")),
        *((name, ctypes.c_int64) for name in ("down_width", "down_stride")),
    )


class Blocks(NamedTuple):
    """Layout ``[outputs / width, inputs / 2, width, 2]`` of a packed weight, padded with zeros."""

    width: int
    stride: int
    """Number of elements from one block of outputs to the next."""


class PackedWeights(NamedTuple):
    """Packed weights of one shape."""

    addresses: Sequence[int]
    blocks: Blocks
    num_outputs: int

    def array(self) -> ctypes.Array[ctypes.c_int64]:
        return (ctypes.c_int64 * len(self.addresses))(*self.addresses)


class ExpertWeights(NamedTuple):
    """Weights of a rank's experts, and the number of the first of them."""

    gate_up: PackedWeights
    down: PackedWeights
    first: int


class Products:
    """Functions of the compiled library that multiply by packed weights."""

    def __init__(self, library: ctypes.CDLL, threads: Threads) -> None:
        self._linear, self._linear_of_heads = library.baton_linear_bf16, library.baton_linear_of_heads_bf16
        self._linear.argtypes = (*[_POINTER] * 4, *[_SIZE] * 9)
        self._linear_of_heads.argtypes = (*[_POINTER] * 3, *[_SIZE] * 12)
        self._order_choices, self._answer_choices = library.baton_order_choices_bf16, library.baton_answer_choices_bf16
        self._order_choices.argtypes = self._answer_choices.argtypes = (_POINTER,)
        self._choose_experts = library.baton_choose_experts_bf16
        self._choose_experts.argtypes = (*[_POINTER] * 4, *[_SIZE] * 5)
        self._sum_answers = library.baton_sum_answers_bf16
        self._sum_answers.argtypes = (_POINTER, *[_SIZE] * 2)
        self.block_widths: tuple[int, ...] = tuple((_SIZE * 2).in_dll(library, "baton_block_widths_bf16"))
        """Numbers of outputs per block of weights that ``linear`` takes, the fastest last."""
        self._threads = threads

    def linear(
        self,
        x: Tensor,
        address: int,
        num_outputs: int,
        blocks: Blocks,
        bias: Tensor | None = None,
        *,
        is_gated: bool = False,
    ) -> Tensor:
        """Return x [R, inputs] @ weight.T + bias in bf16. linear.h describes the weight.

        With ``is_gated``, the products are [gate, up], for sizes that ``can_gate``, and outputs are silu(gate) * up.
        """
        assert not is_gated or self.can_gate(num_outputs), f"{num_outputs} outputs with gates"
        assert bias is None or bias.dtype == x.dtype, f"tensors have dtypes {x.dtype} and {bias.dtype}"
        num_rows, num_inputs = x.shape
        out = x.new_empty(num_rows, num_outputs)
        pointers = (x.data_ptr(), address, None if bias is None else bias.data_ptr(), out.data_ptr())
        given = (*pointers, num_rows, num_inputs, num_outputs, x.stride(0), *blocks, is_gated)
        self._share(self._linear, given, x, out, blocks, num_rows)
        return out

    def can_gate(self, num_outputs: int) -> bool:
        """Return whether ``linear`` and ``experts`` can compute this many outputs with gates."""
        return num_outputs % self.block_widths[-1] == 0

    def linear_of_heads(self, x: Tensor, weights: PackedWeights, out: Tensor) -> None:
        """Write ``linear`` of ``x [R, heads, inputs]``, with a weight per head, into ``out [R, heads, outputs]``."""
        assert out.stride(2) == 1, f"strides {out.stride()}"
        num_rows, num_heads, num_inputs = x.shape
        pointers = x.data_ptr(), weights.array(), out.data_ptr()
        strides = *x.stride()[:2], *out.stride()[:2]
        given = (*pointers, num_heads, num_rows, num_inputs, weights.num_outputs, *strides, *weights.blocks)
        self._share(self._linear_of_heads, given, x, out, weights.blocks, num_heads * num_rows)

    def choose_experts(
        self, logits: Tensor, num_chosen: int, counted: Tensor | None, *, sum_to_one: bool
    ) -> tuple[Tensor, Tensor]:
        """Choose experts like ``choose_experts`` of the kernels for GPUs."""
        num_tokens, num_experts = logits.shape
        assert logits.dtype == torch.bfloat16, f"logits have dtype {logits.dtype}"
        assert logits.is_contiguous(), f"strides {logits.stride()}"
        assert counted is None or counted.is_contiguous(), "flags are not adjacent"
        experts = logits.new_empty(num_tokens, num_chosen, dtype=torch.int32)
        factors = logits.new_empty(num_tokens, num_chosen, dtype=torch.float32)
        flags = None if counted is None else counted.data_ptr()
        given = (logits.data_ptr(), flags, experts.data_ptr(), factors.data_ptr(), num_experts, num_chosen, sum_to_one)
        self._threads.share(self._choose_experts, given, num_tokens, is_large=logits.numel() >= LEAST_SHARED)
        return experts, factors

    def experts(
        self,
        hidden: Tensor,
        chosen: Tensor,
        factors: Tensor,
        weights: ExpertWeights,
        loads: Tensor,
        *,
        most_answer_bytes: int,
    ) -> Tensor:
        """Return the weighted sum of the experts' answers to each token of ``hidden``, ``[tokens, hidden size]``.

        ``chosen [tokens, k]`` int32 and ``factors [tokens, k]`` fp32 are contiguous. Numbers of experts that are not
        here do not count. ``loads [experts]`` int64 are increased by the numbers of tokens. Answers to as many tokens
        as fit ``most_answer_bytes`` are added up at a time.
        """
        assert hidden.dtype == torch.bfloat16, f"tokens have dtype {hidden.dtype}"
        assert hidden.stride(1) == 1, f"strides {hidden.stride()}"
        assert self.can_gate(weights.gate_up.num_outputs // 2), f"{weights.gate_up.num_outputs} outputs of gate and up"
        for x, dtype in ((chosen, torch.int32), (factors, torch.float32), (loads, torch.int64)):
            assert x.dtype == dtype, f"tensor has dtype {x.dtype}, not {dtype}"
            assert x.is_contiguous(), f"strides {x.stride()}"
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        step = max(most_answer_bytes // (chosen.shape[1] * hidden.shape[1] * hidden.itemsize), 1)
        for begin in range(0, len(hidden), step):
            tokens = slice(begin, begin + step)
            self._answer(hidden[tokens], chosen[tokens], factors[tokens], weights, loads, out[tokens])
        return out

    def _answer(
        self, hidden: Tensor, chosen: Tensor, factors: Tensor, weights: ExpertWeights, loads: Tensor, out: Tensor
    ) -> None:
        gate_up, down, first = weights
        answers, next_part = hidden.new_empty(chosen.numel(), hidden.shape[1]), ctypes.c_int64(0)
        ends, order = (loads.new_empty(size) for size in (len(loads), chosen.numel()))
        layer = _Experts(
            *(x.data_ptr() for x in (hidden, chosen, factors, answers, out)),
            *(gate_up.array(), down.array()),
            *(x.data_ptr() for x in (loads, ends, order)),
            *(ctypes.addressof(next_part), *chosen.shape, first, len(loads)),
            *(hidden.shape[1], gate_up.num_outputs // 2, hidden.stride(0), *gate_up.blocks, *down.blocks),
        )
        run(partial(self._order_choices, ctypes.byref(layer)))
        self._threads.take_turns(self._answer_choices, layer, next_part)
        is_large = answers.numel() >= LEAST_SHARED
        self._threads.share(self._sum_answers, (ctypes.byref(layer),), len(hidden), is_large=is_large)

    def _share(
        self, function: Function, given: tuple[object, ...], x: Tensor, out: Tensor, blocks: Blocks, num_rows: int
    ) -> None:
        """Call ``function`` for all outputs of ``num_rows`` rows like those of ``x``, divided among threads if many."""
        num_inputs, num_outputs, num_together = x.shape[-1], out.shape[-1], self.block_widths[-1]
        assert x.dtype == out.dtype == torch.bfloat16, f"tensors have dtypes {x.dtype} and {out.dtype}"
        assert num_inputs % 2 == 0, f"{num_inputs} inputs do not form pairs"
        assert x.stride(-1) == 1, f"strides {x.stride()}"
        assert blocks.width in self.block_widths, f"blocks have {blocks.width} outputs"
        num_parts = -(-num_outputs // num_together)
        is_large = num_parts * num_together * num_inputs * num_rows >= _LEAST_PRODUCTS
        self._threads.share(function, given, num_parts, is_large=is_large)
