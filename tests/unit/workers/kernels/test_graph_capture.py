"""Failed captures of CUDA graphs, with a fake of torch.cuda."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.spec.errors import PeerLostError
from workers.engine.captures import CaptureError, GraphCapture


class Cuda:
    """Fake of torch.cuda after a failed capture, for versions that do and do not end the capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends_itself: bool) -> None:
        self.current: Any = SimpleNamespace(device_index=0, wait_stream=lambda _: None)
        self.is_capturing, self._ends_itself = False, ends_itself
        for name in ("stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)

    @contextmanager
    def stream(self, _: object) -> Iterator[None]:
        yield

    @contextmanager
    def graph(self, _: object, *, stream: object, **__: object) -> Iterator[None]:
        usual, self.current, self.is_capturing = self.current, stream, True
        try:
            yield
        except Exception:
            self.is_capturing = not self._ends_itself
            raise
        self.current, self.is_capturing = usual, False

    def end(self, device: int, pool: tuple[int, int]) -> None:
        assert (device, pool) == (0, (0, 1))
        if not self.is_capturing:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.is_capturing = False


@pytest.mark.parametrize("ends_itself", [False, True])
@pytest.mark.parametrize("kind", [RuntimeError, PeerLostError], ids=["of work", "of a collective"])
def test_a_failure_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, kind: type[Exception], *, ends_itself: bool
) -> None:
    cuda = Cuda(monkeypatch, ends_itself=ends_itself)
    before, stream = cuda.current, SimpleNamespace(wait_stream=lambda _: None)
    graph_capture, result = GraphCapture(stream), torch.zeros(1)  # type: ignore[arg-type]

    def compute() -> torch.Tensor:
        if cuda.is_capturing:
            raise kind("operation not permitted when stream is capturing")
        return result

    with pytest.raises(CaptureError, match="not permitted"):
        graph_capture(compute)
    assert (cuda.current, cuda.is_capturing) == (before, False)
    assert graph_capture(lambda: result)[0] is result
