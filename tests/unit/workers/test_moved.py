"""Tensors that are not where a backend wants them: copied there, and what arrives is copied back when waited for."""

import pytest
import torch
from torch import Tensor

from workers.parallel.collectives import Work
from workers.parallel.torch_groups import MovedBackend

THERE = torch.device("meta")


class Waiting:
    """A work that notes that it was waited for."""

    waited = False

    def wait(self) -> bool:
        self.waited = True
        return True


class Elsewhere:
    """A backend that takes tensors of one device, and notes the calls."""

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

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work:
        return self._note("all_gather", output, tensor)

    def allreduce(self, tensor: Tensor, /) -> Work:
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
        backend._allgather_base(outs[0], torch.zeros(2, device=device)),
        backend.allreduce(outs[1]),
        backend.broadcast(outs[2], 1),
        backend.shift(outs[3], torch.zeros(1, device=device), 2),
        backend.barrier(),
    ):
        assert work.wait()
    backend.leave()
    return outs


CALLS = ["all_gather", "all_reduce", "broadcast 1", "shift 2", "barrier", "leave"]


def test_tensors_that_are_there_go_as_they_are() -> None:
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
