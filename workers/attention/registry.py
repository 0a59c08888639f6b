"""Attention backends by name; each is imported when first asked for, so that a machine needs only its own libraries."""

import logging
from importlib import import_module

import torch

from cluster.spec.errors import UserError
from workers.attention.interface import AttentionBackend
from workers.attention.native.compile import CannotCompileError

BACKENDS = {
    "native": "workers.attention.native.backend:NativeAttention",
    "torch": "workers.attention.torch_backend:TorchAttention",
}

_log = logging.getLogger(__name__)


def load_backend(name: str) -> AttentionBackend:
    """The backend of a name; UserError lists the known ones."""
    if name not in BACKENDS:
        raise UserError(f"unknown attention backend {name!r}; allowed: {', '.join(sorted(BACKENDS))}")
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend


def fastest_backend(device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The best there is on this machine; compiles it if need be."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        try:
            return load_backend("native")
        except CannotCompileError as error:
            level = logging.WARNING if error.mend else logging.INFO
            _log.log(
                level, "attention in plain torch, at half the speed: %s%s", error, error.mend and f"; {error.mend}"
            )
    return load_backend("torch")
