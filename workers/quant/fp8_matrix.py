"""Weights that stay in FP8 on devices that multiply in FP8. Other weights are plain tensors."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """Matrix [outputs, inputs], or one for each expert, whose element [i, j] is values[i, j] * scales[i, j // width].

    Every row has scales of its own, so that a range of rows is a matrix, wherever blocks of a checkpoint begin.
    """

    values: Tensor
    """E4M3 ``[..., outputs, inputs]``."""
    scales: Tensor
    """fp32 ``[..., outputs, groups]``. The last group can be smaller."""
    width: int
    """Number of inputs per group."""

    @classmethod
    def empty(cls, shape: Sequence[int], width: int, device: torch.device) -> Self:
        values = torch.empty(*shape, dtype=torch.float8_e4m3fn, device=device)
        return cls(values, torch.empty(*shape[:-1], -(-shape[-1] // width), device=device), width)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def __getitem__(self, rows: int | slice) -> "Fp8Matrix":
        """Return an expert's matrix, or some rows."""
        return Fp8Matrix(self.values[rows], self.scales[rows], self.width)

    def cleared(self, sizes: tuple[int, ...]) -> "Fp8Matrix":
        """Return the first rows and columns, and fill the rest with zeros."""
        num_rows, num_columns = sizes
        if sizes != self.shape:
            self.values.zero_()
            self.scales.zero_()
        groups = self.scales[:num_rows, : -(-num_columns // self.width)]
        return Fp8Matrix(self.values[:num_rows, :num_columns], groups, self.width)


def split_rows(matrix: Tensor | Fp8Matrix, sizes: list[int]) -> Sequence[Tensor | Fp8Matrix]:
    """Divide a matrix into ranges of rows."""
    if isinstance(matrix, Tensor):
        return torch.split(matrix, sizes)
    parts = zip(torch.split(matrix.values, sizes), torch.split(matrix.scales, sizes), strict=True)
    return [Fp8Matrix(values, scales, matrix.width) for values, scales in parts]
