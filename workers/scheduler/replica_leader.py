"""Leader of a replica, on top of the leaders of its DP ranks. Sans I/O.

Each DP rank has separate requests, pages and cache, and all DP ranks compute their steps together. The replica leader
assigns requests to DP ranks and combines steps.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf

from msgspec.structs import asdict, replace

from cluster.spec.ids import Room
from cluster.spec.messages import Blame, CommandResult, Inquire, KvEvents, Message, Output, Outputs, Submit
from cluster.spec.phases import ComputedStep
from cluster.spec.ranks import coords_of
from cluster.spec.registry import AxisSizes, ComputeTimes, ReplicaLoad
from cluster.spec.sampling import Sampled
from cluster.spec.step_messages import StepPlan, StepResult, StepWork
from cluster.spec.strategy import DpPolicy
from cluster.spec.tiers import TierJobResult, joined
from cluster.spec.transfer_messages import Ticket
from workers.context_parallel.shard_plan import idle_plan, join_shapes
from workers.scheduler.leader import REMEMBERED_ROOMS, DpLeader


class ReplicaLeader:
    """Leaders of all DP ranks. Steps end in the order of their plans."""

    def __init__(
        self,
        leaders: Sequence[DpLeader],
        sizes: AxisSizes,
        *,
        depth: int = 1,
        policy: DpPolicy = DpPolicy.LEAST_TOKENS,
    ) -> None:
        """Create a leader from the DP ranks' leaders. At most ``depth`` steps are under way."""
        assert len(leaders) == sizes.dp, f"{len(leaders)} leaders for dp = {sizes.dp}"
        self._leaders, self._sizes, self._depth, self._policy = leaders, sizes, depth, policy
        self._under_way: list[deque[tuple[StepPlan, float]]] = [deque() for _ in leaders]
        """Plans under way that schedule requests, and the times at which they were made, by DP rank."""
        self._ended_s = [-inf for _ in leaders]
        """Time at which each DP rank's newest step ended."""
        self._now_s = 0.0
        self._dp_ranks: OrderedDict[Room, int] = OrderedDict()
        """DP ranks by room, newest room last."""
        self._next_numbers: dict[str, int] = {}
        """Number of the next KvEvents message, by router address."""
        self._work: dict[int, StepWork] = {}
        """Latest work report by global rank."""

    def take_outgoing(self) -> list[tuple[str, Message]]:
        """Return messages to send, as (address, message)."""
        outgoing: list[tuple[str, Message]] = []
        taken: dict[tuple[str, int], CommandResult] = {}
        for dp_rank, leader in enumerate(self._leaders):
            for address, message in leader.outgoing:
                if isinstance(message, CommandResult):
                    named = address, message.number
                    taken[named] = _combined(taken[named], message) if named in taken else message
                else:
                    outgoing.append((address, self._numbered(dp_rank, address, message)))
            leader.outgoing = []
        return outgoing + [(address, answer) for (address, _), answer in taken.items()]

    def on_message(self, message: Message, now_s: float) -> None:
        """Pass a message to the leader of its room or rank, or to all leaders."""
        if isinstance(message, StepResult):
            self.commit(message.dp_rank, message.sampled, now_s, message.communication_s)
            return
        if isinstance(message, StepWork):
            self._work[message.global_rank] = message
            return
        if isinstance(message, Inquire):
            for dp_rank, rooms in self._by_dp_rank(message).items():
                self._leaders[dp_rank].on_message(replace(message, rooms=rooms), now_s)
            return
        for dp_rank in self._addressed(message):
            self._leaders[dp_rank].on_message(message, now_s)

    def refuse(self, submit: Submit, reason: str) -> None:
        """Refuse a request instead of passing it to a leader. Its router may try again."""
        self._leaders[0].send_failure(submit, reason, retryable=True, blame=Blame.NEITHER)

    def has(self, room: Room) -> bool:
        return any(leader.has(room) for leader in self._leaders)

    def tick(self, now_s: float) -> None:
        self._now_s = now_s
        for leader in self._leaders:
            leader.tick(now_s)

    def has_work(self) -> bool:
        return self._can_plan and any(leader.has_work() for leader in self._leaders)

    def next_deadline_s(self) -> float | None:
        deadlines_s = [leader.next_deadline_s() for leader in self._leaders]
        return min((deadline_s for deadline_s in deadlines_s if deadline_s is not None), default=None)

    @property
    def must_end(self) -> str:
        """Return why this replica must end. Empty if it need not end, or while another DP rank's leader has work."""
        reasons = [leader.must_end for leader in self._leaders if leader.must_end]
        has_work = any(not leader.must_end and not leader.is_idle() for leader in self._leaders)
        return "" if has_work else "; ".join(reasons)

    def next_plans(self) -> list[StepPlan]:
        """Return the next step's plan for every DP rank. Empty if there is nothing to do."""
        plans = [leader.next_plan() for leader in self._leaders] if self._can_plan else []
        for under_way, plan in zip(self._under_way, plans, strict=False):
            if plan is not None and plan.scheduled:
                under_way.append((plan, self._now_s))
        if not any(plans):
            return []
        step = [plan or idle_plan() for plan in plans]
        shapes = join_shapes([plan.shape for plan in step], self._sizes.cp)
        return [replace(plan, shape=shape) for plan, shape in zip(step, shapes, strict=True)]

    def commit(self, dp_rank: int, sampled: Mapping[Room, Sampled], now_s: float, communication_s: float = 0.0) -> None:
        """Apply the outcome of a DP rank's oldest step under way. Its time begins when the one before it has ended."""
        plan, planned_s = self._under_way[dp_rank].popleft()
        step = ComputedStep(max(planned_s, self._ended_s[dp_rank]), now_s, communication_s)
        self._ended_s[dp_rank] = now_s
        self._leaders[dp_rank].commit(plan, sampled, step)
        self._leaders[dp_rank].report_cache()

    def load(self) -> ReplicaLoad:
        loads = [leader.load() for leader in self._leaders]
        counts = [name for name, value in asdict(loads[0]).items() if type(value) is int]
        sums = {name: sum(getattr(load, name) for load in loads) for name in counts}
        parts = [*(load.dropped for load in loads), *(work.dropped for work in self._work.values())]
        dropped = sum(map(Counter[str], parts), Counter[str]())
        states = [load.tiers for load in loads if load.tiers is not None]
        return replace(
            loads[0],
            **sums,
            draining=any(load.draining for load in loads),
            dropped=dict(dropped),
            tiers=joined(states) if states else None,
            expert_tokens=dict(sum((Counter(work.expert_tokens) for work in self._work.values()), Counter())),
            computed=tuple(
                ComputeTimes(global_rank=rank, num_steps=work.num_steps, total_s=work.step_s)
                for rank, work in sorted(self._work.items())
            ),
            sends=tuple(times for load in loads for times in load.sends),
        )

    @property
    def _can_plan(self) -> bool:
        return all(len(under_way) < self._depth for under_way in self._under_way)

    def _addressed(self, message: Message) -> Sequence[int]:
        if isinstance(message, TierJobResult):
            return [coords_of(message.global_rank, self._sizes).dp]
        room: Room | None = getattr(message, "room", None)
        return range(len(self._leaders)) if room is None else [self._dp_rank_of(room, message)]

    def _by_dp_rank(self, inquire: Inquire) -> dict[int, list[Room]]:
        """Split an inquiry by DP rank, since a leader reports unknown rooms as ended."""
        rooms: dict[int, list[Room]] = defaultdict(list)
        for room in inquire.rooms:
            rooms[self._dp_rank_of(room, inquire)].append(room)
        return rooms

    def _dp_rank_of(self, room: Room, message: Message) -> int:
        """Return a room's DP rank. A new room goes to the rank that its request asks for or that the policy picks. If
        another message arrives before the request, the room's id decides.
        """
        if room not in self._dp_ranks:
            self._dp_ranks[room] = self._new_dp_rank(room, message)
            if len(self._dp_ranks) > REMEMBERED_ROOMS:
                self._dp_ranks.popitem(last=False)
        return self._dp_ranks[room]

    def _new_dp_rank(self, room: Room, message: Message) -> int:
        for dp_rank, leader in enumerate(self._leaders):
            if leader.has(room):  # the room is too old to be remembered
                return dp_rank
        wanted = None
        if isinstance(message, Submit):
            if message.prompt_of is not None:
                # The request shares the pages of another choice.
                return self._dp_ranks.get(message.prompt_of, message.prompt_of % len(self._leaders))
            wanted = message.dp_rank
        elif isinstance(message, Ticket):
            wanted = message.wanted_dp_rank
        return wanted if wanted is not None and wanted < len(self._leaders) else self._choose(room, message)

    def _choose(self, room: Room, message: Message) -> int:
        if self._policy is DpPolicy.FOLLOW_ROOM or len(self._leaders) == 1 or not isinstance(message, Submit):
            return room % len(self._leaders)
        by_requests = self._policy is DpPolicy.LEAST_REQUESTS
        work = [leader.num_requests if by_requests else leader.num_tokens for leader in self._leaders]
        return work.index(min(work))

    def _numbered(self, dp_rank: int, address: str, message: Message) -> Message:
        """Renumber cache reports. A router gets one stream, which restarts when the first leader's stream does."""
        if not isinstance(message, KvEvents):
            return message
        begins = dp_rank == 0 and message.number == 0
        number = 0 if begins else self._next_numbers[address]
        self._next_numbers[address] = number + 1
        return replace(message, number=number)


def _combined(one: CommandResult, other: CommandResult) -> CommandResult:
    """Combine two DP ranks' results of one command. All accept the command, or refuse it for the same reason."""
    return replace(one, refusal=one.refusal or other.refusal, num_pinned=max(one.num_pinned, other.num_pinned))


def join_outputs(outgoing: Iterable[tuple[str, Message]]) -> Iterator[tuple[str, Message]]:
    """Join each address's consecutive outputs into one message."""
    together: dict[str, list[Output]] = {}
    for address, message in outgoing:
        if isinstance(message, Output):
            together.setdefault(address, []).append(message)
            continue
        if outputs := together.pop(address, None):
            yield address, Outputs(outputs=outputs)
        yield address, message
    for address, outputs in together.items():
        yield address, Outputs(outputs=outputs)
