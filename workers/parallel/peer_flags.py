"""Flags in shared memory by which ranks wait for each other: growing numbers, with a check that the peers' processes
live.
"""

import os
import select
import time
import weakref
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import count

_LINE = 8
"""Number of 8-byte words per rank: a cache line, so that ranks do not slow each other down."""
_SPINS = 300
"""Polls of a flag before the core is yielded to others: some 20 microseconds."""
_YIELD_S = 200e-6
_LONGEST_PAUSE_S = 1e-3


class Flag(IntEnum):
    """Number that one rank writes and all others read; it never decreases."""

    PUBLISHED = 0
    CONSUMED = 1
    LEFT = 2
    SUMMED = 3


class PeerFlags:
    """One rank's view of a group's flags."""

    def __init__(self, memory: memoryview, rank: int, pids: Sequence[int], timeout_s: float) -> None:
        """Wrap ``memory``, which begins with ``num_bytes`` of zeros that all ranks map; ``pids`` are by rank."""
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
        """Return the memory that the flags of a group of ``size`` take."""
        return size * _LINE * 8

    def set(self, flag: Flag, number: int) -> None:
        """Publish a number; writes to shared memory before this call are visible to whoever reads it."""
        self._flags[self._rank * _LINE + flag] = number

    def wait_for(self, flag: Flag, peers: Iterable[int], number: int) -> None:
        """Return once the flags of all ``peers`` are ``number`` or more; RuntimeError if one is gone or too slow."""
        flags = self._flags
        for peer in peers:
            place = peer * _LINE + flag
            if flags[place] < number:
                for _ in range(_SPINS):
                    if flags[place] >= number:
                        break
                else:
                    self._wait_slowly(place, peer, number)

    def failure(self, reason: str) -> RuntimeError:
        """Return the error to raise. Numbers no longer agree after it, so this rank leaves and peers do not wait for
        it.
        """
        self.set(Flag.LEFT, 1)
        return RuntimeError(reason)

    def _wait_slowly(self, place: int, peer: int, number: int) -> None:
        """Yield to other threads at first, then sleep a fortieth of the time waited so far."""
        begin_s = time.monotonic()
        for turn in count():
            if self._flags[place] >= number:
                return
            waited_s = time.monotonic() - begin_s
            if waited_s < _YIELD_S:
                os.sched_yield()
                continue
            if turn % 8 == 0 or waited_s > 0.01:
                self._check(place, number)
            if waited_s > self._timeout_s:
                raise self.failure(f"{self._described(peer)} did not answer in {self._timeout_s} s")
            time.sleep(min(waited_s / 40, _LONGEST_PAUSE_S))

    def _check(self, place: int, number: int) -> None:
        """Raise RuntimeError if a peer has left, unless the awaited number came before that."""
        gone = [self._watched[watched] for watched, _ in self._watch.poll(0)]
        gone += [peer for peer in self.peers if self._flags[peer * _LINE + Flag.LEFT]]
        if gone and self._flags[place] < number:
            raise self.failure(f"{self._described(gone[0])} is gone")

    def _described(self, peer: int) -> str:
        return f"rank {peer} (process {self._pids[peer]})"


def _leave(flags: memoryview, rank: int, watched: Sequence[int]) -> None:
    flags[rank * _LINE + Flag.LEFT] = 1
    for descriptor in watched:
        os.close(descriptor)
