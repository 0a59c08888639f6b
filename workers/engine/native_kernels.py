"""Choice of a model's kernels: the attention backend, and on CPUs native code, as far as it is faster than torch."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile

import torch
from torch import Tensor

from cluster.compilation import CannotCompileError
from cluster.spec.config import AttentionSetting
from cluster.spec.kv import KvGeometry
from workers.attention.registry import BackendChoice, choose_backend, needs_of
from workers.device import Device
from workers.kernels import elementwise
from workers.layers.matmul import FewRows, PackedMatrix
from workers.models.decoder import DecoderModel
from workers.native.library import DTYPES, MOST_ROWS, Library

_log = logging.getLogger(__name__)

_ROWS = (1, 4, 16, MOST_ROWS)
_SAMPLE_BYTES = 64 << 20
"""Bytes of weights to multiply by, which are more than a core's caches hold."""


def choose_kernels(setting: AttentionSetting, model: DecoderModel, geometry: KvGeometry) -> BackendChoice:
    """Choose the attention backend. On a CPU, let native code compute norms, gates and products, too.

    This does not depend on the choice: attention to a window, for example, is left to torch.
    """
    needs = needs_of(geometry.groups, model.device)
    choice = choose_backend(setting, model.device, model.dtype, needs, model.attention)
    if setting is not AttentionSetting.TORCH and not model.device.has_kernels and model.dtype in DTYPES:
        with suppress(CannotCompileError):  # then plain torch computes everything
            library = Library.load()
            elementwise.register(model.device, model.dtype, library)
            use_native_products(model, library)
    return choice


def use_native_products(model: DecoderModel, library: Library) -> None:
    """Let native code multiply few rows by packed weights, where it is faster than oneDNN."""
    readable = [matrix for matrix in model.packed_matrices() if matrix.blocks is not None]
    if not readable or not library.multiplies_packed:
        return
    sample, num_bytes = list[PackedMatrix](), 0
    for matrix in readable:
        sample.append(matrix)
        num_bytes += matrix.matrix.nbytes
        if num_bytes >= _SAMPLE_BYTES:
            break
    most = max(takewhile(lambda num_rows: _is_faster(model.device, library, sample, num_rows), _ROWS), default=0)
    for matrix in readable:
        matrix.few_rows = FewRows(library, most)
    _log.info("native code multiplies up to %d rows by weights", most)


def _is_faster(device: Device, library: Library, matrices: Sequence[PackedMatrix], num_rows: int) -> bool:
    inputs = {size: torch.zeros(num_rows, size, dtype=torch.bfloat16) for size in {each.shape[1] for each in matrices}}

    def time_s(multiply: Callable[[PackedMatrix, Tensor], Tensor]) -> float:
        def multiply_all() -> None:
            for matrix in matrices:
                multiply(matrix, inputs[matrix.shape[1]])

        multiply_all()  # the first time, oneDNN prepares its code for these shapes
        return device.least_s(multiply_all)

    return time_s(lambda matrix, x: matrix.multiply_few(library, x)) < time_s(PackedMatrix.multiply_many)
