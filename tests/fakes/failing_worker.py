"""A worker whose model fails in a step, on the rank that a test names."""

import os
from typing import Any

from cluster.spec.lifecycle import Role
from cluster.spec.registry import RankRow
from workers.worker import Worker

RANK = "BATON_TEST_FAILING_RANK"
"""Environment variable: global rank of prefill."""
REASON = "no memory for this step"


class FailingModel:
    """Stands before a real model, and fails when it is called."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *_: object) -> None:
        raise RuntimeError(REASON)


class FailingWorker(Worker):
    """Fails after the warm-up."""

    def load(self, store_address: str) -> RankRow:
        """See Worker."""
        row = super().load(store_address)
        if (self.spec.role, self.spec.global_rank) == (Role.PREFILL, int(os.environ[RANK])):
            assert self._rank is not None
            runner: Any = self._rank.runner
            runner._model = FailingModel(runner._model)
        return row
