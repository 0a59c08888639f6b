"""Settings of sampled rows, on the device of their logits."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.spec.sampling import Sampling
from workers.device import on_device
from workers.engine.exponential_race import key_of

_ROUNDING = 1e-4
"""Logits in fp32 that differ by less count as equal."""
_NUM_SETTINGS, _NUM_WHOLE = 7, 3
"""Number of settings per row; whole numbers come first."""


class DrawSettings:
    """Columns of ``[num_rows]`` each: views of one table, which reaches a GPU in one copy."""

    def __init__(self, table: Tensor) -> None:
        """Wrap ``table [settings, num_rows]`` int64, part of which holds the bits of fp64 numbers."""
        self._table = table
        self.indices, self.keys, self.top_k = table[:_NUM_WHOLE]
        """Columns of int64: index among the step's rows, sampling key, and number of tokens to keep, at least 1."""
        self.top_p, self.temperature, self.floor, self.rounding = table[_NUM_WHOLE:].view(torch.float64)
        """Columns of fp64: mass to keep, divisor, least score by min-p, and tolerance of equal scores."""

    @classmethod
    def of(
        cls,
        rows: Sequence[Sampling],
        positions: Sequence[int],
        indices: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> "DrawSettings":
        """Return the settings of rows with temperatures above zero; ``positions`` are output positions."""
        table = np.empty((_NUM_SETTINGS, len(rows)), np.int64)
        table[0] = indices
        table[1] = [key_of(row.seed, position) for row, position in zip(rows, positions, strict=True)]
        table[2] = [row.top_k or vocab_size for row in rows]
        top_p, temperature, floor, rounding = table[_NUM_WHOLE:].view(np.float64)
        top_p[:] = [row.top_p for row in rows]
        temperature[:] = [row.temperature for row in rows]
        floor[:] = [math.log(row.min_p) if row.min_p > 0 else -math.inf for row in rows]
        rounding[:] = _ROUNDING / temperature
        return cls(on_device(torch.from_numpy(table), device))

    def at(self, rows: Tensor) -> "DrawSettings":
        """Return the settings of some rows."""
        return DrawSettings(self._table[:, rows])
