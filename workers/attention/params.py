"""How a layer attends, and what a backend may lack to do so."""

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
    """How one layer attends, given with every call. The width of values is read off the values."""

    scale: float
    """Factor of the products of queries and keys."""
    window: int | None = None
    """Number of latest keys that a query sees, its own token's among them; None for all."""
    sinks: Tensor | None = None
    """``[heads]`` fp32: scores, already scaled, that join each head's softmax without a value.

    They count once for each query, so ``merge`` adds them when all partials are there; backends leave them alone.
    """
