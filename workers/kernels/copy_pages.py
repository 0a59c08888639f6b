"""Page copies in one launch, within a GPU or between a GPU and pinned host memory, which the GPU accesses directly."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from workers.device import is_within_device

_BLOCK_WORDS, _WARPS = 8192, 16
"""Words and warps per program. Each thread has 64 bytes in flight."""
_PROGRAMS_TO_HOST = 8
"""Number of programs for host copies, which mostly wait. Their 256 KiB in flight saturate a 50 GB/s link with a latency
of 2 µs. More programs would only delay other kernels.
"""


def copy_pages(source: Tensor, target: Tensor, indices: Tensor) -> None:
    """Copy pages ``indices[0]`` of ``source [page, head, ...]`` to the distinct pages ``indices[1]`` of ``target``.

    ``indices [2, n]`` int64 is on the GPU. A head's data is adjacent in memory and consists of 4-byte words.
    """
    assert source.shape[1:] == target.shape[1:], f"page shapes {source.shape[1:]} and {target.shape[1:]} differ"
    source, target = _words(source), _words(target)
    _, num_heads, num_words = source.shape
    num_parts = triton.cdiv(num_words, _BLOCK_WORDS)
    num_blocks = indices.shape[1] * num_heads * num_parts
    if num_blocks:
        strides, sizes = (
            (*source.stride()[:2], *target.stride()[:2]),
            (indices.shape[1], num_heads, num_parts, num_words),
        )
        _copy_kernel[(num_blocks if is_within_device(source, target) else min(num_blocks, _PROGRAMS_TO_HOST),)](
            source, target, indices, *strides, *sizes, BLOCK_WORDS=_BLOCK_WORDS, num_warps=_WARPS
        )


def _words(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], math.prod(x.shape[2:])).view(torch.int32)


@triton.jit(do_not_specialize=["num_pages", "num_heads", "num_parts"])
def _copy_kernel(
    source, target, indices, source_page, source_head, target_page, target_head,
    num_pages, num_heads, num_parts, num_words, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    for block in range(tl.program_id(0), num_pages * num_heads * num_parts, tl.num_programs(0)):
        piece = block // num_parts
        words = block % num_parts * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
        index, head = piece // num_heads, (piece % num_heads).to(tl.int64)
        read = tl.load(indices + index) * source_page + head * source_head
        written = tl.load(indices + num_pages + index) * target_page + head * target_head
        content = tl.load(source + read + words, mask=words < num_words)
        tl.store(target + written + words, content, mask=words < num_words)
