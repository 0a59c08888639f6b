"""Huge pages: which memory Linux is asked for, and that its content stays."""

import ctypes
import errno
import mmap
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.readme import ROOT
from transfer.backends.shared_memory import SharedMemoryBackend
from workers.memory.huge_pages import _ALLOW, _COLLAPSE, use_huge_pages

MIB = 1 << 20


class Libc:
    """Linux that refuses all advice."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, int]] = []

    def madvise(self, start: Any, num_bytes: Any, advice: int) -> int:
        self.asked.append((start.value // MIB - 64, (start.value + num_bytes.value) // MIB - 64, advice))
        return -1


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(0, 1, (0, 2)), (2, 4, (2, 4)), (3, 4, (2, 4)), (3, 5, (2, 6)), (7, 12, (6, 12))],
)
def test_all_that_holds_a_part_of_the_memory(
    first: int, last: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = Libc()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    use_huge_pages((64 + first) * MIB, (last - first) * MIB)
    pages = [(page, page + 2, _COLLAPSE) for page in range(*expected, 2)]
    assert libc.asked == [(*expected, _ALLOW), *pages]


def test_content_stays() -> None:
    content = bytes(range(256)) * (8 * MIB // 256)
    memory = mmap.mmap(-1, len(content))
    memory[:] = content
    use_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(memory)) + 3 * MIB, 2 * MIB)
    assert memory[:] == content


@pytest.mark.parametrize("num_bytes", [1, 5000, 5 * MIB])
def test_shared_memory_is_writable_and_begins_where_a_huge_page_can(num_bytes: int) -> None:
    backend = SharedMemoryBackend()
    region = backend.allocate(num_bytes)
    assert len(region.buffer) == num_bytes
    assert ctypes.addressof(ctypes.c_char.from_buffer(region.buffer)) % (2 * MIB) == 0
    region.buffer[-1] = 7
    use_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(region.buffer)), num_bytes)
    backend.close()
    assert region.buffer[-1] == 7


_TWO_BUFFERS = """
import ctypes, functools, mmap, re
from workers.memory.huge_pages import _DISABLE, use_huge_pages, use_small_pages

# This process inherits the setting of the one that runs tests, in which a rank may have used small pages.
ctypes.CDLL(None).prctl(_DISABLE, 0, 0, 0, 0)

def make_buffer() -> mmap.mmap:
    buffer = mmap.mmap(-1, 16 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer[:] = bytes(len(buffer))
    for start in range(0, len(buffer), 2 << 20):  # as torch does for single tensors
        buffer.madvise(mmap.MADV_HUGEPAGE, start, 1 << 20)
    return buffer

def huge_kib() -> int:
    return int(re.search(r"AnonHugePages: +(\\d+)", open("/proc/self/smaps_rollup").read())[1])

first = make_buffer()
ctypes.CDLL = functools.partial(ctypes.CDLL, use_errno=True)
use_huge_pages(ctypes.addressof(ctypes.c_char.from_buffer(first)), len(first))
error = ctypes.get_errno()
before = huge_kib()
use_small_pages()
second = make_buffer()
print(before, huge_kib(), error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has huge pages")
def test_huge_pages_stay_and_none_is_added() -> None:
    """Linux may have no memory for huge pages at this moment, or an administrator turned them off."""
    done = subprocess.run([sys.executable, "-c", _TWO_BUFFERS], capture_output=True, text=True, check=True, cwd=ROOT)
    before, after, error = map(int, done.stdout.split())
    assert after == before
    no_memory = error in (errno.EAGAIN, errno.EBUSY, errno.ENOMEM)
    assert before > 0 or no_memory or "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
