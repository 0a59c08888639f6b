"""Weighted sum of each token's expert outputs, in the order in which it chose the experts.

The reference is a loop.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_COLS = 1024


def sum_choices(answers: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    """Compute ``out[t] = sum_i weights[t, i] * answers[rows[t, i]]`` over the ``rows [tokens, k]`` that are not
    negative.

    answers: ``[rows, cols]``; weights: ``[tokens, k]`` fp32. All are contiguous. Added up in fp32, rounded once.
    """
    assert rows.shape == weights.shape, f"{rows.shape} rows, {weights.shape} weights"
    assert all(tensor.is_contiguous() for tensor in (answers, rows, weights)), "strides"
    (num_tokens, num_chosen), num_cols = rows.shape, answers.shape[1]
    out = torch.empty(num_tokens, num_cols, dtype=answers.dtype, device=answers.device)
    if num_tokens:
        _sum_choices_kernel[(num_tokens, triton.cdiv(num_cols, _BLOCK_COLS))](
            answers, rows, weights, out, num_chosen, num_cols, BLOCK_COLS=_BLOCK_COLS
        )
    return out


@triton.jit
def _sum_choices_kernel(answers, rows, weights, out, num_chosen, num_cols, BLOCK_COLS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    total = tl.zeros((BLOCK_COLS,), tl.float32)
    for choice in range(0, num_chosen):
        row = tl.load(rows + token * num_chosen + choice).to(tl.int64)
        answer = tl.load(answers + row * num_cols + cols, mask=(cols < num_cols) & (row >= 0), other=0.0)
        total += answer.to(tl.float32) * tl.load(weights + token * num_chosen + choice)
    tl.store(out + token * num_cols + cols, total.to(out.dtype.element_ty), mask=cols < num_cols)
