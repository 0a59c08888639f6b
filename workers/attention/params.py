"""Parameters of a layer's attention, and features that a backend may lack."""

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor


class Feature(StrEnum):
    """Abilities that only some backends have; all of them scale scores as asked and return the log-sum-exp."""

    WINDOW = "sliding windows"
    VALUE_WIDTH = "values of another width than keys"


ALL_FEATURES = frozenset(Feature)


@dataclass(frozen=True, slots=True, eq=False)
class AttentionParams:
    """Attention parameters of one layer, passed with every call. The width of values is read from the values."""

    scale: float
    """Scale of the products of queries and keys."""
    window: int | None = None
    """Number of latest keys that a query sees, including its own token's; None for all."""
    sinks: Tensor | None = None
    """``[heads]`` fp32: scores, already scaled, that join each head's softmax without a value.

    They count once for each query, so ``merge`` adds them when all partials are there; backends leave them alone.
    """
