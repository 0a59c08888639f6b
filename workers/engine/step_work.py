"""What one rank has computed, told to the leader now and then."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from cluster.spec.step_messages import StepWork
from workers.layers.experts import Experts
from workers.parallel.model_groups import ModelGroups

_EVERY_S = 1.0


class StepReports:
    """One rank's. Of the ranks that share the width of an expert, the first one tells of it."""

    def __init__(self, model: nn.Module, groups: ModelGroups, global_rank: int) -> None:
        """Counts from now on: what was computed to warm up is left out."""
        self._num_steps, self._step_s = 0, 0.0
        self._told: tuple[int, Mapping[str, int]] = (0, {})
        tells = groups.position.moe_tp == 0
        self._experts = [module for module in model.modules() if isinstance(module, Experts)] if tells else []
        self._global_rank = global_rank
        self._before = self._counts()
        self._due_s = 0.0

    def count(self, seconds: float) -> None:
        """One more step, and how long it took."""
        self._num_steps += 1
        self._step_s += seconds

    def next(
        self, now_s: float, *, is_idle: bool, dropped: Mapping[str, int] = MappingProxyType({})
    ) -> StepWork | None:
        """What is to be told now, if there is anything new: once a second, or when nothing else is to be done.

        dropped: what was kept out of the rank's inbox so far, by reason.
        """
        news = self._num_steps, dict(dropped)
        if news == self._told or (now_s < self._due_s and not is_idle):
            return None
        self._due_s = now_s + _EVERY_S
        self._told = news
        return StepWork(
            global_rank=self._global_rank,
            num_steps=self._num_steps,
            step_s=self._step_s,
            expert_tokens=dict(self._counts() - self._before),
            dropped=dict(dropped),
        )

    def _counts(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        if self._experts:  # of all layers at once, since the host may wait for a GPU
            loads = torch.stack([experts.loads for experts in self._experts]).tolist()
            for experts, of_layer in zip(self._experts, loads, strict=True):
                counts.update(dict(zip(experts.logical, of_layer, strict=True)))
        return counts
