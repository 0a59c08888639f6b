"""`baton bench engine` on the CPU: floors that can be worked out on paper, and two engines that say the same."""

from collections.abc import Iterator
from typing import Any

import pytest

from cluster.spec.config import Device
from workers.bench_engine import EngineBench, model_work
from workers.bench_transformers import TransformersPeer
from workers.engine.runner import ModelRunner
from workers.engine_result import ENGINE_SHAPES, ModelWork, Timed, num_same
from workers.kernel_result import ChipLimits

LIMITS = ChipLimits(device="none", flops_per_s=1e6, bytes_per_s=1e3)
LAYER = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 96 + 2 * 64
WEIGHTS = 2 * 256 * 64 + 2 * LAYER + 64
"""Of the shape `tiny`."""


@pytest.fixture(scope="module")
def bench() -> Iterator[EngineBench]:
    made = EngineBench("tiny", Device.CPU, most_tokens=200, chunk_tokens=50)
    made._limits = LIMITS
    yield made
    made.close()


def test_floors_of_a_known_model() -> None:
    """Llama 3 8B, at 790 TFLOP/s and 4.3 TB/s."""
    shape = ENGINE_SHAPES["Llama-3-8B"]
    assert shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"] == 131072
    work = ModelWork(num_weights=8_030_261_248, weight_bytes=16_060_522_496, attention_width=131072, token_bytes=131072)
    assert work.prefill_flops(8192) == pytest.approx(1.49e14, rel=0.005)
    assert work.decode_bytes(0) / 4.3e12 == pytest.approx(3.73e-3, rel=0.005)
    assert work.decode_bytes(8192) / 4.3e12 == pytest.approx(3.73e-3 + 0.25e-3, rel=0.005)


def test_times_begin_and_end_with_tokens() -> None:
    timed = Timed.of(1.0, [3.0, 4.0, 7.0], [5, 6, 7])
    assert (timed.ttft_s, timed.tpot_s) == (2.0, 2.0)
    assert [num_same([1, 2, 3], theirs) for theirs in ([1, 2, 3], [1, 4, 3], [0, 2, 3])] == [3, 1, 0]


@pytest.mark.parametrize("ahead", [False, True])
def test_both_engines_say_the_same(bench: EngineBench, monkeypatch: pytest.MonkeyPatch, *, ahead: bool) -> None:
    monkeypatch.setattr(ModelRunner, "is_asynchronous", ahead)
    result = bench.measure(130, 6, 1)
    assert (result.model, result.prompt_len, result.output_len) == ("tiny", 130, 6)
    assert result.num_same_tokens == 6
    assert result.ttft_floor_s == (2 * WEIGHTS * 130 + 4 * 2 * 64 * 130 * 131 / 2) / 1e6
    assert result.tpot_floor_s == (4 * WEIGHTS + 2 * 2 * 32 * 4 * 133) / 1e3
    assert result.ttft_ratio == result.ttft_s / result.ttft_floor_s
    assert result.tpot_ratio == result.tpot_s / result.tpot_floor_s
    assert min(result.transformers_ttft_s or 0, result.transformers_tpot_s or 0) > 0
    assert result.transformers_problem is None
    assert (result.host_s is not None) == ahead
    assert len(bench._host_s) == 5, "of the round that counts, each step but the prompt's"


def test_tables_that_are_one_count_once_and_are_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And heads that are normalised, as Qwen3's."""
    small = {name: value for name, value in ENGINE_SHAPES["tiny"].items() if name.endswith(("_size", "_dim", "_heads"))}
    shapes: Any = ENGINE_SHAPES
    monkeypatch.setitem(shapes, "small", {**ENGINE_SHAPES["Qwen3-0.6B"], **small, "num_hidden_layers": 2})
    bench = EngineBench("small", Device.CPU, most_tokens=80, chunk_tokens=50)
    work = model_work(bench._model)
    assert work.num_weights == WEIGHTS - 256 * 64 + 2 * 2 * 16
    assert bench.measure(70, 6, 1).num_same_tokens == 6


def test_answers_depend_on_prompts(bench: EngineBench) -> None:
    answers = [tuple(bench._generate([token] * 70, 6).token_ids) for token in (1, 2, 3)]
    assert len(set(answers)) == 3


def test_what_does_not_fit_for_the_other_engine_is_told(bench: EngineBench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(*_: Any) -> Timed:
        calls.append(1)
        raise RuntimeError("CUDA out of memory.\nTried to allocate 1 TiB.")

    monkeypatch.setattr(TransformersPeer, "generate", fail)
    result = bench.measure(60, 3, 2)
    assert result.ttft_s > 0
    told = (result.transformers_ttft_s, result.transformers_tpot_s, result.num_same_tokens)
    assert told == (None, None, None)
    assert result.transformers_problem == "CUDA out of memory."
    assert len(calls) == 1
