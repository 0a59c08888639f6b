"""A traced step shows its layers, nested in it; a step that is not traced leaves no trace, and no hook on the model."""

from pathlib import Path

import pytest
import torch

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import Admit, ScheduledRequest, StepPlan
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.thread_group import on_thread_ranks
from workers.context_parallel.shard_plan import make_step_shape
from workers.engine.weights import load_model
from workers.parallel.collectives import Communicator
from workers.trace.recorder import COLLECTIVES, COMPUTE
from workers.trace.step_recorder import StepRecorder

TOKENS = torch.arange(1, 6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_a_timed_step_shows_its_parts_and_leaves_the_model_as_it_was(folder: Path) -> None:
    model = load_model(folder)
    recorder = StepRecorder(model, [Communicator("alone")])
    with recorder.step(_plan(Room(1), traced=True)), torch.inference_mode():
        traced = model(TOKENS, TOKENS, DenseAttention())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with recorder.step(_plan(Room(2), traced=False)), torch.inference_mode():
        assert torch.equal(model(TOKENS, TOKENS, DenseAttention()), traced)
    intervals = recorder.recorder.take(Room(1), 0.0).intervals
    parts = [name for number in (0, 1) for name in ("attention", "mlp", f"layer {number}")]
    assert [(interval.lane, interval.name) for interval in intervals] == [
        (COMPUTE, name) for name in [*parts, "step 7"]
    ]
    assert intervals[-1].facts == {"requests": 1, "tokens": 5, "tokens before": 0, "strategy": "none"}
    for outer, inner in [(2, 0), (2, 1), (5, 3), (5, 4), (6, 2), (6, 5)]:
        assert intervals[outer].start_s <= intervals[inner].start_s <= intervals[inner].end_s <= intervals[outer].end_s
    assert recorder.recorder.take(Room(2), 0.0).intervals == []


def test_a_step_that_fails_leaves_no_hooks(folder: Path) -> None:
    model = load_model(folder)
    recorder = StepRecorder(model, [Communicator("alone")])
    with pytest.raises(ZeroDivisionError), recorder.step(_plan(Room(1), traced=True)):
        raise ZeroDivisionError
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_collectives_of_a_timed_step_have_their_lane(folder: Path) -> None:
    model = load_model(folder)

    def names(group: Communicator) -> list[str]:
        recorder = StepRecorder(model, [group])
        group.barrier()
        with recorder.step(_plan(Room(1), traced=True)):
            group.all_gather(torch.empty(2), torch.ones(1))
        group.barrier()
        return [
            interval.name for interval in recorder.recorder.take(Room(1), 0.0).intervals if interval.lane == COLLECTIVES
        ]

    begun_and_waited_for = ["all_gather", "all_gather"]
    assert on_thread_ranks(2, names) == [begun_and_waited_for] * 2


def _plan(room: Room, traced: bool) -> StepPlan:
    admit = Admit(room=room, prompt_len=5, owner_base=0, sampling=Sampling(), destination=None, traced=traced)
    row = ScheduledRequest(
        room=room, first_position=0, token_ids=TOKENS.tolist(), new_pages=[[0]], samples=True, output_position=0
    )
    return StepPlan(step=7, shape=make_step_shape([row]), admits=[admit], scheduled=[row], releases=[])
