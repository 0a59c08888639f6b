"""Every case of `baton bench kernels` runs, and the work it is said to do is what it must do."""

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.cli.bench_kernels import _print_limits, _print_result
from workers import kernel_cases as kernel_cases_module
from workers.attention.merge import Partial
from workers.attention.triton import backend, decode
from workers.bench_kernels import KernelBench
from workers.cache.page_copies import LEAST_PIECE_BYTES
from workers.kernel_cases import PAGE_SIZE, PIECE_LAYERS, KernelCase, Sizes, kernel_cases
from workers.kernel_result import SHAPES, ChipLimits, HeadShape, Limit, Way
from workers.kernels.copy_pages import copy_pages

CPU = torch.device("cpu")
SHAPE = HeadShape(heads=4, kv_heads=2, head_dim=16, hidden=32, inner=48, vocab=300)
TWO_OF_MANY = {"merge 4 partials", "normalise a sum"}
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
    num_drawn=3,
    moved_kv_bytes=200 * ROW_BYTES,
    linked_kv_bytes=3 * 32 * 64 * ROW_BYTES,
    least_bytes=0,
)


def test_every_case_runs() -> None:
    torch.manual_seed(0)
    works = {}
    for [case] in kernel_cases(SHAPE, SIZES, CPU):
        case.run()
        works[case.kernel] = (case.limit, case.work)
        for beside in case.beside.values():
            beside()
    assert works == {
        "prefill 70": (Limit.FLOPS, 4 * 4 * 16 * 70 * 71 / 2),
        "prefill 110": (Limit.FLOPS, 4 * 4 * 16 * 110 * 111 / 2),
        "prefill 10 behind 100": (Limit.FLOPS, 4 * 4 * 16 * (10 * 100 + 10 * 11 / 2)),
        "decode 3 x 130": (Limit.BYTES, 3 * 130 * 2 * 2 * 16 * 2),
        "decode 1 x 600": (Limit.BYTES, 600 * 2 * 2 * 16 * 2),
        "decode 2 x 20 + 1 x 600": (Limit.BYTES, 640 * 2 * 2 * 16 * 2),
        "merge 4 partials": (Limit.BYTES, 5 * 70 * 4 * (16 * 2 + 4)),
        "rotate": (Limit.BYTES, 2 * 70 * 4 * 16 * 2),
        "normalise and rotate": (Limit.BYTES, 2 * 70 * 4 * 16 * 2),
        "rotate and store": (Limit.BYTES, 2 * 70 * 8 * 16 * 2),
        "normalise a sum": (Limit.BYTES, 4 * 70 * 32 * 2),
        "gate": (Limit.BYTES, 3 * 70 * 48 * 2),
        "8 experts": (Limit.FLOPS, 2 * 70 * 32 * 48),
        "add up choices": (Limit.BYTES, 3 * 70 * 32 * 2),
        "draw": (Limit.BYTES, 3 * 300 * 4),
        "top-p of likely many": (Limit.BYTES, 3 * 300 * 4),
        "store K and V": (Limit.BYTES, 2 * 200 * 2 * 2 * 16 * 2),
        "gather pages": (Limit.BYTES, 2 * 4 * 64 * 2 * 2 * 16 * 2),
        "scatter pages": (Limit.BYTES, 2 * 4 * 64 * 2 * 2 * 16 * 2),
        "save 4 of 32 layers": (Limit.TO_HOST, 3 * 4 * 64 * 2 * 2 * 16 * 2),
        "load 4 of 32 layers": (Limit.FROM_HOST, 3 * 4 * 64 * 2 * 2 * 16 * 2),
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
        assert {(copy.kernel, copy.work, *copy.beside) for copy in copies} == {(case.kernel, case.work, *case.beside)}
    counts = {copies[0].kernel: len(copies) for copies in cases}
    assert counts["prefill 70"] == 1
    assert counts["draw"] == 14


def test_unjoined_launches_differ_in_nothing_but_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in several parts are never written, however often; those in one part are."""

    def unwritten(query: Tensor) -> Partial:
        return Partial(torch.full_like(query, torch.nan), torch.full(query.shape[:2], torch.nan))

    for module in (backend, decode):
        monkeypatch.setattr(module, "unwritten", unwritten)
    sizes = replace(SIZES, prefix_len=520)
    cases = {case.kernel: case for [case] in kernel_cases(SHAPE, sizes, CPU) if Way.UNJOINED in case.beside}
    in_parts = {
        "prefill 530": [True] * 530,
        "prefill 10 behind 520": [True] * 10,
        "decode 3 x 130": [False] * 3,
        "decode 1 x 600": [True],
        "decode 2 x 20 + 1 x 600": [False, False, True],
    }
    assert cases.keys() == in_parts.keys()
    for kernel, case in cases.items():
        joined = _rows(case.run())
        assert not joined.isnan().any()
        for _ in range(3):
            rows = _rows(case.beside[Way.UNJOINED]())
            is_unwritten = torch.tensor(in_parts[kernel])
            assert rows[is_unwritten].isnan().all()
            assert torch.equal(rows[~is_unwritten], joined[~is_unwritten])


def _rows(result: Any) -> Tensor:
    out = result.out if isinstance(result, Partial) else result
    return out.flatten(1)


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
        if Way.FLASH_ATTN in case.beside:
            case.beside[Way.FLASH_ATTN]()
    assert calls == [
        ((1, 70, 4, 16), (1, 70, 2, 16), True),
        ((1, 110, 4, 16), (1, 110, 2, 16), True),
        ((1, 10, 4, 16), (1, 110, 2, 16), True),
        ((3, 1, 4, 16), (3, 130, 2, 16), False),
        ((1, 1, 4, 16), (1, 600, 2, 16), False),
        ((2, 1, 4, 16), (2, 20, 2, 16), False),
        ((1, 1, 4, 16), (1, 600, 2, 16), False),
    ]
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert all(Way.FLASH_ATTN not in case.beside for [case] in kernel_cases(SHAPE, SIZES, CPU))


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

    bench: Any = KernelBench.__new__(KernelBench)
    bench._cache = SimpleNamespace(sum=lambda: events.append("fill"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: events.append(f"sleep {cycles // 1_000_000}"))
    ways = [[lambda: events.append("run")] * 3, [lambda: events.append("other")]]
    assert bench._seconds(ways) == [0.002, 0.005]
    one = ["fill", "sleep 12", "event", "run", "run", "run", "event", "wait"]
    other = ["fill", "sleep 4", "event", "other", "event", "wait"]
    assert events[: 2 * len(one + other)] == (one + other) * 2


SECONDS = {"kernel": 500e-6, Way.UNJOINED: 495e-6, Way.TORCH: 700e-6, Way.FLASH_ATTN: 600e-6}
CASES = [
    KernelCase("decode", Limit.BYTES, 2e9, lambda: "kernel", {way: lambda way=way: way for way in Way}),  # type: ignore[misc]
    KernelCase("prefill", Limit.FLOPS, 0.2e12, lambda: "kernel"),
    KernelCase("save", Limit.TO_HOST, 20e6, lambda: "kernel"),
    KernelCase("load", Limit.FROM_HOST, 20e6, lambda: "kernel"),
]


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA GH200 480GB"])
def test_output_says_what_goals_are_about(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench: Any = KernelBench.__new__(KernelBench)
    link = {"to_host_bytes_per_s": 4e10, "from_host_bytes_per_s": 5e10}
    bench._limits = ChipLimits(device=device, flops_per_s=700e12, bytes_per_s=4e12, **link)
    bench._time = lambda launches: SECONDS[launches[0]()]
    bench._device = CPU
    monkeypatch.setattr(kernel_cases_module, "kernel_cases", lambda *_: [[case] * 2 for case in CASES])
    results = bench.measure("Qwen3-8B")
    _print_limits(bench.limits(), as_json=False)
    for result in results:
        _print_result(result, as_json=False)
    limits, _, *lines = (line.split() for line in capsys.readouterr().out.splitlines())
    decode_line = ["Qwen3-8B", "decode", "2.000", "GB", "500.0", "4.00", "TB/s", "100.0%", "93.0%", "1.0%"]
    prefill_line = ["Qwen3-8B", "prefill", "0.20", "TFLOP", "500.0", "400.00", "TFLOP/s", "57.1%", "50.6%"]
    save_line, load_line = (
        ["Qwen3-8B", name, "0.020", "GB", "500.0", "0.04", "TB/s", share]
        for name, share in (("save", "100.0%"), ("load", "80.0%"))
    )
    if device == "NVIDIA H200":
        assert " ".join(limits) == (
            "NVIDIA H200: 700 TFLOP/s in bf16 (88.6% of 790), 4.00 TB/s copied (93.0% of 4.3), 0.040 TB/s to the host, "
            "0.050 TB/s from the host"
        )
    else:
        assert "790" not in " ".join(limits)
        decode_line.remove("93.0%")
        prefill_line.remove("50.6%")
    assert lines == [[*decode_line, "700.0", "600.0"], prefill_line, save_line, load_line]
    _print_result(results[0], as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["share_of_joining"] == pytest.approx(0.01)
