"""Small sums through symmetric memory: which go that way, that all ranks agree, and what is done if one cannot."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from cluster.spec.config import DeployConfig
from cluster.spec.errors import UserError
from cluster.spec.lifecycle import Role
from tests.fakes.symmetric_memory import CPU, NAME, Host, Memory
from tests.fakes.thread_group import on_thread_ranks
from tests.fakes.worker_specs import worker_of
from workers.parallel import symmetric_memory
from workers.parallel.collectives import Communicator
from workers.parallel.symmetric_memory import READ_BYTES, SmallSums, SymmetricMemory, largest_sum, meet_for_sums
from workers.rank_groups import join_groups

STEPS = ["allocate", "map", "add_up", "add_up"]


def on_ranks(
    size: int, use: Callable[[SmallSums | None], object], change: Callable[[Memory], None] = lambda _: None
) -> tuple[list[Memory], list[object]]:
    """Meet as every rank of a group and use what comes of it; the memories, changed before, and the results."""
    store, host = c10d.HashStore(), Host(size)
    memories = [Memory(host, rank) for rank in range(size)]

    def rank(group: Communicator) -> object:
        memory = memories[group.rank]
        change(memory)
        return use(meet_for_sums(memory, store, NAME, group.rank, size))

    return memories, on_thread_ranks(size, rank)


@pytest.mark.parametrize("size", range(2, 17))
def test_the_largest_sum_reads_no_more_than_it_may(size: int) -> None:
    num_bytes = 4 * largest_sum(size)
    assert num_bytes % 16 == 0
    assert READ_BYTES - 16 * size < num_bytes * (size - 1) <= READ_BYTES


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_are_those_in_fp32_rounded_once_one_after_another_in_one_buffer(size: int, dtype: torch.dtype) -> None:
    shapes = [(5,), (largest_sum(size),), (3, 7), (1,)]
    terms = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(size)]
    wanted = [sum(each.float() for each in of_ranks).to(dtype) for of_ranks in zip(*terms, strict=True)]

    def add_up(sums: SmallSums | None) -> list[Tensor]:
        assert sums is not None
        totals = [term.clone() for term in terms[sums._rank]]
        read = [sums.add_up(total) for total in totals]
        assert read == [4 * (size - 1) * total.numel() for total in totals]
        return totals

    memories, results = on_ranks(size, add_up)
    for totals in results:
        assert isinstance(totals, list)
        assert all(torch.equal(total, want) for total, want in zip(totals, wanted, strict=True))
    assert all(memory.calls == STEPS + ["add_up"] * len(shapes) for memory in memories)


def test_what_does_not_fit_is_left_to_nccl() -> None:
    def which(sums: SmallSums | None) -> list[bool]:
        assert sums is not None
        return [sums.holds(torch.empty(largest_sum(2) + more, dtype=torch.bfloat16)) for more in (0, 1)]

    assert on_ranks(2, which)[1] == [[True, False]] * 2


def _fails(*_: object) -> None:
    raise RuntimeError("CUDA error: no\nand much more")


def _elsewhere(memory: Memory) -> None:
    pytest.MonkeyPatch().setattr(memory, "place", lambda: "another host GPU-1")


def _same_gpu(memory: Memory) -> None:
    pytest.MonkeyPatch().setattr(memory, "place", lambda: "a host GPU-0")


def _cannot_allocate(memory: Memory) -> None:
    pytest.MonkeyPatch().setattr(memory, "allocate", _fails)


def _cannot_map(memory: Memory) -> None:
    def fail(*_: object) -> None:
        memory.host.gate.wait()
        _fails()

    pytest.MonkeyPatch().setattr(memory, "map", fail)


def _adds_up_wrongly(memory: Memory) -> None:
    memory.error = 1.0


@pytest.mark.parametrize(
    ("change", "reason", "num_calls"),
    [
        (_elsewhere, "its ranks are not known to share a host", 0),
        (_same_gpu, "some of its ranks share a GPU", 0),
        (_cannot_allocate, "rank 1: allocate: CUDA error: no", 1),
        (_cannot_map, "rank 1: map: CUDA error: no", 2),
        (_adds_up_wrongly, "rank 1: try_out: sums [0, 1] were wrong", 4),
    ],
)
def test_where_one_rank_cannot_none_does_and_each_says_why(
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Memory], None],
    reason: str,
    num_calls: int,
) -> None:
    memories, results = on_ranks(2, lambda sums: sums, lambda memory: change(memory) if memory.rank == 1 else None)
    assert results == [None, None]
    line = f"sums of group {NAME} go over NCCL, not through symmetric memory: {reason}"
    assert [record.getMessage() for record in caplog.records] == [line] * 2
    assert memories[0].calls == [*STEPS[:num_calls], f"forget {NAME}"]


def test_a_sum_that_does_not_end_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    never = SimpleNamespace(record_event=lambda: SimpleNamespace(query=lambda: False))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: never)
    monkeypatch.setattr(symmetric_memory, "TRIAL_S", 0.01)
    with pytest.raises(
        UserError, match=r"^resources\.symmetric_memory: got true, but a sum of group attn_tp/0 did not"
    ):
        symmetric_memory._wait_for(torch.device("cuda", 0), NAME)


def test_torch_finds_a_group_by_its_name_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "TORCH_SYMM_MEM_DISABLE_MULTICAST"):
        monkeypatch.setenv(variable, "0")
    memory = SymmetricMemory(CPU)
    for _ in range(2):
        group = dist.ProcessGroup(c10d.HashStore(), 1, 3)
        with pytest.raises(RuntimeError, match="does not support device type cpu"):
            memory.map(torch.empty(4), NAME, group)
        found = c10d._resolve_process_group(NAME)  # type: ignore[arg-type]
        assert (found.rank(), found.size()) == (1, 3)
        memory.forget(NAME)
    assert os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] == "1", "each worker sees one GPU, number 0"


def test_torch_without_such_memory_is_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    store = c10d.HashStore()

    def meet(group: Communicator) -> SmallSums | None:
        memory = SymmetricMemory(CPU)
        pytest.MonkeyPatch().setattr(memory, "place", lambda: f"a host GPU-{group.rank}")
        return meet_for_sums(memory, store, NAME, group.rank, 2)

    assert on_thread_ranks(2, meet) == [None, None]
    assert "rank 1: allocate: SymmetricMemory does not support device type cpu" in caplog.messages[0]


@pytest.mark.parametrize("wanted", [True, False])
def test_the_groups_of_tensor_parallelism_have_it_where_it_is_wanted(
    monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    config = DeployConfig.model_validate(
        {
            "prefill": {"parallel": {"cp": 2, "tp": 2}},
            "resources": {"device": "cuda", "symmetric_memory": wanted},
        }
    )
    met: list[tuple[str, int, int]] = []

    def meet(memory: SymmetricMemory, store: c10d.Store, name: str, rank: int, size: int) -> None:
        assert memory.device == torch.device("cuda", 0)
        assert store is stores
        met.append((name, rank, size))

    class ProcessGroupNCCL:
        Options = SimpleNamespace

        def __init__(self, *_: object) -> None:
            """Nobody is met."""

    monkeypatch.setattr(symmetric_memory, "meet_for_sums", meet)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    stores: Any = c10d.HashStore()
    model: Any = SimpleNamespace(moe=None, num_kv_heads=2)

    def join(group: Communicator) -> None:
        join_groups(worker_of(config, Role.PREFILL, group.rank), stores, model)

    on_thread_ranks(4, join)
    everybody = [("attn_tp/0", 0, 2), ("attn_tp/0", 1, 2), ("attn_tp/2", 0, 2), ("attn_tp/2", 1, 2)]
    assert sorted(met) == (everybody if wanted else [])
