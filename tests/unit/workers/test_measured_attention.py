"""Choice among CPU backends by their times and results, with backends whose calls take a given time."""

from collections.abc import Callable, Sequence
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster.spec.config import AttentionSetting
from workers.attention import measured
from workers.attention.interface import AttentionBackend, AttentionParams, AttentionShape, StepAttention
from workers.attention.measured import ByWork, Work, work_of
from workers.attention.merge import Partial, empty_partial
from workers.attention.native_backend import NativeAttention
from workers.attention.registry import choose_backend
from workers.attention.runs import Run
from workers.attention.selection import IndexQueries, QueryRun
from workers.attention.torch_backend import TorchAttention
from workers.device import CPU

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, query_dim=8, value_dim=8, params=AttentionParams(0.5))


class Clock:
    now_s = 0.0


class Timed(TorchAttention):
    """Backend whose calls take ``decode_s`` with one query per request, and ``prompt_s`` otherwise."""

    def __init__(self, clock: Clock, decode_s: float, prompt_s: float) -> None:
        self._clock, self._decode_s, self._prompt_s = clock, decode_s, prompt_s
        self.num_prepared, self.error = 0, 0.0

    def prepare(self, runs: Sequence[Run], *_: object) -> StepAttention:  # type: ignore[override]
        self.num_prepared += 1
        seconds = self._decode_s if all(run.count == 1 for run in runs) else self._prompt_s
        return TimedStep(self._clock, seconds, self.error)


class TimedStep:
    def __init__(self, clock: Clock, seconds: float, error: float) -> None:
        self._clock, self._seconds, self._error = clock, seconds, error

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        assert key_pages.shape[1:] == value_pages.shape[1:] == (2, 64, 8)
        assert params is SHAPE.params
        self._clock.now_s += self._seconds
        return Partial(torch.full_like(query, self._error), empty_partial(query).lse)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], Timed]:
    clock = Clock()
    monkeypatch.setattr("time.thread_time", lambda: clock.now_s)
    return lambda decode_s, prompt_s: Timed(clock, decode_s, prompt_s)


def find(preferred: AttentionBackend, other: AttentionBackend) -> tuple[str, AttentionBackend, str]:
    return measured.find_fastest({"native": preferred, "torch": other}, SHAPE, torch.float32)


def test_the_faster_one_is_used(timed: Callable[[float, float], Timed]) -> None:
    fast, slow = timed(0.001, 0.01), timed(0.002, 0.02)
    decode, prompts = "native 1 ms, torch 2 ms", "native 10 ms, torch 20 ms"
    times = f"decode: {decode}; decode of many: {decode}; prompts: {prompts}; prompts behind a prefix: {prompts}"
    assert find(fast, slow) == ("native", fast, times)
    name, backend, _ = find(slow, fast)
    before = slow.num_prepared, fast.num_prepared
    for count in (1, 7):
        backend.prepare([Run(0, 0, count, 1)], [torch.arange(1)], 64)
    assert (name, slow.num_prepared, fast.num_prepared) == ("torch", before[0], before[1] + 2)


def test_the_preferred_one_makes_selections(timed: Callable[[float, float], Timed]) -> None:
    preferred, fast = timed(0.002, 0.02), timed(0.001, 0.01)
    _, backend, _ = find(preferred, fast)
    keys, table, query = torch.randn(2, 1, 4, 3), torch.tensor([1, 0]), torch.randn(2, 3, 3)
    index, rows = IndexQueries(query, torch.randn(2, 3)), slice(0, 2)
    runs, params = [QueryRun(rows, table, np.array([3, 8]))], AttentionParams(1.0, value_dim=2)
    step, expected = (each.prepare_selection(runs) for each in (backend, preferred))
    selected = step.best_keys(index, keys, rows, 2).keys
    assert torch.equal(selected, expected.best_keys(index, keys, rows, 2).keys)
    attended, wanted = (each.attend(query, keys, selected.int(), params).out for each in (step, expected))
    assert torch.equal(attended, wanted)
    assert wanted.any()


def test_noise_does_not_decide(timed: Callable[[float, float], Timed]) -> None:
    preferred, other = timed(0.001, 0.01), timed(0.00096, 0.0096)
    name, backend, _ = find(preferred, other)
    assert (name, backend) == ("native", preferred)


def test_each_kind_of_step_has_its_fastest(timed: Callable[[float, float], Timed]) -> None:
    native, other = timed(0.001, 0.03), timed(0.002, 0.01)
    name, backend, times = find(native, other)
    assert name == "native and torch"
    assert "decode: native 1 ms, torch 2 ms; " in times
    assert "prompts: torch 10 ms, native 30 ms; " in times
    before = native.num_prepared, other.num_prepared
    tables = [torch.arange(2)] * 2
    for runs in ([Run(0, 5, 1, 1)], [Run(0, 5, 1, 1), Run(1, 90, 1, 1)]):
        backend.prepare(runs, tables, 64)
    assert (native.num_prepared, other.num_prepared) == (before[0] + 2, before[1])
    for runs in ([Run(0, 0, 7, 1)], [Run(0, 5, 7, 1)], [Run(0, 5, 1, 1), Run(1, 0, 7, 1)]):
        backend.prepare(runs, tables, 64)
    assert (native.num_prepared, other.num_prepared) == (before[0] + 2, before[1] + 3)


def test_captured_steps_of_any_size_have_one_backend() -> None:
    """All sizes are captured, or none: one backend may be unable to."""
    backends = {work: Mock() for work in Work}
    for num_requests in (1, 2, 32):
        graph = ByWork(backends, Mock()).prepare_graph(Mock(num_requests=num_requests))
        assert graph is backends[Work.MANY].prepare_graph.return_value


@pytest.mark.parametrize(
    ("runs", "work"),
    [
        ([Run(0, 0, 1, 1)], Work.ONE),
        ([Run(0, 5, 1, 1), Run(1, 9, 1, 1)], Work.MANY),
        ([Run(0, 0, 9, 2), Run(1, 0, 1, 1)], Work.PROMPT),
        ([Run(0, 0, 9, 1), Run(1, 4, 1, 1)], Work.EXTEND),
    ],
)
def test_the_kind_of_a_step(runs: list[Run], work: Work) -> None:
    assert work_of(runs) is work


@pytest.mark.parametrize("wrong", [0.05, float("nan")])
def test_wrong_results_are_not_used(
    timed: Callable[[float, float], Timed], wrong: float, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound, reference = timed(0.001, 0.001), timed(0.01, 0.03), timed(0.02, 0.02)
    broken.error = wrong
    backends = {"native": broken, "native for this": sound, "torch": reference}
    name, _, times = measured.find_fastest(backends, SHAPE, torch.float32)
    assert name == "native for this and torch"
    assert "native 1 ms" not in times
    assert [record.message for record in caplog.records] == [
        "native attention gives wrong results on this CPU and is not used"
    ]


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_auto_measures_the_real_ones(dtype: torch.dtype) -> None:
    choice = choose_backend(AttentionSetting.AUTO, CPU, dtype, shape=SHAPE)
    assert choice.reason.startswith("compiled for ")
    assert all(part in choice.reason for part in ("decode: ", "prompts: ", "native ", "torch "))
    assert isinstance(choice.backend, NativeAttention | TorchAttention | measured.ByWork)
