"""A process that is one rank of a replica, and the loop of those ranks that are not the leader."""

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial

from cluster.simulator.device import VirtualDevice
from cluster.simulator.leaders import shard_of
from cluster.simulator.memory import Memory
from cluster.simulator.mover import VirtualMover
from cluster.simulator.process import Process
from cluster.simulator.surroundings import Surroundings
from cluster.simulator.writer import VirtualWriter
from cluster.spec.config import TransferConfig
from cluster.spec.ids import Room
from cluster.spec.messages import Message
from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import DropSend, ForgetPeer, StepPlan, StepResult
from cluster.spec.strategy import Strategy
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import CheckPages, PagesChecked
from transfer.digests import wrong_pages
from workers.cache.page_allocator import PageAllocator
from workers.kv_sender import KvSender

_CHECK_S = 0.1
"""Longest time in which a rank compares the pages of one request."""


class RankProcess(Process):
    """Has a device, with page memory that dies with it."""

    def __init__(
        self, around: Surroundings, rows: Sequence[RankRow], global_rank: int, leader: Peer, allocator: PageAllocator
    ) -> None:
        """``rows`` are those of all ranks of the replica, ``allocator`` is that of the DP rank."""
        row, shape = rows[global_rank], around.shape
        own = shard_of(rows, row.coords.dp)
        super().__init__(around, row.address)
        self.row = row
        self.leader_address = leader.address
        self.shard: list[RankProcess] = []
        """All ranks of its DP rank, by CP rank."""
        self.num_computed = 0
        """Steps."""
        self._step: StepPlan | None = None
        """The one at hand."""
        self._is_computed = False
        """This rank's own part of it."""
        self.memory = Memory.empty(row.endpoint.session, allocator, row.layout)
        around.memories[self.memory.session] = self.memory
        self.sender = KvSender(
            prefill=leader,
            row=row,
            pool=memoryview(self.memory.pool),
            config=TransferConfig(mode=shape.mode, page_filter=shape.page_filter, verify=shape.verify),
            outbox=_Post(self),
            start_writer=partial(VirtualWriter, around, self.memory, row.layout.page_bytes, self.when_running),
        )
        self.mover = VirtualMover(self, leader.address, own, row.coords.cp, self.memory)
        self.device = VirtualDevice(own, row.coords.cp, around.memories, self.sender)

    def obey(self, message: Message) -> bool:
        """Do what every rank does when its leader says so; False where it is nothing of the kind."""
        match message:
            case TierJob():
                self.mover.take(message)
            case DropSend():
                self.sender.drop(message)
            case ForgetPeer():
                self.sender.forget(message)
            case CheckPages():
                self.after(self.around.random.uniform(1e-4, _CHECK_S), partial(self._check_pages, message))
            case _:
                return False
        return True

    @property
    def is_idle(self) -> bool:
        """Nothing is left of any transfer, and no copy is on its way."""
        return not self.sender.num_open and self.mover.is_idle

    def kill(self) -> None:
        """Die; what the sender has handed to the wire may still arrive."""
        if self.is_dead:
            return
        super().kill()
        self.sender.close()
        self.memory.is_gone = True

    def _check_pages(self, message: CheckPages) -> None:
        """What ``workers.page_checker`` does on a thread."""
        wrong = wrong_pages(memoryview(self.memory.pool), self.row.layout, message.told)
        answer = PagesChecked(room=message.room, rank=self.row.global_rank, wrong=wrong)
        self.send(self.leader_address, answer)

    @property
    def draws(self) -> bool:
        """Whether this rank samples the tokens of its DP rank."""
        return self.row.coords.cp == 0

    @property
    def is_computing(self) -> bool:
        """A step is at hand."""
        return self._step is not None

    @abstractmethod
    def on_ended(self, plan: StepPlan, sampled: Mapping[Room, Sampled]) -> None:
        """The step is over, with this outcome."""

    def begin(self, plan: StepPlan) -> None:
        """Compute a step."""
        self._step, self._is_computed = plan, False
        self.device.begin(plan)
        filled_s = self.mover.fill(plan.layerwise_load) if plan.layerwise_load is not None else 0.0
        self.after(filled_s + self.step_s(plan), self._compute)

    def _compute(self) -> None:
        self._is_computed = True
        self.num_computed += 1
        self.end_if_over()
        who_draws = self.shard[0]
        if who_draws is not self:
            who_draws.when_running(who_draws.end_if_over)

    def end_if_over(self) -> None:
        """End the step when this rank has computed it; where ranks meet in it, who draws waits for all of them."""
        plan = self._step
        if plan is None or not self._is_computed:
            return
        meets = self.draws and (plan.strategy is not Strategy.NONE or self.row.num_owners > 1)
        if meets and any(rank.num_computed < self.num_computed for rank in self.shard):
            return
        self._step = None
        self.on_ended(plan, self.device.end(plan))

    def step_s(self, plan: StepPlan) -> float:
        """How long this rank computes a step."""
        num_tokens = sum(len(row.token_ids) for row in plan.scheduled)
        return self.around.hazards.slowness * (self.around.random.uniform(2e-3, 3e-2) + 1e-4 * num_tokens)


class Follower(RankProcess):
    """Obeys step plans."""

    def __init__(
        self, around: Surroundings, rows: Sequence[RankRow], global_rank: int, leader: Peer, allocator: PageAllocator
    ) -> None:
        super().__init__(around, rows, global_rank, leader, allocator)
        self._inbox: deque[Message] = deque()

    def take(self, message: Message) -> None:
        """A message has arrived."""
        self._inbox.append(message)
        self.when_running(self._turn)

    def on_ended(self, plan: StepPlan, sampled: Mapping[Room, Sampled]) -> None:
        """Tell the leader what was drawn, and go on."""
        if self.draws and plan.scheduled:
            result = StepResult(step=plan.step, dp_rank=self.row.coords.dp, sampled=sampled)
            self.send(self.leader_address, result)
        self._turn()

    def _turn(self) -> None:
        while self._inbox and not self.is_computing:
            message = self._inbox.popleft()
            if isinstance(message, StepPlan):
                self.begin(message)
            else:
                self.obey(message)


class _Post:
    """A process's outbox."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def send(self, address: str, message: Message) -> None:
        self._process.send(address, message)

    def close(self) -> None:
        """Nothing is held."""
