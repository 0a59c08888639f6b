"""Torch's symmetric memory between the ranks of one process, each of them a thread."""

from threading import Barrier

import torch
import torch.distributed as dist
from torch import Tensor

from workers.parallel.symmetric_memory import SymmetricMemory

CPU = torch.device("cpu")
NAME = "attn_tp/0"
"""Of the group."""


class Host:
    """What the GPUs of one host have in common."""

    def __init__(self, size: int) -> None:
        self.gate = Barrier(size, timeout=60)
        self.buffers = [torch.empty(0)] * size


class Memory(SymmetricMemory):
    """One rank's end; what the kernel promises is done by a barrier. It notes the calls."""

    def __init__(self, host: Host, rank: int) -> None:
        super().__init__(CPU)
        self.host, self.rank = host, rank
        self.calls: list[str] = []
        self.error = 0.0
        """Of every sum."""

    def place(self) -> str:
        return f"a host GPU-{self.rank}"

    def allocate(self, num_elements: int) -> Tensor:
        self.calls.append("allocate")
        self.host.buffers[self.rank] = torch.full((num_elements,), torch.nan)
        return self.host.buffers[self.rank]

    def map(self, buffer: Tensor, name: str, group: dist.ProcessGroup) -> None:
        self.calls.append("map")
        assert buffer is self.host.buffers[self.rank]
        assert (name, group.rank(), group.size()) == (NAME, self.rank, len(self.host.buffers))
        self.host.gate.wait()

    def add_up(self, terms: Tensor, name: str) -> Tensor:
        self.calls.append("add_up")
        assert terms.data_ptr() == self.host.buffers[self.rank].data_ptr(), "the kernel reads peers at the same place"
        assert terms.is_contiguous()
        super().add_up(torch.empty_like(terms, device="meta"), name)  # torch takes what it is given
        self.host.gate.wait()
        total = torch.zeros_like(terms)
        for buffer in self.host.buffers:
            total += buffer[: terms.numel()].view(terms.shape)
        self.host.gate.wait()
        return total + self.error

    def forget(self, name: str) -> None:
        self.calls.append(f"forget {name}")
