"""Per-rank state of requests, and of steps whose tokens are still in flight."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.kv import kv_pool
from tests.fakes.thread_group import on_thread_ranks
from tests.fakes.thread_layout import tp_groups
from workers.attention.torch_backend import TorchAttention
from workers.context_parallel.shard_plan import make_step_shape
from workers.device import CpuDevice
from workers.engine.known_requests import PageTable
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model
from workers.parallel.communicator import Communicator


class StreamEvents(CpuDevice):
    """Events of a GPU stream. A step is complete once a later event has been awaited."""

    def __init__(self) -> None:
        self.num_awaited = 0

    def record_event(self) -> "StreamEvents":  # type: ignore[override]
        return self

    def synchronize(self) -> None:
        self.num_awaited += 1


def runner_of(folder: Path, tp: Communicator) -> ModelRunner:
    model = load_model(folder, groups=tp_groups(tp))
    config = model.config
    pool = kv_pool(4, config.attention.num_kv_heads, config.num_layers, 16, config.attention.head_dim, model.dtype)
    return ModelRunner(model, pool, TorchAttention(), RankGroups())


def plan_of(*, samples: bool) -> StepPlan:
    new = NewRequest(room=Room(1), prompt_len=9, owner_base=0, sampling=Sampling(), destination=None)
    request = ScheduledRequest(
        room=Room(1), first_position=0, token_ids=[1, 2, 3], new_pages=[[0]], samples=samples, output_position=0
    )
    return StepPlan(step=1, shape=make_step_shape([request]), new_requests=[new], scheduled=[request], releases=[])


@pytest.mark.parametrize("samples", [True, False])
def test_a_step_ends_when_its_writes_do(tmp_path: Path, *, samples: bool) -> None:
    """Otherwise a peer could get pages that are still being written. Sampling follows all writes."""
    events = StreamEvents()
    runner = runner_of(make_checkpoint(tmp_path, "llama"), Communicator("tp"))
    runner.model.device = events
    begun = runner.begin(plan_of(samples=samples))
    assert events.num_awaited == 0
    assert len(begun.wait()) == samples
    assert events.num_awaited == (not samples)


def test_no_rank_ends_a_step_before_all_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without sampling end without a reduction, so a rank could write after the leader's end of the step."""
    folder = make_checkpoint(tmp_path, "llama")

    def compute(tp: Communicator) -> list[bool]:
        runner = runner_of(folder, tp)
        runner.pool.group("full_attention").zero_()
        had_written, meet = [], tp.all_reduce

        def all_reduce(tensor: Tensor) -> Tensor:
            had_written.append(bool(runner.pool.group("full_attention")[:, :, -1].any()))
            return meet(tensor)

        monkeypatch.setattr(tp, "all_reduce", all_reduce)
        runner.begin(plan_of(samples=False)).wait()
        return had_written

    for had_written in on_thread_ranks(2, compute):
        assert not had_written[0]
        assert had_written[-1]


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=40), max_size=6))
def test_state_grows_and_keeps_earlier_content(parts: list[list[int]]) -> None:
    table, seen, added = PageTable(), [], list[int]()
    for part in parts:
        table.extend(part, 7)
        added += part
        seen.append((table.all, list(added)))
    assert all(view.tolist() == wanted for view, wanted in seen)
