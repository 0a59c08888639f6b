"""Sums of several GPUs of one host through symmetric memory, one process a rank: `pytest -m gpu tests/gpu`."""

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.spec.config import Device
from workers.device import open_device
from workers.engine.gpu_recorder import GpuRecorder
from workers.parallel.collectives import Communicator
from workers.parallel.groups import ReplicaStore, join_group, join_store, open_store
from workers.parallel.symmetric_memory import largest_sum
from workers.worker_process import WorkerProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

HOST, TIMEOUT_S = "127.0.0.1", 120.0
DTYPES = [torch.float32, torch.bfloat16]
TURNS = 50


def term(turn: int, rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """What a rank brings to a sum."""
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)


def total(turn: int, size: int, length: int, dtype: torch.dtype) -> NDArray[np.float32]:
    """The sum in fp32, in the order of ranks, rounded once."""
    result = torch.zeros(length)
    for rank in range(size):
        result += term(turn, rank, length, dtype).float()
    return result.to(dtype).float().numpy()


class SumRank:
    """One process, which sees one GPU as a worker does."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._device = open_device(Device.CUDA)
        self._store: ReplicaStore | None = None
        self._group = Communicator("attn_tp/0")

    def open_store(self) -> str:
        """On rank 0."""
        self._store, port = open_store(HOST, TIMEOUT_S)
        return f"{HOST}:{port}"

    def join(self, address: str) -> bool:
        """Meet the others; whether small sums go through symmetric memory."""
        store = self._store = self._store or join_store(address, TIMEOUT_S)
        self._group = join_group(
            store,
            "attn_tp/0",
            range(self._size),
            self._rank,
            host=HOST,
            timeout_s=TIMEOUT_S,
            device=Device.CUDA,
            symmetric_memory=True,
        )
        moved: Any = self._group._backend
        return moved._backend._sums is not None

    def add_up(self, lengths: list[int], dtype: torch.dtype) -> list[NDArray[np.float32]]:
        """One sum after another, none of which is waited for before the last was begun."""
        terms = [term(turn, self._rank, length, dtype).to(self._device) for turn, length in enumerate(lengths)]
        for each in terms:
            self._group.all_reduce(each)
        return [each.float().cpu().numpy() for each in terms]

    def replay(self, length: int, dtype: torch.dtype) -> list[NDArray[np.float32]]:
        """Two sums in a recorded step, replayed with other terms each time."""
        given = torch.zeros(length, dtype=dtype, device=self._device)
        recorder = GpuRecorder(torch.cuda.Stream(self._device))  # type: ignore[no-untyped-call]
        out, replay = recorder(lambda: torch.stack([self._group.all_reduce(each) for each in (given.clone(), -given)]))
        results = []
        for turn in range(TURNS):
            given.copy_(term(turn, self._rank, length, dtype))
            replay()
            results.append(out.float().clone())
        return [each.cpu().numpy() for each in results]

    def close(self) -> None:
        """Leave the group."""
        self._group.destroy()


class Ranks:
    """All of them, each called at once."""

    def __init__(self, size: int, processes: list[WorkerProcess]) -> None:
        self.size, self.processes = size, processes

    def call(self, method: str, *args: object) -> list[Any]:
        """The results by rank."""
        for process in self.processes:
            process.call(method, *args)
        return [process.result(2 * TIMEOUT_S) for process in self.processes]


@pytest.fixture(params=[2, 3, 4, 8])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    size: int = request.param
    if torch.cuda.device_count() < size:
        pytest.skip(f"{size} GPUs are needed; here: {torch.cuda.device_count()}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(size)))
    processes = []
    try:
        for rank, gpu in enumerate(visible.split(",")[:size]):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpu)
            processes.append(WorkerProcess("tests.gpu.test_symmetric_memory:SumRank"))
            processes[-1].call("make", rank, size)
        for process in processes:
            process.result(TIMEOUT_S)
        processes[0].call("open_store")
        address = processes[0].result(TIMEOUT_S)
        found = Ranks(size, processes)
        assert found.call("join", address) == [True] * size, "the log of the ranks says why; GPUs need NVLink"
        yield found
    finally:
        for process in processes:
            process.stop()
        for process in processes:
            process.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_sums_are_exact_and_large_ones_are_nccl(ranks: Ranks, dtype: torch.dtype) -> None:
    largest = largest_sum(ranks.size)
    lengths = [1, 5, 4096, largest, *[4097] * TURNS, largest + 1]
    results = ranks.call("add_up", lengths, dtype)
    for turn, length in enumerate(lengths):
        for of_rank in results:
            assert np.array_equal(of_rank[turn], results[0][turn]), "every rank has the same bits"
        wanted = total(turn, ranks.size, length, dtype)
        if length <= largest:
            assert np.array_equal(results[0][turn], wanted)
        else:
            np.testing.assert_allclose(results[0][turn], wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_sums_are_replayed(ranks: Ranks, dtype: torch.dtype) -> None:
    length = 4 * 4096
    for of_rank in ranks.call("replay", length, dtype):
        for turn, pair in enumerate(of_rank):
            wanted = total(turn, ranks.size, length, dtype)
            assert np.array_equal(pair, np.stack([wanted, -wanted]))
