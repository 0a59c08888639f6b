"""Captured decode steps, their memory and the engine's benchmark on a GPU: `pytest -m gpu tests/gpu`."""

import random
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import pytest
import torch

from cluster.spec.config import Device
from tests.fakes.steps import Request, step_of
from workers.attention.triton.backend import TritonAttention
from workers.bench.engine import EngineBench
from workers.bench.shapes import SHAPES, config_json
from workers.device import GPU
from workers.engine.captures import CaptureError, GraphCapture
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.weights import random_model
from workers.memory.page_pool import PagePool
from workers.models.decoder import DecoderModel
from workers.models.registry import parse_model_config

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel


EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
T = TypeVar("T")


def runner_of(model: DecoderModel, num_pages: int) -> ModelRunner:
    geometry = model.config.kv_geometry("graphs", str(model.dtype).removeprefix("torch."), 64)
    pool = PagePool.of_one_rank(geometry, num_pages, model.device.torch_device)
    return ModelRunner(model, pool, TritonAttention(), RankGroups())


def checked(found: T | None) -> T:
    """Return a value that must not be None."""
    assert found is not None
    return found


def test_a_rehearsal_uses_and_frees_the_memory_of_graphs() -> None:
    """Memory of the stream and of compiled kernels stays."""
    model = random_model(parse_model_config(SHAPES["Qwen3-0.6B"].config_json()), torch.bfloat16, GPU)
    make_capture = partial(GraphCapture, torch.cuda.Stream(GPU.torch_device))  # type: ignore[no-untyped-call]
    taken = []
    for num_pages in (1, 1, 100):
        runner = runner_of(model, num_pages)
        runner.run_dummy(64)
        runner.capture_decode(16, make_capture())
        taken.append(runner.graph_bytes)
        del runner
    first, *others = taken
    assert min(others) > 0
    assert max(others) <= first
    assert max(others) - min(others) <= 32 << 20, "whatever the pool holds"


@pytest.mark.parametrize(
    ("shape", "dtype", "tolerance"),
    [
        (SHAPES["tiny"].config_json(), torch.bfloat16, 0.02),
        ({**SHAPES["tiny"].config_json(), **EXPERTS}, torch.float32, 1e-3),
        (config_json("small-latent", 4096), torch.bfloat16, 0.02),
        (config_json("small-sparse", 4096), torch.bfloat16, 0.02),
        (config_json("small-sparse", 4096) | {"index_topk": 64}, torch.float32, 1e-3),
    ],
    ids=["dense", "experts", "latents", "all keys", "selected keys"],
)
def test_replayed_steps_are_the_usual_ones(shape: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    """Batches grow and shrink, with requests of any length and pages in no order.

    In bf16, another choice of experts or keys is equally good when two are nearly equal.
    """
    model = random_model(parse_model_config(shape), dtype, GPU)
    runner = runner_of(model, 200)
    for part in chain.from_iterable(map(runner.pool.layer_view, range(model.config.num_layers))):
        part.normal_()
    runner.capture_decode(16, GraphCapture(torch.cuda.Stream(GPU.torch_device)))  # type: ignore[no-untyped-call]
    rng = random.Random(0)
    for count in (16, 1, 3, 11, 2):
        free, requests = rng.sample(range(200), 200), []
        for _ in range(count):
            prefix_len = rng.choice([0, 1, 63, 64, rng.randrange(700)])
            pages = [free.pop() for _ in range(prefix_len // 64 + 1)]
            requests.append(Request([rng.randrange(256)], prefix_len, pages))
        with torch.inference_mode():
            replayed = checked(runner._graphs).run(step_of(requests))
            found = checked(replayed).clone()
            _, wanted = runner._compute(step_of(requests))
        assert (found - wanted).float().norm() <= tolerance * wanted.float().norm(), f"{count} requests"
    assert runner.graph_steps == {"replayed": 5}


def test_after_a_failure_steps_run_as_usual() -> None:
    """Torch leaves its stream and its allocator in capture mode."""
    device = GPU.torch_device
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    capture, usual, ones = GraphCapture(stream), torch.cuda.current_stream(), torch.ones(1000, device=device)

    def wait() -> torch.Tensor:
        (ones + 1).sum().item()
        return ones

    with pytest.raises(CaptureError):
        capture(wait)
    assert torch.cuda.current_stream() == usual
    torch.cuda.empty_cache()
    doubled, replay = GraphCapture(stream)(lambda: ones * 2)
    ones.fill_(3)
    replay()
    assert doubled.eq(6).all()


def test_the_benchmark_replays_graphs_next_to_transformers() -> None:
    bench = EngineBench("tiny", Device.CUDA, most_tokens=200)
    result = bench.measure(130, 6, 2)
    assert bench._runner.graph_steps["replayed"] == 3 * 5
    assert result.transformers_problem is None
    assert result.num_same_tokens
    assert min(result.ttft_ratio, result.tpot_ratio) > 0
    assert bench.limits().flops_per_s > 0
