"""Connections between two processes of this machine that lose every packet in one direction. Requires root and nft."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.fakes.cluster import open_files, tcp_sockets

TABLE = "baton-chaos"
_RULES = f"""
table inet {TABLE} {{
    set pairs {{ type inet_service . inet_service; }}
    chain input {{ type filter hook input priority 0; tcp sport . tcp dport @pairs drop; }}
}}
"""
_ESTABLISHED = "01"


@contextmanager
def filtering() -> Iterator[None]:
    """Install the packet filter that `cut` uses."""
    _nft(f"add table inet {TABLE}; delete table inet {TABLE}; {_RULES}")
    try:
        yield
    finally:
        _nft(f"delete table inet {TABLE}")


@contextmanager
def cut(sender: int, receiver: int) -> Iterator[int]:
    """Drop every packet from one process to another on their connections of now. Yield the number of connections."""
    pairs = _connections(sender) & {(far, near) for near, far in _connections(receiver)}
    elements = ", ".join(f"{near} . {far}" for near, far in pairs)
    if pairs:
        _nft(f"add element inet {TABLE} pairs {{ {elements} }}")
    try:
        yield len(pairs)
    finally:
        if pairs:
            _nft(f"delete element inet {TABLE} pairs {{ {elements} }}")


def _connections(pid: int) -> set[tuple[int, int]]:
    """Return the own and the other port of each TCP connection of a process."""
    files = {*open_files(pid)}
    open_rows = [row for row in tcp_sockets() if row[3] == _ESTABLISHED and f"socket:[{row[9]}]" in files]
    return {(_port(row[1]), _port(row[2])) for row in open_rows}


def _port(end: str) -> int:
    return int(end.rpartition(":")[2], 16)


def _nft(rules: str) -> None:
    done = subprocess.run(["nft", "-f", "-"], input=rules, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"nft: {done.stderr} (apt-get install nftables)"
