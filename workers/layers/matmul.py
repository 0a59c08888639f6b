"""Products with weights: plain ones, packed ones on CPUs, and ones in FP8."""

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from workers.device import device_of
from workers.native.library import Library
from workers.native.products import Blocks, PackedWeights
from workers.quant.fp8_matrix import Fp8Matrix

_ONEDNN_WIDTHS = (32, 64)
"""Outputs per block of a packed weight, as oneDNN chooses them on CPUs with and without AMX."""
_FEW_ROWS = 2
"""Maximum number of rows for which a CPU without bf16 arithmetic is fastest one row at a time."""
_MANY_ROWS = 16
"""Minimum number of rows for which a CPU without bf16 arithmetic is faster with weights converted to fp32, whose
products run at four times the speed of bf16.
"""
_PART = 1 << 20
"""Number of weight elements converted to fp32 at a time, so that they stay in the cache for the product."""


class NativeProducts(NamedTuple):
    """Native code, which multiplies up to ``most_rows`` rows."""

    library: Library
    most_rows: int

    @property
    def takes_all(self) -> bool:
        """Return whether native code multiplies any number of rows."""
        return self.most_rows == sys.maxsize


@dataclass(slots=True)
class PackedMatrix:
    """Matrix [outputs, inputs] in bf16, in the layout in which oneDNN or native code multiplies."""

    matrix: Tensor
    """Opaque tensor of oneDNN or, on CPUs without bf16 arithmetic, the blocks of native code."""
    address: int
    shape: torch.Size
    blocks: Blocks | None
    """Layout of the elements. None if native code does not know it."""
    native: NativeProducts | None = None
    """None if oneDNN multiplies any number of rows."""

    def rows(self, outputs: slice) -> Tensor:
        """Return a plain copy of some outputs' rows."""
        if self.matrix.is_mkldnn:
            return self.matrix.to_dense()[outputs]
        num_outputs, num_inputs = self.shape
        return self.matrix.transpose(1, 2).reshape(-1, num_inputs)[:num_outputs][outputs]

    def part(self, outputs: slice) -> "PackedMatrix":
        """Return some outputs' rows, without a copy if native code multiplies any number of rows by them."""
        begin, end, _ = outputs.indices(self.shape[0])
        if self.native is not None and self.native.takes_all and self.blocks is not None:
            block, rest = divmod(begin, self.blocks.width)
            if not rest:
                address = self.address + block * self.blocks.stride * self.matrix.itemsize
                return replace(self, address=address, shape=torch.Size((end - begin, self.shape[1])))
        rows = self.rows(outputs)
        if not self.matrix.is_mkldnn:
            assert self.native is not None, "only native code multiplies in this layout"
            return _pack_for(self.native.library, rows)
        part = _pack_with_onednn(rows)
        part.native = self.native if part.blocks is not None else None
        return part

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        library = self._library_for(x)
        return self.multiply_with_onednn(x, bias) if library is None else self.multiply_natively(library, x, bias)

    def multiply_gated(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return silu(gate) * up of the products [gate, up], or None if these have to be computed apart."""
        library, num_outputs = self._library_for(x), self.shape[0] // 2
        if library is None or self.blocks is None or not library.products.can_gate(num_outputs):
            return None
        return library.products.linear(x, self.address, num_outputs, self.blocks, bias, is_gated=True)

    def multiply_natively(self, library: Library, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply with native code, which must know the layout."""
        assert self.blocks is not None, "native code does not know the layout"
        return library.products.linear(x, self.address, self.shape[0], self.blocks, bias)

    def multiply_with_onednn(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply with oneDNN, which prepares code for each new number of rows."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.matrix, bias, "none", [], "")
        return product

    def _library_for(self, x: Tensor) -> Library | None:
        """Return native code if it multiplies as many rows as ``x`` has."""
        return self.native.library if self.native is not None and x.shape[0] <= self.native.most_rows else None


def weights_of(matrices: Sequence[PackedMatrix]) -> PackedWeights:
    """Return matrices of one shape for native code, which must know the layout."""
    first = matrices[0]
    assert first.blocks is not None, "native code does not know the layout"
    return PackedWeights([matrix.address for matrix in matrices], first.blocks, first.shape[0])


Matrix = Tensor | Fp8Matrix | PackedMatrix


def multiply(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return x [R, inputs] @ weight.T + bias, summed in fp32 and rounded once, on every device.

    With a weight in FP8, ``x`` is first rounded to FP8, with a scale per row and group of inputs.
    """
    if isinstance(weight, PackedMatrix):
        return weight.multiply(x, bias)
    if isinstance(weight, Fp8Matrix):
        from workers.kernels.fp8 import fp8_matmul

        return fp8_matmul(x, weight.values, weight.scales, weight.width, bias)
    if x.dtype != torch.bfloat16 or device_of(x).multiplies_bf16:
        return functional.linear(x, weight, bias)
    if len(x) <= _FEW_ROWS and bias is None:
        return torch.stack([torch.mv(weight, row) for row in x]) if len(x) else x.new_empty(0, len(weight))
    return functional.linear(x, weight, bias) if len(x) < _MANY_ROWS else _multiply_in_fp32(x, weight, bias)


def _multiply_in_fp32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    wide, out = x.float(), x.new_empty(len(x), len(weight))
    step = max(_PART // weight.shape[1], 1)
    for begin in range(0, len(weight), step):
        part = slice(begin, begin + step)
        out[:, part] = functional.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out


def packed(weight: Tensor, library: Library | None = None) -> Tensor | PackedMatrix:
    """Rearrange a weight [outputs, inputs] for ``multiply`` if it is in bf16 and on a CPU.

    Where oneDNN does not multiply in bf16, do so for native code, if there is a library.
    """
    weight = weight.detach()
    if weight.dtype != torch.bfloat16:
        return weight
    if device_of(weight).packs_bf16:
        return _pack_with_onednn(weight)
    is_in_pairs = weight.shape[1] % 2 == 0
    return _pack_for(library, weight) if library is not None and is_in_pairs else weight


def _pack_for(library: Library, weight: Tensor) -> PackedMatrix:
    """Pack a weight with an even number of inputs for native code, which then multiplies any number of rows."""
    (num_outputs, num_inputs), width = weight.shape, library.products.block_widths[-1]
    missing = -num_outputs % width
    whole = functional.pad(weight, (0, 0, 0, missing)) if missing else weight  # padding by nothing copies, too
    matrix = whole.reshape(-1, width, num_inputs // 2, 2).transpose(1, 2).contiguous()
    native = NativeProducts(library, sys.maxsize)
    return PackedMatrix(matrix, matrix.data_ptr(), weight.shape, Blocks(width, width * num_inputs), native)


def _pack_with_onednn(weight: Tensor) -> PackedMatrix:
    matrix = torch.ops.mkldnn._reorder_linear_weight(weight)
    address, size = torch.ops.mkldnn.data_ptr(matrix), torch.ops.mkldnn._nbytes(matrix) // weight.itemsize
    memory = torch.frombuffer((ctypes.c_int16 * size).from_address(address), dtype=torch.bfloat16)
    return PackedMatrix(matrix, address, weight.shape, _find_blocks(memory, weight))


def _find_blocks(memory: Tensor, weight: Tensor) -> Blocks | None:
    """Return the layout of a packed weight. OneDNN chooses it by the processor, and does not name it."""
    layouts = (Blocks(width, len(memory) // -(-len(weight) // width)) for width in _ONEDNN_WIDTHS)
    return next((blocks for blocks in layouts if _is_in_blocks(memory, weight, blocks)), None)


def _is_in_blocks(memory: Tensor, weight: Tensor, blocks: Blocks) -> bool:
    num_inputs, (width, stride) = weight.shape[1], blocks
    depth = stride // width
    if num_inputs % 2 or depth % 2 or depth < num_inputs or stride % width or len(memory) % stride:
        return False
    for found, rows in zip(torch.split(memory, stride), torch.split(weight, width), strict=True):
        block = functional.pad(rows, (0, depth - num_inputs, 0, width - len(rows)))
        # Each pair of inputs is one number.
        if not torch.equal(found.view(torch.int32).view(depth // 2, width), block.view(torch.int32).T.contiguous()):
            return False
    return True
