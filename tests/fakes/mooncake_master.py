"""Mooncake Store with one master and one process that contributes memory."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.fakes.cluster import free_port


def _wait_for(port: int, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            assert time.monotonic() < end_s, "the master does not listen"
            os.sched_yield()


@contextmanager
def mooncake_master(lent_bytes: int = 64 << 20) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Yield the master's address and process."""
    import mooncake

    from workers.hicache.storage.mooncake_store import MooncakeStorage

    port, metrics_port = free_port(), free_port()
    program = Path(mooncake.__path__[0]) / "mooncake_master"
    arguments = [f"-rpc_port={port}", f"-metrics_port={metrics_port}", "-rpc_address=127.0.0.1"]
    master = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(port)
        lender = MooncakeStorage("127.0.0.1", f"127.0.0.1:{port}", lent_bytes)
        try:
            yield f"127.0.0.1:{port}", master
        finally:
            lender.close()
    finally:
        master.kill()
        master.wait()
