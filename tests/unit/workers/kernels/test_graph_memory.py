"""Graph memory is measured before the pool is sized. A fake GPU only counts bytes."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from cluster.spec.checks import ModelLimits
from cluster.spec.config import DeployConfig, Device
from cluster.spec.decode_graphs import batch_sizes, captures_decode, why_not_captured
from cluster.spec.errors import UserError
from cluster.spec.ids import Role, Room
from cluster.spec.memory import GIB
from cluster.spec.sampling import Sampling
from cluster.spec.step_messages import NewRequest, ScheduledRequest, StepPlan, StepShape
from cluster.spec.strategy import Passing, Strategy
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.devices import GpuOnHost
from tests.fakes.kv import kv_pool
from tests.fakes.plain_graphs import PlainGraphs
from tests.fakes.worker_specs import lone_worker
from workers import rank
from workers.attention.registry import BackendChoice
from workers.context_parallel.shard_plan import make_step_shape
from workers.device import GPU, open_device
from workers.engine import captures, native_kernels, pool_memory, runner
from workers.engine.batch import StepInput
from workers.engine.captures import Capture
from workers.engine.pool_memory import pool_memory_gib
from workers.engine.rank_groups import RankGroups
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model
from workers.models.decoder import DecoderModel

TOTAL, WEIGHTS, ACTIVATIONS, OTHERS, GRAPH, WORKSPACE = (n * GIB for n in (100, 16, 2, 1, 3, 4))
SIZES = batch_sizes(8)
DENSE = ModelLimits(num_heads=1, num_kv_heads=1, num_layers=1, num_experts=None)


class FakeGpu:
    """GPU with weights and other processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = WEIGHTS + OTHERS
        """Bytes that the driver counts, graphs included."""
        self.reserved = WEIGHTS
        """Bytes that torch's allocator counts, without graphs."""
        self.has_workspace = False
        for name, answer in (
            ("synchronize", None),
            ("empty_cache", None),
            ("reset_peak_memory_stats", None),
            ("memory_allocated", WEIGHTS),
            ("max_memory_allocated", WEIGHTS + ACTIVATIONS),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *_: self.reserved)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (TOTAL - self.used, TOTAL))

    def make_capture(self) -> Capture:
        """Return a capture. Each graph holds memory until it is deleted, and the first one also the stream."""

        def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:  # noqa: ARG001
            if not self.has_workspace:
                self.has_workspace = True
                self.used += WORKSPACE

            def replay() -> None: ...

            self.used += GRAPH
            weakref.finalize(replay, self.give_back)
            return torch.empty(0), replay

        return capture

    def give_back(self) -> None:
        self.used -= GRAPH


def worker(text: dict[str, Any]) -> Any:
    config = {"resources": {"device": "cuda"}, "decode": {"max_requests": 8, "chunk_tokens": 16}}
    return lone_worker(DeployConfig.model_validate(config | text), Role.DECODE)


def ask(spec: Any, model: DecoderModel, make_capture: Callable[[], Capture] | None) -> float:
    groups = RankGroups()
    store: Any = HashStore()
    geometry = model.config.kv_geometry("m", "float32", 4)
    return pool_memory_gib(spec, store, model, PlainGraphs(), groups, geometry, make_capture)


@pytest.fixture
def model(tmp_path: Path) -> DecoderModel:
    return load_model(make_checkpoint(tmp_path, "qwen3"), device=GpuOnHost())


def test_pages_get_the_memory_that_graphs_leave(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, spec = FakeGpu(monkeypatch), worker({})
    pages_gib = ask(spec, model, gpu.make_capture)
    held = len(SIZES) * GRAPH + WORKSPACE
    assert pages_gib * GIB == 0.9 * TOTAL - WEIGHTS - ACTIVATIONS - OTHERS - held
    assert gpu.used == WEIGHTS + OTHERS + WORKSPACE, "graphs over a page that is gone"

    gpu.used += int(pages_gib * GIB)
    config = model.config
    pool = kv_pool(4, config.attention.num_kv_heads, config.num_layers, 16, config.attention.head_dim, model.dtype)
    one = ModelRunner(model, pool, PlainGraphs(), RankGroups())
    one.capture_decode(8, gpu.make_capture())
    assert one.graph_bytes == len(SIZES) * GRAPH
    assert gpu.used + ACTIVATIONS == 0.9 * TOTAL


def test_graphs_are_deleted_before_an_error_is_raised(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise groups with captured collectives could not be left, and nobody would see the reason."""
    gpu = FakeGpu(monkeypatch)

    def fail_at_last(capture: Capture, countdown: Iterator[int]) -> Capture:
        def capture_some(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
            if not next(countdown):
                raise torch.OutOfMemoryError("in a step that is not captured yet")
            return capture(compute)

        return capture_some

    with pytest.raises(torch.OutOfMemoryError) as no_memory:
        ask(worker({}), model, lambda: fail_at_last(gpu.make_capture(), iter([2, 1, 0])))
    assert gpu.used == WEIGHTS + OTHERS + WORKSPACE, no_memory


def test_graphs_are_deleted_although_an_error_references_a_step(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, config = FakeGpu(monkeypatch), model.config
    pool = kv_pool(4, config.attention.num_kv_heads, config.num_layers, 16, config.attention.head_dim, model.dtype)
    one = ModelRunner(model, pool, PlainGraphs(), RankGroups())
    one.capture_decode(8, gpu.make_capture())
    assert one._graphs is not None
    held = one._graphs._steps[8]
    one.drop_graphs()
    assert gpu.used == WEIGHTS + OTHERS + WORKSPACE, held
    assert one._graphs.run(StepInput([], [], StepShape())) is None


def test_workers_that_share_a_gpu_count_only_their_own_memory(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver's figures change while other workers load and measure."""
    gpu, spec = FakeGpu(monkeypatch), worker({})
    monkeypatch.setattr(GpuOnHost, "share", 0.5)

    def capture(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:  # noqa: ARG001
        gpu.used += 7 * GIB  # by another worker
        gpu.reserved += GIB
        return torch.empty(0), lambda: None

    held = len(SIZES) * GIB
    assert ask(spec, model, lambda: capture) * GIB == 0.9 * 0.5 * TOTAL - WEIGHTS - ACTIVATIONS - GIB - held


def test_a_share_of_a_gpu_limits_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *limit: limits.append(limit))
    monkeypatch.setattr(GPU, "share", 1.0)
    assert open_device(Device.CUDA, 0.25) is GPU
    assert (GPU.share, limits) == (0.25, [(0.25, GPU.torch_device)])


def test_without_graphs_pages_take_their_part(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch)
    assert ask(worker({}), model, None) * GIB == 0.9 * TOTAL - WEIGHTS - ACTIVATIONS - OTHERS


def test_the_largest_batch_is_sampled_before_memory_is_measured(
    model: DecoderModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the memory for logits and for sorting them would not be counted."""
    FakeGpu(monkeypatch)
    before = ask(worker({}), model, None)
    num_sampled = 0

    def draw(logits: Tensor, rows: Sequence[Sampling], positions: Sequence[int]) -> None:
        nonlocal num_sampled
        num_sampled += len(logits)
        assert len(rows) == len(positions) == len(logits)
        assert all(row.top_p < 1 and row.temperature for row in rows)

    monkeypatch.setattr(runner, "draw", draw)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: WEIGHTS + ACTIVATIONS + num_sampled * GIB)
    assert ask(worker({}), model, None) == before - 8


@pytest.mark.parametrize(
    ("prefill", "strategy", "passings"),
    [
        ({}, Strategy.NONE, [None]),
        ({"strategy": "zigzag"}, Strategy.ZIGZAG, [None]),
        ({"mode": "ring"}, Strategy.NONE, list(Passing)),
        ({"mode": "ring", "strategy": "whole_request", "passing": "pass_q"}, Strategy.WHOLE_REQUEST, [Passing.PASS_Q]),
    ],
)
def test_the_largest_step_ends_the_longest_prompt(
    prefill: dict[str, Any],
    strategy: Strategy,
    passings: list[Any],
    model: DecoderModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank has all tokens if the strategy allows it. Every way of passing the prefix is measured."""
    FakeGpu(monkeypatch)
    steps: list[tuple[object, ...]] = []
    monkeypatch.setattr(pool_memory, "least_of_all", lambda *_: 1.0)
    monkeypatch.setattr(ModelRunner, "run_dummy", lambda _, *step: steps.append(step))
    prefill = {"parallel": {"cp": 2}, "chunk_tokens": 16} | prefill
    config = {"resources": {"device": "cuda"}, "model": {"max_context": 200}, "prefill": prefill}
    ask(lone_worker(DeployConfig.model_validate(config), Role.PREFILL), model, None)
    assert steps == [(16, 184, strategy, passing) for passing in passings]


def test_models_with_latents_also_measure_short_extends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries of short extends meet stored latents, which takes more memory than expanded ones."""
    latent = load_model(make_checkpoint(tmp_path, "deepseek_v3"), device=GpuOnHost())
    FakeGpu(monkeypatch)
    steps: list[tuple[object, ...]] = []
    monkeypatch.setattr(pool_memory, "least_of_all", lambda *_: 1.0)
    monkeypatch.setattr(ModelRunner, "run_dummy", lambda _, *step: steps.append(step))
    prefill = {"chunk_tokens": 64, "max_requests": 16}
    config = {"resources": {"device": "cuda"}, "model": {"max_context": 200}, "prefill": prefill}
    ask(lone_worker(DeployConfig.model_validate(config), Role.PREFILL), latent, None)
    assert steps == [(64, 136, Strategy.NONE, None), (4, 32, Strategy.NONE, None, 16)]


def test_pages_without_space_for_graphs_are_reported(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, spec = FakeGpu(monkeypatch), worker({"kv": {"memory_gib": 60}})
    with pytest.raises(UserError) as refused:
        ask(spec, model, gpu.make_capture)
    assert str(refused.value) == (
        "kv.memory_gib: 60 GiB needed for pages, but 0.9 of 100 GiB of GPU memory, less 16 for weights, "
        "2 for activations, 16 for CUDA graphs and 1 for other uses, leaves 55 GiB"
    )
    assert gpu.used == WEIGHTS + OTHERS + WORKSPACE, refused


def test_a_rank_captures_over_its_own_pool_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(rank, "open_device", lambda *_: GpuOnHost())
    monkeypatch.setattr(native_kernels, "choose_backend", lambda *_: BackendChoice("plain", PlainGraphs(), "a test"))
    monkeypatch.setattr(captures, "GraphCapture", lambda stream: stream.make_capture())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: gpu)
    given = worker({"kv": {"memory_gib": 0.001}, "resources": {"device": "cuda", "attention": "auto"}})
    store: Any = HashStore()
    loaded = rank.load_rank(given, make_checkpoint(tmp_path, "qwen3"), store)
    assert loaded.runner.graph_bytes == len(SIZES) * GRAPH
    assert gpu.used == WEIGHTS + OTHERS + WORKSPACE + len(SIZES) * GRAPH
    graphs: Any = loaded.runner._graphs
    assert graphs._pool is loaded.memory.pool
    loaded.close()


def test_a_rank_that_captures_nothing_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "open_device", lambda *_: GpuOnHost())
    monkeypatch.setattr(rank, "captures_decode", lambda *_, **__: False)
    monkeypatch.setattr(rank, "why_not_captured", lambda *_, **__: "a reason")
    FakeGpu(monkeypatch)
    given = worker({"kv": {"memory_gib": 0.001}, "resources": {"device": "cuda", "attention": "auto"}})
    store: Any = HashStore()
    loaded = rank.load_rank(given, make_checkpoint(tmp_path, "qwen3"), store)
    new = NewRequest(room=Room(1), prompt_len=1, owner_base=0, sampling=Sampling(temperature=0.0), destination=None)
    row = ScheduledRequest(
        room=Room(1), first_position=0, token_ids=[5], new_pages=[[0]], samples=True, output_position=0
    )
    plan = StepPlan(step=1, shape=make_step_shape([row]), new_requests=[new], scheduled=[row], releases=[])
    loaded.runner.begin(plan).wait()
    assert loaded.runner.graph_steps == {"a reason": 1}
    loaded.close()


def test_steps_with_layerwise_loads_are_counted(model: DecoderModel) -> None:
    config = model.config
    pool = kv_pool(4, config.attention.num_kv_heads, config.num_layers, 16, config.attention.head_dim, model.dtype)
    one = ModelRunner(model, pool, PlainGraphs(), RankGroups())
    one._graphs = SimpleNamespace(counts=Counter(replayed=2))  # type: ignore[assignment]
    assert one._replay(StepInput([], [], StepShape()), is_loading=True) is None
    assert one.graph_steps == {"replayed": 2, "layerwise load": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({}, ""),
        ({"resources": {"device": "cuda", "attention": "flash_attn"}}, "attention by flash_attn"),
        ({"resources": {"device": "cuda", "attention": "torch"}}, "attention by torch"),
        ({"decode": {"parallel": {"pp": 2}}}, "pipeline stages"),
        ({"resources": {"device": "cpu"}}, ""),
        ({"decode": {"parallel": {"tp": 2}}, "resources": {"device": "cpu"}}, "collectives through the host"),
        ({"resources": {"device": "cpu", "attention": "torch"}}, "attention by torch"),
        ({"decode": {"parallel": {"dp": 2}}}, ""),
        (
            {"decode": {"parallel": {"dp": 2}}, "resources": {"device": "cuda", "collectives": "tcp"}},
            "collectives through the host",
        ),
        ({"decode": {"parallel": {"tp": 2}}}, ""),
        (
            {"decode": {"parallel": {"tp": 2}}, "resources": {"device": "cuda", "collectives": "tcp"}},
            "collectives through the host",
        ),
        (
            {"decode": {"parallel": {"tp": 2}}, "resources": {"device": "cuda", "gpus_per_worker": 0.5}},
            "collectives through the host",
        ),
        ({"resources": {"device": "cuda", "collectives": "tcp"}}, ""),
        ({"resources": {"device": "cuda", "gpus_per_worker": 0.5}}, ""),
    ],
)
def test_pools_that_allow_capture(text: dict[str, Any], reason: str) -> None:
    config = DeployConfig.model_validate({"resources": {"device": "cuda"}} | text)
    assert why_not_captured(config, config.decode, DENSE) == reason
    assert captures_decode(config, config.decode, DENSE) == (not reason)
    assert not captures_decode(config, config.prefill, DENSE)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_can_be_captured_on_any_device(device: str) -> None:
    config, model = DeployConfig.model_validate({"resources": {"device": device}}), replace(DENSE, num_experts=4)
    assert not why_not_captured(config, config.decode, model)
    assert captures_decode(config, config.decode, model)


@pytest.mark.parametrize(("parallel", "reason"), [({}, ""), ({"tp": 2}, "tokens sent to experts")])
def test_steps_that_send_tokens_to_experts_are_not_captured(parallel: dict[str, int], reason: str) -> None:
    resources = {"device": "cuda", "moe_dispatch": "all_to_all"}
    config = DeployConfig.model_validate({"decode": {"parallel": parallel}, "resources": resources})
    assert why_not_captured(config, config.decode, replace(DENSE, num_experts=4)) == reason
    assert not why_not_captured(config, config.decode, DENSE)


def test_windowed_models_are_not_captured() -> None:
    config, model = DeployConfig.model_validate({"resources": {"device": "cuda"}}), replace(DENSE, has_windows=True)
    assert why_not_captured(config, config.decode, model) == "sliding windows"
    assert not captures_decode(config, config.decode, model)
    assert not why_not_captured(config, config.prefill, model)
