"""Several DP ranks with one leader: assignment of requests, formation of steps, routing of messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.spec.ids import Incarnation, Peer, ReplicaId, Room
from cluster.spec.messages import (
    Cancel,
    CommandResult,
    Failure,
    Inquire,
    KvEvents,
    Message,
    Output,
    Outputs,
    Resume,
    Submit,
    SubscribeKvEvents,
)
from cluster.spec.phases import ComputedStep
from cluster.spec.registry import AxisSizes, ReplicaLoad
from cluster.spec.sampling import Sampled, Sampling, Stopping
from cluster.spec.step_messages import ScheduledRequest, StepPlan, StepResult
from cluster.spec.strategy import DpPolicy, Strategy
from cluster.spec.tiers import TierJobResult, TierState
from cluster.spec.transfer_messages import Ticket
from cluster.spec.wire import TokenIds
from tests.fakes.kv import kv_geometry
from tests.fakes.rank_records import tier_state
from workers.context_parallel.shard_plan import make_step_shape
from workers.scheduler.leader import DpLeader
from workers.scheduler.replica_leader import ReplicaLeader, join_outputs

PEER = Peer(replica=ReplicaId("decode-0"), incarnation=Incarnation(1), address="here")


TIERS = tier_state(host_pages=10, used_host_pages=3, num_pinned=1)


@dataclass
class FakeLeader(DpLeader):
    """Leader that records messages, and returns the plans in ``plans``."""

    outgoing: list[tuple[str, Message]] = field(default_factory=list)
    must_end: str = ""
    got: list[Message] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    steps: list[ComputedStep] = field(default_factory=list)
    tier_state: TierState | None = None
    is_deaf: bool = False

    def on_message(self, message: Message, now_s: float) -> None:
        del now_s
        self.got.append(message)
        if isinstance(message, SubscribeKvEvents) and not self.is_deaf:
            self.outgoing += [(message.router.address, _news(number)) for number in (0, 1)]

    def tick(self, now_s: float) -> None: ...

    def has_work(self) -> bool:
        return bool(self.plans)

    def next_deadline_s(self) -> float | None:
        return None

    def next_plan(self) -> StepPlan | None:
        return self.plans.pop(0) if self.plans else None

    def commit(self, plan: StepPlan, sampled: Mapping[Room, Sampled], step: ComputedStep) -> None:
        del sampled
        self.steps.append(step)
        self.committed.append(plan.step)

    def _on_token(self, room: Room, sampled: Sampled) -> None: ...

    def report_cache(self) -> None: ...

    @property
    def num_requests(self) -> int:
        return sum(isinstance(message, Submit) for message in self.got)

    @property
    def num_tokens(self) -> int:
        return sum(len(message.prompt_ids) for message in self.got if isinstance(message, Submit))

    @property
    def _num_queued(self) -> int:
        return 0

    def load(self) -> ReplicaLoad:
        return ReplicaLoad(free_pages=1, total_pages=2, tiers=self.tier_state)

    def is_idle(self) -> bool:
        return not self.plans

    def has(self, room: Room) -> bool:
        return any(isinstance(message, Submit) and message.room == room for message in self.got)

    def check_integrity(self) -> None: ...


def leader_of(dp: int, cp: int = 1, **settings: Any) -> tuple[ReplicaLeader, list[FakeLeader]]:
    leaders = [FakeLeader() for _ in range(dp)]
    return ReplicaLeader(leaders, AxisSizes(dp=dp, cp=cp, tp=1, pp=2), **settings), leaders


def submit(room: int, prompt_len: int = 1, dp_rank: int | None = None) -> Submit:
    return Submit(
        room=Room(room),
        prompt_ids=TokenIds.of([1] * prompt_len),
        sampling=Sampling(),
        stopping=Stopping(max_tokens=1),
        prefill=PEER,
        decode=PEER,
        router=PEER,
        dp_rank=dp_rank,
    )


def ticket(room: int, wanted: int | None = None) -> Ticket:
    geometry = kv_geometry(model="m", num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", page_size=4)
    return Ticket(
        room=Room(room),
        decode=PEER,
        prefill_incarnation=Incarnation(1),
        pages=[[]],
        num_held_pages=0,
        geometry=geometry,
        wanted_dp_rank=wanted,
    )


def plan_of(step: int, *lens: int, samples: bool = True, cp: int = 1) -> StepPlan:
    scheduled = [
        ScheduledRequest(
            room=Room(i), first_position=0, token_ids=[1] * n, new_pages=[], samples=samples, output_position=0
        )
        for i, n in enumerate(lens)
    ]
    shape = make_step_shape(scheduled, Strategy.CONTIGUOUS, cp=cp)
    return StepPlan(step=step, shape=shape, new_requests=[], scheduled=scheduled, releases=[])


def _news(number: int) -> KvEvents:
    return KvEvents(replica=ReplicaId("x"), incarnation=Incarnation(1), number=number, stored=[], removed=[])


@pytest.mark.parametrize(
    ("policy", "lengths", "expected"),
    [
        (DpPolicy.LEAST_TOKENS, [9, 2, 3, 1], [[0], [1, 2, 3]]),
        (DpPolicy.LEAST_REQUESTS, [9, 2, 3, 1], [[0, 2], [1, 3]]),
        (DpPolicy.FOLLOW_ROOM, [9, 2, 3, 1], [[0, 2], [1, 3]]),
    ],
)
def test_requests_follow_the_policy(policy: DpPolicy, lengths: list[int], expected: list[list[int]]) -> None:
    replica, leaders = leader_of(2, policy=policy)
    for room, length in enumerate(lengths):
        replica.on_message(submit(room, length), 0.0)
    assert [[message.room for message in leader.got if isinstance(message, Submit)] for leader in leaders] == expected


@pytest.mark.parametrize("policy", DpPolicy)
def test_a_request_uses_exactly_the_dp_rank_that_it_names(policy: DpPolicy) -> None:
    replica, leaders = leader_of(2, policy=policy)
    replica.on_message(submit(4, dp_rank=1), 0.0)
    assert leaders[1].got == [submit(4, dp_rank=1)]


@pytest.mark.parametrize("dp", [1, 2])
def test_a_dp_rank_of_the_other_role_only_is_ignored(dp: int) -> None:
    replica, leaders = leader_of(dp, policy=DpPolicy.LEAST_TOKENS)
    for room, prompt_len in enumerate([9, 2, 3]):
        replica.on_message(submit(room, prompt_len, dp_rank=3), 0.0)
    rooms = [[message.room for message in leader.got if isinstance(message, Submit)] for leader in leaders]
    assert rooms == ([[0, 1, 2]] if dp == 1 else [[0], [1, 2]])


@pytest.mark.parametrize("first", [ticket(7), ticket(7, wanted=1), Cancel(room=Room(7), incarnation=Incarnation(1))])
def test_all_messages_of_a_room_reach_one_leader_in_any_order(first: Message) -> None:
    replica, leaders = leader_of(3)
    replica.on_message(first, 0.0)
    replica.on_message(submit(7, dp_rank=1 if getattr(first, "wanted_dp_rank", None) else None), 0.0)
    assert sorted(len(leader.got) for leader in leaders) == [0, 0, 2]


def test_another_choice_uses_the_dp_rank_of_its_prompt() -> None:
    replica, leaders = leader_of(2)
    replica.on_message(submit(3, prompt_len=9), 0.0)
    other = replace(submit(5), prompt_of=Room(3))
    replica.on_message(other, 0.0)
    replica.on_message(Cancel(room=Room(5), incarnation=Incarnation(1)), 0.0)
    assert [len(leader.got) for leader in leaders] == [3, 0]


def test_inquiries_reach_the_leader_of_a_request_or_any_for_unknown_ones() -> None:
    replica, leaders = leader_of(2)
    replica.on_message(submit(4, dp_rank=1), 0.0)
    replica.on_message(submit(6, dp_rank=0), 0.0)
    inquire = Inquire(rooms=[Room(4), Room(6), Room(9)], sender=PEER, incarnation=Incarnation(1))
    replica.on_message(inquire, 0.0)
    replica.on_message(submit(9, dp_rank=0), 0.0)
    assert leaders[0].got[1:] == [replace(inquire, rooms=[Room(6)])]
    assert leaders[1].got[1:] == [replace(inquire, rooms=[Room(4), Room(9)]), submit(9, dp_rank=0)]


def test_a_long_request_keeps_its_leader_after_its_room_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("workers.scheduler.replica_leader.REMEMBERED_ROOMS", 3)
    replica, leaders = leader_of(2)
    replica.on_message(submit(4, dp_rank=1), 0.0)
    for room in range(10, 15):
        replica.on_message(submit(room, dp_rank=0), 0.0)
    inquire = Inquire(rooms=[Room(4)], sender=PEER, incarnation=Incarnation(1))
    replica.on_message(inquire, 0.0)
    assert leaders[1].got[1:] == [inquire]


def test_messages_without_a_room_reach_all_leaders() -> None:
    replica, leaders = leader_of(2)
    replica.on_message(Resume(), 0.0)
    assert [leader.got for leader in leaders] == [[Resume()]] * 2
    assert (replica.load().free_pages, replica.load().total_pages) == (2, 4)


@pytest.mark.parametrize(("rank", "expected"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 0), (7, 1)])
def test_reports_of_a_rank_reach_its_own_leader(rank: int, expected: int) -> None:
    replica, leaders = leader_of(2, cp=2)
    answer = TierJobResult(job_id=1, global_rank=rank, done=[])
    replica.on_message(answer, 0.0)
    assert [leader.got for leader in leaders] == [[answer] if dp_rank == expected else [] for dp_rank in (0, 1)]


def test_tiers_of_all_ranks_add_up() -> None:
    replica, leaders = leader_of(2)
    assert replica.load().tiers is None
    for leader, used in zip(leaders, (3, 4), strict=True):
        leader.tier_state = TIERS if used == 3 else replace(TIERS, used_host_pages=used, is_attached=False)
    assert replica.load().tiers == replace(TIERS, host_pages=20, used_host_pages=7, num_pinned=2, is_attached=False)


def test_a_router_sees_one_stream_of_news() -> None:
    replica, leaders = leader_of(2)
    for _ in range(2):
        replica.on_message(SubscribeKvEvents(router=PEER, incarnation=Incarnation(1)), 0.0)
        numbers = [message.number for _, message in replica.take_outgoing() if isinstance(message, KvEvents)]
        assert numbers == [0, 1, 2, 3]
    leaders[1].outgoing.append(("here", _news(2)))
    (_, news), *_ = replica.take_outgoing()
    assert isinstance(news, KvEvents)
    assert news.number == 4


def test_ranks_answer_a_command_as_one() -> None:
    replica, leaders = leader_of(2)
    for leader, num_pinned in zip(leaders, (2, 3), strict=True):
        for number in (1, 2):
            taken = CommandResult(number=number, replica=PEER.replica, incarnation=PEER.incarnation)
            refusal = "no room" if number == 2 and num_pinned == 3 else ""
            leader.outgoing.append(("router", replace(taken, num_pinned=num_pinned, refusal=refusal)))
    answers = [message for _, message in replica.take_outgoing() if isinstance(message, CommandResult)]
    assert [(answer.number, answer.num_pinned, answer.refusal) for answer in answers] == [(1, 3, ""), (2, 3, "no room")]


def test_an_unanswered_subscription_does_not_restart_the_events() -> None:
    replica, leaders = leader_of(2)
    replica.on_message(SubscribeKvEvents(router=PEER, incarnation=Incarnation(1)), 0.0)
    replica.take_outgoing()
    for leader in leaders:
        leader.is_deaf = True
    replica.on_message(SubscribeKvEvents(router=PEER, incarnation=Incarnation(2)), 0.0)
    leaders[0].outgoing.append(("here", _news(2)))
    (_, news), *_ = replica.take_outgoing()
    assert isinstance(news, KvEvents)
    assert news.number == 4


def test_a_rank_with_nothing_to_do_takes_part_and_all_know_all_lengths() -> None:
    replica, leaders = leader_of(2, cp=2)
    leaders[1].plans = [plan_of(1, 5, cp=2)]
    idle, busy = replica.next_plans()
    assert (idle.scheduled, busy.step) == ([], 1)
    assert idle.shape.shard_lens == busy.shape.shard_lens == (0, 0, 3, 2)
    assert idle.shape.last_layer_lens == busy.shape.last_layer_lens == (0, 0, 0, 1)
    assert replica.next_plans() == []


def test_no_step_begins_before_all_results_of_the_last_one() -> None:
    replica, leaders = leader_of(2)
    for leader in leaders:
        leader.plans = [plan_of(1, 1), plan_of(2, 1)]
    assert len(replica.next_plans()) == 2
    replica.commit(0, {}, 0.0)
    assert not replica.has_work()
    replica.on_message(StepResult(dp_rank=1, sampled={}), 0.0)
    assert [leader.committed for leader in leaders] == [[1], [1]]
    assert [plan.step for plan in replica.next_plans()] == [2, 2]


def test_a_steps_time_begins_when_the_one_before_it_has_ended() -> None:
    replica, (leader,) = leader_of(1, depth=2)
    leader.plans = [plan_of(step, 1) for step in (1, 2, 3)]
    replica.tick(1.0)
    for _ in range(2):
        replica.next_plans()
    replica.commit(0, {}, 3.0, communication_s=0.5)
    replica.commit(0, {}, 4.0)
    replica.tick(6.0)
    replica.next_plans()
    replica.on_message(StepResult(dp_rank=0, sampled={}, communication_s=0.25), 7.0)
    assert leader.steps == [ComputedStep(1.0, 3.0, 0.5), ComputedStep(3.0, 4.0), ComputedStep(6.0, 7.0, 0.25)]


def test_stages_have_several_steps_in_flight_which_end_in_order() -> None:
    replica, (leader,) = leader_of(1, depth=2)
    leader.plans = [plan_of(step, 1) for step in (1, 2, 3)]
    assert [bool(replica.next_plans()) for _ in range(3)] == [True, True, False]
    replica.commit(0, {}, 0.0)
    assert leader.committed == [1]
    assert replica.has_work()


def message_of(number: int, is_output: bool) -> Message:
    room, replica, incarnation = Room(number), ReplicaId("decode-0"), Incarnation(1)
    if is_output:
        return Output(room=room, replica=replica, incarnation=incarnation, first_index=0, token_ids=[number])
    return Failure(room=room, replica=replica, incarnation=incarnation, reason="", retryable=True)


@given(st.lists(st.tuples(st.sampled_from(["a", "b"]), st.booleans()), max_size=12))
def test_each_address_sees_the_same(kinds: list[tuple[str, bool]]) -> None:
    outgoing = [(address, message_of(number, is_output)) for number, (address, is_output) in enumerate(kinds)]
    sent = list(join_outputs(outgoing))
    for address in ("a", "b"):
        apart: list[Message] = []
        for _, message in [pair for pair in sent if pair[0] == address]:
            apart += message.outputs if isinstance(message, Outputs) else [message]
        assert apart == [message for to, message in outgoing if to == address]
    kinds_sent = [(address, type(message)) for address, message in sent if address == "a"]
    assert (("a", Outputs), ("a", Outputs)) not in pairwise(kinds_sent)
