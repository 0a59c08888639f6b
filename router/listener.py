"""The TCP socket that clients connect to."""

import errno
import socket

from cluster.spec.errors import UserError


def listen(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """A TCP socket that listens; port 0 takes a free one.

    Args:
        is_shared: other processes may have the port too. The kernel gives each connection to one of those that listen,
            so this one does not listen yet.

    Raises:
        UserError: the address cannot be listened on; names it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        if not is_shared:
            listener.listen(2048)
    except OSError as error:
        listener.close()
        raise UserError(_why_not(host, port, error)) from error
    return listener


def _why_not(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"router.port: {host}:{port} is taken by another process; give a free port, or 0 for any"
    return f"router.host: cannot listen on {host}:{port}: {error.strerror}"


def reachable(listening: str, own: str) -> str:
    """An address that a client can connect to."""
    host = own if listening in ("0.0.0.0", "::") else listening
    return f"[{host}]" if ":" in host else host
