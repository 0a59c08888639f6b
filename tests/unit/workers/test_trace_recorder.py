"""Recording of traced requests: states, steps and their details."""

from pathlib import Path

import pytest
import torch

from cluster.spec.clock import Interval
from cluster.spec.ids import Room
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan, StepShape
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.thread_group import on_thread_ranks
from workers.context_parallel.shard_plan import make_step_shape
from workers.engine.weights import load_model
from workers.parallel.communicator import Communicator
from workers.trace import recorder as trace_recorder
from workers.trace.recorder import COLLECTIVES, COMPUTE, REQUEST, Recorder
from workers.trace.step_recorder import StepRecorder


def test_untraced_requests_leave_nothing() -> None:
    recorder = Recorder()
    assert not recorder.begin(_plan(1, traced=()))
    recorder.note(_interval("layer 0"))
    recorder.add(Room(1), _interval("write"))
    recorder.enter(Room(1), "queued", 1.0)
    assert recorder.take(Room(1), 8.0).intervals == []


def test_a_step_belongs_to_every_timed_request_in_it_and_to_no_later_one() -> None:
    recorder = Recorder()
    assert recorder.begin(_plan(1, 2, 3, traced=(1, 3)))
    recorder.note(_interval("step 1"))
    recorder.end()
    recorder.note(_interval("between"))
    assert recorder.begin(_plan(3, 4, traced=()))
    recorder.note(_interval("step 2"))
    recorder.end()
    assert not recorder.begin(_plan(4, traced=()))
    names = {room: [interval.name for interval in recorder.take(Room(room), 8.0).intervals] for room in range(1, 5)}
    assert names == {1: ["step 1"], 2: [], 3: ["step 1", "step 2"], 4: []}
    assert recorder.take(Room(1), 8.0).intervals == [], "taken twice"


def test_states_follow_each_other_without_a_gap() -> None:
    recorder = Recorder()
    recorder.trace(Room(1))
    for state, now_s in [("queued", 1.0), ("receiving", 2.5), ("running", 4.0), (None, 7.0), (None, 9.0)]:
        recorder.enter(Room(1), state, now_s)
    assert recorder.take(Room(1), 8.0).intervals == [
        Interval(REQUEST, "queued", 1.0, 2.5),
        Interval(REQUEST, "receiving", 2.5, 4.0),
        Interval(REQUEST, "running", 4.0, 7.0),
    ]


def test_a_trace_of_a_running_request_ends_now() -> None:
    recorder = Recorder()
    recorder.trace(Room(1))
    recorder.enter(Room(1), "sending", 5.0)
    assert recorder.take(Room(1), 8.0).intervals == [Interval(REQUEST, "sending", 5.0, 8.0)]


def test_unclaimed_traces_are_bounded() -> None:
    recorder = Recorder()
    for room in range(trace_recorder.MAX_ROOMS + 1):
        recorder.begin(_plan(room, traced=(room,)))
        recorder.note(_interval("step"))
        recorder.end()
    assert recorder.take(Room(0), 8.0).intervals == []
    assert len(recorder.take(Room(1), 8.0).intervals) == 1
    for _ in range(trace_recorder.MAX_INTERVALS + 5):
        recorder.add(Room(2), _interval("write"))
    log = recorder.take(Room(2), 8.0)
    assert (len(log.intervals), log.num_left_out) == (trace_recorder.MAX_INTERVALS, 6)


def _interval(name: str) -> Interval:
    return Interval(COMPUTE, name, 1.0, 2.0)


def _plan(*rooms: int, traced: tuple[int, ...]) -> StepPlan:
    new_requests = [
        NewRequest(
            room=Room(room), prompt_len=1, owner_base=0, sampling=Sampling(), destination=None, traced=room in traced
        )
        for room in rooms
    ]
    records = [
        ScheduledRequest(
            room=Room(room), first_position=0, token_ids=[1], new_pages=[], samples=True, output_position=0
        )
        for room in rooms
    ]
    return StepPlan(step=1, shape=StepShape(), new_requests=new_requests, scheduled=records, releases=[])


TOKENS = torch.arange(1, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_a_timed_step_shows_its_parts_and_leaves_the_model_as_it_was(folder: Path) -> None:
    model = load_model(folder)
    recorder = StepRecorder(model, [Communicator("alone")])
    plan = _step_plan(Room(1), traced=True)
    assert recorder.recorder.begin(plan)
    with recorder.step(plan), torch.inference_mode():
        traced = model(TOKENS, TOKENS, DenseAttention())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not recorder.recorder.begin(_step_plan(Room(2), traced=False))
    with torch.inference_mode():
        assert torch.equal(model(TOKENS, TOKENS, DenseAttention()), traced)
    intervals = recorder.recorder.take(Room(1), 0.0).intervals
    parts = [name for number in (0, 1) for name in ("attention", "mlp", f"layer {number}")]
    assert [(interval.track, interval.name) for interval in intervals] == [
        (COMPUTE, name) for name in [*parts, "step 7"]
    ]
    assert intervals[-1].facts == {"requests": 1, "tokens": 5, "tokens before": 0, "strategy": "none"}
    for outer, inner in [(2, 0), (2, 1), (5, 3), (5, 4), (6, 2), (6, 5)]:
        assert intervals[outer].start_s <= intervals[inner].start_s <= intervals[inner].end_s <= intervals[outer].end_s
    assert recorder.recorder.take(Room(2), 0.0).intervals == []


def test_a_step_that_fails_leaves_no_hooks(folder: Path) -> None:
    model = load_model(folder)
    recorder = StepRecorder(model, [Communicator("alone")])
    with pytest.raises(ZeroDivisionError), recorder.step(_step_plan(Room(1), traced=True)):
        raise ZeroDivisionError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_collectives_of_a_timed_step_have_their_lane(folder: Path) -> None:
    model = load_model(folder)

    def names(group: Communicator) -> list[str]:
        recorder = StepRecorder(model, [group])
        group.barrier()
        plan = _step_plan(Room(1), traced=True)
        assert recorder.recorder.begin(plan)
        with recorder.step(plan):
            group.all_gather(torch.empty(2), torch.ones(1))
        group.barrier()
        return [
            interval.name
            for interval in recorder.recorder.take(Room(1), 0.0).intervals
            if interval.track == COLLECTIVES
        ]

    begun_and_waited_for = ["all_gather", "all_gather"]
    assert on_thread_ranks(2, names) == [begun_and_waited_for] * 2


def _step_plan(room: Room, traced: bool) -> StepPlan:
    new = NewRequest(room=room, prompt_len=5, owner_base=0, sampling=Sampling(), destination=None, traced=traced)
    request = ScheduledRequest(
        room=room, first_position=0, token_ids=TOKENS.tolist(), new_pages=[[0]], samples=True, output_position=0
    )
    return StepPlan(step=7, shape=make_step_shape([request]), new_requests=[new], scheduled=[request], releases=[])
