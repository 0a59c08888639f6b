"""Every case of `baton bench kernels` runs, and the work it is said to do is what it must do."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from workers import kernel_cases as kernel_cases_module
from workers.bench_kernels import KernelBench
from workers.kernel_cases import Sizes, kernel_cases
from workers.kernel_result import HeadShape, Limit

SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=16, hidden=32, inner=48, vocab=300)
TWO_OF_MANY = {"merge 4 partials", "normalise a sum"}
ROW_BYTES = 2 * 2 * 16 * 2
SIZES = Sizes(
    prompt_len=70,
    prefix_len=100,
    chunk_len=10,
    decode_len=130,
    decode_kv_bytes=130 * ROW_BYTES * 3,
    num_drawn=3,
    moved_kv_bytes=200 * ROW_BYTES,
)


def test_every_case_runs() -> None:
    torch.manual_seed(0)
    works = {}
    for case in kernel_cases(SHAPE, SIZES, torch.device("cpu")):
        case.run()
        works[case.kernel] = (case.limit, case.work)
        if case.peer is not None:
            case.peer()
    assert works == {
        "prefill 70": (Limit.FLOPS, 4 * 4 * 16 * 70 * 71 / 2),
        "prefill 10 behind 100": (Limit.FLOPS, 4 * 4 * 16 * (10 * 100 + 10 * 11 / 2)),
        "decode 3 x 130": (Limit.BYTES, 3 * 130 * 2 * 2 * 16 * 2),
        "join 3 x 45 parts": (Limit.BYTES, 3 * 4 * (2 * 45 * (16 * 4 + 4) + 2 * 16 * 2 + 4)),
        "merge 4 partials": (Limit.BYTES, 5 * 70 * 4 * (16 * 2 + 4)),
        "rotate": (Limit.BYTES, 2 * 70 * 4 * 16 * 2),
        "normalise a sum": (Limit.BYTES, 4 * 70 * 32 * 2),
        "gate": (Limit.BYTES, 3 * 70 * 48 * 2),
        "8 experts": (Limit.FLOPS, 2 * 70 * 32 * 48),
        "draw": (Limit.BYTES, 3 * 300 * 4),
        "top-p of likely many": (Limit.BYTES, 3 * 300 * 4),
        "store K and V": (Limit.BYTES, 2 * 200 * 2 * 2 * 16 * 2),
        "gather pages": (Limit.BYTES, 2 * 4 * 64 * 2 * 2 * 16 * 2),
        "scatter pages": (Limit.BYTES, 2 * 4 * 64 * 2 * 2 * 16 * 2),
    }


def test_flash_attn_is_timed_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("flash_attn")
    calls = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
        assert k.shape == v.shape
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        calls.append((tuple(q.shape), tuple(k.shape), causal))

    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for case in kernel_cases(SHAPE, SIZES, torch.device("cpu")):
        if case.flash is not None:
            case.flash()
    assert calls == [
        ((1, 70, 4, 16), (1, 70, 2, 16), True),
        ((1, 10, 4, 16), (1, 110, 2, 16), True),
        ((3, 1, 4, 16), (3, 130, 2, 16), False),
    ]
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert all(case.flash is None for case in kernel_cases(SHAPE, SIZES, torch.device("cpu")))


def test_no_case_reads_a_tensor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache would have it."""

    def merge(outs: list[Tensor], lses: list[Tensor]) -> None:
        assert len({x.data_ptr() for x in (*outs, *lses)}) == 8

    def add_norm(x: Tensor, y: Tensor, *_: object) -> None:
        assert x.data_ptr() != y.data_ptr()

    monkeypatch.setattr(kernel_cases_module, "merge_partials", merge)
    monkeypatch.setattr(kernel_cases_module, "add_rms_norm", add_norm)
    seen = [case.run() for case in kernel_cases(SHAPE, SIZES, torch.device("cpu")) if case.kernel in TWO_OF_MANY]
    assert len(seen) == len(TWO_OF_MANY)


def test_what_the_host_needs_is_not_the_kernels_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU sleeps after its cache was flushed, until the host has started everything that is timed."""
    events: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("event")

        def synchronize(self) -> None:
            events.append("wait")

        def elapsed_time(self, _: "Event") -> float:
            return 5.0

    bench: Any = KernelBench.__new__(KernelBench)
    bench._cache = SimpleNamespace(zero_=lambda: events.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append(f"sleep {cycles > 1e6}"))
    assert bench._seconds(lambda: events.append("run")) == 0.005
    assert events[:6] == ["flush", "sleep True", "event", "run", "event", "wait"]
