"""Pages out of a pool into memory in one piece, and back: for a host tier, staging, and pools of unequal layout.

The references are ``index_select`` and ``index_copy_``.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_WORDS = 1024


def gather_pages(pool: Tensor, pages: Tensor, out: Tensor) -> None:
    """Copy ``pages [n]`` int64 of ``pool [page, head, ...]``, in their order, into ``out [n, head, ...]``.

    What follows the heads is adjacent in memory, and whole 4-byte words: a pool, or a range of its heads or layers.
    """
    _copy(_words(pool), pages, _words(out), to_pool=False)


def scatter_pages(staged: Tensor, pages: Tensor, pool: Tensor) -> None:
    """Copy ``staged [n, head, ...]`` to ``pages [n]``, each once, of ``pool``; see gather_pages."""
    _copy(_words(pool), pages, _words(staged), to_pool=True)


def _words(x: Tensor) -> Tensor:
    """``[page, head, word]``, without a copy."""
    return x.view(*x.shape[:2], math.prod(x.shape[2:])).view(torch.int32)


def _copy(pool: Tensor, pages: Tensor, staged: Tensor, *, to_pool: bool) -> None:
    num_pages, num_heads, num_words = staged.shape
    assert pool.shape[1:] == staged.shape[1:], f"pages of {pool.shape[1:]} and of {staged.shape[1:]}"
    assert len(pages) == num_pages, f"{len(pages)} pages, {num_pages} staged"
    if num_pages:
        _copy_kernel[(num_pages, triton.cdiv(num_words, _BLOCK_WORDS), num_heads)](
            pool,
            pages,
            staged,
            *pool.stride()[:2],
            *staged.stride()[:2],
            num_words,
            TO_POOL=to_pool,
            BLOCK_WORDS=_BLOCK_WORDS,
        )


@triton.jit
def _copy_kernel(
    pool, pages, staged, page_stride, head_stride, staged_page_stride, staged_head_stride, num_words,
    TO_POOL: tl.constexpr, BLOCK_WORDS: tl.constexpr,
):  # fmt: skip
    words = tl.program_id(1) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    in_pool = pool + tl.load(pages + place) * page_stride + head * head_stride + words
    in_staged = staged + place * staged_page_stride + head * staged_head_stride + words
    if TO_POOL:
        tl.store(in_pool, tl.load(in_staged, mask=words < num_words), mask=words < num_words)
    else:
        tl.store(in_staged, tl.load(in_pool, mask=words < num_words), mask=words < num_words)
