"""Kills processes that write objects, at any moment: python -m tests.integration.storage_killer FOLDER COUNT."""

import os
import random
import signal
import sys
import time
from pathlib import Path

from workers.hicache.storage.files import FileStorage

SIZE = 200_000


def content_of(number: int) -> bytes:
    """The bytes of an object, which its name tells."""
    return number.to_bytes(4, "little") * (SIZE // 4)


def write_for_ever(folder: Path, first: int) -> None:
    storage = FileStorage(folder, 1 << 30, fsync=False)
    for number in range(first, first + 10_000):
        storage.write(f"n/{number}", [memoryview(content_of(number))])


def main(folder: Path, count: int) -> None:
    rng = random.Random(1)
    for number in range(count):
        child = os.fork()
        if child == 0:
            write_for_ever(folder, number * 10_000)
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
