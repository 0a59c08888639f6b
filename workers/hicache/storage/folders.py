"""Folders that outlive a power failure, and locks that end with the process that holds them."""

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_TRY_AGAIN_S = 0.001


def make_folder(folder: Path, *, fsync: bool) -> None:
    """Make a folder and the parents it lacks, and wait for the disk if asked to.

    Raises:
        FileExistsError: there is a file in its place.
        NotADirectoryError: there is one in the place of a parent.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
        return
    except FileNotFoundError:
        make_folder(folder.parent, fsync=fsync)
        folder.mkdir(exist_ok=True)
    if fsync:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the names of what is in a folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path, patience_s: float) -> Iterator[int]:
    """A file that only we have, made if need be.

    Raises:
        TimeoutError: somebody else has had it for so long.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end_s = time.monotonic() + patience_s
        while not try_lock(descriptor):
            if time.monotonic() >= end_s:
                raise TimeoutError(errno.ETIMEDOUT, f"{path} is locked by another process")
            time.sleep(_TRY_AGAIN_S)
        yield descriptor
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Have an open file alone until it is closed, also by the end of this process; False where another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
