"""Ray's daemons that a driver cannot do without: the raylet of its machine, and the GCS on the head node.

Ray itself reports their death late or never. This module does not import Ray.
"""

import socket
import struct

from cluster.processes import ProcessId, is_alive, process_id
from cluster.spec.clock import AttentiveClock

_CONNECT_S = 5.0


class RayDaemons:
    def __init__(self, head: str, raylet_socket: str, head_gone_s: float) -> None:
        """Find the daemons.

        Args:
            head: host and port of the GCS.
            raylet_socket: path of the raylet's Unix socket.
            head_gone_s: time without a connection after which the head is lost.
        """
        self._head, self._head_gone_s = head, head_gone_s
        self._raylet = _listener(raylet_socket)
        self._attentive_clock = AttentiveClock(_CONNECT_S)
        self._gone_since_s: float | None = None

    def why_lost(self, now_s: float) -> str:
        """Return which daemon is lost; empty if none is. A driver that was stopped meanwhile looks again first."""
        heard_s = self._attentive_clock.look(now_s)
        if self._raylet is not None and not is_alive(self._raylet):
            return "the raylet of this machine has died, and with it all processes of the cluster here"
        if _is_listening(self._head):
            self._gone_since_s = None
            return ""
        if self._gone_since_s is None:
            self._gone_since_s = heard_s
        is_lost = heard_s >= self._gone_since_s + self._head_gone_s
        return f"Ray's head node at {self._head} does not respond" if is_lost else ""


def _is_listening(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except OSError:
        return False
    return True


def _listener(path: str) -> ProcessId | None:
    """Return the process that listens on a Unix socket; None if it is not visible from here."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:
            return None
        pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process_id(pid) if pid else None
