"""Steps under way on one rank, and counts of computed steps. On a CPU, at most one step is under way."""

import math
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import nullcontext
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
from workers.device import Arriving
from workers.engine.begun_step import BegunStep
from workers.handoff.kv_sender import KvSender
from workers.hicache.tier_worker import TierWorker
from workers.layers.feed_forward import Experts
from workers.loop.watch import BETWEEN_STEPS, LoopProgress
from workers.parallel.model_groups import ModelGroups
from workers.rank import Rank

REPORT_EVERY_S = 1.0
"""Interval between work reports."""
PATIENCE_S = 1.0
"""Time after which the loop stops handling messages and waits for a running step, monitored by the watchdog."""


class EndedStep(NamedTuple):
    plan: StepPlan
    sampled: Mapping[Room, Sampled]
    seconds: float
    """Time since the step's start or the previous step's end, whichever is later."""
    communication_s: float
    """Part of this time spent in collectives."""


class RankSteps:
    """Steps of one rank. They end in the order in which they start."""

    def __init__(
        self,
        rank: Rank,
        sender: KvSender,
        tiers: TierWorker | None,
        clock: Clock,
        progress: LoopProgress,
        num_ahead: int = 0,
    ) -> None:
        """Create a rank without steps. When it starts one, at most ``num_ahead`` earlier ones may be under way."""
        self._num_ahead = num_ahead
        self._rank, self._sender, self._tiers, self._clock, self._progress = rank, sender, tiers, clock, progress
        self._begun: deque[tuple[StepPlan, BegunStep, float]] = deque()
        self._ended_s = -math.inf
        self._communication_s = rank.step_recorder.communication_s
        """Time spent in collectives until the last step's end."""

    @property
    def num_begun(self) -> int:
        return len(self._begun)

    @property
    def is_full(self) -> bool:
        """Return whether the oldest step must end before another one can start."""
        return len(self._begun) > self._num_ahead

    @property
    def is_due(self) -> bool:
        """Return whether to end the oldest step, because it has finished or has run for ``PATIENCE_S``."""
        if not self._begun:
            return False
        _, step, start_s = self._begun[0]
        return step.is_over or self._clock.now_s() - max(start_s, self._ended_s) > PATIENCE_S

    def begin(self, plan: StepPlan) -> None:
        """Start this rank's part of a step. On a CPU, compute all of it; ``end`` then only collects the tokens.

        Cached KV is sent immediately. New KV is sent layer by layer if that is worthwhile.
        """
        start_s = self._clock.now_s()
        self._progress.at(f"in step {plan.step}")
        self._sender.before_step(plan)
        # Before the load: a page may be received, freed with its request, and loaded for another one in the same step.
        self._rank.memory.receive(plan.received_pages)
        load = None
        if plan.layerwise_load is not None:
            assert self._tiers is not None, "got a tier job, but this rank has no host memory"
            load = self._tiers.submit_layerwise(plan.layerwise_load)
        recording = self._rank.step_recorder
        with recording.step(plan) if recording.recorder.begin(plan) else nullcontext():
            runner = self._rank.runner
            on_stored = self._sender.layer_callback(plan, runner.requests)
            self._begun.append((plan, runner.begin(plan, load, on_stored), start_s))
        self._progress.at(BETWEEN_STEPS)

    def end(self) -> EndedStep:
        """Wait for the oldest step's tokens, and send the KV that the step computed."""
        plan, step, start_s = self._begun.popleft()
        self._progress.at(f"at the end of step {plan.step}")
        sampled = step.wait()
        self._sender.after_step(plan, step.requests)
        self._progress.at(BETWEEN_STEPS)
        start_s, self._ended_s = max(start_s, self._ended_s), self._clock.now_s()
        before_s, self._communication_s = self._communication_s, self._rank.step_recorder.communication_s
        return EndedStep(plan, sampled, self._ended_s - start_s, self._communication_s - before_s)


class StepReports:
    """Work reports of one rank. If several ranks hold parts of an expert, only the first reports its tokens."""

    def __init__(self, model: nn.Module, groups: ModelGroups, global_rank: int) -> None:
        self._num_steps, self._step_s = 0, 0.0
        self._reported: tuple[int, Mapping[str, int]] = (0, {})
        reports = groups.position.moe_tp == 0
        self._experts = [module for module in model.modules() if isinstance(module, Experts)] if reports else []
        self._global_rank = global_rank
        self._before = self._counts(self._copy_loads())
        self._loads: Arriving | None = None
        """Copies for the next report."""
        self._due_s = 0.0

    def count(self, seconds: float) -> None:
        self._num_steps += 1
        self._step_s += seconds

    def next(
        self, now_s: float, *, is_idle: bool, dropped: Mapping[str, int] = MappingProxyType({})
    ) -> StepWork | None:
        """Return a report if anything has changed, at most once per second unless the rank is idle.

        On a GPU, a report comes a call or more later than it is due, so that the host need not wait for the next step.
        ``dropped`` counts the messages that the rank's inbox has dropped so far, by reason.
        """
        state = self._num_steps, dict(dropped)
        if self._loads is None:
            if state == self._reported or (now_s < self._due_s and not is_idle):
                return None
            self._due_s, self._loads, self._reported = now_s + REPORT_EVERY_S, self._copy_loads(), state
        if not self._loads.is_there:
            return None
        counts, self._loads = self._counts(self._loads), None
        return StepWork(
            global_rank=self._global_rank,
            num_steps=self._num_steps,
            step_s=self._step_s,
            expert_tokens=dict(counts - self._before),
            dropped=dict(dropped),
        )

    def _copy_loads(self) -> Arriving:
        """Start to copy the numbers of tokens that the experts have computed, ``[layers, experts]``."""
        loads = [experts.loads for experts in self._experts]
        return Arriving(torch.stack(loads) if loads else torch.empty(0))

    def _counts(self, loads: Arriving) -> Counter[int]:
        """Return the number of tokens that each expert has computed in all layers."""
        counts: Counter[int] = Counter()
        for experts, of_layer in zip(self._experts, loads.wait()[0].tolist(), strict=True):
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
