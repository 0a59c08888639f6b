"""Worker of one rank: its lifecycle and work loop, regardless of how the process was started.

Every rank computes the steps that the leader plans, and sends its part of the computed KV. If a rank raises an error,
its replica ends.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from cluster.bootstrap.client import LeaseRenewer, ReplicaRegistrar
from cluster.channel import Inbox, Outbox, send_or_log
from cluster.spec.clock import HEARTBEAT_S, SystemClock
from cluster.spec.messages import Message, TableUpdate
from cluster.spec.registry import RankRecord, TableSnapshot
from cluster.spec.step_messages import CancelSend, ForgetPeer, ReportTrace, Shutdown, StepPlan
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import CheckPages
from cluster.spec.worker_spec import Rendezvous, WorkerSpec
from workers.build import (
    make_kv_sender,
    make_leader,
    make_rank_trace,
    make_record,
    make_tier_worker,
    num_ahead,
)
from workers.device import use_cpu
from workers.handoff.kv_sender import KvSender
from workers.handoff.page_checker import PageChecker
from workers.hicache.tier_worker import TierWorker
from workers.loop.leader_link import LeaderLink, LocalLink, RemoteLink
from workers.loop.rank_steps import RankSteps
from workers.loop.watch import BETWEEN_STEPS, LoopProgress
from workers.parallel.store import ReplicaStore, join_store, open_store
from workers.rank import Rank, load_rank

PAUSE_S = 1e-4
"""Interval between inbox checks during a step on the GPU. It is short, so that the GPU does not become idle."""

_MESSAGES_S = 0.01
"""Time for messages in a round of the loop, or half the time of the last round if that is longer. Many requests that
arrive at once must not hold up those that run."""
_MOST_AT_ONCE = 8
"""Number of messages handled between two looks at the clock."""


class Worker:
    """Process of one rank. Every rank calls ``load``, and then ``run`` with all ranks' records."""

    def __init__(self, spec: WorkerSpec, model_folder: Path, rendezvous: Rendezvous | None) -> None:
        """Create a worker. Without a rendezvous, workers do not register, and the leader gets the table in messages."""
        use_cpu(spec.config.resources.threads_per_worker)
        self.spec = spec
        self.progress = LoopProgress()
        """Progress of the loop in ``run``, for a watchdog."""
        self._model_folder = model_folder
        self._rendezvous = rendezvous
        self._clock = SystemClock()
        self._key = rendezvous.channel_key if rendezvous is not None else None
        self._inbox = Inbox(spec.host, self._key)
        self._store: ReplicaStore | None = None
        self._rank: Rank | None = None
        self._failure: Exception | None = None
        """Error in another thread that ends this rank."""

    def open_store(self) -> str:
        """Open the store through which the ranks meet. Return its ``host:port``. Only global rank 0 calls this."""
        self._store, port = open_store(self.spec.host, self.spec.config.resources.start_timeout_s)
        return f"{self.spec.host}:{port}"

    def load(self, store_address: str) -> RankRecord:
        """Join the other ranks, load the weights, allocate the pool, and warm up. Return this rank's record."""
        if self._store is None:
            self._store = join_store(store_address, self.spec.config.resources.start_timeout_s)
        self._rank = load_rank(self.spec, self._model_folder, self._store)
        return make_record(self.spec, self._rank, self._inbox.address)

    def run(self, records: list[RankRecord]) -> None:
        """Work until Shutdown, or raise the error that ended this rank. ``records`` are ordered by global rank."""
        assert self._rank is not None, "run before load"
        own, region = records[self.spec.global_rank], self._rank.memory.region.buffer
        tiers = make_tier_worker(self.spec, self._rank, records, partial(Outbox, self._key), self._fail)
        with (
            closing(Outbox(self._key)) as outbox,
            closing(tiers) if tiers is not None else nullcontext(),
            closing(PageChecker(own, region, records[0].address, Outbox(self._key), self._fail)) as checker,
            closing(make_kv_sender(self.spec, self._rank, records, Outbox(self._key), self._fail)) as sender,
        ):
            try:
                link = self._link(self._rank, records, tiers, outbox)
                ahead = num_ahead(self.spec, self._rank)
                steps = RankSteps(self._rank, sender, tiers, self._clock, self.progress, ahead)
                with self._renewing_lease(records, link):
                    self._work(link, steps, _Parts(sender, checker, tiers, outbox))
                if self._failure is not None:
                    raise self._failure
            except BaseException:
                # Peers that wait for this rank in a collective fail now instead of after the timeout.
                self._rank.runner.drop_graphs()
                self._rank.groups.leave()
                raise

    def close(self) -> None:
        """Release the inbox and the transfer memory, after ``run`` has returned."""
        self._inbox.close()
        if self._rank is not None:
            self._rank.close()

    def _link(self, rank: Rank, records: list[RankRecord], tiers: TierWorker | None, outbox: Outbox) -> LeaderLink:
        if self.spec.is_leader:
            leader = make_leader(self.spec, rank, records)
            return LocalLink(leader, self.spec, rank, records, self._inbox, outbox, tiers, self._clock)
        return RemoteLink(self.spec, rank, records[0].address, self._inbox, outbox, self._clock)

    def _work(self, link: LeaderLink, steps: RankSteps, parts: "_Parts") -> None:
        is_stopping, round_s = False, 0.0
        while not is_stopping:
            self.progress.at(BETWEEN_STEPS)
            messages = self._messages(0.0 if steps.num_begun else link.idle_wait_s(), max(_MESSAGES_S, round_s / 2))
            is_stopping = self._handle(messages, link, steps, parts)
            begin_s = self._clock.now_s()
            plans = () if is_stopping else link.next_plans()
            _begin(plans, link, steps)
            if steps.is_due:
                link.on_ended(steps.end())
            elif steps.num_begun and not plans:
                time.sleep(PAUSE_S)
            round_s = self._clock.now_s() - begin_s
            link.end_round(is_busy=steps.num_begun > 0)

    def _messages(self, wait_s: float, limit_s: float) -> Iterator[Message]:
        """Yield the messages that have arrived. Wait for the first one, and stop when the limit has passed."""
        messages = self._inbox.receive(wait_s, _MOST_AT_ONCE)
        end_s = self._clock.now_s() + limit_s
        while messages:
            yield from messages
            messages = self._inbox.receive(0.0, _MOST_AT_ONCE) if self._clock.now_s() < end_s else []

    def _handle(self, messages: Iterable[Message], link: LeaderLink, steps: RankSteps, parts: "_Parts") -> bool:
        """Pass every message to the part that handles it. Return whether the loop must end.

        Steps and other messages are handled in the order of their arrival: a tier job saves the pages of the step
        before it, and a step must not open a transfer that a later message has already cancelled.
        """
        for message in messages:
            match message:
                case Shutdown():
                    return True
                case CancelSend():
                    parts.sender.cancel(message)
                case ForgetPeer():
                    parts.sender.forget(message)
                case TierJob():
                    assert parts.tiers is not None, "got a tier job, but this rank has no host memory"
                    parts.tiers.submit(message)
                case CheckPages():
                    parts.checker.check(message)
                case ReportTrace():
                    assert self._rank is not None
                    trace = make_rank_trace(self.spec, self._rank, message.room, self._clock.now_s())
                    send_or_log(parts.outbox, message.reply_to, trace)
                case StepPlan():
                    link.on_message(message)
                    _begin([message], link, steps)
                case _:
                    link.on_message(message)
        return False

    @contextmanager
    def _renewing_lease(self, records: list[RankRecord], link: LeaderLink) -> Iterator[None]:
        """Renew the replica's lease, or report that this rank is alive, while the context is active."""
        if self._rendezvous is None:
            yield
            return
        renewer = self._make_renewer(self._rendezvous, records, link)
        renewer.start()
        try:
            yield
        finally:
            renewer.stop()

    def _make_renewer(self, rendezvous: Rendezvous, records: list[RankRecord], link: LeaderLink) -> LeaseRenewer:
        url, token = rendezvous.bootstrap_url, rendezvous.token
        if isinstance(link, RemoteLink):
            return LeaseRenewer(url, token, records[self.spec.global_rank], HEARTBEAT_S, self._fail)
        outbox = Outbox(self._key)  # not closed, since the thread that uses it may outlive the renewer

        def on_table(snapshot: TableSnapshot) -> None:
            outbox.send(self._inbox.address, TableUpdate(snapshot=snapshot))

        registrar = ReplicaRegistrar(url, token, records, lambda: link.load, on_table, HEARTBEAT_S, self._fail)
        link.hurry = registrar.hurry
        return registrar

    def _fail(self, error: Exception) -> None:
        """End the rank from another thread, which has failed or lost the lease."""
        self._failure = error
        outbox = Outbox(self._key)
        outbox.send(self._inbox.address, Shutdown())
        outbox.close()


def _begin(plans: Iterable[StepPlan], link: LeaderLink, steps: RankSteps) -> None:
    """Start steps. Before the next one, end as many as necessary; on a CPU, each has ended by then."""
    for plan in plans:
        steps.begin(plan)
        if steps.is_full:
            link.on_ended(steps.end())


class _Parts(NamedTuple):
    """Message handlers of a worker."""

    sender: KvSender
    checker: PageChecker
    tiers: TierWorker | None
    outbox: Outbox
