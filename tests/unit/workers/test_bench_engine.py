"""`baton bench engine` on the CPU: ratios to limits calculated by hand, and equal tokens from both engines."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import workers.bench.engine
from cluster.spec.config import Device
from workers.bench.engine import EngineBench, TransformersPeer, num_same, timed
from workers.bench.results import DeviceLimits
from workers.bench.shapes import SHAPES, BenchShape
from workers.device import CPU
from workers.engine.runner import ModelRunner
from workers.engine.weights import random_model
from workers.models.registry import parse_model_config

LIMITS = DeviceLimits(device="none", flops_per_s=1e6, bytes_per_s=1e3)
WEIGHTS = 2 * 256 * 64 + 2 * (64 * (2 * 64 + 2 * 32) + 3 * 64 * 96)
"""Number of weights in the matrices of `tiny`."""


@pytest.fixture(scope="module")
def bench() -> Iterator[EngineBench]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers.bench.engine, "_CHUNK_TOKENS", 50)
        made = EngineBench("tiny", Device.CPU, most_tokens=200)
        made._limits = LIMITS
        yield made


def test_floors_of_a_known_model() -> None:
    """Llama 3 8B at 790 TFLOP/s and 4.3 TB/s."""
    shape = SHAPES["Llama-3-8B"]
    assert shape.num_weights == pytest.approx(8_030_261_248, rel=1e-4)
    embedding = 128_256 * 4096
    layers = shape.num_weights - 2 * embedding
    assert shape.prefill_flops(8192) == pytest.approx(2 * (8192 * layers + embedding) + 1.76e13, rel=0.005)
    assert shape.decode_bytes(0, 2) == 2 * (layers + embedding)
    assert shape.decode_bytes(8192, 2) / 4.3e12 == pytest.approx(3.49e-3 + 0.25e-3, rel=0.005)
    tied = SHAPES["Qwen3-0.6B"]
    assert tied.decode_bytes(0, 2) == 2 * tied.num_weights


def test_times_begin_and_end_with_tokens() -> None:
    assert timed(1.0, [3.0, 4.0, 7.0], [[5, 6, 7]]) == (2.0, 2.0, [[5, 6, 7]])
    assert [num_same([1, 2, 3], theirs) for theirs in ([1, 2, 3], [1, 4, 3], [0, 2, 3])] == [3, 1, 0]


@pytest.mark.parametrize("ahead", [False, True])
def test_both_engines_say_the_same(bench: EngineBench, monkeypatch: pytest.MonkeyPatch, *, ahead: bool) -> None:
    monkeypatch.setattr(ModelRunner, "is_asynchronous", ahead)
    result = bench.measure(130, 6, 1)
    assert (result.model, result.prompt_len, result.output_len) == ("tiny", 130, 6)
    assert result.num_same_tokens == 6
    embedding = 256 * 64
    layers = WEIGHTS - 2 * embedding
    ttft_floor_ms = (2 * (130 * layers + embedding) + 4 * 2 * 64 * 130 * 131 / 2) / 1e6 * 1e3
    tpot_floor_ms = (4 * (layers + embedding) + 2 * 2 * 32 * 4 * 133) / 1e3 * 1e3
    assert result.ttft_ratio == pytest.approx(result.ttft_ms / ttft_floor_ms)
    assert result.tpot_ratio == pytest.approx(result.tpot_ms / tpot_floor_ms)
    assert min(result.transformers_ttft_ms or 0, result.transformers_tpot_ms or 0) > 0
    assert result.transformers_problem is None


@pytest.mark.parametrize("name", ["small", "tiny", "tied"])
def test_a_shape_counts_the_weights_that_its_model_has(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Only matrices count, and a tied embedding counts once."""
    shapes: Any = SHAPES
    monkeypatch.setitem(shapes, "tied", replace(SHAPES["tiny"], family="qwen3", tied=True))
    shape: BenchShape = SHAPES[name]
    model = random_model(parse_model_config(shape.config_json()), torch.float32, CPU)
    assert sum(weight.numel() for weight in model.parameters() if weight.ndim > 1) == shape.num_weights


def test_transformers_ties_embeddings_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: Any = SHAPES
    monkeypatch.setitem(shapes, "tied", replace(SHAPES["tiny"], family="qwen3", tied=True))
    assert EngineBench("tied", Device.CPU, most_tokens=80).measure(70, 6, 1).num_same_tokens == 6


def test_answers_depend_on_prompts(bench: EngineBench) -> None:
    answers = [bench._generate([[token] * 70], 6).answers for token in (1, 2, 3)]
    assert len({str(answer) for answer in answers}) == 3


@pytest.mark.parametrize("ahead", [False, True])
def test_a_batch_counts_the_weights_once(monkeypatch: pytest.MonkeyPatch, *, ahead: bool) -> None:
    monkeypatch.setattr(ModelRunner, "is_asynchronous", ahead)
    bench = EngineBench("tiny", Device.CPU, most_tokens=80, batch_size=3)
    bench._limits = LIMITS
    result = bench.measure(70, 6, 1)
    assert (result.batch_size, result.num_same_tokens) == (3, 6)
    embedding = 256 * 64
    layers = WEIGHTS - 2 * embedding
    ttft_floor_ms = 3 * (2 * (70 * layers + embedding) + 4 * 2 * 64 * 70 * 71 / 2) / 1e6 * 1e3
    tpot_floor_ms = (4 * (layers + embedding) + 2 * 2 * 32 * 4 * 3 * 73) / 1e3 * 1e3
    assert result.ttft_ratio == pytest.approx(result.ttft_ms / ttft_floor_ms)
    assert result.tpot_ratio == pytest.approx(result.tpot_ms / tpot_floor_ms)


def test_limits_of_the_other_engine_are_reported(bench: EngineBench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*_: Any) -> None:
        calls.append(1)
        raise RuntimeError("CUDA out of memory.\nTried to allocate 1 TiB.")

    monkeypatch.setattr(TransformersPeer, "generate", fail)
    result = bench.measure(60, 3, 2)
    assert result.ttft_ms > 0
    reported = (result.transformers_ttft_ms, result.transformers_tpot_ms, result.num_same_tokens)
    assert reported == (None, None, None)
    assert result.transformers_problem == "CUDA out of memory."
    assert len(calls) == 1
