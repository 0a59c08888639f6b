"""Work reports of one rank, sent to the leader periodically."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from cluster.spec.step_messages import StepWork
from workers.layers.feed_forward import Experts
from workers.parallel.model_groups import ModelGroups

_EVERY_S = 1.0


class StepReports:
    """Reports of one rank. Of the ranks that share the width of an expert, the first one reports it."""

    def __init__(self, model: nn.Module, groups: ModelGroups, global_rank: int) -> None:
        """Start counting; warm-up is left out."""
        self._num_steps, self._step_s = 0, 0.0
        self._reported: tuple[int, Mapping[str, int]] = (0, {})
        reports = groups.position.moe_tp == 0
        self._experts = [module for module in model.modules() if isinstance(module, Experts)] if reports else []
        self._global_rank = global_rank
        self._before = self._counts()
        self._due_s = 0.0

    def count(self, seconds: float) -> None:
        """Count one step and its duration."""
        self._num_steps += 1
        self._step_s += seconds

    def next(
        self, now_s: float, *, is_idle: bool, dropped: Mapping[str, int] = MappingProxyType({})
    ) -> StepWork | None:
        """Return a report if there is anything new: once a second, or when idle.

        dropped: messages that the rank's inbox has dropped so far, by reason.
        """
        news = self._num_steps, dict(dropped)
        if news == self._reported or (now_s < self._due_s and not is_idle):
            return None
        self._due_s = now_s + _EVERY_S
        self._reported = news
        return StepWork(
            global_rank=self._global_rank,
            num_steps=self._num_steps,
            step_s=self._step_s,
            expert_tokens=dict(self._counts() - self._before),
            dropped=dict(dropped),
        )

    def _counts(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        if self._experts:  # all layers at once, since the host may wait for a GPU
            loads = torch.stack([experts.loads for experts in self._experts]).tolist()
            for experts, of_layer in zip(self._experts, loads, strict=True):
                counts.update(dict(zip(experts.numbers, of_layer, strict=True)))
        return counts
