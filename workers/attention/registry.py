"""Attention backends by name; each is imported when first asked for, so that a machine needs only its own libraries."""

from importlib import import_module

from cluster.spec.errors import UserError
from workers.attention.interface import AttentionBackend

BACKENDS = {"torch": "workers.attention.torch_backend:TorchAttention"}


def load_backend(name: str) -> AttentionBackend:
    """The backend of a name; UserError lists the known ones."""
    if name not in BACKENDS:
        raise UserError(f"unknown attention backend {name!r}; allowed: {', '.join(sorted(BACKENDS))}")
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend
