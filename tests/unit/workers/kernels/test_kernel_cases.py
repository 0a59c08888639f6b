"""Every case of `baton bench kernels` runs, with the work that it must do at least."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.cli.bench_device import _kernel_cells
from workers.bench import kernel_cases as kernel_cases_module
from workers.bench.kernel_cases import PAGE_SIZE, PIECE_LAYERS, KernelCase, Sizes, kernel_cases
from workers.bench.kernels import KernelBench
from workers.bench.results import DeviceLimits, Limit
from workers.bench.shapes import SHAPES, BenchShape
from workers.bench.timing import GpuTimer
from workers.kernels.copy_pages import copy_pages
from workers.memory.copy import LEAST_PIECE_BYTES

CPU = torch.device("cpu")
SHAPE = BenchShape(family="llama", layers=1, heads=4, kv_heads=2, head_dim=16, hidden=32, inner=48, vocab=300)
TWO_OF_MANY = {"merge 4 partials", "add and normalize"}
ROW_BYTES = 2 * 2 * 16 * 2
SIZES = Sizes(
    prompt_len=70,
    prefix_len=100,
    chunk_len=10,
    decode_len=130,
    decode_kv_bytes=130 * ROW_BYTES * 3,
    long_len=600,
    short_len=20,
    num_short=2,
    num_sampled=3,
    moved_kv_bytes=32 * 64 * ROW_BYTES,
    least_bytes=0,
)


def test_every_case_runs() -> None:
    torch.manual_seed(0)
    works = {}
    for [case] in kernel_cases(SHAPE, SIZES, CPU):
        case.run()
        works[case.kernel] = (case.limit, case.work)
        for peer in case.peers.values():
            peer()
    assert works == {
        "prefill 70": (Limit.FLOPS, 4 * 4 * 16 * 70 * 71 / 2),
        "prefill 10 after 100": (Limit.FLOPS, 4 * 4 * 16 * (10 * 100 + 10 * 11 / 2)),
        "decode 3 x 130": (Limit.BYTES, 3 * 130 * 2 * 2 * 16 * 2),
        "decode 1 x 600": (Limit.BYTES, 600 * 2 * 2 * 16 * 2),
        "decode 2 x 20 + 1 x 600": (Limit.BYTES, 640 * 2 * 2 * 16 * 2),
        "merge 4 partials": (Limit.BYTES, 5 * 70 * 4 * (16 * 2 + 4)),
        "rotate and store": (Limit.BYTES, 2 * 70 * 8 * 16 * 2),
        "add and normalize": (Limit.BYTES, 4 * 70 * 32 * 2),
        "swiglu": (Limit.BYTES, 3 * 70 * 48 * 2),
        "8 experts": (Limit.FLOPS, 2 * 70 * 32 * 48),
        "combine experts": (Limit.BYTES, 3 * 70 * 32 * 2),
        "sample": (Limit.BYTES, 3 * 300 * 4),
        "top-p": (Limit.BYTES, 3 * 300 * 4),
        "store K and V": (Limit.BYTES, 2 * 32 * 64 * ROW_BYTES),
        "gather pages": (Limit.BYTES, 2 * 32 * 64 * ROW_BYTES),
        "save 4 of 32 layers": (Limit.TO_HOST, 4 * 64 * ROW_BYTES),
        "load 4 of 32 layers": (Limit.FROM_HOST, 4 * 64 * ROW_BYTES),
    }


def test_layers_move_in_pieces_as_small_as_a_kernel_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(PIECE_LAYERS * 2 * PAGE_SIZE * shape.head_dim * 2 < LEAST_PIECE_BYTES for shape in SHAPES.values())
    copied = []

    def copy(source: Tensor, target: Tensor, places: Tensor) -> None:
        copy_pages(source, target, places)
        assert torch.equal(target[places[1]], source[places[0]])
        copied.append((source.stride(1), target.stride(1)))

    monkeypatch.setattr(kernel_cases_module, "copy_pages", copy)
    for [case] in kernel_cases(SHAPE, SIZES, CPU):
        if case.limit in {Limit.TO_HOST, Limit.FROM_HOST}:
            case.run()
    pool_head, host_head = (num_layers * 2 * 64 * 16 for num_layers in (32, 4))
    assert copied == [(pool_head, host_head), (host_head, pool_head)]


def test_a_short_case_comes_as_often_as_moves_more_than_a_cache_holds() -> None:
    cases = list(kernel_cases(SHAPE, replace(SIZES, least_bytes=50_000), CPU))
    for copies in cases:
        case = copies[0]
        total = len(copies) * case.work
        assert case.limit is not Limit.BYTES or 50_000 <= total < 50_000 + case.work
        assert {(copy.kernel, copy.work, *copy.peers) for copy in copies} == {(case.kernel, case.work, *case.peers)}
    counts = {copies[0].kernel: len(copies) for copies in cases}
    assert counts["prefill 70"] == 1
    assert counts["sample"] == 14


def test_flash_attn_is_timed_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("flash_attn")
    calls = []

    def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> None:
        assert k.shape == v.shape
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        calls.append((tuple(q.shape), tuple(k.shape), causal))

    package.flash_attn_func = flash_attn_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for [case] in kernel_cases(SHAPE, SIZES, CPU):
        if "flash_attn" in case.peers:
            case.peers["flash_attn"]()
    assert calls == [
        ((1, 70, 4, 16), (1, 70, 2, 16), True),
        ((1, 10, 4, 16), (1, 110, 2, 16), True),
        ((3, 1, 4, 16), (3, 130, 2, 16), False),
        ((1, 1, 4, 16), (1, 600, 2, 16), False),
        ((2, 1, 4, 16), (2, 20, 2, 16), False),
        ((1, 1, 4, 16), (1, 600, 2, 16), False),
    ]
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert all("flash_attn" not in case.peers for [case] in kernel_cases(SHAPE, SIZES, CPU))


def test_no_case_reads_a_tensor_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache would have it."""

    def merge(outs: list[Tensor], lses: list[Tensor]) -> None:
        assert len({x.data_ptr() for x in (*outs, *lses)}) == 8

    def add_norm(x: Tensor, y: Tensor, *_: object) -> None:
        assert x.data_ptr() != y.data_ptr()

    monkeypatch.setattr(kernel_cases_module, "merge_partials", merge)
    monkeypatch.setattr(kernel_cases_module, "add_rms_norm", add_norm)
    seen = [case.run() for [case] in kernel_cases(SHAPE, SIZES, CPU) if case.kernel in TWO_OF_MANY]
    assert len(seen) == len(TWO_OF_MANY)


def test_what_the_host_needs_is_not_the_kernels_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU sleeps after its cache was filled, until the host has started everything that is timed."""
    events: list[str] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            events.append("event")

        def synchronize(self) -> None:
            events.append("wait")

        def elapsed_time(self, _: "Event") -> float:
            return 6.0 if events[-2:] == ["event", "wait"] and events[-3] == "run" else 5.0

    timer: Any = GpuTimer.__new__(GpuTimer)
    timer._cache = SimpleNamespace(sum=lambda: events.append("fill"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append(f"sleep {cycles // 1_000_000}"))
    ways = [[lambda: events.append("run")] * 3, [lambda: events.append("other")]]
    assert timer.medians(ways) == [0.002, 0.005]
    one = ["fill", "sleep 12", "event", "run", "run", "run", "event", "wait"]
    other = ["fill", "sleep 4", "event", "other", "event", "wait"]
    assert events[: 2 * len(one + other)] == (one + other) * 2


CASES = [
    KernelCase("decode", Limit.BYTES, 2e9, lambda: 500e-6, {"torch": lambda: 700e-6, "flash_attn": lambda: 600e-6}),
    KernelCase("prefill", Limit.FLOPS, 0.2e12, lambda: 500e-6),
    KernelCase("load", Limit.FROM_HOST, 20e6, lambda: 500e-6),
]


def test_rows_are_shares_of_the_measured_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = KernelBench.__new__(KernelBench)
    link = {"to_host_bytes_per_s": 4e10, "from_host_bytes_per_s": 5e10}
    bench._limits = DeviceLimits(device="NVIDIA H200", flops_per_s=700e12, bytes_per_s=4e12, **link)
    bench._timer = SimpleNamespace(medians=lambda ways: [launches[0]() for launches in ways])
    bench._device = CPU
    monkeypatch.setattr(kernel_cases_module, "kernel_cases", lambda *_: [[case] * 2 for case in CASES])
    results = bench.measure("Qwen3-8B", 2)
    assert {result.model for result in results} == {"Qwen3-8B/TP2"}
    assert [_kernel_cells(result) for result in results] == [
        ["decode", "2.000 GB", "500.0", "4.00 TB/s", "100.0%", "700.0", "600.0"],
        ["prefill", "0.20 TFLOP", "500.0", "400.00 TFLOP/s", "57.1%", "", ""],
        ["load", "0.020 GB", "500.0", "0.04 TB/s", "80.0%", "", ""],
    ]
