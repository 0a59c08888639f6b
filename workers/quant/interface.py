"""Formats in which checkpoints store weights. Does not import torch, so that the planner can read any model."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from cluster.spec.errors import UserError

if TYPE_CHECKING:  # the planner has no torch
    from torch import Tensor

    from workers.quant.fp8_matrix import Fp8Matrix

Shape = tuple[int, ...]
Index = tuple[slice, ...]
"""Range of elements in each dimension, with both bounds."""
Read = Callable[[str, Index], "Tensor"]
"""Function that reads elements of a tensor in the checkpoint, by name, into host memory."""


class UnsupportedFormatError(UserError):
    """Format of weights that the engine cannot load. The message says what was given and what is allowed."""


class TensorSpec(NamedTuple):
    """Properties that a tensor in a checkpoint must have."""

    shape: Shape
    dtypes: tuple[str, ...]
    """Allowed number formats, by safetensors' names."""


class StoredWeight(Protocol):
    """One weight of the model, as one or several tensors of the checkpoint."""

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return the tensors that the checkpoint must contain for this weight, by name."""

    def fp8_width(self, start: int, size: int) -> int | None:
        """Return the ``width`` of an Fp8Matrix that holds ``size`` columns from ``start``; None if none can."""

    def load(self, index: Index, target: "Tensor | Fp8Matrix", read: Read) -> None:
        """Copy the elements at ``index`` into ``target``, which has their shape, any device, and any float dtype or the
        width that ``fp8_width`` has returned.

        Only the parts of tensors that these elements need are read.
        """


class WeightFormat(Protocol):
    """Format of a checkpoint, whose text names it. Any format also stores some weights as plain numbers."""

    def weight(self, name: str, shape: Shape, dtype: str | None) -> StoredWeight:
        """Return a weight, given its shape in the model and the stored number format of the tensor with its name.

        ``dtype`` is None if the checkpoint has no such tensor.
        """

    def fp8_width(self, columns: int, start: int, size: int) -> int | None:
        """Return ``StoredWeight.fp8_width`` of a weight with this number of columns, stored as the format intends."""
