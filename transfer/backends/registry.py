"""Factory of transfer backends."""

from cluster.spec.config import TransferBackendName, TransferProtocol
from cluster.spec.errors import UserError
from transfer.backends.interface import TransferBackend
from transfer.backends.shared_memory import SharedMemoryBackend


def make_backend(
    name: TransferBackendName, host: str, protocol: TransferProtocol = TransferProtocol.TCP
) -> TransferBackend:
    """Create the named backend, which peers reach at ``host``.

    Raises:
        UserError: a library or device that the backend needs is missing.
    """
    if name is TransferBackendName.SHARED_MEMORY:
        return SharedMemoryBackend()
    try:
        from transfer.backends.mooncake import MooncakeBackend
    except ImportError as error:
        message = f"transfer.backend: mooncake cannot be loaded ({error}); `baton doctor` shows what is missing"
        raise UserError(message) from error
    return MooncakeBackend(host, protocol)
