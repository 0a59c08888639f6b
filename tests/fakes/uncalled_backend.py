"""Group backend for tests with few or no collectives."""

from torch import Tensor

from workers.parallel.collectives import Work


class UncalledBackend:
    """Backend that fails when called. Tests replace the methods that they expect."""

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

    def leave(self) -> None: ...
