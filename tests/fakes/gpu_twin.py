"""GPU whose tensors are on the CPU. Operations that a GPU would refuse, or for which the host would wait, raise errors.

To torch, the tensors are on the meta device, which every build of torch has. Triton interprets the kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from cluster.spec.memory import GpuMemory
from workers import device
from workers.device import Device, Event

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


class TwinGpu(Device):
    """GPU that does all work at once, except that copies to the host arrive when the host waits for them."""

    name = "meta"
    torch_device = META
    has_own_memory = has_kernels = is_asynchronous = True

    def __init__(self) -> None:
        self.may_wait = True
        """Whether the host may wait, as it does while it loads a model."""
        self.num_waits = 0
        """Number of times that the host has waited for work to end."""
        self.arriving: list[Callable[[], object]] = []
        """Copies to the host that are in progress."""
        self.recorded: list[Callable[[], object]] | None = None
        """Work of the capture in progress."""

    def record_event(self) -> Event:
        """Return the device itself: to wait for one event is to wait for all work."""
        return self  # type: ignore[return-value]

    def synchronize(self) -> None:
        self.num_waits += 1
        with torch.inference_mode():
            while self.arriving:
                self.arriving.pop()()

    def measure_memory(self, compute: Callable[[], None], fraction: float) -> GpuMemory:
        """Compute, but measure nothing."""
        compute()
        return GpuMemory(total=80.0, fraction=fraction, weights=1.0, activations=1.0)

    def put(self, on_host: Tensor) -> Tensor:
        self.refuse_in_capture("a copy from the host")
        return Twin(on_host.clone())

    def note_wait(self, reason: str) -> None:
        self.refuse_in_capture(reason)
        if not self.may_wait:
            raise GpuError(f"the host waits: {reason}")

    def refuse_in_capture(self, reason: str) -> None:
        if self.recorded is not None:
            raise GpuError(f"not permitted in a capture: {reason}")

    def record(self, work: Callable[[], object]) -> None:
        """Note work for replays, if a capture is in progress."""
        if self.recorded is not None:
            self.recorded.append(work)

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Capture a computation's second run, like a CUDA graph."""
        compute()
        recorded = self.recorded = list[Callable[[], object]]()
        try:
            out = compute()
        finally:
            self.recorded = None

        def replay() -> None:
            for work in recorded:
                work()

        return out, replay


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Torch's operations on twins and on host memory."""

    def __init__(self, gpu: TwinGpu) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu
        self._pinned: dict[int, Tensor] = {}
        """Pinned tensors by address. They are kept, so that their addresses stay theirs."""

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
        if (name == "_to_copy" and (to_host or others)) or _waits(func, name, args, kwargs):
            self._gpu.note_wait(str(func))
        elif any(each.dim() for each in others):
            raise GpuError(f"{func} of tensors on different devices")
        return self._on_host(func, *tree_map(_on_cpu, (args, kwargs))) if to_host else self._compute(func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_pinned = kwargs.pop("pin_memory", None)
        out = func(*args, **kwargs)
        if is_pinned:
            self._pinned[_address(out)] = out
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute on the CPU. Replays write to the same results."""
        twins = {id(leaf.on_cpu): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Twin)}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        work = partial(func, *tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        out = work()
        if func is torch.ops.aten.scalar_tensor.default:
            number = Twin(out)
            number.is_number = True
            return number
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        if func._schema.is_mutable:
            self._gpu.record(work)
        elif not {_address(each) for each in results} <= {_address(twin.on_cpu) for twin in twins.values()}:
            # The results are not views.
            self._gpu.record(lambda: [to.copy_(found) for to, found in zip(results, tree_leaves(work()), strict=True)])
        return tree_map(lambda leaf: _twin_of(twins.get(id(leaf), leaf)), out)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        to_gpu, copy = isinstance(target, Twin), partial(_on_cpu(target).copy_, _on_cpu(source))
        if to_gpu == isinstance(source, Twin):
            copy()
            self._gpu.record(copy)
            return target
        self._gpu.refuse_in_capture("a copy between host and GPU")
        in_background = non_blocking and _address(source if to_gpu else target) in self._pinned
        if not in_background:
            self._gpu.note_wait("a copy between host and GPU")
        if in_background and not to_gpu:
            target.fill_(-1)  # what a host that does not wait might read
            copy = partial(self._gpu.arriving.append, partial(target.copy_, _on_cpu(source).clone()))
        copy()
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


@contextmanager
def twin_gpu() -> Iterator[TwinGpu]:
    """Provide a GPU of twins to the code in this context."""
    gpu, launch, make = TwinGpu(), interpreter.GridExecutor.__call__, torch.tensor

    def launch_on_cpu(executor: Any, *args: Any, **kwargs: Any) -> None:
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Tensor) and not isinstance(arg, Twin):
                raise GpuError(f"{executor.fn.__name__} gets a tensor on {arg.device}")
        work = partial(launch, executor, *map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        work()
        gpu.record(work)

    def make_on_cpu(values: Any, *, device: torch.device | None = None, **options: Any) -> Tensor:
        """Copy values to the GPU. For the meta device, torch would drop them."""
        made = make(values, device="cpu", **options)
        return made if device is None else made.to(device)

    with pytest.MonkeyPatch.context() as patch, _Operations(gpu):
        patch.setitem(device._DEVICES, META, gpu)
        patch.setattr(interpreter.GridExecutor, "__call__", launch_on_cpu)
        patch.setattr(torch, "tensor", make_on_cpu)
        yield gpu
