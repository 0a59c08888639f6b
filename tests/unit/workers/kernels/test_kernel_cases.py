"""Every case of `baton bench kernels` runs, with the work that it must do at least."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.cli.bench_local import _kernel_cells
from workers.bench import kernel_cases as kernel_cases_module
from workers.bench.kernel_cases import KernelCase, Sizes, kernel_cases
from workers.bench.kernels import KernelBench
from workers.bench.results import DeviceLimits, Limit
from workers.bench.shapes import BenchShape

CPU = torch.device("cpu")
SHAPE = BenchShape(family="llama", layers=1, heads=4, kv_heads=2, head_dim=16, hidden=32, inner=48, vocab=300)
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
        "rotate and store": (Limit.BYTES, 2 * 70 * 8 * 16 * 2),
        "add and normalize": (Limit.BYTES, 4 * 70 * 32 * 2),
        "swiglu": (Limit.BYTES, 3 * 70 * 48 * 2),
        "8 experts": (Limit.FLOPS, 2 * 70 * 32 * 48),
    }


CASES = [
    KernelCase("decode", Limit.BYTES, 2e9, lambda: 500e-6, {"torch": lambda: 700e-6, "flash_attn": lambda: 600e-6}),
    KernelCase("prefill", Limit.FLOPS, 0.2e12, lambda: 500e-6),
]


def test_rows_are_shares_of_the_measured_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = KernelBench.__new__(KernelBench)
    bench._limits = DeviceLimits(device="NVIDIA H200", flops_per_s=700e12, bytes_per_s=4e12)
    bench._timer = SimpleNamespace(medians=lambda ways: [launches[0]() for launches in ways])
    bench._device = CPU
    monkeypatch.setattr(kernel_cases_module, "kernel_cases", lambda *_: [[case] * 2 for case in CASES])
    results = bench.measure("Qwen3-8B")
    assert {result.model for result in results} == {"Qwen3-8B"}
    assert [_kernel_cells(result) for result in results] == [
        ["decode", "2.000 GB", "500.0", "4.00 TB/s", "100.0%", "700.0", "600.0"],
        ["prefill", "0.20 TFLOP", "500.0", "400.00 TFLOP/s", "57.1%", "", ""],
    ]
