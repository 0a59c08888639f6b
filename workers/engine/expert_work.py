"""What the experts of one rank have computed, told to the leader now and then."""

from collections import Counter

from torch import nn

from cluster.spec.step_messages import ExpertWork
from workers.layers.experts import Experts
from workers.parallel.model_groups import ModelGroups

_EVERY_S = 1.0


class ExpertReports:
    """One rank's. Of the ranks that share the width of an expert, the first one tells."""

    def __init__(self, model: nn.Module, groups: ModelGroups, global_rank: int) -> None:
        """Counts from now on: what was computed to warm up is left out."""
        tells = groups.position.moe_tp == 0
        self._experts = [module for module in model.modules() if isinstance(module, Experts)] if tells else []
        self._global_rank = global_rank
        self._before = self._counts()
        self._told: Counter[int] = Counter()
        self._due_s = 0.0

    def next(self, now_s: float, *, is_idle: bool) -> ExpertWork | None:
        """What is to be told now, if there is anything new: once a second, or when nothing else is to be done."""
        if not self._experts or (now_s < self._due_s and not is_idle):
            return None
        self._due_s = now_s + _EVERY_S
        counts = self._counts() - self._before
        if counts == self._told:
            return None
        self._told = counts
        return ExpertWork(global_rank=self._global_rank, tokens=dict(counts))

    def _counts(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        for experts in self._experts:
            counts.update(dict(zip(experts.held, experts.loads, strict=True)))
        return counts
