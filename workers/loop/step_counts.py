"""Counts of computed steps: each rank's work reports, and the leader's step times by strategy."""

from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from cluster.spec.registry import StepTimes
from cluster.spec.step_messages import StepPlan, StepWork
from cluster.spec.strategy import Passing, Strategy
from workers.layers.feed_forward import Experts
from workers.parallel.model_groups import ModelGroups

_EVERY_S = 1.0
"""Interval between work reports."""


class StepReports:
    """Work reports of one rank. If several ranks hold parts of an expert, only the first reports its tokens."""

    def __init__(self, model: nn.Module, groups: ModelGroups, global_rank: int) -> None:
        self._num_steps, self._step_s = 0, 0.0
        self._reported: tuple[int, Mapping[str, int]] = (0, {})
        reports = groups.position.moe_tp == 0
        self._experts = [module for module in model.modules() if isinstance(module, Experts)] if reports else []
        self._global_rank = global_rank
        self._before = self._counts()
        self._due_s = 0.0

    def count(self, seconds: float) -> None:
        self._num_steps += 1
        self._step_s += seconds

    def next(
        self, now_s: float, *, is_idle: bool, dropped: Mapping[str, int] = MappingProxyType({})
    ) -> StepWork | None:
        """Return a report if anything has changed, at most once per second unless the rank is idle.

        dropped: number of messages that the rank's inbox has dropped so far, by reason.
        """
        state = self._num_steps, dict(dropped)
        if state == self._reported or (now_s < self._due_s and not is_idle):
            return None
        self._due_s = now_s + _EVERY_S
        self._reported = state
        return StepWork(
            global_rank=self._global_rank,
            num_steps=self._num_steps,
            step_s=self._step_s,
            expert_tokens=dict(self._counts() - self._before),
            dropped=dict(dropped),
        )

    def _counts(self) -> Counter[int]:
        counts: Counter[int] = Counter()
        if self._experts:  # all layers together, since the host may wait for a GPU
            loads = torch.stack([experts.loads for experts in self._experts]).tolist()
            for experts, of_layer in zip(self._experts, loads, strict=True):
                counts.update(dict(zip(experts.numbers, of_layer, strict=True)))
        return counts


class StepMeter:
    """Step times by strategy. Steps without a time estimate, such as decode steps, are not counted."""

    def __init__(self) -> None:
        self._by_strategy: dict[tuple[Strategy, Passing | None], StepTimes] = {}
        self.times: tuple[StepTimes, ...] = ()
        """Step times. The tuple is replaced, never changed, because the lease thread reads it."""

    def after_step(self, plan: StepPlan, seconds: float) -> None:
        if plan.estimate_s is None:
            return
        key = plan.shape.strategy, plan.shape.passing
        before = self._by_strategy.get(key, StepTimes(strategy=plan.shape.strategy, passing=plan.shape.passing))
        self._by_strategy[key] = StepTimes(
            strategy=plan.shape.strategy,
            passing=plan.shape.passing,
            num_steps=before.num_steps + 1,
            num_tokens=before.num_tokens + sum(len(request.token_ids) for request in plan.scheduled),
            total_s=before.total_s + seconds,
            total_estimate_s=before.total_estimate_s + plan.estimate_s,
            last_s=seconds,
            last_estimate_s=plan.estimate_s,
        )
        self.times = tuple(self._by_strategy.values())
