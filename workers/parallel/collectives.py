"""Collectives over one group of ranks behind one small class; a group of one does nothing and needs no library."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from cluster.spec.errors import PeerLostError


class CollectiveError(PeerLostError):
    """Error of a group whose peer is gone or did not answer in time; the replica cannot continue."""


class Work(Protocol):
    def wait(self) -> bool:
        """Block until the collective is done. Raises RuntimeError if it failed."""


class Backend(Protocol):
    """Part of torch.distributed's process group interface that Communicator uses."""

    in_background: bool

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work: ...

    def allreduce(self, tensor: Tensor, /) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int, /) -> Work: ...

    def barrier(self) -> Work: ...

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work: ...

    def leave(self) -> None: ...


class CompletedWork:
    """Completed collective that moved nothing."""

    def wait(self) -> bool:
        return True


class CopiedBack:
    """Collective on a copy of a tensor; ``wait`` copies the result back."""

    def __init__(self, work: Work, copy: Tensor, tensor: Tensor) -> None:
        self._work, self._copy, self._tensor = work, copy, tensor

    def wait(self) -> bool:
        done = self._work.wait()
        self._tensor.copy_(self._copy)
        return done


class Pending:
    """Started collective; its tensors must not be touched until ``wait`` returns."""

    def __init__(self, work: Work | None, translated: Callable[[], AbstractContextManager[None]]) -> None:
        self._work = work
        self._translated = translated

    def wait(self) -> None:
        """Block until it is done; CollectiveError as from Communicator. Further calls return at once."""
        work, self._work = self._work, None
        if work is not None:
            with self._translated():
                work.wait()


Observe = Callable[[str, float, float], None]
"""Callback with (call, start, end) of a collective, in seconds of ``time.monotonic``."""


class Communicator:
    """One member's view of a group. Every member makes the same calls in the same order.

    Every call raises CollectiveError when a peer is gone or does not answer within the group's timeout. Started
    collectives are waited for in the order of their starts.
    """

    def __init__(self, name: str, rank: int = 0, size: int = 1, backend: Backend | None = None) -> None:
        assert (size == 1) == (backend is None), f"group {name} of {size} needs a backend exactly if > 1"
        self.name = name
        self.rank = rank
        self.size = size
        self.waited_s = 0.0
        """Time spent inside calls (starting, copying and waiting), in seconds. It does not overlap with computation."""
        self.in_background = backend is not None and backend.in_background
        """Whether started collectives proceed while this member computes; if not, the calls do all the work."""
        self.observe: Observe | None = None
        """Callback at the end of every call."""
        self._backend = backend

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Fill ``out [size * n, ...]`` with every member's ``tensor [n, ...]`` by rank; both contiguous."""
        self.start_all_gather(out, tensor).wait()

    def start_all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """Start an ``all_gather``; ``tensor`` may be its own part of ``out``."""
        assert len(out) == self.size * len(tensor), f"{out.shape} cannot hold {self.size} of {tensor.shape}"
        backend = self._backend
        if backend is None:
            out.copy_(tensor)
        if backend is None or not tensor.numel():
            return Pending(None, nullcontext)
        return self._start("all_gather", lambda: backend._allgather_base(out, tensor))

    def start_shift(self, out: Tensor, tensor: Tensor, distance: int = 1) -> Pending:
        """Start sending ``tensor`` to the member ``distance`` ranks on, and receiving ``out`` from as far back.

        Ranks wrap around. Both are contiguous; lengths may differ from rank to rank and be zero.
        """
        backend = self._backend
        if backend is None or distance % self.size == 0:
            out.copy_(tensor)
            return Pending(None, nullcontext)
        return self._start("shift", lambda: backend.shift(out, tensor, distance))

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace a contiguous ``tensor`` with the sum of every member's, and return it.

        The sum is computed in fp32 and rounded once; every member gets the same bits.
        """
        backend = self._backend
        if backend is not None and tensor.numel():
            self._start("all_reduce", lambda: backend.allreduce(tensor)).wait()
        return tensor

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` with that of the member whose rank in the group is ``root``."""
        backend = self._backend
        if backend is not None and tensor.numel():
            self._start("broadcast", lambda: backend.broadcast(tensor, root)).wait()

    def barrier(self) -> None:
        """Return once every member has called this."""
        if self._backend is not None:
            self._start("barrier", self._backend.barrier).wait()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Treat this member as a group of one inside the context, to time its own work. Nothing is sent."""
        whole = self.rank, self.size, self._backend
        self.rank, self.size, self._backend = 0, 1, None
        try:
            yield
        finally:
            self.rank, self.size, self._backend = whole

    def destroy(self) -> None:
        """Leave the group. Peers' calls that still need this member fail."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.leave()

    def _start(self, call: str, begin: Callable[[], Work]) -> Pending:
        with self._translated(call):
            return Pending(begin(), lambda: self._translated(call))

    @contextmanager
    def _translated(self, call: str) -> Iterator[None]:
        start_s = time.monotonic()
        try:
            yield
        except RuntimeError as exc:
            raise CollectiveError(f"{call} in group {self.name}, rank {self.rank} of {self.size}: {exc}") from exc
        finally:
            end_s = time.monotonic()
            self.waited_s += end_s - start_s
            if self.observe is not None:
                self.observe(call, start_s, end_s)


def gather_exact(group: Communicator, rows: Tensor, lens: Sequence[int]) -> Tensor:
    """Return every rank's ``rows [lens[rank], ...]``, concatenated, on every rank; nothing is padded."""
    out = rows.new_empty((sum(lens), *rows.shape[1:]))
    parts = list(torch.split(out, list(lens)))
    parts[group.rank].copy_(rows)
    for distance in range(1, group.size):
        group.start_shift(parts[(group.rank - distance) % group.size], parts[group.rank], distance).wait()
    return out


def all_to_all(group: Communicator, sends: Sequence[Tensor], lens: Sequence[int]) -> list[Tensor]:
    """Send ``sends[rank]`` to each rank; return what each sent, ``lens[rank]`` rows, by rank."""
    own = sends[group.rank]
    received = [own.new_empty((length, *own.shape[1:])) for length in lens]
    received[group.rank] = own
    for distance in range(1, group.size):
        source, target = (group.rank - distance) % group.size, (group.rank + distance) % group.size
        group.start_shift(received[source], sends[target].contiguous(), distance).wait()
    return received


def exchange_counts(group: Communicator, counts: Sequence[int]) -> list[int]:
    """Send each rank a number; return the numbers received, by rank."""
    table = torch.empty(group.size * group.size, dtype=torch.int64)
    group.all_gather(table, torch.tensor(counts, dtype=torch.int64))
    received: list[int] = table.view(group.size, group.size)[:, group.rank].tolist()
    return received


def reduce_scatter_exact(group: Communicator, terms: Tensor, lens: Sequence[int]) -> Tensor:
    """Add up ``terms [sum of lens, ...]`` of every rank in fp32, in the order of ranks; each rank gets its own rows."""
    parts = all_to_all(group, torch.split(terms, list(lens)), [lens[group.rank]] * group.size)
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(terms.dtype)
