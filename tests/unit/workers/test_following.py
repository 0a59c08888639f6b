"""Follower with an asynchronous device. Tests decide when its steps end."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from cluster.grammar import Compiled
from cluster.spec.clock import IDLE_WAIT_S
from cluster.spec.ids import Incarnation, Room
from cluster.spec.messages import Inquire, Message, Submit
from cluster.spec.registry import ReplicaLoad
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.step_messages import Shutdown, StepPlan, StepShape
from cluster.spec.tiers import TierJob, TierJobKind
from cluster.spec.wire import TokenIds
from tests.fakes.bootstrap import peer_of
from workers import worker as worker_module
from workers.engine.begun_step import BegunStep, SampledTokens
from workers.loop import leader_link
from workers.loop.leader_link import LocalLink, RemoteLink
from workers.loop.rank_steps import PATIENCE_S, RankSteps
from workers.loop.watch import LoopProgress
from workers.worker import Worker


class Rank:
    """Recorder of step events. ``over`` has the steps that the device has computed."""

    def __init__(self, inbox: Iterator[list[Message]]) -> None:
        self.calls: list[tuple[str, int]] = []
        self.over: set[int] = set()
        self._inbox = inbox
        self._has_received = False
        self.now_s = 0.0

    def receive(self, timeout_s: float, most: int) -> list[Message]:
        """Return the messages of a round, and then no more in the same round."""
        del timeout_s, most
        messages = [] if self._has_received else next(self._inbox)
        self._has_received = bool(messages)
        return messages

    def begin(self, plan: StepPlan, *_: object) -> BegunStep:
        self.calls.append(("begin", plan.step))
        end: Any = SimpleNamespace(query=lambda: plan.step in self.over, synchronize=lambda: self._wait(plan.step))
        return BegunStep({}, SampledTokens(), end)

    def _wait(self, step: int) -> None:
        self.calls.append(("wait", step))

    def follow(self) -> list[tuple[str, int]]:
        """Follow until the inbox has a Shutdown."""
        reports = SimpleNamespace(count=lambda _: None, next=lambda *_, **__: None)
        clock: Any = SimpleNamespace(now_s=lambda: self.now_s)
        inbox: Any = SimpleNamespace(receive=self.receive, dropped={})
        worker: Any = SimpleNamespace(progress=LoopProgress(), _inbox=inbox, _clock=clock)
        worker._handle, worker._messages = partial(Worker._handle, worker), partial(Worker._messages, worker)
        rank: Any = SimpleNamespace(
            runner=SimpleNamespace(begin=self.begin, requests={}),
            memory=SimpleNamespace(receive=lambda _: None),
            groups=SimpleNamespace(is_sampling_rank=False),
            grammars=None,
            step_recorder=SimpleNamespace(recorder=SimpleNamespace(begin=lambda _: False), communication_s=0.0),
        )
        nothing = lambda *_: None  # noqa: E731
        sender: Any = SimpleNamespace(before_step=nothing, layer_callback=nothing, after_step=nothing)
        nobody: Any = None
        spec: Any = SimpleNamespace(coords=SimpleNamespace(dp=0))
        with patch.object(leader_link, "step_reports", lambda *_: reports):
            link = RemoteLink(spec, rank, "leader", inbox, nobody, clock)
        tiers = SimpleNamespace(submit=lambda job: self.calls.append(("job", job.job_id)))
        parts: Any = SimpleNamespace(tiers=tiers)
        Worker._work(worker, link, RankSteps(rank, sender, nobody, clock, worker.progress, num_ahead=1), parts)
        return self.calls


def plan_of(step: int) -> StepPlan:
    return StepPlan(step=step, shape=StepShape(), new_requests=[], scheduled=[], releases=[])


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "PAUSE_S", 0.0)


def test_a_step_is_not_awaited_while_the_next_plan_may_come() -> None:
    """Otherwise the next step would begin only after the device has become idle."""

    def inbox() -> Iterator[list[Message]]:
        yield [plan_of(1)]
        yield from ([], [])
        yield [plan_of(2)]
        yield from ([], [])
        yield [plan_of(3)]
        rank.over = {2, 3}
        yield from ([], [])
        yield [Shutdown()]

    rank = Rank(inbox())
    assert rank.follow() == [("begin", 1), ("begin", 2), ("wait", 1), ("begin", 3), ("wait", 2), ("wait", 3)]


def test_an_endless_step_is_awaited_where_a_watcher_sees_it() -> None:
    def inbox() -> Iterator[list[Message]]:
        yield [plan_of(1)]
        yield []
        rank.now_s = PATIENCE_S / 2
        yield []
        assert rank.calls == [("begin", 1)]
        rank.now_s = 10.0
        yield []
        yield [Shutdown()]

    rank = Rank(inbox())
    assert rank.follow() == [("begin", 1), ("wait", 1)]


def test_a_tier_job_follows_the_steps_before_it() -> None:
    """The job may save pages that the steps compute."""

    def inbox() -> Iterator[list[Message]]:
        yield [plan_of(1), TierJob(job_id=7, kind=TierJobKind.SAVE, pages=[]), plan_of(2)]
        yield [Shutdown()]

    calls = Rank(inbox()).follow()
    assert calls.index(("begin", 1)) < calls.index(("job", 7)) < calls.index(("begin", 2))


def test_a_request_waits_for_its_grammar_outside_the_scheduler() -> None:
    """The leader, which does not know the request yet, would report it as lost, and the driver would end a draining
    replica."""
    compiled, passed = Future[Compiled](), list[Room]()

    def on_message(message: Submit | Inquire, _: float) -> None:
        passed.extend([message.room] if isinstance(message, Submit) else message.rooms)

    leader: Any = SimpleNamespace(
        must_end="",
        has_work=lambda: False,
        tick=lambda _: None,
        next_plans=lambda: (),
        next_deadline_s=lambda: None,
        take_outgoing=lambda: [],
        on_message=on_message,
        has=passed.__contains__,
        load=ReplicaLoad,
    )
    spec: Any = SimpleNamespace(coords=SimpleNamespace(dp=0), sizes=SimpleNamespace(dp=1))
    runner = SimpleNamespace(graph_steps={}, graph_bytes=0)
    rank: Any = SimpleNamespace(grammars=SimpleNamespace(prepare=lambda *_: compiled), runner=runner)
    inbox: Any = SimpleNamespace(dropped=Counter())
    reports: Any = SimpleNamespace(next=lambda *_, **__: None)
    clock: Any = SimpleNamespace(now_s=lambda: 0.0)
    nobody: Any = None
    with patch.object(leader_link, "step_reports", lambda *_: reports):
        link = LocalLink(leader, spec, rank, [], inbox, nobody, nobody, clock)
    link.on_message(submit_of(1, Sampling(grammar="slow")))
    link.on_message(submit_of(2, Sampling()))
    link.next_plans()
    link.end_round(is_busy=False)
    assert (passed, link.idle_wait_s(), link.load.num_waiting) == ([2], leader_link.COMPILING_WAIT_S, 1)
    leader.has_work = lambda: True
    assert link.idle_wait_s() == 0.0, "steps of other requests would start late"
    leader.has_work = lambda: False
    inquire = Inquire(rooms=[Room(1), Room(2)], sender=peer_of("router"), incarnation=Incarnation(1))
    link.on_message(inquire)
    assert passed == [2, 2]
    compiled.set_result(Compiled(nobody, 0.0))
    link.next_plans()
    link.end_round(is_busy=False)
    assert (passed, link.idle_wait_s(), link.load.num_waiting) == ([2, 2, 1], IDLE_WAIT_S, 0)
    link.on_message(inquire)
    assert passed == [2, 2, 1, 1, 2]


def submit_of(room: int, sampling: Sampling) -> Submit:
    peer = peer_of("decode-0")
    stopping = Stopping(max_tokens=1)
    return Submit(
        room=Room(room),
        prompt_ids=TokenIds.of([1]),
        sampling=sampling,
        stopping=stopping,
        prefill=None,
        decode=peer,
        router=peer,
    )
