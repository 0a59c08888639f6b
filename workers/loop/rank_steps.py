"""Steps under way on one rank. On a CPU, there is at most one."""

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from cluster.spec.clock import Clock
from cluster.spec.ids import Room
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan
from workers.engine.step_state import BegunStep
from workers.handoff.kv_sender import KvSender
from workers.hicache.tier_worker import TierWorker
from workers.loop.watch import BETWEEN_STEPS, Heartbeat
from workers.rank import Rank

PATIENCE_S = 1.0
"""Maximum time that the loop handles messages before it waits for a step. The watchdog monitors that wait."""


class EndedStep(NamedTuple):
    plan: StepPlan
    sampled: Mapping[Room, Sampled]
    seconds: float
    """Time since the step's start or the previous step's end, whichever is later."""


class RankSteps:
    """Steps of one rank. They end in the order in which they start."""

    def __init__(
        self, rank: Rank, sender: KvSender, tiers: TierWorker | None, clock: Clock, heartbeat: Heartbeat
    ) -> None:
        self._rank, self._sender, self._tiers, self._clock, self._heartbeat = rank, sender, tiers, clock, heartbeat
        self._begun: deque[tuple[StepPlan, BegunStep, float]] = deque()
        self._ended_s = -math.inf

    @property
    def num_begun(self) -> int:
        return len(self._begun)

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
        self._heartbeat.at(f"in step {plan.step}")
        self._sender.before_step(plan)
        load = None
        if plan.layerwise_load is not None:
            assert self._tiers is not None, "got a tier job, but this rank has no host memory"
            load = self._tiers.submit_layerwise(plan.layerwise_load)
        with self._rank.step_recorder.step(plan):
            runner = self._rank.runner
            on_stored = self._sender.layer_callback(plan, runner.requests)
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
