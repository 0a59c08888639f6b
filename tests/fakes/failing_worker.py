"""Worker whose model fails in a step, on a rank that the test names."""

import os
from typing import Any

from cluster.spec.ids import Role
from cluster.spec.registry import RankRecord
from workers.worker import Worker

RANK = "BATON_TEST_FAILING_RANK"
"""Environment variable with role, global rank and number of the failing call, such as "decode 1 3"."""
REASON = "no memory for this step"


class FailingModel:
    """Model that fails in one of its calls."""

    def __init__(self, model: Any, num_calls: int) -> None:
        self._model = model
        self._num_calls_left = num_calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._num_calls_left -= 1
        if self._num_calls_left == 0:
            raise RuntimeError(REASON)
        return self._model(*args, **kwargs)


class FailingWorker(Worker):
    """Worker that fails after the warm-up."""

    def load(self, store_address: str) -> RankRecord:
        record = super().load(store_address)
        role, rank, num_calls = os.environ[RANK].split()
        if (self.spec.role, self.spec.global_rank) == (Role(role), int(rank)):
            assert self._rank is not None
            runner: Any = self._rank.runner
            runner.model = FailingModel(runner.model, int(num_calls))
        return record
