"""Collectives between ranks on one host. Each rank copies its part into shared memory, from which the others read.

The memory is anonymous (a memfd that peers open through /proc), so nothing can be left behind, and sparse: unused parts
take no memory. This requires a CPU on which stores become visible in order, since Python has no memory fence.
"""

import mmap
import os
import select
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import partial
from itertools import count, pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cluster.spec.memory import STAGING_PIECE_BYTES, STAGING_SLOTS, staging_slot_bytes
from workers.parallel.communicator import OpenGather, Work

_LINE = 8
"""Number of 8-byte words per rank: one cache line, so that ranks do not slow each other down."""
_SPINS = 300
"""Number of polls, about 20 microseconds, before a rank yields its core."""
_YIELD_S = 200e-6
_LONGEST_PAUSE_S = 1e-3
WHOLE_SUM_BYTES = 128 << 10
"""Maximum size of a piece that every rank sums in full. For larger pieces, the reads cost more than a second wait, as
measured on two cores for two and four ranks.
"""
_MAX_PIECES = 1 << 20
"""Maximum number of pieces per call. A piece's number is call * _MAX_PIECES + its index."""


class Flag(IntEnum):
    """Kind of number that one rank writes and all others read. Numbers never decrease."""

    PUBLISHED = 0
    CONSUMED = 1
    LEFT = 2
    SUMMED = 3


class PeerFlags:
    """One rank's view of a group's flags."""

    def __init__(self, memory: memoryview, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        """Wrap ``memory``, which all ranks map and which starts with ``num_bytes`` of zeros. ``pids`` are by rank."""
        self.peers = [peer for peer in range(len(pids)) if peer != rank]
        self._flags = memory[: self.num_bytes(len(pids))].cast("q")
        self._rank, self._pids, self._timeout_s = rank, pids, timeout_s
        self._watch = select.poll()
        self._watched = {os.pidfd_open(pids[peer]): peer for peer in self.peers}
        for watched in self._watched:
            self._watch.register(watched, select.POLLIN)
        weakref.finalize(self, _leave, self._flags, rank, list(self._watched))

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the size in bytes of the flags of ``size`` ranks."""
        return size * _LINE * 8

    def set(self, flag: Flag, number: int) -> None:
        """Publish a number. Ranks that read it also see all that this rank wrote to shared memory before."""
        self._flags[self._rank * _LINE + flag] = number

    def wait_for(self, flag: Flag, peers: Iterable[int], number: int) -> None:
        """Wait until the flags of all ``peers`` reach ``number``. Raises RuntimeError if a peer is dead or too slow."""
        flags = self._flags
        for peer in peers:
            index = peer * _LINE + flag
            if flags[index] < number:
                for _ in range(_SPINS):
                    if flags[index] >= number:
                        break
                else:
                    self._wait_slowly(index, peer, number)

    def failure(self, reason: str) -> RuntimeError:
        """Leave the group, since the ranks' numbers will no longer agree, and return the error to raise."""
        self.set(Flag.LEFT, 1)
        return RuntimeError(reason)

    def _wait_slowly(self, index: int, peer: int, number: int) -> None:
        """Yield to other threads first, then sleep for 1/40 of the time waited so far."""
        begin_s = time.monotonic()
        for attempt in count():
            if self._flags[index] >= number:
                return
            waited_s = time.monotonic() - begin_s
            if waited_s < _YIELD_S:
                os.sched_yield()
                continue
            if attempt % 8 == 0 or waited_s > 0.01:
                self._check(index, number)
            if waited_s > self._timeout_s:
                raise self.failure(f"{self._described(peer)} did not answer within {self._timeout_s} s")
            time.sleep(min(waited_s / 40, _LONGEST_PAUSE_S))

    def _check(self, index: int, number: int) -> None:
        """Raise RuntimeError if any peer is gone, unless the awaited number has already arrived."""
        gone = [self._watched[watched] for watched, _ in self._watch.poll(0)]
        gone += [peer for peer in self.peers if self._flags[peer * _LINE + Flag.LEFT]]
        if gone and self._flags[index] < number:
            raise self.failure(f"{self._described(gone[0])} is gone")

    def _described(self, peer: int) -> str:
        return f"rank {peer} (process {self._pids[peer]})"


def _leave(flags: memoryview, rank: int, watched: Sequence[int]) -> None:
    flags[rank * _LINE + Flag.LEFT] = 1
    for descriptor in watched:
        os.close(descriptor)


Bytes = NDArray[np.uint8]


class SharedMemoryWork:
    """Running collective. This rank's part is already published; ``wait`` collects the other parts."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


class SharedMemoryCollectives:
    """Shared-memory backend of one rank of a group.

    Calls have the same numbers on all ranks, as do pieces within a call. A rank may have more pieces than another. To
    publish a piece, a rank writes the piece's number after its data. After reading all peers' pieces with this number,
    a rank marks the number as consumed. At the end of a call, it marks the largest possible number. A slot is refilled
    once all ranks have consumed its content. Only one collective is in flight: starting the next finishes it.
    """

    in_background = False

    def __init__(
        self,
        descriptor: int,
        rank: int,
        pids: Sequence[int],
        timeout_s: float,
        piece_bytes: int = STAGING_PIECE_BYTES,
        whole_sum_bytes: int = WHOLE_SUM_BYTES,
    ) -> None:
        """Map ``descriptor``, a file of ``num_bytes`` zeros, and take ownership of it."""
        self._descriptor, self._piece_bytes, self._whole_sum_bytes = descriptor, piece_bytes, whole_sum_bytes
        self._rank, self._size = rank, len(pids)
        memory = mmap.mmap(descriptor, self.num_bytes(self._size))
        self._flags = PeerFlags(memoryview(memory), rank, pids, timeout_s)
        self._data: Bytes = np.frombuffer(memory, dtype=np.uint8)
        self._data_offset = _data_offset(self._size)
        self._reserved = [0] * STAGING_SLOTS
        self._held = [0] * STAGING_SLOTS
        self._call = 0
        self._pending: SharedMemoryWork | None = None
        weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def num_bytes(size: int) -> int:
        """Return the memory size for a group of ``size`` ranks. Most of it is never used."""
        return _data_offset(size) + size * STAGING_SLOTS * STAGING_PIECE_BYTES

    def all_gather(self, output: Tensor, tensor: Tensor, /) -> SharedMemoryWork:
        mine, parts = _bytes_of(tensor), _bytes_of(output).reshape(self._size, -1)
        if mine.ctypes.data != parts[self._rank].ctypes.data:
            np.copyto(parts[self._rank], mine)
        return self._start(mine, [(peer, parts[peer]) for peer in self._flags.peers])

    def open_all_gather(self, num_bytes: int, /) -> OpenGather[Work] | None:
        """Return a gather in place: a rank's part is the slot that peers read. None if it is larger than a piece."""
        if num_bytes > self._piece_bytes:
            return None
        self._next_call()
        slot = self._slot_of(0)
        self._free(slot, num_bytes)
        parts = [torch.from_numpy(self._slot(rank, slot)[:num_bytes]) for rank in range(self._size)]
        return OpenGather(parts, self._start_opened)

    def all_reduce(self, tensor: Tensor, /) -> SharedMemoryWork:
        """Start a sum. The ranks' tensors are added in rank order, piece by piece.

        Every rank sums one share of a large piece and reads the sums of the other shares. Thus each of N ranks reads
        about twice the tensor's size, instead of N times.
        """
        data = _bytes_of(tensor)
        return self._begin(data, [data], partial(self._add_up, data, tensor.dtype))

    def broadcast(self, tensor: Tensor, root: int, /) -> SharedMemoryWork:
        data = _bytes_of(tensor)
        return self._start(data, []) if self._rank == root else self._start(data[:0], [(root, data)])

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> SharedMemoryWork:
        return self._start(_bytes_of(tensor), [((self._rank - distance) % self._size, _bytes_of(output))])

    def barrier(self) -> SharedMemoryWork:
        nothing = np.empty(0, dtype=np.uint8)
        return self._start(nothing, [(peer, nothing) for peer in self._flags.peers])

    def leave(self) -> None:
        self._flags.set(Flag.LEFT, 1)

    def _start(self, mine: Bytes, theirs: Sequence[tuple[int, Bytes]]) -> SharedMemoryWork:
        """Publish this rank's part and collect the others into ``theirs``, pairs of rank and destination."""
        return self._begin(mine, [part for _, part in theirs], partial(self._copy, theirs))

    def _begin(self, mine: Bytes, parts: Sequence[Bytes], collect: Callable[[int], None]) -> SharedMemoryWork:
        """Publish the first piece of ``mine``. The returned work publishes the rest and collects ``parts``."""
        self._next_call()
        self._publish(mine, 0)

        def finish() -> None:
            for index in range(max(map(self._num_pieces, (mine, *parts)))):
                if 0 < index < self._num_pieces(mine):
                    self._publish(mine, index)
                collect(index)
                self._flags.set(Flag.CONSUMED, self._number(index))
            self._end_call()

        self._pending = SharedMemoryWork(finish)
        return self._pending

    def _start_opened(self) -> SharedMemoryWork:
        """Publish this rank's slot. The next call marks the peers' slots as consumed."""
        self._announce(self._slot_of(0), 0)
        number = self._number(0)
        self._pending = SharedMemoryWork(lambda: self._flags.wait_for(Flag.PUBLISHED, self._flags.peers, number))
        return self._pending

    def _next_call(self) -> None:
        """Begin a call. Finish the last one, whose parts may not be read in place any more."""
        if self._pending is not None:
            self._pending.wait()
        self._end_call()
        self._call += 1

    def _end_call(self) -> None:
        self._flags.set(Flag.CONSUMED, self._number(_MAX_PIECES - 1))

    def _publish(self, mine: Bytes, index: int) -> None:
        piece, slot = self._piece(mine, index), self._slot_of(index)
        self._free(slot, piece.size)
        np.copyto(self._slot(self._rank, slot)[: piece.size], piece)
        self._announce(slot, index)

    def _free(self, slot: int, num_bytes: int) -> None:
        """Wait until all peers have read this rank's slot, and reserve memory for its next content."""
        self._flags.wait_for(Flag.CONSUMED, self._flags.peers, self._held[slot])
        self._reserve(slot, num_bytes)

    def _announce(self, slot: int, index: int) -> None:
        self._held[slot] = self._number(index)
        self._flags.set(Flag.PUBLISHED, self._held[slot])

    def _copy(self, theirs: Sequence[tuple[int, Bytes]], index: int) -> None:
        for peer, part in theirs:
            if index < self._num_pieces(part):
                self._flags.wait_for(Flag.PUBLISHED, [peer], self._number(index))
                piece = self._piece(part, index)
                np.copyto(piece, self._slot(peer, self._slot_of(index))[: piece.size])

    def _add_up(self, data: Bytes, dtype: torch.dtype, index: int) -> None:
        piece, slot = self._piece(data, index), self._slot_of(index)
        self._flags.wait_for(Flag.PUBLISHED, self._flags.peers, self._number(index))
        if piece.size <= self._whole_sum_bytes:
            self._sum(slot, slice(piece.size), dtype, piece)
            return
        shares = self._shares(piece.size, dtype.itemsize)
        own = shares[self._rank]
        # The sum overwrites this rank's own terms, which no other rank reads.
        mine = self._slot(self._rank, slot)[own]
        self._sum(slot, own, dtype, mine)
        self._flags.set(Flag.SUMMED, self._number(index))
        np.copyto(piece[own], mine)
        for peer in self._flags.peers:
            self._flags.wait_for(Flag.SUMMED, [peer], self._number(index))
            np.copyto(piece[shares[peer]], self._slot(peer, slot)[shares[peer]])

    def _sum(self, slot: int, share: slice, dtype: torch.dtype, out: Bytes) -> None:
        """Sum one share of all ranks' pieces in ``slot``."""
        if not out.size:
            return
        first, *rest = (torch.from_numpy(self._slot(rank, slot)[share]).view(dtype) for rank in range(self._size))
        total = first.to(torch.float32, copy=True)
        for part in rest:
            total += part
        torch.from_numpy(out).view(dtype).copy_(total)

    def _shares(self, num_bytes: int, itemsize: int) -> list[slice]:
        ends = [num_bytes // itemsize * rank // self._size * itemsize for rank in range(self._size + 1)]
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def _number(self, index: int) -> int:
        return self._call * _MAX_PIECES + index

    def _num_pieces(self, part: Bytes) -> int:
        """Return the number of pieces. An empty part has one piece, so that it also synchronizes."""
        return max(-(-part.size // self._piece_bytes), 1)

    def _piece(self, part: Bytes, index: int) -> Bytes:
        return part[index * self._piece_bytes : (index + 1) * self._piece_bytes]

    def _slot_of(self, index: int) -> int:
        return (self._call + index) % STAGING_SLOTS

    def _slot(self, rank: int, slot: int) -> Bytes:
        begin = self._data_offset + (rank * STAGING_SLOTS + slot) * self._piece_bytes
        return self._data[begin : begin + self._piece_bytes]

    def _reserve(self, slot: int, num_bytes: int) -> None:
        """Reserve memory, since running out of it during a copy would cause a bus error."""
        if num_bytes <= self._reserved[slot]:
            return
        wanted = staging_slot_bytes(num_bytes, self._piece_bytes)
        begin = self._data_offset + (self._rank * STAGING_SLOTS + slot) * self._piece_bytes
        try:
            os.posix_fallocate(self._descriptor, begin, wanted)
        except OSError as error:
            raise self._flags.failure(f"cannot allocate {wanted} bytes of shared memory: {error.strerror}") from error
        self._reserved[slot] = wanted


def _data_offset(size: int) -> int:
    return -(-PeerFlags.num_bytes(size) // mmap.PAGESIZE) * mmap.PAGESIZE


def _bytes_of(tensor: Tensor) -> Bytes:
    assert tensor.is_contiguous(), f"the tensor {tuple(tensor.shape)} is not contiguous"
    data: Bytes = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return data
