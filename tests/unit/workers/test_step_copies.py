"""When a rank waits for the copies to and from host memory that its step brings, and how far the step is by then."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import Admit, HostCopy, Row, StepPlan
from cluster.spec.strategy import Strategy
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.kv import kv_pool
from workers.attention.torch_backend import TorchAttention
from workers.engine import runner
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model
from workers.parallel.collectives import Communicator

ROOM = Room(1)
ADMIT = Admit(room=ROOM, prompt_len=2, owner_base=0, sampling=Sampling(temperature=0.0), target=None)
COPY = HostCopy(room=Room(7), pages=[2], slots=[0])


class NotedHostPages:
    """Host pages that only note what they are asked."""

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def begin(self, saves: Sequence[HostCopy], loads: Sequence[HostCopy]) -> None:
        self._calls.append(f"{len(saves)} saves, {len(loads)} loads")

    def wait_for(self, tables: Iterable[Sequence[int]]) -> None:
        self._calls.append(f"wait for {list(tables)}")

    def finish(self) -> None:
        self._calls.append("finish")


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def rank(tmp_path: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> ModelRunner:
    """One that notes what it does after one another."""
    model = load_model(make_checkpoint(tmp_path, "qwen3"))
    logits = model.logits

    def note_logits(hidden: Tensor) -> Tensor:
        calls.append("logits")
        return logits(hidden)

    model.register_forward_pre_hook(lambda *_: calls.append("layers"))
    monkeypatch.setattr(model, "logits", note_logits)
    monkeypatch.setattr(runner, "synchronize", lambda _: calls.append("synchronize"))
    config = model.config
    pool = kv_pool(4, config.num_kv_heads, config.num_layers, 16, config.head_dim, torch.float32)
    host_pages: Any = NotedHostPages(calls)
    return ModelRunner(model, pool, TorchAttention(), Communicator("cp"), host_pages=host_pages)


def plan_of(row: Row | None, **copies: Any) -> StepPlan:
    rows, admits = ([row], [ADMIT]) if row is not None else ([], [])
    return StepPlan(step=1, strategy=Strategy.NONE, admits=admits, rows=rows, releases=[], **copies)


def row_of(*, samples: bool) -> Row:
    return Row(room=ROOM, first_position=0, token_ids=[5, 6], new_pages=[3], samples=samples, output_position=0)


def test_a_step_whose_token_is_awaited_ends_its_copies_before_ranks_meet_for_it(
    rank: ModelRunner, calls: list[str]
) -> None:
    rank.execute(plan_of(row_of(samples=True), saves=[COPY], loads=[COPY]))
    assert calls == ["1 saves, 1 loads", "wait for [[3]]", "layers", "finish", "logits"]


@pytest.mark.parametrize("copies", [{"saves": [COPY]}, {"loads": [COPY]}], ids=str)
def test_a_step_that_nobody_awaits_ends_its_copies_first_and_is_waited_for(
    copies: dict[str, list[HostCopy]], rank: ModelRunner, calls: list[str]
) -> None:
    """Of a prompt's chunk; it is computed only where every rank has ended its copies."""
    rank.execute(plan_of(row_of(samples=False), **copies))
    assert calls.index("finish") < calls.index("layers") < calls.index("synchronize")
    assert calls[0] == f"{len(copies.get('saves', []))} saves, {len(copies.get('loads', []))} loads"
    assert "logits" not in calls


def test_a_step_of_copies_alone_ends_with_them(rank: ModelRunner, calls: list[str]) -> None:
    rank.execute(plan_of(None, saves=[COPY]))
    assert calls == ["1 saves, 0 loads", "wait for []", "finish", "synchronize"]


def test_a_step_without_copies_is_not_waited_for(rank: ModelRunner, calls: list[str]) -> None:
    rank.begin(plan_of(row_of(samples=False)))
    assert "synchronize" not in calls
