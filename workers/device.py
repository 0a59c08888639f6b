"""Device that a rank computes on: the CPU or a GPU.

Other modules query its capabilities, such as ``has_kernels`` and ``is_asynchronous``. Only modules that are for GPUs
alone use ``torch.cuda`` themselves.
"""

import ctypes
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.spec import config
from cluster.spec.errors import UserError
from cluster.spec.memory import GIB, LIBRARIES_GIB, GpuMemory

SAMPLE_S = 0.02
"""Minimum duration in seconds of a measurement that need not be repeated or enlarged."""
_MOST_SAMPLES = 5
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameter numbers of mallopt(3)."""
_RETAINED_BYTES = 512 << 20
_LARGEST_BYTES = 32 << 20
"""Largest mmap threshold that glibc accepts."""

_FP8_CAPABILITY = (8, 9)
"""Least compute capability of GPUs with tensor cores for FP8: Ada, Hopper and later."""

Event = torch.cuda.Event
"""Event that completes after all GPU work that was started before the event. None stands for a completed event."""
Stream = torch.cuda.Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Sizes of the measurements during warm-up."""

    tokens: tuple[int, int]
    """Smallest and largest token count. The count quadruples in between. At the largest count, arithmetic dominates."""
    queries: int
    prefix: int
    rows: tuple[int, int]
    """Rows per rank in a collective."""


class Device:
    """Device that a rank computes on. By default, calls return once work is done, and memory is host memory."""

    name: str
    torch_device: torch.device
    """Device on which torch allocates tensors."""
    share = 1.0
    """Part of the device that this process uses. Other workers use the rest."""
    has_own_memory = False
    """Whether the device computes in its own memory instead of host memory."""
    has_kernels = False
    """Whether the device runs the kernels of workers.kernels. Otherwise, plain torch computes."""
    has_torch_flash = False
    """Whether torch has a flash-attention kernel that returns partials on the device."""
    is_asynchronous = False
    """Whether work runs in the background, as do copies if the host memory is pinned."""
    multiplies_fp8 = False
    """Whether a kernel multiplies in FP8. Otherwise, weights in FP8 are dequantized."""
    multiplies_bf16 = True
    """Whether matrix products are faster in bf16 than in fp32."""
    packs_bf16 = False
    """Whether oneDNN multiplies in bf16, with weights in a layout of its own."""
    compute_capability: tuple[int, int] | None = None
    shared_bytes: int | None = None
    """Maximum shared memory of a kernel's program, on a GPU."""
    samples: Samples

    @property
    def title(self) -> str:
        """Return the device's name for display."""
        return self.name

    def synchronize(self) -> None:
        """Wait for all work on the device."""

    def now_s(self) -> float:
        """Return the current time, for measurements, once all work started so far is complete."""
        return time.perf_counter()

    def least_s(self, call: Callable[[], object]) -> float:
        """Return the shortest time in seconds of several calls, of fewer if they take long. There are at least two,
        since the first one can wait for new memory.
        """
        started_s, least_s = self.now_s(), math.inf
        for number in range(_MOST_SAMPLES):
            start_s = self.now_s()
            call()
            end_s = self.now_s()
            least_s = min(least_s, end_s - start_s)
            if number and end_s - started_s >= SAMPLE_S:
                break
        return least_s

    def record_event(self) -> Event | None:
        """Record an event after all work that this thread has started; return None if that work is complete."""
        return None

    def copy_stream(self) -> Stream | None:
        """Return a high-priority stream, on which copies need not wait for a large kernel to end."""
        return None

    def on_stream(self, stream: Stream | None, after: Event | None) -> AbstractContextManager[None]:  # noqa: ARG002
        """Return a context in which work runs after an event, on the given stream or, by default, the current one."""
        return nullcontext()

    def put(self, on_host: Tensor) -> Tensor:
        """Return the tensor on the device. Copying it does not block the host."""
        return on_host

    def put_index(self, numbers: Sequence[int]) -> Tensor:
        """Return integers on the device, for indexing. Indexing with a list would block the host during the copy."""
        return self.put(torch.tensor(numbers, dtype=torch.int64, device="cpu"))

    def argmax(self, scores: Tensor) -> Tensor:
        """Return the index of each row's first maximum."""
        return scores.argmax(dim=-1)

    def used_bytes(self) -> int:
        """Return how many bytes of the device's own memory are in use; on a shared device, by torch in this process."""
        return 0

    def measure_memory(self, compute: Callable[[], None], fraction: float) -> GpuMemory:
        """Return how much of the device's own memory weights take, and how much activations take in a computation."""
        raise NotImplementedError


class CpuDevice(Device):
    name = "cpu"
    torch_device = torch.device("cpu")
    has_torch_flash = True
    samples = Samples(tokens=(16, 256), queries=128, prefix=896, rows=(16, 512))

    def __init__(self) -> None:
        self.multiplies_bf16 = self.packs_bf16 = _has_bf16_instructions()

    def now_s(self) -> float:
        """Return the thread's CPU time, which excludes other work on the core, or with several threads, the time."""
        return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()

    def argmax(self, scores: Tensor) -> Tensor:
        """Use numpy, which is several times as fast as torch."""
        return torch.from_numpy(scores.numpy().argmax(axis=-1))


class GpuDevice(Device):
    """First GPU of this process."""

    name = "cuda"
    torch_device = torch.device("cuda", 0)
    has_own_memory = has_kernels = is_asynchronous = True
    # Below the largest token count, reading weights and launching kernels takes a GPU longer than arithmetic.
    samples = Samples(tokens=(32, 2048), queries=2048, prefix=6144, rows=(16, 4096))

    @property
    def title(self) -> str:
        index = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        return f"GPU {index}, {torch.cuda.get_device_name(self.torch_device)}"

    @property
    def compute_capability(self) -> tuple[int, int]:  # type: ignore[override]
        return torch.cuda.get_device_capability(self.torch_device)

    @property
    def shared_bytes(self) -> int:  # type: ignore[override]
        properties = torch.cuda.get_device_properties(self.torch_device)
        return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]

    @property
    def multiplies_fp8(self) -> bool:  # type: ignore[override]
        return self.compute_capability >= _FP8_CAPABILITY

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def now_s(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def record_event(self) -> Event:
        event: Event = torch.cuda.current_stream(self.torch_device).record_event()
        return event

    def copy_stream(self) -> Stream:
        return Stream(self.torch_device, priority=-1)  # type: ignore[no-untyped-call]

    @contextmanager
    def on_stream(self, stream: Stream | None, after: Event | None) -> Iterator[None]:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            if after is not None:
                torch.cuda.current_stream(self.torch_device).wait_event(after)
            yield

    def put(self, on_host: Tensor) -> Tensor:
        """Copy from pinned memory, which torch keeps until the copy is done."""
        if not on_host.numel():
            return on_host.to(self.torch_device)
        return on_host.pin_memory().to(self.torch_device, non_blocking=True)

    def used_bytes(self) -> int:
        self.synchronize()
        torch.cuda.empty_cache()
        if self.share < 1:  # the other workers' memory may change at any time
            return torch.cuda.memory_reserved(self.torch_device)
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free

    def measure_memory(self, compute: Callable[[], None], fraction: float) -> GpuMemory:
        device = self.torch_device
        self.used_bytes()
        weights = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        others = max(self.used_bytes() - torch.cuda.memory_reserved(device), 0) / GIB
        return GpuMemory(
            total=self.share * torch.cuda.mem_get_info(device)[1] / GIB,
            fraction=fraction,
            weights=weights / GIB,
            activations=(torch.cuda.max_memory_allocated(device) - weights) / GIB,
            others=LIBRARIES_GIB if self.share < 1 else others,
        )


def _has_bf16_instructions() -> bool:
    """Return whether the processor has bf16 instructions that torch uses."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if platform.machine() in ("aarch64", "arm64"):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


CPU, GPU = CpuDevice(), GpuDevice()
_DEVICES: dict[torch.device, Device] = {each.torch_device: each for each in (CPU, GPU)}


def missing_gpu() -> str | None:
    """Return the reason why torch cannot use a GPU, or None if it can."""
    if torch.cuda.is_available():
        return None
    build = "has no CUDA" if torch.version.cuda is None else f"is for CUDA {torch.version.cuda} and sees no GPU"
    return f"torch {torch.__version__} {build}"


def open_device(device: config.Device, share: float = 1.0) -> Device:
    """Return the CPU, or make this process's first GPU current and return it.

    Torch allocates at most a ``share`` of the GPU's memory, so that a worker does not take that of its neighbours.

    Raises:
        UserError: torch sees no GPU.
    """
    if device is config.Device.CPU:
        return CPU
    if (missing := missing_gpu()) is not None:
        raise UserError(f"resources.device: got cuda, but {missing}; allowed here: cpu")
    torch.cuda.set_device(GPU.torch_device)
    GPU.share = share
    torch.cuda.set_per_process_memory_fraction(share, GPU.torch_device)
    # Containers can allow TF32 by an environment variable.
    torch.set_float32_matmul_precision("highest")
    # Otherwise, cuBLAS may add parts of a sum in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    return GPU


def device_of(tensor: Tensor) -> Device:
    """Return the device whose memory holds a tensor."""
    return _DEVICES[tensor.device]


def device_between(source: Tensor, target: Tensor) -> Device:
    """Return the device that copies between two memories: the GPU if either memory is on a GPU."""
    device = device_of(source)
    return device if device.has_own_memory else device_of(target)


def is_within_device(source: Tensor, target: Tensor) -> bool:
    """Return whether a copy involves no host memory."""
    return device_of(source).has_own_memory and device_of(target).has_own_memory


class Arriving:
    """Tensors that are being copied to the host. GPU work started later does not delay the copies."""

    def __init__(self, *tensors: Tensor) -> None:
        device = device_of(tensors[0])
        self._on_host = tensors
        if device.is_asynchronous:
            self._on_host = tuple(
                torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
                for tensor in tensors
            )
        self._there = device.record_event()

    @property
    def is_there(self) -> bool:
        return self._there is None or bool(self._there.query())  # type: ignore[no-untyped-call]

    def wait(self) -> tuple[Tensor, ...]:
        if self._there is not None:
            self._there.synchronize()
        return self._on_host


def use_cpu(num_threads: int) -> None:
    """Set the number of compute threads, and make the process keep freed memory for the next layer.

    Without this, each large activation would use new memory, which the system clears page by page. That takes 6% of a
    prefill step with 4096 tokens.
    """
    torch.set_num_threads(num_threads)
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST_BYTES)
        libc.mallopt(_TRIM_THRESHOLD, _RETAINED_BYTES)
