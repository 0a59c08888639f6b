"""Collectives over one group of ranks behind one small class; a group of one does nothing and needs no library."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from cluster.spec.errors import BatonError


class CollectiveError(BatonError):
    """A peer of a group is gone or did not answer in time; the replica cannot go on."""


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> bool:
        """Block until it is done; RuntimeError when it failed."""


class Backend(Protocol):
    """The part of torch.distributed's process group backends that we use."""

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work: ...

    def broadcast(self, tensor: Tensor, root: int, /) -> Work: ...

    def barrier(self) -> Work: ...


Observe = Callable[[str, float, float], None]
"""(call, start, end) of a collective, in seconds of ``time.monotonic``."""


class Communicator:
    """One group as one of its members sees it. Every member makes the same calls in the same order.

    Every call raises CollectiveError when a peer is gone or does not answer within the group's timeout.
    """

    def __init__(self, name: str, rank: int = 0, size: int = 1, backend: Backend | None = None) -> None:
        assert (size == 1) == (backend is None), f"group {name} of {size} needs a backend exactly if > 1"
        self.name = name
        self.rank = rank
        self.size = size
        self.waited_s = 0.0
        """Time that this member has spent inside calls, waiting for the other members included."""
        self.observe: Observe | None = None
        """Told of every call when it ends."""
        self._backend = backend

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Fill ``out [size * n, ...]`` with every member's ``tensor [n, ...]`` by rank; both contiguous."""
        assert len(out) == self.size * len(tensor), f"{out.shape} cannot hold {self.size} of {tensor.shape}"
        if self._backend is None:
            out.copy_(tensor)
        elif tensor.numel():
            with self._translated("all_gather"):
                self._backend._allgather_base(out, tensor).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        """Overwrite ``tensor`` with that of the member whose rank in the group is ``root``."""
        if self._backend is not None:
            with self._translated("broadcast"):
                self._backend.broadcast(tensor, root).wait()

    def barrier(self) -> None:
        """Return once every member has called this."""
        if self._backend is not None:
            with self._translated("barrier"):
                self._backend.barrier().wait()

    def destroy(self) -> None:
        """Close the connections; only a group of one can be used after it."""
        self._backend = None

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
