"""Ranks as threads of one process, whose collectives meet at a barrier."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

import torch
from torch import Tensor

from workers.parallel.communicator import Communicator, OpenGather, Work

T = TypeVar("T")


class CompletedWork:
    """Collective that is complete when its call returns."""

    def wait(self) -> bool:
        return True


class ThreadBackend:
    """Backend of one rank. ``board`` has a slot for each rank."""

    def __init__(self, rank: int, board: list[Tensor], gate: Barrier, *, in_background: bool) -> None:
        self.rank, self.board, self.gate, self.in_background = rank, board, gate, in_background

    def all_gather(self, output: Tensor, tensor: Tensor, /) -> CompletedWork:
        self.board[self.rank] = tensor
        self.gate.wait()
        output.copy_(torch.cat(self.board))
        return self._leave()

    def open_all_gather(self, num_bytes: int, /) -> OpenGather[Work] | None:
        if self.in_background:
            return None
        self.board[self.rank] = torch.empty(num_bytes, dtype=torch.uint8)
        self.gate.wait()
        return OpenGather(list(self.board), self._leave)

    def all_reduce(self, tensor: Tensor, /) -> CompletedWork:
        self.board[self.rank] = tensor
        self.gate.wait()
        total = torch.stack(self.board).float().sum(0)
        self.gate.wait()
        tensor.copy_(total)
        return self._leave()

    def barrier(self) -> CompletedWork:
        return self._leave()

    def broadcast(self, tensor: Tensor, root: int, /) -> CompletedWork:
        self.board[self.rank] = tensor
        self.gate.wait()
        if self.rank != root:
            tensor.copy_(self.board[root])
        return self._leave()

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> CompletedWork:
        self.board[self.rank] = tensor
        self.gate.wait()
        output.copy_(self.board[(self.rank - distance) % len(self.board)])
        return self._leave()

    def leave(self) -> None:
        """Do nothing, because nobody waits for a thread."""

    def _leave(self) -> CompletedWork:
        self.gate.wait()
        return CompletedWork()


def on_thread_ranks(size: int, function: Callable[[Communicator], T], *, in_background: bool = True) -> list[T]:
    """Call a function on all ranks of a group in parallel. Return the results by rank."""
    if size == 1:
        return [function(Communicator("threads"))]
    barrier, board = Barrier(size, timeout=240), [torch.empty(0)] * size

    def call(rank: int) -> T:
        try:
            backend = ThreadBackend(rank, board, barrier, in_background=in_background)
            return function(Communicator("threads", rank, size, backend))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(call, range(size)))
