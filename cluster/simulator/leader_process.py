"""The process of rank 0: the loop of ``workers.worker`` around the real leader, its heartbeats and its table."""

from collections import deque
from collections.abc import Callable, Sequence

from cluster.bootstrap.table import BootstrapTable, RefusalCode, TableRefusedError, rows_digest
from cluster.simulator.bootstrap import Bootstrap
from cluster.simulator.fence import hand_over
from cluster.simulator.network import machine_of
from cluster.simulator.rank_process import Follower, RankProcess
from cluster.simulator.stale import send_late_words
from cluster.simulator.surroundings import Surroundings
from cluster.spec.errors import PeerUnreachableError
from cluster.spec.messages import Message, Output, TableUpdate
from cluster.spec.peer import Peer
from cluster.spec.registry import Heartbeat, RankRow, ReplicaLoad, TableSnapshot
from cluster.spec.step_messages import StepPlan
from cluster.spec.strategy import Strategy
from cluster.spec.tiers import MovePages
from cluster.spec.transfer_messages import Ticket
from workers.cache.page_allocator import PageAllocator
from workers.scheduler.leader import Leader

HEARTBEAT_S = 1.0
IDLE_WAIT_S = 1.0


class LeaderProcess(RankProcess):
    """Takes in what has arrived, lets time pass, computes one step, says what is to be said."""

    def __init__(
        self,
        around: Surroundings,
        bootstrap: Bootstrap,
        rows: Sequence[RankRow],
        me: Peer,
        leader: Leader,
        allocator: PageAllocator,
        on_refused: Callable[[str], None],
    ) -> None:
        """``on_refused`` is called when the table will not have this replica."""
        super().__init__(around, rows, 0, me, allocator)
        self.leader = leader
        self.allocator = allocator
        self.followers: list[Follower] = []
        self.me = me
        self.rows = rows
        self._digest = rows_digest(rows)
        self._bootstrap = bootstrap
        self._on_refused = on_refused
        self._inbox: deque[Message] = deque()
        self._load = ReplicaLoad()
        self._step: StepPlan | None = None
        """The one that is being computed."""
        self._is_computed = False
        """Rank 0's own part of it."""
        self._num_shown = 0
        """Outgoing messages that the checks have seen."""
        self._unwatch = bootstrap.watch(machine_of(self.address), self._on_table)
        self.every(HEARTBEAT_S, self._beat)
        self.every(IDLE_WAIT_S, self._turn)

    @property
    def is_idle(self) -> bool:
        """Nothing is left of any request or transfer, and nobody holds a page."""
        pages_are_free = self.allocator.num_free == self.allocator.num_pages
        return self._step is None and self.leader.is_idle() and pages_are_free and super().is_idle

    def kill(self) -> None:
        """Die."""
        if not self.is_dead:
            self._unwatch()
        super().kill()

    def take(self, message: Message) -> None:
        """A message has arrived."""
        self._inbox.append(message)
        self.when_running(self._turn)

    def end_step(self) -> None:
        """Commit the step when rank 0 has computed it; where ranks meet in it, when all of them have."""
        plan = self._step
        if plan is None or not self._is_computed:
            return
        meets = plan.strategy is not Strategy.NONE or self.rows[0].num_owners > 1
        if meets and any(follower.num_steps < plan.step for follower in self.followers):
            return
        self._step = None
        sampled = self.device.end(plan)
        if plan.rows:
            self.leader.commit(plan, sampled, self.around.now_s())
        self._close_turn()
        self.after(0.0, self._turn)

    def _turn(self) -> None:
        if self._step is not None:
            return
        while self._inbox:
            message = self._inbox.popleft()
            if not self.obey(message):
                hand_over(self.leader, self.me, message, self.around.now_s())
                self._show_new()
        self.leader.tick(self.around.now_s())
        self._show_new()
        if self.leader.must_end:
            self.around.was_quarantined = True
            self.around.happened["quarantine"] += 1
            self._on_refused(self.leader.must_end)
            return
        plan = self.leader.next_plan()
        if plan is None:
            self._close_turn()
            return
        self.around.trace.add(self.address, "computes", {row.room: len(row.token_ids) for row in plan.rows})
        self._step, self._is_computed = plan, False
        for follower in self.followers:
            self.send(follower.address, plan)
        self.device.begin(plan)
        self.after(self.step_s(plan), self._compute)

    def _compute(self) -> None:
        self._is_computed = True
        self.end_step()

    def _close_turn(self) -> None:
        self._show_new()
        self._load = load = self.leader.load()
        if load.quarantined_pages > self.around.shape.quarantine_limit * load.total_pages:
            self.around.was_quarantined = True
        outgoing, self.leader.outgoing, self._num_shown = self.leader.outgoing, [], 0
        for address, message in outgoing:
            if isinstance(message, MovePages) and address == self.address:
                self.mover.take(message)
            else:
                self.send(address, message)

    def _show_new(self) -> None:
        """Let the checks see what permits writing, and what reads, before anything is computed."""
        self.leader.check_integrity()
        for _, message in self.leader.outgoing[self._num_shown :]:
            if isinstance(message, Ticket):
                self.around.tickets.give(self.memory, message, bytes(self.around.submits[message.room].prompt_ids))
                send_late_words(self.around, message, self.rows[0].layout.page_bytes)
            elif isinstance(message, Output) and message.first_index == self.around.submits[message.room].num_given:
                self.around.tickets.check_start(self.memory, message)
        self._num_shown = len(self.leader.outgoing)

    def _on_table(self, snapshot: TableSnapshot) -> None:
        self.take(TableUpdate(snapshot=snapshot))

    def _beat(self) -> None:
        self._bootstrap.call(machine_of(self.address), self._renew, self._on_answer)

    def _renew(self, table: BootstrapTable) -> None:
        """What the lease keeper does: one heartbeat; where the rows are unknown, all of them first."""
        try:
            table.heartbeat(self._heartbeat(), self.around.now_s())
        except TableRefusedError as error:
            if error.code is not RefusalCode.UNKNOWN_ROWS:
                raise
            for row in self.rows:
                table.register(row)
            table.heartbeat(self._heartbeat(), self.around.now_s())
        for row in self.rows[1:]:  # a replica that pauses does so with all its ranks
            table.alive(row.replica, row.incarnation, row.global_rank, self.around.now_s())

    def _heartbeat(self) -> Heartbeat:
        first = self.rows[0]
        return Heartbeat(
            replica=first.replica, incarnation=first.incarnation, rows_digest=self._digest, load=self._load
        )

    def _on_answer(self, answer: TableRefusedError | PeerUnreachableError | None) -> None:
        if isinstance(answer, TableRefusedError) and not self.is_dead:
            self._on_refused(str(answer))
