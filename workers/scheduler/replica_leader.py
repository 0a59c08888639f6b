"""The leader of a whole replica, as the worker loop sees it: steps under way, and what came out of them. Sans I/O."""

from collections import deque
from collections.abc import Mapping

from cluster.spec.ids import Room
from cluster.spec.messages import Message, StepPlan, StepResult
from cluster.spec.registry import ReplicaLoad
from cluster.spec.sampling import Sampled
from workers.scheduler.leader import Leader


class ReplicaLeader:
    """Several steps are under way at once where a replica has several stages; they end in the order of their plans."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._under_way: deque[StepPlan] = deque()

    def take_outgoing(self) -> list[tuple[str, Message]]:
        """Messages to send, as (address, message)."""
        outgoing, self._leader.outgoing = self._leader.outgoing, []
        return outgoing

    def on_message(self, message: Message, now_s: float) -> None:
        """Take in one message."""
        if isinstance(message, StepResult):
            self.commit(message.sampled, now_s)
        else:
            self._leader.on_message(message, now_s)

    def tick(self, now_s: float) -> None:
        """Let deadlines pass."""
        self._leader.tick(now_s)

    def has_work(self) -> bool:
        """Whether there is a step to compute now."""
        return self._leader.has_work()

    def next_deadline_s(self) -> float | None:
        """When something is due though no message comes."""
        return self._leader.next_deadline_s()

    @property
    def must_end(self) -> str:
        """Why this replica cannot go on; empty while it can."""
        return self._leader.must_end

    def next_plan(self) -> StepPlan | None:
        """The next step, or None."""
        plan = self._leader.next_plan()
        if plan is not None:
            self._under_way.append(plan)
        return plan

    def commit(self, sampled: Mapping[Room, Sampled], now_s: float) -> None:
        """Take in the outcome of the oldest step under way."""
        self._leader.commit(self._under_way.popleft(), sampled, now_s)

    def load(self) -> ReplicaLoad:
        """What the heartbeat tells the router."""
        return self._leader.load()
