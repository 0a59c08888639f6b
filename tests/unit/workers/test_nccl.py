"""NCCL against the binding that torch gives every one of its process groups; no GPU is needed."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

from workers.parallel import torch_groups
from workers.parallel.collectives import CollectiveError, Communicator
from workers.parallel.torch_groups import NcclBackend

RANK, SIZE = 1, 3


class Group:
    """Torch's group that moves nothing: it takes the arguments that NCCL's takes, and this notes the calls.

    As with NCCL, what was coalesced without a transfer has no work.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.is_open = False
        self._group: Any = FakeProcessGroup._create_internal(RANK, SIZE)

    def _start_coalescing(self, *args: object) -> None:
        self._group._start_coalescing(*args)
        self.is_open = True

    def _end_coalescing(self, *args: object) -> Any:
        work = self._group._end_coalescing(*args)
        self.is_open = False
        return work if self.calls else None

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert self.is_open
        self.calls.append(("send", peer))
        return self._group.send(tensors, peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        assert self.is_open
        self.calls.append(("recv", peer))
        return self._group.recv(tensors, peer, tag)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        self.calls.append(("allreduce", tensors[0].numel()))
        return self._group.allreduce(tensors)

    def abort(self) -> None:
        self.calls.append(("abort", 0))


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Group:
    group = Group()

    class ProcessGroupNCCL:
        class Options:
            _timeout = timedelta()

        def __new__(cls, store: object, rank: int, size: int, options: Options) -> Any:  # noqa: ARG004
            return group

    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return group


def make_communicator() -> Communicator:
    return Communicator("ring", RANK, SIZE, NcclBackend(HashStore(), RANK, SIZE, timedelta(seconds=5)))


@pytest.mark.parametrize(
    ("num_out", "num_in", "expected"),
    [
        (4, 4, [("send", 2), ("recv", 0)]),
        (4, 0, [("recv", 0)]),
        (0, 4, [("send", 2)]),
        (0, 0, []),
    ],
)
def test_both_directions_of_a_shift_are_one_call(
    group: Group, num_out: int, num_in: int, expected: list[tuple[str, int]]
) -> None:
    make_communicator().start_shift(torch.zeros(num_out), torch.zeros(num_in)).wait()
    assert group.calls == expected
    assert not group.is_open


def test_a_shift_that_fails_leaves_no_call_open(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:  # noqa: ARG001
        raise RuntimeError("no route")

    monkeypatch.setattr(group, "send", fail)
    with pytest.raises(CollectiveError, match="shift in group ring, rank 1 of 3: no route"):
        make_communicator().start_shift(torch.zeros(4), torch.zeros(4))
    assert not group.is_open


def test_a_sum_is_one_call(group: Group) -> None:
    make_communicator().all_reduce(torch.zeros(4))
    assert group.calls == [("allreduce", 4)]


def test_what_never_ends_is_left_alone(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a recorded sum is still held, or another group's kernel waits for a dead rank."""
    released = threading.Event()
    monkeypatch.setattr(torch_groups, "LEAVE_S", 0.05)
    monkeypatch.setattr(group, "abort", released.wait)
    make_communicator().destroy()
    released.set()
