"""The steps that one rank has begun and not ended; one at most, where its device does not go on by itself."""

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from cluster.spec.clock import Clock
from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan
from workers.engine.begun_step import BegunStep
from workers.handoff.kv_sender import KvSender
from workers.hicache.tier_worker import TierWorker
from workers.loop.watch import BETWEEN_STEPS, Turns
from workers.rank import Rank

PATIENCE_S = 1.0
"""Longest time in which messages are looked at beside a step."""


class EndedStep(NamedTuple):
    """A step that is over."""

    plan: StepPlan
    sampled: Mapping[Room, Sampled]
    seconds: float
    """Since it was begun, and the one before it had ended."""


class RankSteps:
    """Steps end in the order in which they were begun."""

    def __init__(self, rank: Rank, sender: KvSender, tiers: TierWorker, clock: Clock, turns: Turns) -> None:
        self._rank, self._sender, self._tiers, self._clock, self._turns = rank, sender, tiers, clock, turns
        self._begun: deque[tuple[StepPlan, BegunStep, float]] = deque()
        self._ended_s = -math.inf

    @property
    def num_begun(self) -> int:
        """Steps that have not ended."""
        return len(self._begun)

    @property
    def is_due(self) -> bool:
        """Return whether the oldest step is over, or has taken so long that a watcher is to see it waited for."""
        if not self._begun:
            return False
        _, step, start_s = self._begun[0]
        return step.is_over or self._clock.now_s() - max(start_s, self._ended_s) > PATIENCE_S

    def begin(self, plan: StepPlan) -> None:
        """Begin this rank's part of a step; KV that is there leaves, and layers as they are stored."""
        start_s = self._clock.now_s()
        self._turns.at(f"in step {plan.step}")
        self._sender.before_step(plan)
        load = self._tiers.submit_layerwise(plan.layerwise_load) if plan.layerwise_load is not None else None
        with self._rank.step_recorder.step(plan):
            runner = self._rank.runner
            on_stored = self._sender.during_step(plan, runner.requests)
            self._begun.append((plan, runner.begin(plan, load, on_stored), start_s))
        self._turns.at(BETWEEN_STEPS)

    def end(self) -> EndedStep:
        """Wait for the tokens of the oldest step; the KV that it has computed leaves."""
        plan, step, start_s = self._begun.popleft()
        self._turns.at(f"at the end of step {plan.step}")
        sampled = step.wait()
        self._sender.after_step(plan, step.requests)
        self._turns.at(BETWEEN_STEPS)
        start_s, self._ended_s = max(start_s, self._ended_s), self._clock.now_s()
        return EndedStep(plan, sampled, self._ended_s - start_s)
