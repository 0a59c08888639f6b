"""A group's backend for tests in which nothing, or little, may be asked of it."""

from torch import Tensor

from workers.parallel.collectives import Work


class UncalledBackend:
    """Fails when it is called; a test puts what it expects in place."""

    in_background = True

    def _allgather_base(self, output: Tensor, tensor: Tensor, /) -> Work:
        raise AssertionError(f"all_gather {output.shape} {tensor.shape}")

    def allreduce(self, tensor: Tensor, /) -> Work:
        raise AssertionError(f"all_reduce {tensor.shape}")

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        raise AssertionError(f"broadcast {tensor.shape} {root}")

    def barrier(self) -> Work:
        raise AssertionError("barrier")

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        raise AssertionError(f"shift {output.shape} {tensor.shape} {distance}")

    def leave(self) -> None:
        """Nobody waits."""
