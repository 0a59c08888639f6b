"""One rank of one replica: intake, plan, forward, send, emit. Plain Python: whoever starts processes makes one.

The leader (global rank 0) turns messages into step plans and sends each plan to the other ranks; every rank computes
the plan and sends its part of the finished KV. A rank that raises ends its replica.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from cluster.bootstrap.client import LeaseKeeper
from cluster.bootstrap.rank_keeper import RankKeeper
from cluster.channel import Inbox, Outbox
from cluster.spec.clock import SystemClock
from cluster.spec.config import DeployConfig
from cluster.spec.errors import QuarantineError
from cluster.spec.messages import Drain, Message, Submit, TableUpdate
from cluster.spec.registry import RankRow, ReplicaLoad, TableSnapshot
from cluster.spec.step_messages import DropSend, ForgetPeer, GiveTimeline, Shutdown, StepPlan, StepResult
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import CheckPages
from cluster.spec.worker_spec import Rendezvous, WorkerSpec
from workers.build import (
    make_kv_sender,
    make_leader,
    make_page_checker,
    make_row,
    make_tier_worker,
    make_timeline,
    num_ahead,
)
from workers.cpu import use_cpu
from workers.engine.step_work import StepReports
from workers.hicache.tier_worker import TierWorker
from workers.kv_sender import KvSender
from workers.loop_watch import BETWEEN_STEPS, Turns
from workers.page_checker import PageChecker
from workers.parallel.groups import ReplicaStore, join_store, open_store
from workers.post import send_if_heard, send_to_ranks
from workers.rank import Rank, load_rank
from workers.rank_steps import RankSteps
from workers.scheduler.outgoing import outputs_together
from workers.scheduler.replica_leader import ReplicaLeader
from workers.scheduler.step_meter import StepMeter
from workers.traffic import HANDOFF, Traffic

_log = logging.getLogger(__name__)

LOAD_EVERY_S = 0.05
"""Time between two looks at what heartbeats tell, while there is work."""
PAUSE_S = 1e-4
"""Between two looks at the inbox while a step goes on by itself: the next plan is to find the GPU busy."""
IDLE_WAIT_S = 1.0
"""Longest sleep of an idle loop; deadlines are seen this late at most."""


class Worker:
    """One process's part of a replica: ``load`` on every rank, then ``run`` on every rank with everybody's rows."""

    def __init__(self, spec: WorkerSpec, model_folder: Path, rendezvous: Rendezvous | None) -> None:
        """Without a rendezvous nothing is registered, and the table comes to the leader as messages."""
        use_cpu(spec.config.resources.threads_per_worker)
        self.spec = spec
        self.turns = Turns()
        """Of the loop of ``run``, for whoever watches it."""
        self._model_folder = model_folder
        self._rendezvous = rendezvous
        self._clock = SystemClock()
        self._key = rendezvous.channel_key if rendezvous is not None else None
        self._inbox = Inbox(spec.host, self._key)
        self._store: ReplicaStore | None = None
        self._rank: Rank | None = None
        self._checker: PageChecker | None = None
        self._load = ReplicaLoad()
        self._num_sent_bytes = 0
        self._failure: Exception | None = None
        """Why this rank must end, as another of its threads found."""

    def open_store(self) -> str:
        """On global rank 0: open the store at which the ranks meet; returns its ``host:port``."""
        self._store, port = open_store(self.spec.host, self.spec.config.resources.start_timeout_s)
        return f"{self.spec.host}:{port}"

    def load(self, store_address: str) -> RankRow:
        """Meet the other ranks, load the weights, allocate the pool, warm up; returns this rank's row."""
        if self._store is None:
            self._store = join_store(store_address, self.spec.config.resources.start_timeout_s)
        self._rank = load_rank(self.spec, self._model_folder, self._store)
        return make_row(self.spec, self._rank, self._inbox.address)

    def configure(self, config: DeployConfig) -> None:
        """Between runs: take over settings that do not change what was loaded."""
        self.spec = replace(self.spec, config=config)

    def run(self, rows: list[RankRow]) -> None:
        """Work until Shutdown; raises the error that ended this rank. ``rows`` are all ranks' rows, by global rank."""
        assert self._rank is not None, "run before load"
        outbox = Outbox(self._key)
        sender = make_kv_sender(self.spec, self._rank, rows, Outbox(self._key), self._fail)
        self._checker = make_page_checker(self.spec, self._rank, rows, Outbox(self._key), self._fail)
        tiers = make_tier_worker(self.spec, self._rank, rows, partial(Outbox, self._key))
        try:
            if self.spec.is_leader:
                self._lead(rows, self._rank, sender, tiers, outbox)
            else:
                with self._showing_life(rows[self.spec.global_rank]):
                    self._follow(self._rank, sender, tiers, outbox, rows[0].address)
                if self._failure is not None:
                    raise self._failure
        except BaseException:
            # Peers that wait for this rank in a collective end now, instead of after its timeout.
            self._rank.runner.drop_graphs()
            self._rank.groups.leave()
            raise
        finally:
            sender.close()
            self._checker.close()
            tiers.close()
            outbox.close()
            self._num_sent_bytes += sender.num_sent_bytes

    def traffic(self) -> Traffic:
        """Between runs: bytes that this rank has taken from others and sent to decode since it was loaded."""
        assert self._rank is not None, "traffic before load"
        return self._rank.groups.received() + Traffic({HANDOFF: self._num_sent_bytes})

    def stop(self, reason: str) -> None:
        """From any thread: make ``run`` return after the step at hand."""
        self._post(Shutdown(reason=reason))

    def drain(self) -> None:
        """From any thread: take no new requests, finish those at hand."""
        self._post(Drain())

    def close(self) -> None:
        """Give back the inbox and the transfer memory; after ``run``."""
        self._inbox.close()
        if self._rank is not None:
            self._rank.close()

    def _lead(self, rows: list[RankRow], rank: Rank, sender: KvSender, tiers: TierWorker, outbox: Outbox) -> None:
        leader = make_leader(self.spec, rank, rows)
        followers = [
            [row.address for row in rows[1:] if row.coords.dp == dp_rank] for dp_rank in range(self.spec.sizes.dp)
        ]
        lease = self._keep_lease(rows)
        meter = StepMeter()
        work = self._step_reports(rank)
        load_due_s = 0.0
        steps = RankSteps(rank, sender, tiers, self._clock, self.turns)
        try:
            while self._take_in(leader, sender, outbox, is_busy=steps.num_begun > 0):
                plans = leader.next_plans()
                # First tokens, tickets and pages that are loaded do not wait for the step.
                self._emit(leader, tiers, outbox)
                if leader.must_end:
                    raise QuarantineError(leader.must_end)
                if plans:
                    for addresses, plan in zip(followers, plans, strict=True):
                        send_to_ranks(outbox, addresses, plan)
                    steps.begin(plans[self.spec.coords.dp])
                if steps.num_begun > leader.num_ahead or steps.is_due:
                    ended = steps.end()
                    meter.after_step(ended.plan, ended.seconds)
                    work.count(ended.seconds)
                    if rank.runner.draws and ended.plan.rows:
                        leader.commit(self.spec.coords.dp, ended.sampled, self._clock.now_s())
                elif steps.num_begun and not plans:
                    time.sleep(PAUSE_S)
                is_idle = steps.num_begun == 0 and not leader.has_work()
                if told := work.next(self._clock.now_s(), is_idle=is_idle):
                    leader.on_message(told, self._clock.now_s())
                if self._clock.now_s() >= load_due_s or is_idle:
                    was_draining, self._load = self._load.draining, self._whole_load(leader.load(), meter, rank)
                    if lease is not None and self._load.draining != was_draining:
                        lease.hurry()  # routers go on sending until they know
                    load_due_s = self._clock.now_s() + LOAD_EVERY_S
                self._emit(leader, tiers, outbox)
        finally:
            if lease is not None:
                lease.stop(unregister=True)
        if self._failure is not None:
            raise self._failure

    def _whole_load(self, load: ReplicaLoad, meter: StepMeter, rank: Rank) -> ReplicaLoad:
        """With what the leader itself does not see."""
        dropped = Counter(load.dropped) + self._inbox.dropped
        return msgspec.structs.replace(
            load,
            dropped=dict(dropped),
            steps=meter.times,
            graph_steps=rank.runner.graph_steps,
            graph_bytes=rank.runner.graph_bytes,
        )

    def _take_in(self, leader: ReplicaLeader, sender: KvSender, outbox: Outbox, *, is_busy: bool) -> bool:
        """Hand waiting messages to the leader; sleeps while there is no step to plan or end. False ends the loop."""
        self.turns.at(BETWEEN_STEPS)
        going_on = True
        for message in self._inbox.receive(0.0 if is_busy else self._idle_wait_s(leader)):
            if isinstance(message, Shutdown):
                going_on = False
            elif isinstance(message, DropSend):
                sender.drop(message)
            elif isinstance(message, ForgetPeer):
                sender.forget(message)
            elif isinstance(message, CheckPages):
                self._check_pages(message)
            elif isinstance(message, GiveTimeline):
                self._give_timeline(message, outbox)
            else:
                if isinstance(message, Submit):
                    self._prepare(message)
                leader.on_message(message, self._clock.now_s())
        leader.tick(self._clock.now_s())
        return going_on

    def _idle_wait_s(self, leader: ReplicaLeader) -> float:
        if leader.has_work():
            return 0.0
        deadline_s = leader.next_deadline_s()
        return IDLE_WAIT_S if deadline_s is None else min(IDLE_WAIT_S, max(0.0, deadline_s - self._clock.now_s()))

    def _prepare(self, submit: Submit) -> None:
        """What takes long is begun now, while the request waits for its turn."""
        assert self._rank is not None
        if submit.sampling.grammar and self._rank.grammars is not None:
            self._rank.grammars.prepare(submit.sampling.grammar)

    def _emit(self, leader: ReplicaLeader, tiers: TierWorker, outbox: Outbox) -> None:
        """Send what the leader has to say."""
        for address, message in outputs_together(leader.take_outgoing()):
            if isinstance(message, TierJob) and address == self._inbox.address:
                tiers.submit(message)
            else:
                send_if_heard(outbox, address, message)

    def _follow(self, rank: Rank, sender: KvSender, tiers: TierWorker, outbox: Outbox, leader_address: str) -> None:
        work = self._step_reports(rank)
        steps = RankSteps(rank, sender, tiers, self._clock, self.turns)
        ahead = num_ahead(self.spec, rank)

        def end_step() -> None:
            ended = steps.end()
            work.count(ended.seconds)
            if rank.runner.draws and ended.plan.rows:
                result = StepResult(step=ended.plan.step, dp_rank=self.spec.coords.dp, sampled=ended.sampled)
                send_to_ranks(outbox, [leader_address], result)

        while True:
            self.turns.at(BETWEEN_STEPS)
            is_busy = steps.num_begun > 0
            messages = self._inbox.receive(0.0 if is_busy else IDLE_WAIT_S)
            if steps.is_due:
                end_step()
            elif is_busy and not messages:
                time.sleep(PAUSE_S)
            is_idle = not messages and not is_busy
            if told := work.next(self._clock.now_s(), is_idle=is_idle, dropped=self._inbox.dropped):
                send_if_heard(outbox, leader_address, told)
            for message in messages:
                if isinstance(message, StepPlan):
                    steps.begin(message)
                    if steps.num_begun > ahead:
                        end_step()
                elif isinstance(message, TierJob):
                    tiers.submit(message)
                elif isinstance(message, DropSend):
                    sender.drop(message)
                elif isinstance(message, ForgetPeer):
                    sender.forget(message)
                elif isinstance(message, CheckPages):
                    self._check_pages(message)
                elif isinstance(message, GiveTimeline):
                    self._give_timeline(message, outbox)
                elif isinstance(message, Shutdown):
                    return

    def _step_reports(self, rank: Rank) -> StepReports:
        return StepReports(rank.model, rank.groups.model, self.spec.global_rank)

    @contextmanager
    def _showing_life(self, row: RankRow) -> Iterator[None]:
        if self._rendezvous is None:
            yield
            return
        url, token = self._rendezvous.bootstrap_url, self._rendezvous.token
        keeper = RankKeeper(url, token, row, self.spec.config.resources.heartbeat_s, self._fail)
        keeper.start()
        try:
            yield
        finally:
            keeper.stop()

    def _check_pages(self, message: CheckPages) -> None:
        assert self._checker is not None
        self._checker.check(message)

    def _give_timeline(self, asked: GiveTimeline, outbox: Outbox) -> None:
        assert self._rank is not None
        send_if_heard(outbox, asked.reply_to, make_timeline(self.spec, self._rank, asked.room, self._clock.now_s()))

    def _keep_lease(self, rows: list[RankRow]) -> LeaseKeeper | None:
        if self._rendezvous is None:
            return None
        outbox = Outbox(self._key)

        def on_table(snapshot: TableSnapshot) -> None:
            outbox.send(self._inbox.address, TableUpdate(snapshot=snapshot))

        lease = LeaseKeeper(
            self._rendezvous.bootstrap_url,
            self._rendezvous.token,
            rows,
            lambda: self._load,
            on_table,
            self.spec.config.resources.heartbeat_s,
            self._fail,
        )
        lease.start()
        return lease

    def _fail(self, error: Exception) -> None:
        """On another thread: a rank that nobody can find, or that has lost a thread, must not go on."""
        self._failure = error
        self.stop(str(error) or repr(error))

    def _post(self, message: Message) -> None:
        outbox = Outbox(self._key)
        outbox.send(self._inbox.address, message)
        outbox.close()
