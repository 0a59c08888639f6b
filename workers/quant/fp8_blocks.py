"""FP8 weights with one scale per block, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.2) and Qwen3's FP8 models.

Element [i, j] of a weight W is ``W[i, j] * W_scale_inv[i // rows, j // columns]``, computed in fp32 and rounded once if
the weight does not stay in FP8. The last blocks of a weight can be partial. Which weights are in FP8 follows from the
number formats of the stored tensors, so `modules_to_not_convert` is not needed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from workers.quant.interface import Index, Read, Shape, StoredWeight, TensorSpec, UnsupportedFormatError
from workers.quant.plain import PLAIN_DTYPES, PlainWeight

if TYPE_CHECKING:  # the planner has no torch
    from torch import Tensor

    from workers.quant.fp8_matrix import Fp8Matrix

_WEIGHT_DTYPE = "F8_E4M3"
_SCALE_DTYPES = ("F32", "BF16")
_STRIP_SIZE = 1 << 16
"""Number of elements to dequantize at a time, unless one row of blocks has more. Few enough that the heap keeps no
memory of freed strips.
"""
_WIDTHS = range(32, 129)
"""Widths of groups for products in FP8: tensor cores multiply at least 32 inputs, and their sums are exact enough for
128.
"""


@dataclass(frozen=True, slots=True)
class Fp8Blocks:
    """Format of a checkpoint whose blocks have this number of rows and columns."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"FP8 with blocks of {self.rows} x {self.columns}"

    def weight(self, name: str, shape: Shape, dtype: str | None) -> StoredWeight:
        if dtype is None or dtype in PLAIN_DTYPES or len(shape) != 2:
            return PlainWeight(name, shape)
        return Fp8Weight(name, shape, self)

    def fp8_width(self, columns: int, start: int, size: int) -> int | None:
        # Blocks and groups need a common divisor only if the weight is divided.
        whole = min(self.columns, columns)
        shared = whole if size == columns else gcd(whole, start, size)
        return max((width for width in _WIDTHS if shared % width == 0), default=None)


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """Weight [outputs, inputs] with a tensor of scales [row blocks, column blocks]."""

    name: str
    shape: Shape
    format: Fp8Blocks

    @property
    def block(self) -> tuple[int, int]:
        """Return the rows and columns of a block, at most those of the weight."""
        return min(self.format.rows, self.shape[0]), min(self.format.columns, self.shape[1])

    def tensors(self) -> Mapping[str, TensorSpec]:
        scales = tuple(-(-size // of_block) for size, of_block in zip(self.shape, self.block, strict=True))
        return {
            self.name: TensorSpec(self.shape, (_WEIGHT_DTYPE,)),
            self._scale_name: TensorSpec(scales, _SCALE_DTYPES),
        }

    @property
    def _scale_name(self) -> str:
        return f"{self.name}_scale_inv"

    def fp8_width(self, start: int, size: int) -> int | None:
        return self.format.fp8_width(self.shape[1], start, size)

    def load(self, index: Index, target: "Tensor | Fp8Matrix", read: Read) -> None:
        from torch import Tensor

        if isinstance(target, Tensor):
            self._dequantize(index, target, read)
        else:
            self._copy(index, target, read)

    def _copy(self, index: Index, target: "Fp8Matrix", read: Read) -> None:
        (rows, columns), height = index, self.block[0]
        target.values.copy_(read(self.name, index))
        scales = self._scales(rows, columns, read)[:, :: target.width].repeat_interleave(height, dim=0)
        begin = rows.start % height
        target.scales.copy_(scales[begin : begin + rows.stop - rows.start])

    def _dequantize(self, index: Index, target: "Tensor", read: Read) -> None:
        rows, columns = index
        height, first = self.block[0], rows.start // self.block[0]
        scales = self._scales(rows, columns, read).to(target.device)
        step = max(_STRIP_SIZE // max(target.shape[1] * height, 1), 1)
        for block in range(first, -(-rows.stop // height), step):
            strip = slice(max(block * height, rows.start), min((block + step) * height, rows.stop))
            # Copied to the device as FP8, which is the smallest form.
            values = read(self.name, (strip, columns)).to(target.device)
            part = target[strip.start - rows.start : strip.stop - rows.start]
            part.copy_(self._scaled(values, scales[block - first : block - first + step], strip.start - block * height))

    def _scaled(self, values: "Tensor", scales: "Tensor", begin: int) -> "Tensor":
        """Return FP8 values in fp32, multiplied by scales whose first block begins ``begin`` rows before them."""
        factors = scales.repeat_interleave(self.block[0], dim=0)
        return values.float().mul_(factors[begin : begin + len(values)])

    def _scales(self, rows: slice, columns: slice, read: Read) -> "Tensor":
        """Return fp32 scales of some rows and columns, one row per block and one column per column of the weight."""
        height, width = self.block
        scales = read(self._scale_name, (_blocks_of(rows, height), _blocks_of(columns, width))).float()
        begin = columns.start % width
        return scales.repeat_interleave(width, dim=1)[:, begin : begin + columns.stop - columns.start]


def _blocks_of(elements: slice, size: int) -> slice:
    """Return the range of blocks that contain these elements."""
    return slice(elements.start // size, -(-elements.stop // size))


def read(given: Mapping[str, Any]) -> Fp8Blocks:
    """Read `quantization_config`. Raises UnsupportedFormatError for FP8 in another form."""
    scheme = given.get("activation_scheme", "dynamic")
    if scheme != "dynamic":
        raise UnsupportedFormatError(f"quantization_config: activation_scheme is {scheme!r}; allowed: 'dynamic'")
    match given.get("weight_block_size"):
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Fp8Blocks(rows, columns)
        case size:
            raise UnsupportedFormatError(
                f"quantization_config: weight_block_size is {size!r}; "
                "allowed: the rows and columns of a block with one scale, such as [128, 128]"
            )
