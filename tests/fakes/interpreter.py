"""Fixes for Triton 3.6's interpreter, where it differs from a GPU or from what numpy 2.4 accepts."""

from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter


@cache
def patch_interpreter() -> None:
    """Apply the fixes. Call this before the first launch."""
    patch_tensor, convert = interpreter._patch_lang_tensor, interpreter._convert_float

    def patch_tensor_too(tensor: Any, scope: Any) -> None:
        """Convert one-element arrays to numbers, which numpy refuses for the bounds of a range."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def convert_rounding(array: NDArray[Any], source: tl.dtype, target: tl.dtype, mode: Any) -> NDArray[Any]:
        """Round to the nearest bf16 and FP8 like a GPU, instead of truncating, and keep NaN in FP8."""
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.ascontiguousarray(array)).bfloat16()
            return rounded.view(torch.uint16).numpy().reshape(array.shape)
        if (source, target) == (tl.bfloat16, tl.float32):
            return (array.astype(np.uint32) << 16).view(np.float32)
        if (source, target) == (tl.float32, tl.float8e4nv):
            rounded = torch.from_numpy(np.ascontiguousarray(array)).to(torch.float8_e4m3fn)
            return rounded.view(torch.uint8).numpy().reshape(array.shape)
        if (source, target) == (tl.float8e4nv, tl.float32):
            return torch.from_numpy(np.ascontiguousarray(array)).view(torch.float8_e4m3fn).float().numpy()
        converted: NDArray[Any] = convert(array, source, target, mode)
        return converted

    interpreter._patch_lang_tensor = patch_tensor_too
    interpreter._convert_float = convert_rounding
