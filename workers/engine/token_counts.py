"""Token counts of one request, as arrays that grow with its output."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Counts of each token in the output: 0 for one that only the prompt has."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        counts = Counter(output)
        counts.update(dict.fromkeys(prompt, 0))
        self._indices = {token_id: index for index, token_id in enumerate(counts)}
        self._ids = np.fromiter(counts.keys(), dtype=np.int64)
        self._counts = np.fromiter(counts.values(), dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._indices)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Return each token's count in the output."""
        return self._counts[: len(self._indices)]

    def add(self, token_id: int) -> None:
        """Count one more output token."""
        index = self._indices.setdefault(token_id, len(self._indices))
        if index == len(self._ids):
            room = np.zeros(max(len(self._ids), 64), dtype=np.int64)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room.astype(np.float32)])
        self._ids[index] = token_id
        self._counts[index] += 1
