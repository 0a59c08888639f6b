"""A process that is one rank of a replica, and the loop of those ranks that are not the leader."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from cluster.simulator.device import VirtualDevice
from cluster.simulator.memory import Memory
from cluster.simulator.mover import VirtualMover
from cluster.simulator.process import Process
from cluster.simulator.surroundings import Surroundings
from cluster.simulator.writer import VirtualWriter
from cluster.spec.config import TransferConfig
from cluster.spec.messages import Message
from cluster.spec.peer import Peer
from cluster.spec.registry import RankRow
from cluster.spec.step_messages import DropSend, ForgetPeer, StepPlan
from cluster.spec.tiers import MovePages
from cluster.spec.transfer_messages import CheckPages, PagesChecked
from transfer.digests import wrong_pages
from workers.cache.page_allocator import PageAllocator
from workers.kv_sender import KvSender

_CHECK_S = 0.1
"""Longest time in which a rank compares the pages of one request."""


class RankProcess(Process):
    """Has a device, with page memory that dies with it."""

    def __init__(
        self, around: Surroundings, rows: Sequence[RankRow], cp_rank: int, leader: Peer, allocator: PageAllocator
    ) -> None:
        """``rows`` are those of all ranks of the replica."""
        row, shape = rows[cp_rank], around.shape
        super().__init__(around, row.address)
        self.row = row
        self._leader_address = leader.address
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
        self.mover = VirtualMover(self, rows, cp_rank, self.memory)
        self.device = VirtualDevice(rows, cp_rank, around.memories, self.sender)

    def obey(self, message: Message) -> bool:
        """Do what every rank does when its leader says so; False where it is nothing of the kind."""
        match message:
            case MovePages():
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
        self.send(self._leader_address, answer)

    def step_s(self, plan: StepPlan) -> float:
        """How long this rank computes a step."""
        num_tokens = sum(len(row.token_ids) for row in plan.rows)
        return self.around.hazards.slowness * (self.around.random.uniform(2e-3, 3e-2) + 1e-4 * num_tokens)


class Follower(RankProcess):
    """Obeys step plans."""

    def __init__(
        self,
        around: Surroundings,
        rows: Sequence[RankRow],
        cp_rank: int,
        leader: Peer,
        allocator: PageAllocator,
        on_step: Callable[[], None],
    ) -> None:
        """``on_step`` is called after each step."""
        super().__init__(around, rows, cp_rank, leader, allocator)
        self.num_steps = 0
        """Number of the newest step that it has computed."""
        self._on_step = on_step
        self._is_busy = False
        self._inbox: deque[Message] = deque()

    def take(self, message: Message) -> None:
        """A message has arrived."""
        self._inbox.append(message)
        self.when_running(self._turn)

    def _turn(self) -> None:
        while self._inbox and not self._is_busy:
            message = self._inbox.popleft()
            if isinstance(message, StepPlan):
                self._is_busy = True
                self.device.begin(message)
                self.after(self.step_s(message), partial(self._end_step, message))
            else:
                self.obey(message)

    def _end_step(self, plan: StepPlan) -> None:
        self.device.end(plan)
        self.num_steps = plan.step
        self._is_busy = False
        self._on_step()
        self._turn()


class _Post:
    """A process's outbox."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def send(self, address: str, message: Message) -> None:
        self._process.send(address, message)

    def close(self) -> None:
        """Nothing is held."""
