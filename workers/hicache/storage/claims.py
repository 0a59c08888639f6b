"""Room in a folder that writers have claimed.

A claim is a file that its process keeps locked; its name says how much.
"""

import contextlib
import os
import secrets
from pathlib import Path

from workers.hicache.storage.folders import try_lock

_CLAIM = ".claim-"


class Claim:
    """What one call may still write. Used by one thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.token = secrets.token_hex(8)
        self.left_bytes = 0
        self._file: tuple[Path, int] | None = None
        """Path and descriptor."""

    def say(self, left_bytes: int) -> None:
        """Tell others how much it is. Only while nobody looks at claims, who might find the file before it is locked.

        Raises:
            OSError: the folder cannot be written to.
        """
        path = self._folder / f"{_CLAIM}{self.token}.{left_bytes}"
        if self._file is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._file = path, descriptor
            is_ours = try_lock(descriptor)
            assert is_ours, f"{path} is new, and somebody has it"
        else:
            old, descriptor = self._file
            old.rename(path)
            self._file = path, descriptor

    def close(self) -> None:
        """It ends; safe to call twice."""
        self.left_bytes = 0
        if self._file is not None:
            path, descriptor = self._file
            self._file = None
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)


def living_claims(folder: Path) -> dict[str, int]:
    """Bytes by token; claims of processes that have ended are removed. Only while nobody makes claims."""
    claims = {}
    for path in folder.glob(f"{_CLAIM}*"):
        token, _, num_bytes = path.name.removeprefix(_CLAIM).partition(".")
        if _is_held(path):
            claims[token] = int(num_bytes)
        else:
            path.unlink(missing_ok=True)
    return claims


def _is_held(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(descriptor)
    finally:
        os.close(descriptor)
