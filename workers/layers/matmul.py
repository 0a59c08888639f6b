"""Products with weights. In bf16 on a CPU they are packed: rearranged once, as oneDNN else does for every product."""

import torch
from torch import Tensor
from torch.nn import functional


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias; the same bits whether the weight is packed or not."""
    if weight.is_mkldnn:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return functional.linear(x, weight, bias)


def packed(weight: Tensor) -> Tensor:
    """The weight [outputs, inputs] as ``multiply`` likes it: a copy, or itself. With few rows that halves the time."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not _has_bf16():
        return weight.detach()
    rearranged: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return rearranged


def _has_bf16() -> bool:
    is_built_in: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return is_built_in and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
