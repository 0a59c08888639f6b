"""Process of one rank, and the loop of a follower."""

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cluster.simulator.device import VirtualDevice
from cluster.simulator.environment import Environment, Process
from cluster.simulator.memory import Memory
from cluster.simulator.tier_worker import VirtualTierWorker
from cluster.simulator.writer import VirtualWriter
from cluster.spec.config import TransferConfig
from cluster.spec.ids import Room
from cluster.spec.messages import Message
from cluster.spec.registry import RankRecord
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import CancelSend, ForgetPeer, StepPlan, StepResult
from cluster.spec.strategy import Strategy
from cluster.spec.tiers import TierJob
from cluster.spec.transfer_messages import CheckPages, PagesChecked
from transfer.page_assignment import early_ends
from transfer.page_range import wrong_pages
from workers.cache.page_allocator import PageAllocator
from workers.handoff.kv_sender import KvSender
from workers.memory.layerwise_load import LayerwiseLoad

_CHECK_S = 0.1
"""Maximum time to check the pages of one request."""


class RankProcess(Process):
    """Process with a rank's device and page memory, which are lost when it dies."""

    def __init__(
        self, env: Environment, records: Sequence[RankRecord], global_rank: int, allocator: PageAllocator
    ) -> None:
        record, leader, shape = records[global_rank], records[0].peer, env.shape
        super().__init__(env, record.address)
        self.record = record
        self.leader_address = leader.address
        self.shard: list[RankProcess] = []
        """Processes of this DP rank, in order of global rank."""
        self.num_begun = 0
        self.num_computed = 0
        self._step: StepPlan | None = None
        self._num_layers = 0
        """Number of layers of the current step that have been computed."""
        self._ends: deque[int] = deque()
        """Numbers of computed layers at which other processes can observe the progress of the step."""
        self._part_s = 0.0
        self._inbox: deque[Message] = deque()
        self._layerwise_load: LayerwiseLoad | None = None
        self._waits_for_layers = False
        self._on_stored: Callable[[int], None] | None = None
        self.memory = Memory.empty(record, allocator)
        env.memories[self.memory.session] = self.memory
        self.sender = KvSender(
            prefill=leader,
            record=record,
            region=memoryview(self.memory.pool),
            config=TransferConfig(mode=shape.mode, verify=shape.verify),
            outbox=self,
            start_writer=partial(VirtualWriter, env, self.memory, self.in_thread),
            least_span_bytes=1,
        )
        self.tier_worker = VirtualTierWorker(self, leader.address, records, self.memory, self._on_layers)
        self.device = VirtualDevice(env, self.memory, self.sender)

    def handle_control(self, message: Message) -> bool:
        """Handle a message that any rank can receive. Return False for any other message."""
        match message:
            case TierJob():
                self.tier_worker.submit(message)
            case CancelSend():
                self.sender.cancel(message)
            case ForgetPeer():
                self.sender.forget(message)
            case CheckPages():
                self.after(self.env.random.uniform(1e-4, _CHECK_S), partial(self._check_pages, message))
            case _:
                return False
        return True

    @property
    def is_idle(self) -> bool:
        return not self.sender.num_open and self.tier_worker.is_idle

    def kill(self) -> None:
        if self.is_dead:
            return
        super().kill()
        self.sender.close()
        self.memory.is_gone = True

    def _check_pages(self, message: CheckPages) -> None:
        """Check pages, as the thread of ``workers.handoff.page_checker`` does."""
        wrong = wrong_pages(memoryview(self.memory.pool), self.record.layout, message.digests)
        answer = PagesChecked(room=message.room, rank=self.record.global_rank, wrong=wrong)
        self.send(self.leader_address, answer)

    def close(self) -> None:
        """Do nothing, because this outbox has no connections."""

    def receive(self, message: Message) -> None:
        self._inbox.append(message)
        self.when_running(self._run_round)

    @abstractmethod
    def _run_round(self) -> None:
        """Handle messages and steps until there is nothing left to do."""

    @property
    def is_computing(self) -> bool:
        return self._step is not None

    @property
    def tp_group(self) -> "list[RankProcess]":
        """Return the ranks of this TP group, which exchange tensors in every layer."""
        coords = self.record.coords
        return [rank for rank in self.shard if (rank.record.coords.cp, rank.record.coords.pp) == (coords.cp, coords.pp)]

    @abstractmethod
    def on_ended(self, plan: StepPlan, sampled: Mapping[Room, Sampled]) -> None:
        """Handle the end of a step in which this rank sampled these tokens."""

    def begin(self, plan: StepPlan) -> None:
        """Begin a step. The TP group starts computing when its last rank has begun."""
        self._step, self._num_layers = plan, 0
        self.num_begun += 1
        self._on_stored = self.device.begin(plan)
        tp_group = self.tp_group
        if all(peer.num_begun >= self.num_begun for peer in tp_group):
            for peer in tp_group:
                peer.when_running(partial(peer._start, plan))

    def _start(self, plan: StepPlan) -> None:
        """Compute layers in parts. Other processes can observe the end of each part."""
        self.device.take_copies(plan.received_pages, [peer.memory for peer in self.tp_group])
        layout = self.record.layout
        job = plan.layerwise_load
        self._layerwise_load = self.tier_worker.submit_layerwise(job) if job is not None else None
        ends = [] if self._on_stored is None else early_ends(layout, 1)
        if self._layerwise_load is not None:
            ends = list(range(1, layout.num_layers))
        self._ends = deque([*ends, layout.num_layers])
        num_tokens = sum(len(request.token_ids) for request in plan.scheduled)
        step_s = self.env.hazards.slowness * (self.env.random.uniform(2e-3, 3e-2) + 1e-4 * num_tokens)
        self._part_s = step_s / len(self._ends)
        self.after(self._part_s, self._compute_layers)

    def _on_layers(self) -> None:
        if self._waits_for_layers:
            self._waits_for_layers = False
            self._compute_layers()

    def _compute_layers(self) -> None:
        """Compute the next layers once they are loaded."""
        plan, end = self._step, self._ends[0]
        assert plan is not None
        if self._layerwise_load is not None and self._layerwise_load.num_here < end:
            self._waits_for_layers = True
            return
        self.device.compute(plan, range(self._num_layers, end))
        if self._on_stored is not None:
            for layer in range(self._num_layers, end):
                self._on_stored(layer)
        self._num_layers = self._ends.popleft()
        if self._ends:
            self.after(self._part_s, self._compute_layers)
        else:
            self.num_computed += 1
            self.end_if_computed()
            sampler = next(rank for rank in self.shard if rank.device.is_sampling_rank)
            if sampler is not self:
                sampler.when_running(sampler.end_if_computed)

    def end_if_computed(self) -> None:
        """End the step if it is computed. The rank that samples waits for all ranks of the step."""
        plan = self._step
        if plan is None or self.num_computed < self.num_begun:
            return
        if self.device.is_sampling_rank and any(rank.num_computed < self.num_computed for rank in self._ranks_of(plan)):
            return
        self._step = None
        self.on_ended(plan, self.device.end(plan))

    def _ranks_of(self, plan: StepPlan) -> "list[RankProcess]":
        """Return the ranks that compute a step together with this one. Other ranks can lag behind."""
        if plan.shape.strategy is not Strategy.NONE or self.record.num_owners > 1:
            return self.shard
        return [rank for rank in self.shard if rank.record.coords.cp == self.record.coords.cp]


class Follower(RankProcess):
    """Rank that carries out a leader's step plans."""

    def on_ended(self, plan: StepPlan, sampled: Mapping[Room, Sampled]) -> None:
        if self.device.is_sampling_rank and plan.scheduled:
            result = StepResult(dp_rank=self.record.coords.dp, sampled=sampled)
            self.send(self.leader_address, result)
        self._run_round()

    def _run_round(self) -> None:
        while self._inbox and not self.is_computing:
            message = self._inbox.popleft()
            if isinstance(message, StepPlan):
                self.begin(message)
            else:
                self.handle_control(message)
