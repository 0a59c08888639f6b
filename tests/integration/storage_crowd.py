"""Kill one of many processes that write to a full folder, again and again, and print what the folder has each time.

python -m tests.integration.storage_crowd FOLDER TIMES
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import StorageObject
from workers.hicache.storage.sweeper import LOCK

WRITERS = 8
OBJECT_BYTES = 32 << 10
LIMIT = 64 * OBJECT_BYTES


def bytes_in(folder: Path) -> int:
    """Count the bytes of objects, unfinished ones included."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name != LOCK)


def write_for_ever(folder: Path) -> None:
    storage = FileStorage(folder, LIMIT, fsync=False)
    threading.Thread(target=storage.maintain, daemon=True).start()
    data = memoryview(bytes(OBJECT_BYTES))
    while True:
        for _ in storage.write([StorageObject(f"n/{random.randbytes(8).hex()}", [data]) for _ in range(8)]):
            pass


def start(folder: Path) -> int:
    child = os.fork()
    if child == 0:
        random.seed()
        write_for_ever(folder)
    return child


def bytes_at_rest(folder: Path, writers: list[int]) -> int:
    """Count while nobody writes, since files that come and go may be counted twice."""
    for writer in writers:
        os.kill(writer, signal.SIGSTOP)
    for writer in writers:
        os.waitid(os.P_PID, writer, os.WSTOPPED)
    num_bytes = bytes_in(folder)
    for writer in writers:
        os.kill(writer, signal.SIGCONT)
    return num_bytes


def main(folder: Path, times: int) -> None:
    rng = random.Random(1)
    writers = [start(folder) for _ in range(WRITERS)]
    for _ in range(times):
        time.sleep(rng.uniform(0.0, 0.02))
        print(bytes_at_rest(folder, writers), flush=True)
        killed = writers.pop(0)
        os.kill(killed, signal.SIGKILL)
        os.waitpid(killed, 0)
        writers.append(start(folder))
    for writer in writers:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
