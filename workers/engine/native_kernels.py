"""Choice of a model's kernels: the attention backend, and on CPUs native code, as far as it is faster than torch."""

import logging
from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from torch import Tensor

from cluster.spec.config import AttentionSetting
from cluster.spec.kv import KvGeometry
from workers.attention.registry import BackendChoice, choose_backend, needs_of
from workers.device import Device
from workers.kernels import elementwise
from workers.layers.matmul import FewRows, PackedMatrix
from workers.models.decoder import DecoderModel
from workers.native.library import MOST_ROWS, Library

_log = logging.getLogger(__name__)

_ROWS = (1, 4, 16, MOST_ROWS)
_SAMPLE_BYTES = 64 << 20
"""Bytes of weights to multiply by, which are more than a core's caches hold."""


def choose_kernels(setting: AttentionSetting, model: DecoderModel, geometry: KvGeometry) -> BackendChoice:
    """Choose the attention backend. If it is native code, let this also compute norms, gates and products."""
    needs = needs_of(geometry.groups, model.device)
    choice = choose_backend(setting, model.device, model.dtype, needs, model.attention)
    if "native" in choice.name:
        library = Library.load()
        elementwise.register(model.device, model.dtype, library)
        use_native_products(model, library)
    return choice


def use_native_products(model: DecoderModel, library: Library) -> None:
    """Let native code multiply few rows by packed weights, where it is faster than oneDNN."""
    readable = [matrix for matrix in model.packed_matrices() if matrix.block_stride is not None]
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
        return device.least_s(lambda: [multiply(matrix, inputs[matrix.shape[1]]) for matrix in matrices])

    return time_s(lambda matrix, x: matrix.multiply_few(library, x)) < time_s(PackedMatrix.multiply_many)
