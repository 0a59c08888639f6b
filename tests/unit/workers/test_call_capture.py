"""Decode steps of a CPU that are captured as calls, compared bit by bit with steps that are computed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.spec.ids import Room
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.native_runner import native_runner
from workers.context_parallel.shard_plan import make_step_shape
from workers.device import CPU
from workers.engine.captures import CallCapture, CaptureError
from workers.engine.decode_graphs import REPLAYED
from workers.engine.runner import ModelRunner

PAGE_SIZE, PAGES_PER_REQUEST, MOST = 4, 3, 17
DENSE = ("llama", "qwen2", "qwen3")


def plan(step: int, scheduled: list[ScheduledRequest], new: list[NewRequest], releases: list[Room]) -> StepPlan:
    shape = make_step_shape(scheduled)
    return StepPlan(step=step, shape=shape, new_requests=new, scheduled=scheduled, releases=releases)


def answers(runner: ModelRunner, num_requests: int, num_steps: int) -> list[list[int]]:
    """Return greedy tokens of some requests. Their prompts have different lengths, and the last one ends early."""
    rooms = [Room(number) for number in range(num_requests)]
    new = [
        NewRequest(
            room=room, prompt_len=1 + number % 3, owner_base=0, sampling=Sampling(temperature=0.0), destination=None
        )
        for number, room in enumerate(rooms)
    ]
    prompts = [
        ScheduledRequest(
            room=room,
            first_position=0,
            token_ids=[7 + 3 * number] * (1 + number % 3),
            new_pages=[list(range(number * PAGES_PER_REQUEST, (number + 1) * PAGES_PER_REQUEST))],
            samples=True,
            output_position=0,
        )
        for number, room in enumerate(rooms)
    ]
    tokens: list[list[int]] = [[] for _ in rooms]
    found = runner.begin(plan(1, prompts, new, [])).wait()
    for step in range(num_steps):
        for number, room in enumerate(rooms):
            if room in found:
                tokens[number].append(found[room].token_id)
        open_rooms = rooms[: max(num_requests - (step >= num_steps // 2), 1)]
        rows = [
            ScheduledRequest(
                room=room,
                first_position=1 + number % 3 + step,
                token_ids=[tokens[number][-1]],
                new_pages=[[]],
                samples=True,
                output_position=step + 1,
            )
            for number, room in enumerate(open_rooms)
        ]
        found = runner.begin(plan(step + 2, rows, [], [])).wait()
    runner.begin(plan(99, [], [], rooms)).wait()
    return tokens


@pytest.mark.native
@pytest.mark.parametrize(
    ("family", "dtype", "has_bf16"),
    [
        *((family, torch.float32, True) for family in DENSE),
        *(
            (family, torch.bfloat16, has_bf16)
            for family in (*DENSE, "qwen3_moe", "glm4_moe")
            for has_bf16 in (True, False)
        ),
    ],
)
def test_replayed_steps_are_those_that_are_computed(
    tmp_path: Path, family: str, dtype: torch.dtype, has_bf16: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay steps on this CPU, and as on one without instructions for bf16."""
    for name in ("multiplies_bf16", "packs_bf16"):
        monkeypatch.setattr(CPU, name, has_bf16 and getattr(CPU, name))
    folder = make_checkpoint(tmp_path, family)
    runner = native_runner(monkeypatch, folder, dtype, PAGE_SIZE, MOST * PAGES_PER_REQUEST)
    hidden: list[Tensor] = []
    logits = runner.model.logits

    def noted(x: Tensor) -> Tensor:
        hidden.append(x.clone())
        return logits(x)

    monkeypatch.setattr(runner.model, "logits", noted)
    expected = [answers(runner, num_requests, 8) for num_requests in (1, 3, 17)]
    computed = hidden.copy()
    hidden.clear()
    runner.capture_decode(MOST, CallCapture())
    assert [answers(runner, num_requests, 8) for num_requests in (1, 3, 17)] == expected
    assert all(map(torch.equal, hidden, computed))
    assert runner.graph_steps == {REPLAYED: 9 + 8 + 4, "more requests than captured": 4, "prompt tokens": 2}
    assert runner.graph_bytes == 0


@pytest.mark.bf16
@pytest.mark.parametrize("most_rows", [None, 4])
def test_products_by_onednn_are_captured(
    tmp_path: Path, most_rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Native code may know fewer rows than are captured, or not know the layout of packed weights."""
    runner = native_runner(
        monkeypatch, make_checkpoint(tmp_path, "qwen3"), torch.bfloat16, PAGE_SIZE, MOST * PAGES_PER_REQUEST
    )
    for matrix in runner.model.packed_matrices():
        native = matrix.native
        matrix.native = None if native is None or most_rows is None else native._replace(most_rows=most_rows)
    expected = [answers(runner, num_requests, 8) for num_requests in (1, 3, 16)]
    runner.capture_decode(16, CallCapture())
    assert [answers(runner, num_requests, 8) for num_requests in (1, 3, 16)] == expected
    assert runner.graph_steps == {REPLAYED: 9 + 8 + 8, "prompt tokens": 2}


@pytest.mark.native
def test_latents_are_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path, "deepseek_v3")
    runner = native_runner(monkeypatch, folder, torch.float32, PAGE_SIZE, MOST * PAGES_PER_REQUEST)
    runner.capture_decode(MOST, CallCapture())
    answers(runner, 1, 2)
    assert runner.graph_steps == {"attention cannot be captured": 3}


@pytest.mark.native
def test_steps_whose_experts_are_counted_are_not_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code computes experts together for as many rows per expert as it is fast, and not in fp32."""
    folder, num_pages = make_checkpoint(tmp_path, "qwen3_moe"), MOST * PAGES_PER_REQUEST
    for dtype, expected in (
        (torch.float32, {"experts one after another": 6}),
        (torch.bfloat16, {REPLAYED: 3, "prompt tokens": 2, "more requests than captured": 1}),
    ):
        runner = native_runner(monkeypatch, folder, dtype, PAGE_SIZE, num_pages)
        for matrix in runner.model.packed_matrices():
            matrix.native = None if matrix.native is None else matrix.native._replace(most_rows=2)
        runner.capture_decode(MOST, CallCapture())
        for num_requests in (5, 6):  # choose 15 and 18 of 8 experts
            answers(runner, num_requests, 2)
        assert runner.graph_steps == expected


def test_copies_are_made_again_and_views_are_not() -> None:
    x, y = torch.zeros(2, 3), torch.ones(3)

    def compute() -> Tensor:
        wide = x.to(torch.float64).T.reshape(2, 3)
        return wide.add_(y.view(1, 3)).mul(2).flatten()

    with torch.inference_mode():
        out, replay = CallCapture()(compute)
        for number in (1.0, 5.0):
            x.copy_(torch.arange(6.0).view(2, 3) * number)
            y.fill_(number)
            replay()
            assert torch.equal(out, compute())


def test_all_results_of_an_operation_are_written_again() -> None:
    x = torch.arange(6.0).view(2, 3)
    with torch.inference_mode():
        out, replay = CallCapture()(lambda: torch.add(*x.max(dim=1)))
        for number in (-1.0, 5.0):
            x.mul_(number)
            replay()
            assert torch.equal(out, torch.add(*x.max(dim=1)))


def test_captures_share_memory() -> None:
    x, capture = torch.arange(8.0), CallCapture()

    def computation(size: int) -> Callable[[], Tensor]:
        return lambda: torch.add(x[:size], 1, out=torch.empty(size)) * torch.mul(x[:size], 2, out=torch.empty(size))

    with torch.inference_mode():
        captured = {size: capture(computation(size)) for size in (8, 3, 1)}
        held = sum(memory.nbytes for memory in capture._memory)
        for number in (2.0, 3.0):
            x.mul_(number)
            for size, (out, replay) in captured.items():
                replay()
                assert torch.equal(out, computation(size)())
    assert held == 2 * 8 * 4


@pytest.mark.parametrize("compute", [lambda x: x * x.sum().item(), lambda x: x * int(x[0])])
def test_numbers_that_python_reads_cannot_be_captured(compute: Callable[[Tensor], Tensor]) -> None:
    x = torch.ones(2)
    with torch.inference_mode(), pytest.raises(CaptureError, match="does not return tensors"):
        CallCapture()(lambda: compute(x))
