"""Link from a rank's work loop to the leader: by calls on global rank 0, by messages on other ranks."""

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from cluster.channel import Inbox, Outbox, send_or_log, send_to_ranks
from cluster.spec.clock import IDLE_WAIT_S, Clock
from cluster.spec.errors import QuarantineError
from cluster.spec.messages import Inquire, Message, Submit
from cluster.spec.registry import RankRecord, ReplicaLoad
from cluster.spec.step_messages import StepPlan, StepResult
from cluster.spec.tiers import TierJob
from cluster.spec.worker_spec import WorkerSpec
from workers.hicache.tier_worker import TierWorker
from workers.loop.grammar_gate import GrammarGate
from workers.loop.rank_steps import EndedStep, StepMeter, StepReports
from workers.rank import Rank
from workers.scheduler.replica_leader import ReplicaLeader, join_outputs

LOAD_EVERY_S = 0.05
"""Interval between load samples for heartbeats while there is work."""
COMPILING_WAIT_S = 0.005
"""Maximum sleep of an idle loop while a grammar is being compiled."""


class LocalLink:
    """Link to the leader in this process. Also sends the leader's plans to the other ranks."""

    def __init__(
        self,
        leader: ReplicaLeader,
        spec: WorkerSpec,
        rank: Rank,
        records: Sequence[RankRecord],
        inbox: Inbox,
        outbox: Outbox,
        tiers: TierWorker | None,
        clock: Clock,
    ) -> None:
        self.load = ReplicaLoad()
        """Load to report in heartbeats. It is replaced as a whole, since another thread reads it."""
        self.hurry: Callable[[], None] = lambda: None
        """Callback that sends the next heartbeat immediately."""
        self._leader, self._rank, self._dp_rank = leader, rank, spec.coords.dp
        self._inbox, self._outbox, self._tiers, self._clock = inbox, outbox, tiers, clock
        self._followers = [
            [record.address for record in records[1:] if record.coords.dp == dp_rank]
            for dp_rank in range(spec.sizes.dp)
        ]
        self._meter = StepMeter()
        self._reports = step_reports(spec, rank)
        self._load_due_s = 0.0
        self._gate = GrammarGate(rank.grammars, leader)

    def idle_wait_s(self) -> float:
        """Return the maximum wait for messages while no step is under way."""
        if self._leader.has_work():
            return 0.0
        if self._gate.num_waiting:
            return COMPILING_WAIT_S
        deadline_s = self._leader.next_deadline_s()
        return IDLE_WAIT_S if deadline_s is None else min(IDLE_WAIT_S, max(0.0, deadline_s - self._clock.now_s()))

    def on_message(self, message: Message) -> None:
        """Handle a message that is not for the rank itself."""
        if isinstance(message, Submit):
            self._gate.submit(message, self._clock.now_s())
        else:
            if isinstance(message, Inquire):
                message = self._gate.unless_waiting(message)
            self._leader.on_message(message, self._clock.now_s())

    def next_plans(self) -> Sequence[StepPlan]:
        """Return the plans of the steps to start, after the messages of this round."""
        self._gate.pass_on(self._clock.now_s())
        self._leader.tick(self._clock.now_s())
        plans = self._leader.next_plans()
        # First tokens, tickets and tier jobs must not wait for the step.
        self._send_outgoing()
        if self._leader.must_end:
            raise QuarantineError(self._leader.must_end)
        if not plans:
            return ()
        for addresses, plan in zip(self._followers, plans, strict=True):
            send_to_ranks(self._outbox, addresses, plan)
        return (plans[self._dp_rank],)

    def on_ended(self, step: EndedStep) -> None:
        self._meter.after_step(step.plan, step.seconds)
        self._reports.count(step.seconds)
        if self._rank.groups.is_sampling_rank and step.plan.scheduled:
            self._leader.commit(self._dp_rank, step.sampled, self._clock.now_s(), step.communication_s)

    def end_round(self, *, is_busy: bool) -> None:
        """Report work and load, and send pending messages. ``is_busy`` is True while a step is under way."""
        self._gate.release()
        is_idle = not is_busy and not self._leader.has_work()
        if report := self._reports.next(self._clock.now_s(), is_idle=is_idle):
            self._leader.on_message(report, self._clock.now_s())
        if self._clock.now_s() >= self._load_due_s or is_idle:
            was_draining, self.load = self.load.draining, self._full_load()
            if self.load.draining != was_draining:
                self.hurry()  # routers keep sending requests until they get the heartbeat
            self._load_due_s = self._clock.now_s() + LOAD_EVERY_S
        self._send_outgoing()

    def _full_load(self) -> ReplicaLoad:
        """Return the leader's load with this process's counters, and requests that wait for their grammars."""
        load, runner = self._leader.load(), self._rank.runner
        return msgspec.structs.replace(
            load,
            num_waiting=load.num_waiting + self._gate.num_waiting,
            dropped=dict(Counter(load.dropped) + self._inbox.dropped),
            steps=self._meter.times,
            graph_steps=runner.graph_steps,
            graph_bytes=runner.graph_bytes,
        )

    def _send_outgoing(self) -> None:
        for address, message in join_outputs(self._leader.take_outgoing()):
            if isinstance(message, TierJob) and address == self._inbox.address:
                # Bypass the inbox, since the job must be queued before the next step starts.
                assert self._tiers is not None, "got a tier job, but this rank has no host memory"
                self._tiers.submit(message)
            else:
                send_or_log(self._outbox, address, message)


class RemoteLink:
    """Link to the leader in another process, with the methods of ``LocalLink``."""

    def __init__(self, spec: WorkerSpec, rank: Rank, address: str, inbox: Inbox, outbox: Outbox, clock: Clock) -> None:
        self._dp_rank, self._groups, self._grammars = spec.coords.dp, rank.groups, rank.grammars
        self._address, self._inbox, self._outbox, self._clock = address, inbox, outbox, clock
        self._reports = step_reports(spec, rank)
        self._had_plans = False

    def idle_wait_s(self) -> float:
        return IDLE_WAIT_S

    def on_message(self, message: Message) -> None:
        if not isinstance(message, StepPlan):
            return
        self._had_plans = True
        for request in message.new_requests:
            if self._grammars is not None and request.sampling.grammar:
                self._grammars.prepare(request.sampling.grammar)  # while the step computes

    def next_plans(self) -> Sequence[StepPlan]:
        """Return no plans, since the leader's plans arrive as messages."""
        return ()

    def on_ended(self, step: EndedStep) -> None:
        self._reports.count(step.seconds)
        if self._groups.is_sampling_rank and step.plan.scheduled:
            result = StepResult(dp_rank=self._dp_rank, sampled=step.sampled, communication_s=step.communication_s)
            send_to_ranks(self._outbox, [self._address], result)

    def end_round(self, *, is_busy: bool) -> None:
        is_idle = not is_busy and not self._had_plans
        self._had_plans = False
        if report := self._reports.next(self._clock.now_s(), is_idle=is_idle, dropped=self._inbox.dropped):
            send_or_log(self._outbox, self._address, report)


def step_reports(spec: WorkerSpec, rank: Rank) -> StepReports:
    return StepReports(rank.model, rank.groups.model, spec.global_rank)


LeaderLink = LocalLink | RemoteLink
