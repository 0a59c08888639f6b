"""Private folders, and file locks that end with their process."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

PRIVATE_FILE = 0o600
_PRIVATE_FOLDER = 0o700


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents.

    Raises:
        FileExistsError: a file is in its place.
        NotADirectoryError: a file is in the place of a parent.
    """
    try:
        folder.mkdir(_PRIVATE_FOLDER)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    except FileNotFoundError:
        make_folder(folder.parent)
        folder.mkdir(_PRIVATE_FOLDER, exist_ok=True)


@contextlib.contextmanager
def try_locked(path: Path) -> Iterator[bool]:
    """Hold the lock on a file, made if need be; yield False if another process holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, PRIVATE_FILE)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
