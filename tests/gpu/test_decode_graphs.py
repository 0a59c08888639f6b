"""Recorded decode steps and their memory, and the engine's bench, on a GPU: `pytest -m gpu tests/gpu`."""

from functools import partial

import pytest
import torch

from cluster.spec.config import Device
from workers.attention.triton.backend import TritonAttention
from workers.bench_engine import EngineBench
from workers.cache.page_pool import PagePool
from workers.engine.gpu_recorder import GpuRecorder
from workers.engine.random_weights import random_model
from workers.engine.runner import ModelRunner
from workers.engine_result import ENGINE_SHAPES
from workers.models.config import ModelConfig
from workers.models.decoder import DecoderModel
from workers.parallel.collectives import Communicator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]  # a cold cache compiles every kernel


def runner_of(model: DecoderModel, num_pages: int) -> ModelRunner:
    config = model.config
    shape = (config.num_kv_heads, config.num_layers, 64, config.head_dim, model.dtype)
    pool = PagePool(num_pages, *shape, device=model.device)
    return ModelRunner(model, pool, TritonAttention(), Communicator("cp"))


def test_what_a_rehearsal_takes_is_what_graphs_take_and_it_gives_it_back() -> None:
    """But for the memory of the stream and of compiled kernels, which stays."""
    device = torch.device("cuda", 0)
    model = random_model(ModelConfig.from_mapping(ENGINE_SHAPES["Qwen3-0.6B"], {}), torch.bfloat16, device)
    make_record = partial(GpuRecorder, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    taken = []
    for num_pages in (1, 1, 100):
        runner = runner_of(model, num_pages)
        runner.run_trash(64)
        runner.record_decode(16, make_record())
        taken.append(runner.graph_bytes)
        del runner
    first, *others = taken
    assert min(others) > 0
    assert max(others) <= first
    assert max(others) - min(others) <= 32 << 20, "whatever the pool holds"


def test_after_a_failure_steps_run_as_usual() -> None:
    """Torch leaves its stream and its allocator as they were in the recording."""
    device = torch.device("cuda", 0)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    record, usual, ones = GpuRecorder(stream), torch.cuda.current_stream(), torch.ones(1000, device=device)

    def wait() -> torch.Tensor:
        (ones + 1).sum().item()
        return ones

    with pytest.raises(RuntimeError):
        record(wait)
    assert torch.cuda.current_stream() == usual
    torch.cuda.empty_cache()
    doubled, replay = GpuRecorder(stream)(lambda: ones * 2)
    ones.fill_(3)
    replay()
    assert doubled.eq(6).all()


def test_the_bench_replays_graphs_beside_transformers() -> None:
    bench = EngineBench("tiny", Device.CUDA, most_tokens=200, chunk_tokens=50)
    result = bench.measure(130, 6, 2)
    assert bench._runner.graph_steps["replayed"] == 3 * 5
    assert result.transformers_problem is None
    assert result.num_same_tokens
    assert min(result.ttft_ratio, result.tpot_ratio) > 0
    assert bench.limits().flops_per_s > 0
