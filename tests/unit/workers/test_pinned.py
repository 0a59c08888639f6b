"""Registration of host memory with the GPU's runtime: once, and revoked before the memory is freed."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.memory.copy import PinnedMemory
from workers.rank import Rank

ALREADY_REGISTERED, NOT_REGISTERED = 712, 713


class Runtime:
    """Registered ranges, as CUDA keeps them."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.events: list[str] = []

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: ARG002, N802
        if address in self.ranges:
            return ALREADY_REGISTERED
        self.ranges[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.events.append("unpinned")
        return 0 if self.ranges.pop(address, None) else NOT_REGISTERED


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()

    def check(result: int) -> None:
        if result:
            raise RuntimeError(f"CUDA error {result}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: runtime.events.append("synchronized"))
    return runtime


def test_memory_is_pinned_until_it_is_closed(runtime: Runtime) -> None:
    buffers = [memoryview(bytearray(num_bytes)) for num_bytes in (100, 200)]
    pinned = PinnedMemory(buffers)
    assert sorted(runtime.ranges.values()) == [100, 200]
    with pytest.raises(RuntimeError, match="712"):
        PinnedMemory(buffers)
    pinned.close()
    pinned.close()
    assert runtime.events == ["synchronized", "unpinned", "unpinned"]
    PinnedMemory(buffers)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_unpins_before_its_memory_is_freed(runtime: Runtime, *, fails: bool) -> None:
    def close() -> None:
        runtime.events.append("closed")

    pinned = PinnedMemory([memoryview(bytearray(100))])
    if fails:
        runtime.ranges.clear()
    stop_helpers = partial(runtime.events.append, "helpers stopped")
    backend = SimpleNamespace(close=close)
    rank: Any = SimpleNamespace(pinned=pinned, backend=backend, grammars=None, stop_helpers=stop_helpers)
    if fails:
        with pytest.raises(RuntimeError, match="713"):
            Rank.close(rank)
    else:
        Rank.close(rank)
    assert runtime.events == ["helpers stopped", "synchronized", "unpinned", "closed"]
