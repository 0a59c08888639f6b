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
        raise UserError(
            f"transfer.backend: mooncake cannot be loaded ({error}); it needs the Python package "
            "mooncake-transfer-engine-non-cuda and the Debian packages libibverbs1 librdmacm1 libnuma1"
        ) from error
    return MooncakeBackend(host, protocol)
