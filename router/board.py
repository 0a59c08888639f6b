"""Memory that the router processes of one cluster share. Each writes its own pages and reads those of the others.

Nobody waits for anybody: a page that is being written reads as the one before.
"""

import mmap
import os
import struct
import zlib

PAGE_BYTES = 4 * 1024 * 1024
"""Of one page; memory is only taken for what was written."""

_HEAD = struct.Struct("<QII")
"""A number that is odd while the page is written, the length of the content, its checksum."""
_NUMBERS = 1 << 64
_TRIES = 3


class Board:
    """One process's view of all pages."""

    def __init__(self, path: str, num_pages: int) -> None:
        """Map a file, which gets as long as it must be."""
        num_bytes = num_pages * PAGE_BYTES + mmap.PAGESIZE
        descriptor = os.open(path, os.O_RDWR)
        try:
            if os.fstat(descriptor).st_size < num_bytes:
                os.ftruncate(descriptor, num_bytes)
            self._memory = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)

    def write(self, page: int, content: bytes) -> None:
        """Replace a page, which only this process writes."""
        start = page * PAGE_BYTES
        assert len(content) <= PAGE_BYTES - _HEAD.size, f"{len(content)} bytes do not fit on a page"
        # One that died while it wrote has left an odd number.
        number = self.number(page) | 1
        _HEAD.pack_into(self._memory, start, number, 0, 0)
        self._memory[start + _HEAD.size : start + _HEAD.size + len(content)] = content
        _HEAD.pack_into(self._memory, start, (number + 1) % _NUMBERS, len(content), zlib.crc32(content))

    def number(self, page: int) -> int:
        """Changes with every write."""
        number: int = _HEAD.unpack_from(self._memory, page * PAGE_BYTES)[0]
        return number

    def read(self, page: int) -> bytes | None:
        """What a page says; None while it is being written, and before it was."""
        start = page * PAGE_BYTES + _HEAD.size
        for _ in range(_TRIES):
            number, length, checksum = _HEAD.unpack_from(self._memory, page * PAGE_BYTES)
            if number % 2 or not 0 < length <= PAGE_BYTES - _HEAD.size:
                continue
            content = self._memory[start : start + length]
            if zlib.crc32(content) == checksum:
                return content
        return None

    @property
    def flag(self) -> bool:
        """Something that any process may set, for all."""
        return self._memory[-1] != 0

    @flag.setter
    def flag(self, value: bool) -> None:
        self._memory[-1] = value
