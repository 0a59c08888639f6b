"""Steps under way on one rank, and counters of computed steps. A CPU rank has at most one step under way."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from cluster.spec.clock import Clock
from cluster.spec.ids import Room
from cluster.spec.registry import StepTimes
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan, StepWork
from cluster.spec.strategy import Passing, Strategy
from workers.engine.step_state import BegunStep
from workers.handoff.kv_sender import KvSender
from workers.hicache.tier_worker import TierWorker
from workers.layers.feed_forward import Experts
from workers.loop.watch import BETWEEN_STEPS, Heartbeat
from workers.parallel.model_groups import ModelGroups
from workers.rank import Rank

PATIENCE_S = 1.0
"""Maximum time spent on messages while a step runs."""
_EVERY_S = 1.0
"""Interval between work reports, in seconds."""


class EndedStep(NamedTuple):
    plan: StepPlan
    sampled: Mapping[Room, Sampled]
    seconds: float
    """Duration in seconds, counted from the step's start or the previous step's end, whichever is later."""


class RankSteps:
    """Steps of one rank, ending in the order in which they started."""

    def __init__(self, rank: Rank, sender: KvSender, tiers: TierWorker, clock: Clock, heartbeat: Heartbeat) -> None:
        self._rank, self._sender, self._tiers, self._clock, self._heartbeat = rank, sender, tiers, clock, heartbeat
        self._begun: deque[tuple[StepPlan, BegunStep, float]] = deque()
        self._ended_s = -math.inf

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    @property
    def is_due(self) -> bool:
        """Return whether the oldest step has ended, or has run so long that the watchdog must see the wait."""
        if not self._begun:
            return False
        _, step, start_s = self._begun[0]
        return step.is_over or self._clock.now_s() - max(start_s, self._ended_s) > PATIENCE_S

    def begin(self, plan: StepPlan) -> None:
        """Start this rank's part of a step. Cached KV is sent at once, new KV layer by layer as it is stored."""
        start_s = self._clock.now_s()
        self._heartbeat.at(f"in step {plan.step}")
        self._sender.before_step(plan)
        load = self._tiers.submit_layerwise(plan.layerwise_load) if plan.layerwise_load is not None else None
        with self._rank.step_recorder.step(plan):
            runner = self._rank.runner
            on_stored = self._sender.during_step(plan, runner.requests)
            self._begun.append((plan, runner.begin(plan, load, on_stored), start_s))
        self._heartbeat.at(BETWEEN_STEPS)

    def end(self) -> EndedStep:
        """Wait for the oldest step's tokens, and send the KV that the step computed."""
        plan, step, start_s = self._begun.popleft()
        self._heartbeat.at(f"at the end of step {plan.step}")
        sampled = step.wait()
        self._sender.after_step(plan, step.requests)
        self._heartbeat.at(BETWEEN_STEPS)
        start_s, self._ended_s = max(start_s, self._ended_s), self._clock.now_s()
        return EndedStep(plan, sampled, self._ended_s - start_s)


class StepReports:
    """Work reports of one rank. Of the ranks that share an expert's width, only the first reports the expert."""

    def __init__(self, model: nn.Module, groups: ModelGroups, global_rank: int) -> None:
        """Start counting, after warm-up."""
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


class StepMeter:
    """Counters of steps whose plan has a time estimate. Decode steps have none."""

    def __init__(self) -> None:
        self._by_way: dict[tuple[Strategy, Passing | None], StepTimes] = {}
        self.times: tuple[StepTimes, ...] = ()
        """Step times, replaced as a whole because the lease thread reads them."""

    def after_step(self, plan: StepPlan, seconds: float) -> None:
        """Count a computed step, with its duration on the leader's own rank."""
        if plan.estimate_s is None:
            return
        way = plan.shape.strategy, plan.shape.passing
        before = self._by_way.get(way, StepTimes(strategy=plan.shape.strategy, passing=plan.shape.passing))
        self._by_way[way] = StepTimes(
            strategy=plan.shape.strategy,
            passing=plan.shape.passing,
            num_steps=before.num_steps + 1,
            num_tokens=before.num_tokens + sum(len(request.token_ids) for request in plan.scheduled),
            total_s=before.total_s + seconds,
            total_estimate_s=before.total_estimate_s + plan.estimate_s,
            last_s=seconds,
            last_estimate_s=plan.estimate_s,
        )
        self.times = tuple(self._by_way.values())
