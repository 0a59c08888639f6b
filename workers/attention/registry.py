"""Attention backends by name, each imported at first use. A machine needs the libraries of the backends in use only."""

import logging
from collections.abc import Iterable, Set
from importlib import import_module
from typing import NamedTuple

import torch

from cluster.compilation import CannotCompileError
from cluster.spec.checks import ATTENTION_DEVICES
from cluster.spec.config import AttentionSetting
from cluster.spec.errors import UserError
from cluster.spec.kv import KvGroup
from workers.attention.interface import AttentionBackend, AttentionShape, Feature
from workers.attention.measured import find_fastest
from workers.device import Device
from workers.native.compile import find_compiler


class Entry(NamedTuple):
    target: str
    lacks: Set[Feature] = frozenset()
    dtypes: tuple[torch.dtype, ...] | None = None
    """Supported dtypes; None if all are."""


BACKENDS = {
    "flash_attn": Entry(
        "workers.attention.flash_attn_backend:FlashAttention",
        frozenset({Feature.WIDE_KEYS, Feature.SMALL_MEMORY}),
        dtypes=(torch.bfloat16,),
    ),
    "native": Entry(
        "workers.attention.native_backend:NativeAttention",
        frozenset({Feature.WINDOW}),
        dtypes=(torch.bfloat16, torch.float32),
    ),
    "torch": Entry("workers.attention.torch_backend:TorchAttention"),
    "triton": Entry(
        "workers.attention.triton.backend:TritonAttention",
        frozenset({Feature.WIDE_KEYS, Feature.SMALL_MEMORY}),
    ),
}

_WIDE, _WIDE_LATENT = 256, 576
"""Maximum width of keys for the kernels' shared memory: beside values, and with their values inside."""
_LATENT_SHARED_BYTES = 152 << 10
"""Shared memory that kernels for such latents take on GPUs before Hopper. Ada and its like have less."""

_log = logging.getLogger(__name__)


class BackendChoice(NamedTuple):
    name: str
    """Name of the backend, or of both if it combines two."""
    backend: AttentionBackend
    reason: str


def load_backend(name: str) -> AttentionBackend:
    """Import and create a backend. Raises UserError if its package is missing."""
    module, _, attribute = BACKENDS[name].target.partition(":")
    try:
        backend: AttentionBackend = getattr(import_module(module), attribute)()
    except ImportError as error:
        raise UserError(f"attention backend {name!r} cannot be loaded: {error}") from error
    return backend


def needs_of(groups: Iterable[KvGroup], device: Device) -> frozenset[Feature]:
    needs = set()
    for group in groups:
        if group.window is not None:
            needs.add(Feature.WINDOW)
        has_values = "v" in {part.name for part in group.parts}
        widest = max(part.dim for part in group.parts)
        if widest > (_WIDE if has_values else _WIDE_LATENT):
            needs.add(Feature.WIDE_KEYS)
        elif widest > _WIDE and device.shared_bytes is not None and device.shared_bytes < _LATENT_SHARED_BYTES:
            needs.add(Feature.SMALL_MEMORY)
    return frozenset(needs)


def choose_backend(
    setting: AttentionSetting,
    device: Device,
    dtype: torch.dtype,
    needs: Set[Feature] = frozenset(),
    shape: AttentionShape | None = None,
) -> BackendChoice:
    """Return the backend that ``resources.attention`` names, or for ``auto`` the fastest one on this machine.

    The native backend is compiled if necessary. ``needs`` are the features that the model's layers require. On a CPU,
    the fastest backend is measured for layers of this ``shape``. Without one, native counts as the fastest.

    Raises:
        UserError: the backend does not support this device, dtype or model, or is not installed.
    """
    name = setting.value
    if setting is AttentionSetting.AUTO:
        return _fastest(device, dtype, needs, shape)
    suitable = {
        name: entry.lacks
        for name, entry in BACKENDS.items()
        if ATTENTION_DEVICES.get(AttentionSetting(name), device.name) == device.name
        and (entry.dtypes is None or dtype in entry.dtypes)
    }
    on = f"on {device.name} in {dtype}".replace("torch.", "")
    if name not in suitable:
        raise UserError(f"resources.attention: got {name}; allowed {on}: {_listed(suitable)}")
    if missing := needs & suitable[name]:
        able = _listed(other for other, lacks in suitable.items() if not needs & lacks)
        got = f"got {name}, which lacks {_words(missing)}"
        raise UserError(f"resources.attention: {got}; allowed {on} for this model: {able}")
    try:
        return BackendChoice(name, load_backend(name), "set in resources.attention")
    except CannotCompileError as error:
        raise UserError(f"resources.attention: got native; {error}{error.fix and f'; {error.fix}'}") from error


def _listed(names: Iterable[str]) -> str:
    return ", ".join(["auto", *sorted(names)])


def _words(features: Set[Feature]) -> str:
    return " and ".join(sorted(features))


def _fastest(device: Device, dtype: torch.dtype, needs: Set[Feature], shape: AttentionShape | None) -> BackendChoice:
    if device.has_kernels and (missing := needs & BACKENDS["triton"].lacks):
        return BackendChoice("torch", load_backend("torch"), f"triton lacks {_words(missing)}")
    if device.has_kernels:
        return BackendChoice("triton", load_backend("triton"), "reads pages of any size in place")
    if dtype not in (BACKENDS["native"].dtypes or ()):
        return BackendChoice("torch", load_backend("torch"), f"{dtype} on a CPU")
    if missing := needs & BACKENDS["native"].lacks:
        return BackendChoice("torch", load_backend("torch"), f"native lacks {_words(missing)}")
    try:
        native = load_backend("native")
    except CannotCompileError as error:
        _log.warning("attention uses plain torch, at half the speed: %s%s", error, error.fix and f"; {error.fix}")
        return BackendChoice("torch", load_backend("torch"), f"native is unavailable: {error}")
    reason = f"compiled for {find_compiler().kind.name}"
    if shape is None:
        return BackendChoice("native", native, reason)
    name, backend, times = find_fastest({"native": native, "torch": load_backend("torch")}, shape, dtype)
    return BackendChoice(name, backend, f"{reason}; {times}")
