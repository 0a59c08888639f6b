"""One member's view of a group of ranks, and the collectives of the group.

In a group of one, collectives do nothing and need no library.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

from torch import AcceleratorError, OutOfMemoryError, Tensor

from cluster.spec.errors import PeerLostError

SUM_BYTES = 4


class Work(Protocol):
    def wait(self) -> bool:
        """Block until the collective is done. Raises RuntimeError if it fails."""


Started = TypeVar("Started")


class OpenGather(NamedTuple, Generic[Started]):
    """All-gather without copies. Write this rank's part, call ``start``, and wait before reading the other parts.

    They are valid until the group's next collective.
    """

    parts: Sequence[Tensor]
    """Memory of each rank's part, by rank."""
    start: Callable[[], Started]


class Backend(Protocol):
    """Collectives that Communicator needs from a library."""

    in_background: bool

    def all_gather(self, output: Tensor, tensor: Tensor, /) -> Work: ...

    def open_all_gather(self, num_bytes: int, /) -> OpenGather[Work] | None: ...

    def all_reduce(self, tensor: Tensor, /) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int, /) -> Work: ...

    def barrier(self) -> Work: ...

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work: ...

    def leave(self) -> None: ...


class Pending:
    """Running collective. Do not touch its tensors until ``wait`` returns."""

    def __init__(self, work: Work | None, translated: Callable[[], AbstractContextManager[None]]) -> None:
        self._work = work
        self._translated = translated

    def wait(self) -> None:
        """Block until the collective is done. Raises PeerLostError if it fails. Further calls return immediately."""
        work, self._work = self._work, None
        if work is not None:
            with self._translated():
                work.wait()

    def drop(self) -> None:
        """Forget the collective, which may keep connections open, because this rank leaves the group."""
        self._work = None


Observe = Callable[[str, float, float], None]
"""Callback with a collective's name, start and end. Times are in seconds of ``time.monotonic``."""


class Communicator:
    """One member's view of a group. Every member makes the same calls in the same order.

    Every call raises PeerLostError if a peer is dead or does not respond within the group's timeout, and
    OutOfMemoryError or AcceleratorError if this rank's GPU has no memory left or has failed. Callers wait for
    collectives in the order in which they start them.
    """

    def __init__(self, name: str, rank: int = 0, size: int = 1, backend: Backend | None = None) -> None:
        assert (size == 1) == (backend is None), f"group {name} of size {size} has the wrong backend"
        self.name = name
        self.rank = rank
        self.size = size
        self.waited_s = 0.0
        """Time in seconds spent starting, copying and waiting. It does not overlap with computation."""
        self.received_bytes = 0
        """Bytes of tensors received from other members. An all-reduce counts as a reduce-scatter and an all-gather."""
        self.in_background = backend is not None and backend.in_background
        """True if collectives progress while this member computes. Otherwise, the calls do all the work."""
        self.observe: Observe | None = None
        """Callback at the end of every call."""
        self._backend = backend
        self._started: WeakSet[Pending] = WeakSet()
        """Collectives that somebody still holds."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Fill ``out [size * n, ...]`` with every member's ``tensor [n, ...]``, by rank. Both are contiguous."""
        self.start_all_gather(out, tensor).wait()

    def start_all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """Start an ``all_gather``. ``tensor`` may be this rank's own part of ``out``."""
        assert len(out) == self.size * len(tensor), f"{out.shape} cannot hold {self.size} of {tensor.shape}"
        backend = self._backend
        if backend is None:
            out.copy_(tensor)
        if backend is None or not tensor.numel():
            return Pending(None, nullcontext)
        return self._start("all_gather", out.nbytes - tensor.nbytes, lambda: backend.all_gather(out, tensor))

    def open_all_gather(self, num_bytes: int) -> OpenGather[Pending] | None:
        """Return an all-gather of ``num_bytes`` per member, or None if members cannot read each other's memory."""
        backend = self._backend
        if backend is None or not num_bytes:
            return None
        with self._translated("all_gather"):
            opened = backend.open_all_gather(num_bytes)
        if opened is None:
            return None
        received = (self.size - 1) * num_bytes
        return OpenGather(opened.parts, lambda: self._start("all_gather", received, opened.start))

    def start_shift(self, out: Tensor, tensor: Tensor, distance: int = 1) -> Pending:
        """Start sending ``tensor`` to rank + ``distance``, and receiving ``out`` from rank - ``distance``.

        Ranks wrap around. Both tensors are contiguous. Their lengths may differ between ranks and may be zero.
        """
        backend = self._backend
        if backend is None or distance % self.size == 0:
            out.copy_(tensor)
            return Pending(None, nullcontext)
        return self._start("shift", out.nbytes, lambda: backend.shift(out, tensor, distance))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous ``tensor`` with the sum over all members, and return it.

        The sum is computed in fp32 and rounded once. Every member gets the same bits.
        """
        backend = self._backend
        if backend is not None and tensor.numel():
            # Terms travel in fp32, except in shared memory, where each rank reads and adds them.
            itemsize = SUM_BYTES if self.in_background else tensor.itemsize
            received = 2 * tensor.numel() * itemsize * (self.size - 1) // self.size
            self._start("all_reduce", received, lambda: backend.all_reduce(tensor)).wait()
        return tensor

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite a contiguous ``tensor`` with that of rank ``root``."""
        self.start_broadcast(tensor, root).wait()

    def start_broadcast(self, tensor: Tensor, root: int) -> Pending:
        """Start a ``broadcast``."""
        backend = self._backend
        if backend is None or not tensor.numel():
            return Pending(None, nullcontext)
        received = tensor.nbytes if self.rank != root else 0
        return self._start("broadcast", received, lambda: backend.broadcast(tensor, root))

    def barrier(self) -> None:
        """Return once every member has called this."""
        if self._backend is not None:
            self._start("barrier", 0, self._backend.barrier).wait()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Treat this member as a group of one inside the context, to measure its own work. Nothing is sent."""
        whole = self.rank, self.size, self._backend
        self.rank, self.size, self._backend = 0, 1, None
        try:
            yield
        finally:
            self.rank, self.size, self._backend = whole

    def destroy(self) -> None:
        """Leave the group. Peers' calls that still need this member fail."""
        backend, self._backend = self._backend, None
        for pending in list(self._started):
            pending.drop()
        if backend is not None:
            backend.leave()

    def _start(self, call: str, received_bytes: int, begin: Callable[[], Work]) -> Pending:
        self.received_bytes += received_bytes
        with self._translated(call):
            pending = Pending(begin(), lambda: self._translated(call))
        self._started.add(pending)
        return pending

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        except (OutOfMemoryError, AcceleratorError):  # of this rank
            raise
        except RuntimeError as exc:
            raise PeerLostError(f"{call} in group {self.name}, rank {self.rank} of {self.size}: {exc}") from exc
        finally:
            end_s = time.monotonic()
            self.waited_s += end_s - start_s
            if self.observe is not None:
                self.observe(call, start_s, end_s)
