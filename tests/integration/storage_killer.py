"""Kill processes at random times while they write objects, and print the number of unfinished objects.

python -m tests.integration.storage_killer FOLDER COUNT
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

from workers.hicache.storage.files import FileStorage
from workers.hicache.storage.interface import StorageObject

SIZE = 200_000


def content_of(number: int) -> bytes:
    """Return the content of an object, which its name determines."""
    return number.to_bytes(4, "little") * (SIZE // 4)


def write_for_ever(folder: Path, first: int) -> None:
    storage = FileStorage(folder, 1 << 30)
    numbers = range(first, first + 10_000)
    for start in numbers[::8]:
        storage.write([StorageObject(f"n/{n}", [memoryview(content_of(n))]) for n in range(start, start + 8)])


def main(folder: Path, count: int) -> None:
    rng = random.Random(1)
    unfinished = set[Path]()
    for number in range(count):
        child = os.fork()
        if child == 0:
            write_for_ever(folder, number * 10_000)
        time.sleep(rng.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unfinished |= set(folder.rglob(".unfinished-*"))
    print(len(unfinished))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
