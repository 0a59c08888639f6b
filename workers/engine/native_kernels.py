"""Choice of a model's kernels: the attention backend, and on CPUs native code, as far as it is faster than torch."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate, takewhile
from pathlib import Path

import torch
from torch import Tensor

from cluster.compilation import CannotCompileError
from cluster.spec.config import AttentionSetting
from cluster.spec.kv import KvGeometry
from workers.attention.registry import BackendChoice, choose_backend, needs_of
from workers.device import Device
from workers.kernels import elementwise
from workers.layers.matmul import NativeProducts, PackedMatrix
from workers.models.decoder import DecoderModel
from workers.native.library import DTYPES, Library

_log = logging.getLogger(__name__)

_ROWS = {1: 1, 4: 4, 16: 16, 64: 64, 512: 512, 1024: 1024, 2048: sys.maxsize}
"""Numbers of rows that are measured, and up to how many rows each of them stands for."""
_SAMPLE_BYTES = 64 << 20
"""Bytes of weights to multiply by, which are more than a core's caches hold."""
_ROWS_OF_SAMPLE = 64
"""Number of rows above which fewer weights are enough, since products do not wait for memory."""
_MOST_HELPERS = 3
"""Maximum number of helpers per worker. With more, cores would wait for memory."""
_MOST_WITH_HELPERS = 1.25
"""Maximum time of native code, as a multiple of oneDNN's, if helpers can share it: a single one saves a third."""
_ROUNDS = 3
"""Number of measurements of both, in turns."""
_MOST_SLOWDOWN = 1.05
"""Maximum time of native code, as a multiple of oneDNN's. Not measured: oneDNN prepares code for each new number of
rows, and only native code applies gates at once.
"""


def choose_kernels(
    setting: AttentionSetting, model: DecoderModel, geometry: KvGeometry, num_helpers: int = 0
) -> BackendChoice:
    """Choose the attention backend, and rearrange the model's weights for fast products. On a CPU, let native code
    compute norms, gates and products, too.

    This does not depend on the choice: attention to a window, for example, is left to torch.
    """
    needs = needs_of(geometry.groups, model.device)
    choice = choose_backend(setting, model.device, model.dtype, needs, model.attention)
    library = None
    if setting is not AttentionSetting.TORCH and not model.device.has_kernels and model.dtype in DTYPES:
        with suppress(CannotCompileError):  # then plain torch computes everything
            library = Library.load()
            elementwise.register(model.device, model.dtype, library)
    model.pack(library)
    if library is not None:
        use_native_products(model, library, num_helpers)
    return choice


def num_helpers_of(
    setting: AttentionSetting, device: Device, num_ranks: int, quota: Path = Path("/sys/fs/cgroup/cpu.max")
) -> int:
    """Return the number of helpers of each rank of a replica: none on a GPU, without native code, if the worker has
    several threads, or with a quota, of which helpers would take. All ranks compute at the same time.
    """
    has_quota = quota.is_file() and not quota.read_text().startswith("max")
    is_alone = sys.platform == "linux" and torch.get_num_threads() == 1 and not has_quota
    if not is_alone or device.has_own_memory or setting is AttentionSetting.TORCH:
        return 0
    return min(max(len(os.sched_getaffinity(0)) // num_ranks - 1, 0), _MOST_HELPERS)


def start_helpers(count: int, pool: Tensor) -> Callable[[], object]:
    """Let threads of the lowest priority share a CPU's steps while cores are idle. ``pool`` holds all keys and values.

    Returns a function that stops them.
    """
    if not count:
        return lambda: None
    try:
        library = Library.load()
    except CannotCompileError:
        return lambda: None
    if library.start_helpers(count, pool):
        _log.info("up to %d idle cores share steps", count)
    return library.stop_helpers


def use_native_products(model: DecoderModel, library: Library, num_helpers: int = 0) -> None:
    """Let native code multiply by weights in oneDNN's layout, for as many rows as it is about as fast or faster, or not
    much slower if helpers can share it.
    """
    readable = [
        matrix
        for matrix in model.packed_matrices()
        if matrix.native is None and matrix.blocks is not None and matrix.blocks.width in library.products.block_widths
    ]
    if not readable:
        return
    # A step multiplies only a few rows by the head, which can be larger than all layers.
    head = model.lm_head.packed if model.is_last else None
    layers = [matrix for matrix in readable if matrix is not head]
    measured = takewhile(lambda num_rows: _is_fast(model.device, library, layers, num_rows, num_helpers), _ROWS)
    most_rows = max((_ROWS[num_rows] for num_rows in measured), default=0)
    native = NativeProducts(library, most_rows)
    for matrix in readable:
        matrix.native = native
    _log.info("native code multiplies %s rows by weights", "all" if native.takes_all else f"up to {most_rows}")


def _is_fast(
    device: Device, library: Library, matrices: Sequence[PackedMatrix], num_rows: int, num_helpers: int
) -> bool:
    sample = _sample(matrices, _SAMPLE_BYTES * _ROWS_OF_SAMPLE // max(num_rows, _ROWS_OF_SAMPLE))
    # With zeros, which use less power, CPUs multiply faster.
    inputs = {size: torch.randn(num_rows, size).bfloat16() for size in {each.shape[1] for each in sample}}

    def product(multiply: Callable[[PackedMatrix, Tensor], object]) -> Callable[[], None]:
        def multiply_all() -> None:
            for matrix in sample:
                multiply(matrix, inputs[matrix.shape[1]])

        return multiply_all

    native = product(lambda matrix, x: matrix.multiply_natively(library, x))
    onednn = product(PackedMatrix.multiply_with_onednn)
    onednn()  # prepares its code for these shapes
    rounds = [(device.least_s(native), device.least_s(onednn)) for _ in range(_ROUNDS)]
    most = _MOST_WITH_HELPERS if num_helpers else _MOST_SLOWDOWN
    return min(native_s for native_s, _ in rounds) <= most * min(onednn_s for _, onednn_s in rounds)


def _sample(matrices: Sequence[PackedMatrix], least_bytes: int) -> Sequence[PackedMatrix]:
    """Return the first matrices that have ``least_bytes`` in total, or all if they have fewer."""
    totals = accumulate(matrix.matrix.nbytes for matrix in matrices)
    return matrices[: 1 + sum(1 for total in totals if total < least_bytes)]
