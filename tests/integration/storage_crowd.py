"""Kill one of many processes that write to a full folder and sweep it, repeatedly.

python -m tests.integration.storage_crowd FOLDER TIMES
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import StorageObject

WRITERS = 8
OBJECT_BYTES = 32 << 10
LIMIT = 64 * OBJECT_BYTES


def write_for_ever(folder: Path) -> None:
    storage = FileStorage(folder, LIMIT)
    storage.start_sweeper()
    data = memoryview(bytes(OBJECT_BYTES))
    while True:
        storage.write([StorageObject(f"n/{random.randbytes(8).hex()}", [data]) for _ in range(8)])


def start(folder: Path) -> int:
    child = os.fork()
    if child == 0:
        random.seed()
        write_for_ever(folder)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def main(folder: Path, times: int) -> None:
    rng = random.Random(1)
    writers = [start(folder) for _ in range(WRITERS)]
    for _ in range(times):
        time.sleep(rng.uniform(0.0, 0.02))
        end(writers.pop(0))
        writers.append(start(folder))
    for writer in writers:
        end(writer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
