"""GPU whose tensors are on the CPU. Operations that a GPU would refuse, or for which the host would wait, raise errors.

Work begins only when the host waits for it, itself or through an event. Code that does not wait for what it reads thus
gets what was there before. To torch, the tensors are on the meta device, which every build of torch has. Triton
interprets the kernels.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from cluster.spec.memory import GpuMemory
from workers import device
from workers.device import CPU, Device

META = torch.device("meta")
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Tags of operations for whose results the host waits."""


class GpuError(Exception):
    """Operation that a GPU would refuse, or for which the host would wait."""


class Twin(Tensor):
    """Tensor that is on the GPU as far as torch knows."""

    on_cpu: Tensor
    is_number = False
    """Whether this is a plain number of Python, which torch copies to a GPU to assign it to indices."""
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, on_cpu: Tensor) -> "Twin":
        size, strides, offset = on_cpu.size(), on_cpu.stride(), on_cpu.storage_offset()
        with torch.inference_mode(mode=False):
            twin: Twin = Tensor._make_wrapper_subclass(
                cls, size, strides=strides, storage_offset=offset, dtype=on_cpu.dtype, device=META
            )
        twin.on_cpu = on_cpu
        return twin

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} is called outside of twin_gpu")

    def data_ptr(self) -> int:
        return self.on_cpu.data_ptr()


class Stream:
    """Work that begins in order. Only one thread at a time adds to it."""

    _computing = threading.RLock()

    def __init__(self, gpu: "TwinGpu") -> None:
        self._gpu = gpu
        self._waiting = deque[Callable[[], object]]()
        self._num_begun = self._num_added = 0

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def add(self, work: Callable[[], object]) -> None:
        self._num_added += 1
        self._waiting.append(work)

    def record_event(self) -> "Event":
        return Event(self._gpu, partial(self.run, self._num_added))

    def synchronize(self) -> None:
        self.record_event().synchronize()

    def run(self, end: int | None = None) -> None:
        """Do the work that was added first, until ``end`` pieces of work in total, or all."""
        with self._computing, torch.inference_mode():
            while self._waiting and (end is None or self._num_begun < end):
                self._num_begun += 1
                self._waiting.popleft()()


class Event:
    """Event that is over when somebody waits for it, or asks a second time."""

    def __init__(self, gpu: "TwinGpu", run: Callable[[], None]) -> None:
        self._gpu, self._run, self._was_asked = gpu, run, False

    def synchronize(self) -> None:
        self._gpu.num_waits += 1
        self._run()

    def wait(self) -> None:
        """Make the current stream wait."""
        self._gpu.stream.add(self._run)

    def query(self) -> bool:
        was_asked, self._was_asked = self._was_asked, True
        if was_asked:
            self._run()
        return was_asked


class TwinGpu(Device):
    """GPU with streams."""

    name = "meta"
    torch_device = META
    has_own_memory = has_kernels = is_asynchronous = True

    def __init__(self) -> None:
        self.may_wait = True
        """Whether the host may wait, as it does while it loads a model."""
        self.num_waits = 0
        """Number of times that the host has waited for work to end."""
        self._captured: list[Callable[[], object]] | None = None
        """Work of the capture in progress."""
        self._streams = [Stream(self)]
        self._current = threading.local()
        self._pinned: dict[int, Tensor] = {}
        """Torch's pinned tensors by address. They are kept, so that their addresses stay theirs."""
        self._registered: dict[int, int] = {}
        """Sizes of other pinned memory by address."""

    @property
    def stream(self) -> Stream:
        """The thread's current stream."""
        stream: Stream = getattr(self._current, "stream", self._streams[0])
        return stream

    def copy_stream(self) -> Any:
        self._streams.append(Stream(self))
        return self._streams[-1]

    @contextmanager
    def on_stream(self, stream: Any, after: Any) -> Iterator[None]:
        before, self._current.stream = self.stream, stream or self.stream
        try:
            if after is not None:
                after.wait()
            yield
        finally:
            self._current.stream = before

    def record_event(self) -> Any:
        return self.stream.record_event()

    def synchronize(self) -> None:
        self.num_waits += 1
        for stream in self._streams:
            stream.run()

    def measure_memory(self, compute: Callable[[], None], fraction: float) -> GpuMemory:
        """Compute, but measure nothing."""
        compute()
        return GpuMemory(total=80.0, fraction=fraction, weights=1.0, activations=1.0)

    def put(self, on_host: Tensor) -> Tensor:
        self.refuse_in_capture("a copy from the host")
        return Twin(on_host.clone())

    def wait(self, reason: str) -> None:
        """Do the work of the current stream if the host may wait for it."""
        self.refuse_in_capture(reason)
        if not self.may_wait:
            raise GpuError(f"the host waits: {reason}")
        self.stream.run()

    def refuse_in_capture(self, reason: str) -> None:
        if self._captured is not None:
            raise GpuError(f"not permitted in a capture: {reason}")

    def add(self, work: Callable[[], object]) -> None:
        """Add work to the current stream, or to the capture in progress."""
        if self._captured is None:
            self.stream.add(work)
        else:
            self._captured.append(work)

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Capture a computation's second run, like a CUDA graph."""
        compute()
        captured = self._captured = list[Callable[[], object]]()
        try:
            out = compute()
        finally:
            self._captured = None

        def replay() -> None:
            for work in captured:
                self.add(work)

        return out, replay

    def note_pinned(self, tensor: Tensor) -> None:
        self._pinned[_address(tensor)] = tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        is_registered = any(first <= begin and end <= first + size for first, size in self._registered.items())
        return is_registered or _address(tensor) in self._pinned

    def register(self, address: int, num_bytes: int, _: int) -> int:
        """Stand in for cudaHostRegister."""
        assert address not in self._registered
        self._registered[address] = num_bytes
        return 0

    def unregister(self, address: int) -> int:
        """Stand in for cudaHostUnregister."""
        assert all(stream.is_idle for stream in self._streams), "a copy may be in progress"
        del self._registered[address]
        return 0


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch's operations on twins and on host memory."""

    def __init__(self, gpu: TwinGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        others = [each for each in tensors if not isinstance(each, Twin)]
        if len(others) == len(tensors) and kwargs.get("device") != META:
            return self._on_host(func, args, kwargs)
        with self:
            if (out := func.decompose(*args, **kwargs)) is not NotImplemented:
                return out
        to_host = kwargs.get("device") not in (None, META)
        name = func.overloadpacket.__name__
        if name == "copy_":
            return self._copy(*args, **kwargs)
        is_known = func.is_view
        if (name == "_to_copy" and (to_host or others)) or _waits(func, name, args, kwargs):
            self._gpu.wait(str(func))
            is_known = True
        elif any(each.dim() for each in others):
            raise GpuError(f"{func} of tensors on different devices")
        if to_host:
            return self._on_host(func, *tree_map(_on_cpu, (args, kwargs)))
        return self._compute(func, args, kwargs, is_known=is_known)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_pinned = kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        if is_pinned:
            self._gpu.note_pinned(out)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any, *, is_known: bool) -> Any:
        """Return the results. Unless these are views or known, the work writes to them later."""
        on_cpu = tree_map(_on_cpu, kwargs) | ({"device": CPU.torch_device} if "device" in kwargs else {})
        work = partial(func, *tree_map(_on_cpu, args), **on_cpu)
        if func is torch.ops.aten.scalar_tensor.default:
            number = Twin(work())
            number.is_number = True
            return number
        if is_known:
            return tree_map(_twin_of, work())
        twins = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Twin)]
        metas = {id(twin): _like(twin, META) for twin in twins}
        shapes = func(*_replaced(args, metas), **_replaced(kwargs, metas))
        if func._schema.is_mutable:
            self._gpu.add(work)
            return _replaced(shapes, {id(metas[id(twin)]): twin for twin in twins})
        results = tree_map(lambda shape: _like(shape, CPU.torch_device), shapes)
        self._gpu.add(lambda: tree_map(Tensor.copy_, results, work()))
        return tree_map(_twin_of, results)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        to_gpu, copy = isinstance(target, Twin), partial(_on_cpu(target).copy_, _on_cpu(source))
        if to_gpu == isinstance(source, Twin):
            self._gpu.add(copy)
            return target
        self._gpu.refuse_in_capture("a copy between host and GPU")
        if not non_blocking or not self._gpu.is_pinned(source if to_gpu else target):
            self._gpu.wait("a copy between host and GPU")
            copy()
            return target
        if not to_gpu:
            target.fill_(-1 if target.dtype.is_signed else 1)  # what a host that does not wait might read
        self._gpu.add(copy)
        return target


def _waits(func: Any, name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the host must know an operation's result, such as the length, before it goes on."""
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        has_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if name == "index":
            return has_mask
        return args[2].numel() > 1 if has_mask else not isinstance(args[2], Twin) or args[2].is_number
    return kwargs.get("output_size") is None and not _WAITING.isdisjoint(func.tags)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _on_cpu(leaf: Any) -> Any:
    return leaf.on_cpu if isinstance(leaf, Twin) else leaf


def _twin_of(leaf: Any) -> Any:
    return Twin(leaf) if type(leaf) is Tensor else leaf


def _replaced(tree: Any, by_id: Mapping[int, Tensor]) -> Any:
    return tree_map(lambda leaf: by_id.get(id(leaf), leaf), tree)


def _like(shape: Tensor, where: torch.device) -> Tensor:
    return torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device=where)


@contextmanager
def twin_gpu() -> Iterator[TwinGpu]:
    """Provide a GPU of twins to the code in this context, and to threads that start in it."""
    gpu, launch, make, run = TwinGpu(), interpreter.GridExecutor.__call__, torch.tensor, threading.Thread.run

    def launch_on_cpu(executor: Any, *args: Any, **kwargs: Any) -> None:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Tensor) and not isinstance(arg, Twin) and not gpu.is_pinned(arg):
                raise GpuError(f"{executor.fn.__name__} gets a tensor on {arg.device}")
        gpu.add(partial(launch, executor, *map(_on_cpu, args), **tree_map(_on_cpu, kwargs)))

    def make_on_cpu(values: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
        """Copy values to the GPU. For the meta device, torch would drop them."""
        made = make(values, device="cpu", **options)
        return made if device is None else made.to(device)

    def run_thread(thread: threading.Thread) -> None:
        with _Operations(gpu):
            run(thread)

    runtime = SimpleNamespace(cudaHostRegister=gpu.register, cudaHostUnregister=gpu.unregister)
    with pytest.MonkeyPatch.context() as patch, _Operations(gpu):
        patch.setitem(device._DEVICES, META, gpu)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_on_cpu)
        patch.setattr(torch, "tensor", make_on_cpu)
        patch.setattr(threading.Thread, "run", run_thread)
        patch.setattr(torch.cuda, "cudart", lambda: runtime)
        patch.setattr(torch.cuda, "check_error", lambda _: None)
        patch.setattr(torch.cuda, "synchronize", gpu.synchronize)
        yield gpu
