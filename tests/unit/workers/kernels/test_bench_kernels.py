"""Cases of `baton bench kernels`: each one runs, and its minimum work is right."""

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.bench import kernels
from workers.bench.fp8_kernels import fp8_cases
from workers.bench.kernel_case import KernelCase, Sizes
from workers.bench.kernels import KernelBench, kernel_cases
from workers.bench.latent_kernels import latent_cases
from workers.bench.results import DeviceLimits, Limit
from workers.bench.shapes import BenchShape, LatentShape

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
)


def test_every_case_runs() -> None:
    torch.manual_seed(0)
    works = {}
    in_fp8 = fp8_cases(SHAPE, CPU, few_rows=3, many_rows=70)
    for case in chain(kernel_cases(SHAPE, SIZES, CPU), in_fp8):
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
        "8 experts": (Limit.FLOPS, 2 * 70 * 32 * 48),
        "FP8 product of 3": (Limit.BYTES, 32 * 48 + 4 * 48),
        "FP8 product of 70": (Limit.FP8_FLOPS, 2 * 70 * 32 * 48),
        "8 experts in FP8": (Limit.FP8_FLOPS, 2 * 70 * 32 * 48),
    }


def test_every_case_with_latents_runs() -> None:
    torch.manual_seed(0)
    shape = LatentShape(
        heads=4, plain_dim=16, rope_dim=8, value_dim=16, kv_rank=32, index_heads=3, index_dim=20, top_k=30
    )
    sizes = replace(SIZES, decode_kv_bytes=130 * 40 * 2 * 3)
    works = {}
    for case in latent_cases(shape, sizes, CPU):
        case.run()
        works[case.kernel] = (case.limit, case.work)
        for peer in case.peers.values():
            peer()
    pair = 2 * 4 * (40 + 32)
    assert works == {
        "expanded prefill 70": (Limit.FLOPS, 2 * 4 * (24 + 16) * 70 * 71 / 2),
        "stored prefill 10 after 100": (Limit.FLOPS, pair * (10 * 100 + 10 * 11 / 2)),
        "decode 3 x 130": (Limit.BYTES, 3 * 130 * 40 * 2),
        "decode 1 x 600": (Limit.BYTES, 600 * 40 * 2),
        "scores of 128 x 600": (Limit.FLOPS, 2 * 3 * 20 * 128 * 600),
        "scores in decode 3 x 130": (Limit.BYTES, 3 * 130 * 20 * 2),
        "best of 128 x 600": (Limit.BYTES, 4 * 128 * 600),
        "30 selected keys of 10": (Limit.FLOPS, pair * 10 * 30),
        "30 selected keys of 3": (Limit.BYTES, 3 * 30 * 40 * 2),
    }


CASES = [
    KernelCase("decode", Limit.BYTES, 2e9, lambda: 500e-6, {"torch": lambda: 700e-6, "flash_attn": lambda: 600e-6}),
    KernelCase("prefill", Limit.FLOPS, 0.2e12, lambda: 500e-6),
]
FP8_CASES = [KernelCase("FP8", Limit.FP8_FLOPS, 0.35e12, lambda: 500e-6, {"torch": lambda: 900e-6})]


def test_results_are_shares_of_the_measured_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    bench: Any = KernelBench.__new__(KernelBench)
    bench._limits = DeviceLimits(device="NVIDIA H200", flops_per_s=700e12, bytes_per_s=4e12)
    bench._timer = SimpleNamespace(medians=lambda launches: [launch() for launch in launches])
    bench._device, bench._has_fp8 = CPU, True
    monkeypatch.setattr(kernels, "kernel_cases", lambda *_: CASES)
    monkeypatch.setattr(kernels, "fp8_cases", lambda *_, **__: FP8_CASES)
    decode, prefill, in_fp8 = bench.measure("Qwen3-8B")
    assert (decode.model, decode.kernel, prefill.kernel) == ("Qwen3-8B", "decode", "prefill")
    assert (decode.us, decode.torch_us, decode.flash_attn_us) == pytest.approx((500, 700, 600))
    assert (decode.share_of_limit, prefill.share_of_limit) == pytest.approx((1.0, 4 / 7))
    assert prefill.torch_us is None
    assert (in_fp8.share_of_limit, in_fp8.torch_us) == pytest.approx((0.5, 900))
    bench._has_fp8 = False
    assert [result.kernel for result in bench.measure("Qwen3-8B")] == ["decode", "prefill"]
