"""Weights stored as plain numbers, one tensor each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.quant.interface import Index, Read, Shape, TensorSpec

if TYPE_CHECKING:  # the planner has no torch
    from torch import Tensor

    from workers.quant.fp8_matrix import Fp8Matrix

PLAIN_DTYPES = ("F32", "BF16", "F16")


@dataclass(frozen=True, slots=True)
class PlainWeight:
    name: str
    shape: Shape

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {self.name: TensorSpec(self.shape, PLAIN_DTYPES)}

    def fp8_width(self, start: int, size: int) -> None:
        """Return None."""

    def load(self, index: Index, target: "Tensor | Fp8Matrix", read: Read) -> None:
        from torch import Tensor

        assert isinstance(target, Tensor), f"{self.name} is not stored in FP8"
        target.copy_(read(self.name, index))


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Format of checkpoints without `quantization_config`."""

    def __str__(self) -> str:
        return "plain numbers"

    def weight(self, name: str, shape: Shape, dtype: str | None) -> PlainWeight:  # noqa: ARG002 - any dtype
        return PlainWeight(name, shape)

    def fp8_width(self, columns: int, start: int, size: int) -> None:
        """Return None."""
