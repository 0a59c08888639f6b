"""One incarnation of a replica: the process of rank 0 with the real leaders, and its followers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import replace

from cluster.bootstrap.client import WATCH_S
from cluster.bootstrap.table import BootstrapTable, RefusalCode, TableRefusedError, records_digest
from cluster.simulator.bootstrap import Bootstrap
from cluster.simulator.environment import HOME, Environment, machine_of
from cluster.simulator.leaders import make_leader, shard_of
from cluster.simulator.promises import deliver_to_leader
from cluster.simulator.rank_process import Follower, RankProcess
from cluster.spec.clock import HEARTBEAT_S, IDLE_WAIT_S
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.ids import Incarnation, Peer, Room
from cluster.spec.messages import KvEvents, Message, Output, TableUpdate
from cluster.spec.phases import PromptTimes
from cluster.spec.registry import Heartbeat, RankRecord, ReplicaLoad
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import Done, Drained, Result, Ticket
from workers.cache.page_allocator import PageAllocator
from workers.scheduler.leader import DpLeader
from workers.scheduler.replica_leader import ReplicaLeader
from workers.scheduler.step_scheduler import step_depth


class LeaderProcess(RankProcess):
    """Process of rank 0: the loop of ``workers.worker`` around the real leader, with heartbeats and table updates."""

    def __init__(
        self,
        env: Environment,
        bootstrap: Bootstrap,
        records: Sequence[RankRecord],
        made: Sequence[tuple[DpLeader, PageAllocator]],
        on_refused: Callable[[str], None],
    ) -> None:
        """Start the process with each DP rank's leader and allocator. ``on_refused`` ends the replica."""
        super().__init__(env, records, 0, made[0][1])
        self._leaders = [leader for leader, _ in made]
        self._allocators = [allocator for _, allocator in made]
        sizes, depth = records[0].sizes, step_depth(records[0].role, records[0].sizes.pp)
        self.leader = ReplicaLeader(self._leaders, sizes, depth=depth, policy=env.shape.dp_policy)
        self.me = records[0].peer
        self.records = records
        self._bootstrap = bootstrap
        self._on_refused = on_refused
        self._load = ReplicaLoad()
        self.life = Life(env, machine_of(self.address))
        self.num_kv_events: dict[str, int] = {}
        """Number of KV event messages by router address, counted from the message that lists the complete cache."""
        self._outgoing: list[tuple[str, Message]] = []
        """Checked messages that are still to be sent."""
        self._unwatch = bootstrap.watch(
            machine_of(self.address), WATCH_S, lambda snapshot: self.receive(TableUpdate(snapshot=snapshot))
        )
        self.every(HEARTBEAT_S, self._beat, self.in_thread)
        self.every(IDLE_WAIT_S, self._run_round)

    @property
    def is_idle(self) -> bool:
        pages_are_free = all(allocator.num_free == allocator.num_pages for allocator in self._allocators)
        is_done = not self.is_computing and all(leader.is_idle() for leader in self._leaders)
        return is_done and pages_are_free and super().is_idle

    def cached_keys(self) -> set[bytes]:
        return {key for allocator in self._allocators for key in allocator.cached_keys()}

    def kill(self) -> None:
        if not self.is_dead:
            self._unwatch()
        super().kill()

    def on_ended(self, plan: StepPlan, sampled: Mapping[Room, Sampled]) -> None:
        if self.device.is_sampling_rank and plan.scheduled:
            self.leader.commit(0, sampled, self.env.now_s())
        self._end_round()
        self.after(0.0, self._run_round)

    def _run_round(self) -> None:
        if self.is_computing:
            return
        while self._inbox:
            message = self._inbox.popleft()
            if not self.handle_control(message):
                deliver_to_leader(self.leader, self.me, message, self.env.now_s())
                self._check_new()
        self.leader.tick(self.env.now_s())
        if self.leader.must_end:
            self.env.was_quarantined = True
            self.env.happened["quarantine"] += 1
            self._on_refused(self.leader.must_end)
            return
        plans = self.leader.next_plans()
        if not plans:
            self._end_round()
        else:
            # First tokens, tickets and finished loads do not wait for the step.
            self._emit()
            computed = {request.room: len(request.token_ids) for plan in plans for request in plan.scheduled}
            self.env.trace.add(self.address, "computes", computed)
            for record in self.records[1:]:
                self.send(record.address, plans[record.coords.dp])
            self.begin(plans[0])

    def _end_round(self) -> None:
        if self.env.scenario.is_mild:  # otherwise ``was_quarantined`` is not read
            load = self.leader.load()
            # The limit applies to each DP rank, and all have the same number of pages.
            limit = self.env.shape.quarantine_limit * load.total_pages / len(self._leaders)
            if load.quarantined_pages > limit:
                self.env.was_quarantined = True
        self._emit()

    def _emit(self) -> None:
        self._check_new()
        outgoing, self._outgoing = self._outgoing, []
        for address, message in outgoing:
            if isinstance(message, TierJob) and address == self.address:
                self.tier_worker.submit(message)
            else:
                self.send(address, message)

    def _check_new(self) -> None:
        """Check all new messages that permit writes or start reads, before anything is computed."""
        for leader in self._leaders:
            leader.check_integrity()
        new = self.leader.take_outgoing()
        self._outgoing += new
        for address, message in new:
            if isinstance(message, KvEvents):
                self.num_kv_events[address] = message.number + 1
            elif isinstance(message, Ticket):
                records = shard_of(self.records, message.dp_rank)
                memories = [self.env.memories[record.endpoint.session] for record in records]
                num_tokens = len(self.env.submits[message.room].prompt_ids)
                self.env.tickets.grant(memories, message, self.env.text_of(message.room), num_tokens)
                _send_late_message(self.env, message, self.records[0].layout.page_bytes)
            elif isinstance(message, Output) and message.first_index == self.env.submits[message.room].num_given:
                self.env.tickets.check_start(message.room)

    def _beat(self) -> None:
        self.life.beat()
        self._load = self.leader.load()
        self._bootstrap.call(machine_of(self.address), self._renew, self._on_answer)

    def _renew(self, table: BootstrapTable, now_s: float) -> None:
        """Send a heartbeat, as the lease renewer does. If the table does not know the records, register them first."""
        first = self.records[0]
        heartbeat = Heartbeat(
            replica=first.replica,
            incarnation=first.incarnation,
            records_digest=records_digest(self.records),
            load=self._load,
        )
        try:
            table.heartbeat(heartbeat, now_s)
        except TableRefusedError as error:
            if error.code is not RefusalCode.UNKNOWN_RANKS:
                raise
            for record in self.records:
                table.register(record)
            table.heartbeat(heartbeat, now_s)
        for record in self.records[1:]:  # all ranks of a replica pause together
            table.alive(record.replica, record.incarnation, record.global_rank, now_s)

    def _on_answer(self, answer: TableRefusedError | PeerUnreachableError | None) -> None:
        if isinstance(answer, TableRefusedError) and not self.is_dead:
            self._on_refused(str(answer))


def _send_late_message(env: Environment, ticket: Ticket, page_bytes: int) -> None:
    """Sometimes deliver a response that an earlier incarnation of either replica would have left in flight.

    A room has one ticket, handled by one incarnation of each replica, so the simulator makes the response up.
    """
    random = env.random
    if random.random() >= env.hazards.stale:
        return
    env.happened["stale"] += 1
    prefill = env.submits[ticket.room].prefill
    assert prefill is not None, f"room {ticket.room} has a ticket but no prefill"
    earlier, writer = random.choice(
        [
            (replace(ticket, decode=_earlier(ticket.decode)), prefill),
            (ticket, _earlier(prefill)),
        ]
    )
    names: dict[str, Any] = {
        "room": earlier.room,
        "prefill": writer,
        "decode_incarnation": earlier.decode.incarnation,
    }
    num_pages = sum(map(len, ticket.pages))
    times = PromptTimes(replica=prefill.replica, stored_s=0.0, scheduled_s=0.0, steps=[])
    names_and_size = names | {"num_pages": num_pages, "num_bytes": num_pages * page_bytes}
    responses: list[Message] = [
        Drained(**names),
        Done(**names_and_size, sender_rank=0),
        Result(**names_and_size, token_ids=[0], senders=[0], times=times),
    ]
    send = partial(env.network.send, prefill.address, ticket.decode.address, random.choice(responses))
    env.after(random.uniform(0, 0.1), send)


def _earlier(peer: Peer) -> Peer:
    return replace(peer, incarnation=Incarnation(peer.incarnation - 1))


class Life:
    """Heartbeats of a replica, as only the simulator knows them."""

    def __init__(self, env: Environment, machine: str) -> None:
        self._env, self._machine = env, machine
        self._begun_s = self._beat_s = env.now_s()

    def beat(self) -> None:
        now_s = self._env.now_s()
        if now_s > self._beat_s + 1.5 * HEARTBEAT_S or self._env.network.is_partitioned(self._machine, HOME):
            self._begun_s = now_s
        self._beat_s = now_s

    def lasts_s(self) -> float:
        """Return for how long the heartbeats have been regular and not cut off; 0 if they have stopped."""
        has_stopped = self._env.now_s() > self._beat_s + 1.5 * HEARTBEAT_S
        return 0.0 if has_stopped else self._beat_s - self._begun_s


class Replica:
    """Processes of one incarnation of a replica, which the supervisor ends together."""

    def __init__(
        self, env: Environment, bootstrap: Bootstrap, records: list[RankRecord], on_failed: Callable[[str], None]
    ) -> None:
        first = records[0]
        self.machine = machine_of(first.address)
        self._on_failed = on_failed
        made = [make_leader(env, records, dp_rank) for dp_rank in range(first.sizes.dp)]
        self.leader = LeaderProcess(env, bootstrap, records, made, self._on_refused)
        self.ranks: list[RankProcess] = [self.leader]
        for record in records[1:]:
            _, allocator = made[record.coords.dp]
            self.ranks.append(Follower(env, records, record.global_rank, allocator))
        for rank in self.ranks:
            rank.shard += [other for other in self.ranks if other.record.coords.dp == rank.record.coords.dp]

    @property
    def is_idle(self) -> bool:
        return all(rank.is_idle for rank in self.ranks)

    def kill_rank(self, rank: int) -> None:
        process = self.ranks[rank % len(self.ranks)]
        if not process.is_dead:
            process.kill()
            self._on_failed(f"rank {process.address} died")

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()

    def _on_refused(self, reason: str) -> None:
        self.leader.kill()
        self._on_failed(reason)
