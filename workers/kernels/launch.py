"""Helpers for kernel launches: block sizes, and differences between a GPU and Triton's interpreter."""

import torch
import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret
"""True if Triton interprets kernels in Python on CPU tensors, as in tests without a GPU."""


def operand_type(dtype: torch.dtype) -> tl.dtype:
    """Return the operand type of matrix products. The interpreter cannot multiply bf16 and FP8."""
    if dtype == torch.float32 or INTERPRETED:
        return tl.float32
    if dtype == torch.float8_e4m3fn:
        return tl.float8e4nv
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def block_of(size: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least ``size`` and ``least``."""
    return max(1 << (size - 1).bit_length(), least)
