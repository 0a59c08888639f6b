"""Torch's process groups: the calls to NCCL, and tensors on devices that a backend does not support."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup, HashStore

from cluster.spec.errors import PeerLostError
from workers.parallel import torch_groups
from workers.parallel.communicator import Communicator, Work
from workers.parallel.torch_groups import MovedBackend, NcclBackend

RANK, SIZE = 1, 3


class Group:
    """Torch's group without transfers. It accepts NCCL's arguments and records the calls.

    As with NCCL, coalescing without a transfer returns no work.
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
    with pytest.raises(PeerLostError, match="shift in group ring, rank 1 of 3: no route"):
        make_communicator().start_shift(torch.zeros(4), torch.zeros(4))
    assert not group.is_open


def test_a_sum_is_one_call(group: Group) -> None:
    make_communicator().all_reduce(torch.zeros(4))
    assert group.calls == [("allreduce", 4)]


def test_a_group_that_never_ends_is_abandoned(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured collective may still be held, or another group's kernel may wait for a dead rank."""
    released = threading.Event()
    monkeypatch.setattr(torch_groups, "LEAVE_S", 0.05)
    monkeypatch.setattr(group, "abort", released.wait)
    make_communicator().destroy()
    released.set()


THERE = torch.device("meta")


class Waiting:
    """Work that records that it was awaited."""

    waited = False

    def wait(self) -> bool:
        self.waited = True
        return True


class Elsewhere:
    """Backend that accepts tensors on one device and records the calls."""

    in_background = True

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[str] = []
        self.work = Waiting()

    def _note(self, call: str, *tensors: Tensor) -> Work:
        assert all(tensor.device == self.device for tensor in tensors)
        self.calls.append(call)
        for tensor in tensors[:1]:
            tensor.fill_(7)
        return self.work

    def all_gather(self, output: Tensor, tensor: Tensor, /) -> Work:
        return self._note("all_gather", output, tensor)

    def open_all_gather(self, num_bytes: int, /) -> None: ...

    def all_reduce(self, tensor: Tensor, /) -> Work:
        return self._note("all_reduce", tensor)

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        return self._note(f"broadcast {root}", tensor)

    def barrier(self) -> Work:
        return self._note("barrier")

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        return self._note(f"shift {distance}", output, tensor)

    def leave(self) -> None:
        self.calls.append("leave")


def call_everything(backend: MovedBackend, device: str) -> list[Tensor]:
    outs = [torch.zeros(4, device=device) for _ in range(4)]
    for work in (
        backend.all_gather(outs[0], torch.zeros(2, device=device)),
        backend.all_reduce(outs[1]),
        backend.broadcast(outs[2], 1),
        backend.shift(outs[3], torch.zeros(1, device=device), 2),
        backend.barrier(),
    ):
        assert work.wait()
    backend.leave()
    return outs


CALLS = ["all_gather", "all_reduce", "broadcast 1", "shift 2", "barrier", "leave"]


def test_tensors_on_the_right_device_are_passed_through() -> None:
    backend = Elsewhere(torch.device("cpu"))
    moved = MovedBackend(backend, backend.device)
    assert moved.in_background
    assert all(out.eq(7).all() for out in call_everything(moved, "cpu"))
    assert (backend.calls, backend.work.waited) == (CALLS, True)


def test_others_are_copied_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Elsewhere(THERE)
    copied: list[tuple[Tensor, torch.device]] = []
    monkeypatch.setattr(Tensor, "copy_", lambda target, source: copied.append((target, source.device)))
    outs = call_everything(MovedBackend(backend, THERE), "cpu")
    assert [device for _, device in copied] == [THERE] * 4
    assert all(target is out for (target, _), out in zip(copied, outs, strict=True))
    assert (backend.calls, backend.work.waited) == (CALLS, True)
