"""Graphs are counted before pages are: a GPU that only counts bytes stands in for one that computes."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from cluster.spec.config import DeployConfig
from cluster.spec.decode_graphs import batch_sizes, records_decode
from cluster.spec.errors import UserError
from cluster.spec.lifecycle import Role
from cluster.spec.pool import GIB
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.worker_specs import lone_worker
from workers import rank
from workers.attention.torch_backend import TorchAttention
from workers.cache.page_pool import PagePool
from workers.engine.gpu_recorder import Record
from workers.engine.runner import ModelRunner
from workers.engine.weights import load_model
from workers.models.decoder import DecoderModel
from workers.parallel.collectives import Communicator
from workers.parallel.model_groups import ModelGroups
from workers.parallel.pipeline import Pipeline
from workers.pool_memory import pool_memory_gib
from workers.rank_groups import RankGroups

TOTAL, WEIGHTS, ACTIVATIONS, OTHERS, GRAPH, WORKSPACE = (n * GIB for n in (100, 16, 2, 1, 3, 4))
SIZES = batch_sizes(8)


class FakeGpu:
    """Weights and other processes are there; torch's own numbers know nothing of graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.used = WEIGHTS + OTHERS
        self.has_workspace = False
        for name, answer in (
            ("synchronize", None),
            ("empty_cache", None),
            ("reset_peak_memory_stats", None),
            ("memory_allocated", WEIGHTS),
            ("memory_reserved", WEIGHTS),
            ("max_memory_allocated", WEIGHTS + ACTIVATIONS),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (TOTAL - self.used, TOTAL))

    def make_record(self) -> Record:
        """Each graph holds memory until it goes, and the stream of all recorders from the first on."""

        def record(compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:  # noqa: ARG001
            if not self.has_workspace:
                self.has_workspace = True
                self.used += WORKSPACE

            def replay() -> None: ...

            self.used += GRAPH
            weakref.finalize(replay, self.give_back)
            return torch.empty(0), replay

        return record

    def give_back(self) -> None:
        self.used -= GRAPH


def worker(text: dict[str, Any]) -> Any:
    config = {"resources": {"device": "cuda"}, "decode": {"max_requests": 8, "chunk_tokens": 16}}
    return lone_worker(DeployConfig.model_validate(config | text), Role.DECODE)


def ask(spec: Any, model: DecoderModel, make_record: Callable[[], Record] | None) -> float:
    groups = RankGroups(Communicator("cp"), ModelGroups(), Pipeline())
    store: Any = HashStore()
    return pool_memory_gib(spec, store, model, TorchAttention(), groups, make_record)


@pytest.fixture
def model(tmp_path: Path) -> DecoderModel:
    return load_model(make_checkpoint(tmp_path, "qwen3"))


def test_pages_take_what_graphs_leave(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, spec = FakeGpu(monkeypatch), worker({})
    pages_gib = ask(spec, model, gpu.make_record)
    held = len(SIZES) * GRAPH + WORKSPACE
    assert pages_gib * GIB == 0.9 * TOTAL - WEIGHTS - ACTIVATIONS - OTHERS - held
    assert gpu.used == WEIGHTS + OTHERS + WORKSPACE, "graphs over a page that is gone"

    gpu.used += int(pages_gib * GIB)
    config = model.config
    pool = PagePool(4, config.num_kv_heads, config.num_layers, 16, config.head_dim, model.dtype)
    runner = ModelRunner(model, pool, TorchAttention(), Communicator("cp"))
    runner.record_decode(8, gpu.make_record())
    assert runner.graph_bytes == len(SIZES) * GRAPH
    assert gpu.used + ACTIVATIONS == 0.9 * TOTAL


def test_without_graphs_pages_take_their_part(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGpu(monkeypatch)
    assert ask(worker({}), model, None) * GIB == 0.9 * TOTAL - WEIGHTS - ACTIVATIONS - OTHERS


def test_pages_that_leave_no_room_for_graphs_are_told(model: DecoderModel, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, spec = FakeGpu(monkeypatch), worker({"kv": {"memory_gib": 60}})
    with pytest.raises(UserError) as refused:
        ask(spec, model, gpu.make_record)
    assert str(refused.value) == (
        "kv.memory_gib: 60 GiB are wanted for pages, but 0.9 of 100 GiB of GPU memory, less 16 for weights, "
        "2 for activations, 16 for CUDA graphs and 1 for others, leaves 55"
    )


def test_a_rank_records_over_its_own_pool_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(rank, "open_device", lambda _: torch.device("cpu"))
    monkeypatch.setattr(rank, "GpuRecorder", lambda stream: stream.make_record())
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: gpu)
    given = worker({"kv": {"memory_gib": 0.001}, "resources": {"device": "cuda", "attention": "auto"}})
    store: Any = HashStore()
    loaded = rank.load_rank(given, make_checkpoint(tmp_path, "qwen3"), store)
    assert loaded.runner.graph_bytes == len(SIZES) * GRAPH
    assert gpu.used == WEIGHTS + OTHERS + WORKSPACE + len(SIZES) * GRAPH
    graphs: Any = loaded.runner._graphs
    assert graphs._pool is loaded.pool
    loaded.close()


@pytest.mark.parametrize(
    ("text", "recorded"),
    [
        ({}, True),
        ({"resources": {"device": "cpu"}}, False),
        ({"resources": {"device": "cuda", "attention": "flash_attn"}}, False),
        ({"decode": {"parallel": {"pp": 2}}}, False),
        ({"decode": {"parallel": {"dp": 2}}}, False),
        ({"decode": {"parallel": {"tp": 2}}}, True),
        ({"decode": {"parallel": {"tp": 2}}, "resources": {"device": "cuda", "collectives": "tcp"}}, False),
        ({"resources": {"device": "cuda", "collectives": "tcp"}}, True),
    ],
)
def test_which_pools_record(text: dict[str, Any], recorded: bool) -> None:
    config = DeployConfig.model_validate({"resources": {"device": "cuda"}} | text)
    assert records_decode(config, config.decode) == recorded
    assert not records_decode(config, config.prefill)
