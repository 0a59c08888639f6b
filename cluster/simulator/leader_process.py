"""Process of rank 0: the loop of ``workers.worker`` around the real leader, its heartbeats and its table."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from cluster.bootstrap.table import BootstrapTable, RefusalCode, TableRefusedError, rows_digest
from cluster.simulator.bootstrap import Bootstrap
from cluster.simulator.leaders import shard_of, step_depth
from cluster.simulator.network import machine_of
from cluster.simulator.promises import hand_over
from cluster.simulator.rank_process import RankProcess
from cluster.simulator.stale import send_late_words
from cluster.simulator.surroundings import Surroundings
from cluster.spec.clock import HEARTBEAT_S
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.ids import Peer, Room
from cluster.spec.messages import KvEvents, Message, Output, TableUpdate
from cluster.spec.registry import Heartbeat, RankRow, ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import Ticket
from workers.cache.page_allocator import PageAllocator
from workers.scheduler.leader import Leader
from workers.scheduler.replica_leader import ReplicaLeader

IDLE_WAIT_S = 1.0


class LeaderProcess(RankProcess):
    """Handles arrived messages, lets time pass, computes one step, and sends what is due."""

    def __init__(
        self,
        around: Surroundings,
        bootstrap: Bootstrap,
        rows: Sequence[RankRow],
        me: Peer,
        made: Sequence[tuple[Leader, PageAllocator]],
        on_refused: Callable[[str], None],
    ) -> None:
        """Start the process; ``on_refused`` is called when the table refuses this replica.

        Args:
            made: a leader and its pages for each DP rank.
        """
        super().__init__(around, rows, 0, me, made[0][1])
        self._leaders = [leader for leader, _ in made]
        self._allocators = [allocator for _, allocator in made]
        self.leader = ReplicaLeader(
            self._leaders, rows[0].sizes, depth=step_depth(rows[0]), policy=around.shape.dp_policy
        )
        self.me = me
        self.rows = rows
        self._digest = rows_digest(rows)
        self._bootstrap = bootstrap
        self._on_refused = on_refused
        self._inbox: deque[Message] = deque()
        self._load = ReplicaLoad()
        self.num_kv_events: dict[str, int] = {}
        """Number of messages sent to each router, by its address, since the whole cache was sent."""
        self._outgoing: list[tuple[str, Message]] = []
        """Outgoing messages that the checks have seen."""
        self._unwatch = bootstrap.watch(machine_of(self.address), self._on_table)
        self.every(HEARTBEAT_S, self._beat)
        self.every(IDLE_WAIT_S, self._turn)

    @property
    def is_idle(self) -> bool:
        """Return whether no request or transfer is open, and nothing holds a page."""
        pages_are_free = all(allocator.num_free == allocator.num_pages for allocator in self._allocators)
        is_done = not self.is_computing and all(leader.is_idle() for leader in self._leaders)
        return is_done and pages_are_free and super().is_idle

    def cached_keys(self) -> set[bytes]:
        return {key for allocator in self._allocators for key in allocator.cached_keys()}

    def kill(self) -> None:
        if not self.is_dead:
            self._unwatch()
        super().kill()

    def take(self, message: Message) -> None:
        self._inbox.append(message)
        self.when_running(self._turn)

    def on_ended(self, plan: StepPlan, sampled: Mapping[Room, Sampled]) -> None:
        """Commit the part of the step that this rank has sampled."""
        if self.device.draws and plan.scheduled:
            self.leader.commit(0, sampled, self.around.now_s())
        self._close_turn()
        self.after(0.0, self._turn)

    def _turn(self) -> None:
        if self.is_computing:
            return
        while self._inbox:
            message = self._inbox.popleft()
            if not self.obey(message):
                hand_over(self.leader, self.me, message, self.around.now_s())
                self._show_new()
        self.leader.tick(self.around.now_s())
        if self.leader.must_end:
            self.around.was_quarantined = True
            self.around.happened["quarantine"] += 1
            self._on_refused(self.leader.must_end)
            return
        plans = self.leader.next_plans()
        if not plans:
            self._close_turn()
        else:
            # First tokens, tickets and loaded pages do not wait for the step.
            self._emit()
            computed = {row.room: len(row.token_ids) for plan in plans for row in plan.scheduled}
            self.around.trace.add(self.address, "computes", computed)
            for row in self.rows[1:]:
                self.send(row.address, plans[row.coords.dp])
            self.begin(plans[0])

    def _close_turn(self) -> None:
        if self.around.scenario.is_mild:  # no other process asks
            load = self.leader.load()
            # The limit applies to the pages of each DP rank, and all have the same number.
            limit = self.around.shape.quarantine_limit * load.total_pages / len(self._leaders)
            if load.quarantined_pages > limit:
                self.around.was_quarantined = True
        self._emit()

    def _emit(self) -> None:
        self._show_new()
        outgoing, self._outgoing = self._outgoing, []
        for address, message in outgoing:
            if isinstance(message, TierJob) and address == self.address:
                self.tier_worker.submit(message)
            else:
                self.send(address, message)

    def _show_new(self) -> None:
        """Show the checks what permits writing, and what reads, before anything is computed."""
        for leader in self._leaders:
            leader.check_integrity()
        new = self.leader.take_outgoing()
        self._outgoing += new
        for address, message in new:
            if isinstance(message, KvEvents):
                self.num_kv_events[address] = message.number + 1
            elif isinstance(message, Ticket):
                rows = shard_of(self.rows, message.dp_rank)
                memories = [self.around.memories[row.endpoint.session] for row in rows]
                num_tokens = len(self.around.submits[message.room].prompt_ids)
                self.around.tickets.give(memories, message, self.around.text_of(message.room), num_tokens)
                send_late_words(self.around, message, self.rows[0].layout.page_bytes)
            elif isinstance(message, Output) and message.first_index == self.around.submits[message.room].num_given:
                self.around.tickets.check_start(message.room)

    def _on_table(self, snapshot: TableSnapshot) -> None:
        self.take(TableUpdate(snapshot=snapshot))

    def _beat(self) -> None:
        self._load = self.leader.load()
        self._bootstrap.call(machine_of(self.address), self._renew, self._on_answer)

    def _renew(self, table: BootstrapTable) -> None:
        """Renew like the lease keeper: one heartbeat; if the rows are unknown, all of them first."""
        try:
            table.heartbeat(self._heartbeat(), self.around.now_s())
        except TableRefusedError as error:
            if error.code is not RefusalCode.UNKNOWN_ROWS:
                raise
            for row in self.rows:
                table.register(row)
            table.heartbeat(self._heartbeat(), self.around.now_s())
        for row in self.rows[1:]:  # a paused replica pauses with all its ranks
            table.alive(row.replica, row.incarnation, row.global_rank, self.around.now_s())

    def _heartbeat(self) -> Heartbeat:
        first = self.rows[0]
        return Heartbeat(
            replica=first.replica, incarnation=first.incarnation, rows_digest=self._digest, load=self._load
        )

    def _on_answer(self, answer: TableRefusedError | PeerUnreachableError | None) -> None:
        if isinstance(answer, TableRefusedError) and not self.is_dead:
            self._on_refused(str(answer))
