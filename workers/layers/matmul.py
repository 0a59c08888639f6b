"""Products with weights, tuned for CPUs: bf16 weights are rearranged once, or widened to fp32 part by part."""

import torch
from torch import Tensor
from torch.nn import functional

from workers.device import multiplies_bf16

_FEW_ROWS = 2
"""Most rows that are fastest one by one on a CPU that multiplies in fp32 only."""
_MANY_ROWS = 16
"""Fewest rows for which such a CPU is faster with an fp32 weight: torch's bf16 product has a quarter of the speed."""
_PART = 1 << 20
"""Elements of a weight that are widened at once, so that they are still cached when they are multiplied."""


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [R, inputs] @ weight.T + bias, summed in fp32 and rounded once, on every path."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    if _is_fast(x):
        return functional.linear(x, weight, bias)
    if len(x) <= _FEW_ROWS and bias is None:
        return torch.stack([torch.mv(weight, row) for row in x]) if len(x) else x.new_empty(0, len(weight))
    return functional.linear(x, weight, bias) if len(x) < _MANY_ROWS else _multiply_in_fp32(x, weight, bias)


def packed(weight: Tensor) -> Tensor:
    """Rearrange a weight [outputs, inputs] for ``multiply``, where oneDNN would otherwise do so on every call."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not multiplies_bf16():
        return weight.detach()
    rearranged: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return rearranged


def _is_fast(x: Tensor) -> bool:
    return x.device.type != "cpu" or x.dtype != torch.bfloat16 or multiplies_bf16()


def _multiply_in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, out = x.float(), x.new_empty(len(x), len(weight))
    step = max(_PART // weight.shape[1], 1)
    for begin in range(0, len(weight), step):
        part = slice(begin, begin + step)
        out[:, part] = functional.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out
