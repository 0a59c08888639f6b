"""Totals that heartbeats report: step durations against their estimates, and KV sent. Uses no clock of its own."""

from cluster.spec.registry import SendTimes, StepTimes
from cluster.spec.step_messages import SendReport, StepPlan
from cluster.spec.strategy import Passing, Strategy


class StepMeter:
    """Counters of steps that came with an estimate; a decode step has no choice to check."""

    def __init__(self) -> None:
        self._by_way: dict[tuple[Strategy, Passing | None], StepTimes] = {}
        self.times: tuple[StepTimes, ...] = ()
        """Replaced as a whole, since the lease's thread reads it."""

    def after_step(self, plan: StepPlan, seconds: float) -> None:
        """Count a computed step; ``seconds`` are those of the leader's own rank."""
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


class SendMeter:
    """Totals sent by the ranks of a replica, from their reports."""

    def __init__(self) -> None:
        self._by_rank: dict[int, SendTimes] = {}

    @property
    def times(self) -> tuple[SendTimes, ...]:
        """Return the totals by global rank."""
        return tuple(self._by_rank[rank] for rank in sorted(self._by_rank))

    def add(self, report: SendReport) -> None:
        """Add a rank's report of a finished transfer."""
        if not report.num_bytes:
            return
        rank = report.sender_rank
        before = self._by_rank.get(rank, SendTimes(global_rank=rank))
        self._by_rank[rank] = SendTimes(
            global_rank=rank,
            num_transfers=before.num_transfers + 1,
            num_bytes=before.num_bytes + report.num_bytes,
            write_s=before.write_s + report.write_s,
        )
