"""Self-test of the twin GPU: it must refuse what a GPU refuses, and what makes the host wait."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.fakes.gpu_twin import META, GpuError, TwinGpu, twin_gpu
from workers.kernels.triton_elementwise import rms_norm


@pytest.fixture
def gpu() -> Iterator[TwinGpu]:
    with twin_gpu() as gpu:
        gpu.may_wait = False
        yield gpu


MISTAKES: dict[str, Callable[[Tensor], object]] = {
    "tensor of the host": lambda x: x + torch.ones(3),
    "tensor of the host in a kernel": lambda x: rms_norm(x[None], torch.ones(3), 1e-6),
    "index of the host": lambda x: x[torch.tensor([0, 2])],
    "number for the host": lambda x: x[0].item(),
    "decision of the host": lambda x: 1 if (x > 0).all() else 0,
    "length for the host": lambda x: x[x > 0],
    "values from the host": lambda x: torch.tensor([1.0], device=x.device),
    "number for indices": lambda x: x.__setitem__(x.long(), 1.0),
    "blocking copy from the host": lambda x: torch.zeros_like(x, device="cpu", pin_memory=True).to(META),
    "copy from memory that is not pinned": lambda x: x.copy_(torch.zeros(3), non_blocking=True),
    "blocking copy to the host": lambda x: x.cpu(),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.usefixtures("gpu")
def test_mistakes_are_found(mistake: str) -> None:
    with pytest.raises(GpuError):
        MISTAKES[mistake](torch.zeros(3, device=META))


@pytest.mark.parametrize(("waits", "seen"), [(False, [0, 0]), (True, [1, 1])])
def test_work_begins_when_somebody_waits(gpu: TwinGpu, seen: list[int], *, waits: bool) -> None:
    x, on_host, stream = torch.zeros(2, device=META), torch.zeros(2, pin_memory=True), gpu.copy_stream()
    gpu.synchronize()
    x.add_(1)
    with gpu.on_stream(stream, gpu.record_event() if waits else None):
        on_host.copy_(x, non_blocking=True)
    assert on_host.tolist() == [-1, -1]
    stream.synchronize()
    assert on_host.tolist() == seen


def test_captures(gpu: TwinGpu) -> None:
    x = torch.zeros(3, device=META)
    out, replay = gpu.capture(lambda: (x + 1).mul_(2)[1:])
    on_host = torch.zeros(3, pin_memory=True)
    x.copy_(on_host.fill_(4), non_blocking=True)
    replay()
    arrived = torch.zeros(2, pin_memory=True).copy_(out, non_blocking=True)
    assert arrived.tolist() != [10, 10]
    gpu.record_event().synchronize()
    assert arrived.tolist() == [10, 10]
    with pytest.raises(GpuError, match="in a capture"):
        gpu.capture(lambda: x.copy_(on_host, non_blocking=True))
