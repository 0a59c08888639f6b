"""Capture of computations, so that they can be repeated without the Python code between their calls."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cluster.spec.errors import PeerLostError
from workers.device import Device
from workers.native.recording import Call, recorded_in

_ATEN = torch.ops.aten
_EMPTY = (_ATEN.empty.memory_format, _ATEN.empty_like.default, _ATEN.new_empty.default)

Capture = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], None]]]
"""Function that captures a computation. It returns the result, at a fixed address, and a function that replays the
computation. It raises CaptureError if the capture fails.
"""


class CaptureError(RuntimeError):
    """Failed capture of a computation, which can still run uncaptured."""


class GraphCapture:
    """Capture of computations as CUDA graphs. The graphs share memory, since only one is replayed at a time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Use one ``stream`` for all captures, since libraries allocate memory per stream."""
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = stream

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Capture the computation's third run. The first two runs compile kernels and warm up libraries."""
        usual = torch.cuda.current_stream()
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                compute()
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy pages during the capture.
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                out = compute()
        except (RuntimeError, PeerLostError) as error:  # the latter from a collective that cannot be captured
            # After a failure, torch's own stream is current, and its allocator may still be capturing into the pool.
            torch.cuda.set_stream(usual)
            with suppress(RuntimeError):  # the allocator has already stopped
                torch._C._cuda_endAllocateToPool(usual.device_index, self._memory)
            raise CaptureError(str(error)) from error
        return out, graph.replay


class CallCapture:
    """Capture of computations on a CPU as calls of native code and torch. Tensors stay at their addresses.

    Captures share memory, since only one is replayed at a time. A computation must not read numbers into Python, as
    ``tolist`` does, since they would be those of the capture.
    """

    def __init__(self) -> None:
        self._memory: list[Tensor] = []
        """Memory of the tensors that the first capture allocated, in order."""

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        calls: list[Call] = []
        recorder = _Recorder(calls, self._memory)
        try:
            with recorder, recorded_in(calls):
                out = compute()
        except RuntimeError as error:
            raise CaptureError(str(error)) from error
        return out, partial(_replay, calls, recorder.tensors)


def _replay(calls: Sequence[Call], _tensors: Sequence[Tensor]) -> None:
    """Make all calls. Their tensors must live."""
    for call in calls:
        call()


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of torch's operations. Native calls, which torch does not see, are in the same list."""

    def __init__(self, calls: list[Call], memory: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._memory = calls, memory
        self._num_allocated = 0
        self.tensors: list[Tensor] = []
        """Results, whose addresses later calls use."""

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        operation = partial(func, *args, **(kwargs or {}))
        out = operation()
        results = _results(func, out)
        if func in _EMPTY:
            out = self._allocate(out)
            results = [out]
        elif func._schema.is_mutable:
            self._calls.append(operation)
        elif not any(_is_view(result, args) for result in results):
            self._calls.append(partial(_repeat, operation, results))
        self.tensors += results
        return out

    def _allocate(self, tensor: Tensor) -> Tensor:
        """Return a tensor in the memory of the first capture, if that has allocated as much at this point."""
        index, size = self._num_allocated, tensor.numel()
        self._num_allocated += 1
        if index == len(self._memory):
            self._memory.append(tensor)
        memory = self._memory[index]
        if memory.dtype != tensor.dtype or memory.numel() < size or not tensor.is_contiguous():
            return tensor
        return memory.view(-1)[:size].view(tensor.shape)


def _results(operation: object, out: Any) -> Sequence[Tensor]:
    results: Sequence[Tensor] = out if isinstance(out, Sequence) else [out]
    if not all(isinstance(result, Tensor) for result in results):
        raise CaptureError(f"{operation} does not return tensors")
    return results


def _repeat(operation: Callable[[], object], results: Sequence[Tensor]) -> None:
    """Write an operation's results to the tensors that had them before."""
    for old, new in zip(results, _results(operation, operation()), strict=True):
        old.copy_(new)


def _is_view(out: Tensor, args: Sequence[object]) -> bool:
    """Return whether an operation has copied nothing. Its name does not tell: ``to`` may copy or not."""
    address = out.untyped_storage().data_ptr()
    # Packed weights have no storage.
    strided = (arg for arg in args if isinstance(arg, Tensor) and arg.layout is torch.strided)
    return any(arg.untyped_storage().data_ptr() == address for arg in strided)


def capture_maker(device: Device) -> Callable[[], Capture]:
    """Return a factory of captures for a device."""
    if not device.has_own_memory:
        return CallCapture
    return partial(GraphCapture, torch.cuda.Stream(device.torch_device))  # type: ignore[no-untyped-call]
