"""Debugging aid: ranks of a group compare every collective before they run it, and name the first that differs."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.collectives import Backend, CompletedWork, Work

_RECORD_BYTES = 256
_END = "\0"


class Notes:
    """Latest call of every rank of a replica, in any group."""

    def __init__(self, store: Store, group: str, members: Sequence[int], global_rank: int) -> None:
        """Open the notes of one group; ``members`` are global ranks, and ``store`` is the same for all groups."""
        self._store, self._group, self._members, self._global_rank = store, group, members, global_rank

    def write(self, words: str) -> None:
        """Note that this rank starts a call."""
        self._store.set(str(self._global_rank), f"{words} in group {self._group}")

    def read(self) -> str:
        """Return the latest call of each member."""
        try:
            return ", ".join(f"global rank {member}: {self._last(str(member))}" for member in self._members)
        except RuntimeError as error:
            return f"nobody knows: {error}"

    def _last(self, member: str) -> str:
        return bytes(self._store.get(member)).decode() if self._store.check([member]) else "nothing"


class CheckedBackend:
    """Backend that compares calls between ranks before running them; RuntimeError when they differ.

    A rank that calls nothing, or on another group, is found by the backend's timeout; the error has everybody's notes.
    """

    def __init__(self, backend: Backend, rank: int, size: int, notes: Notes) -> None:
        self.in_background = backend.in_background
        self._backend, self._rank, self._size, self._notes = backend, rank, size, notes
        self._count = 0

    @property
    def received_bytes(self) -> int:
        """Return the bytes received, including the comparison's."""
        return self._backend.received_bytes

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work:
        return self._checked("all_gather of", tensor, lambda: self._backend._allgather_base(output, tensor))

    def allreduce(self, tensor: Tensor, /) -> Work:
        return self._checked("all_reduce of", tensor, lambda: self._backend.allreduce(tensor))

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        return self._checked(f"broadcast from rank {root} of", tensor, lambda: self._backend.broadcast(tensor, root))

    def barrier(self) -> Work:
        self._exchange("barrier")
        return self._backend.barrier()

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        """Check that each rank takes what its peer sends; lengths may differ from rank to rank."""
        words = f"shift by {distance} of {tensor.dtype}"
        records = self._exchange(words, f"{tensor.numel()}")
        source = (self._rank - distance) % self._size
        if int(records[source]) != output.numel():
            raise RuntimeError(
                f"collective {self._count} differs: rank {source} sends {records[source]} elements in {words}, "
                f"rank {self._rank} takes {output.numel()}"
            )
        return self._backend.shift(output, tensor, distance)

    def leave(self) -> None:
        self._backend.leave()

    def _checked(self, words: str, tensor: Tensor, begin: Callable[[], Work]) -> Work:
        self._exchange(f"{words} {tensor.dtype} {list(tensor.shape)}")
        return begin() if tensor.numel() else CompletedWork()

    def _exchange(self, words: str, own: str = "") -> list[str]:
        """Compare ``words`` over the ranks; return each rank's ``own``, by rank."""
        self._count += 1
        self._notes.write(words)
        record = f"{words}{_END}{own}".encode().ljust(_RECORD_BYTES, _END.encode())[:_RECORD_BYTES]
        records = torch.empty(self._size * _RECORD_BYTES, dtype=torch.uint8)
        try:
            self._backend._allgather_base(records, torch.frombuffer(bytearray(record), dtype=torch.uint8)).wait()
        except RuntimeError as error:
            begun = self._notes.read()
            raise RuntimeError(f"collective {self._count}, {words}: {error}; last calls: {begun}") from error
        said = [bytes(part.tolist()).decode().split(_END) for part in records.view(self._size, _RECORD_BYTES)]
        for rank, (theirs, *_) in enumerate(said):
            if theirs != said[0][0]:
                raise RuntimeError(
                    f"collective {self._count} differs: rank 0 calls {said[0][0]}, rank {rank} calls {theirs}"
                )
        return [numbers for _, numbers, *_ in said]
