"""Ring rotation of a block of rows of every CP rank."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from workers.context_parallel.gather import at_least
from workers.parallel.collectives import Communicator, Pending


class Ring:
    """Ring with one round per layer: fill ``own``, ``start``, work on the own block, then on each of ``others``.

    Owned by a worker. The block being worked on is meanwhile in transit to the next rank, and the following one to
    this rank. Two buffers grow to the largest block seen and stay allocated.
    """

    def __init__(self, group: Communicator) -> None:
        self.group = group
        self._held: Tensor | None = None
        self._arriving: Tensor | None = None
        self._pending: Pending | None = None
        self._lens: Sequence[int] = ()

    def own(self, num_rows: int, lens: Sequence[int], row_shape: tuple[int, ...], like: Tensor) -> Tensor:
        """Return the buffer for this rank's block in the next round, ``[num_rows, *row_shape]``.

        Only the first ``lens[r]`` rows of rank r's block are passed on; ``lens`` is the same on every rank. The result
        is valid until the first of ``others``.
        """
        self._lens = lens
        capacity = max(num_rows, *lens)
        self._held = at_least(self._held, capacity, row_shape, like)
        self._arriving = at_least(self._arriving, capacity, row_shape, like)
        return self._held[:num_rows]

    def start(self) -> None:
        """Send this rank's block. Do not write to it before the first of ``others`` is returned."""
        self._pass_on(self.group.rank)

    def others(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, block) of every other rank with any rows, the preceding rank first.

        A block is valid until the next is requested.
        """
        for distance in range(1, self.group.size):
            source = (self.group.rank - distance) % self.group.size
            if self._pending is not None:
                self._pending.wait()
            self._held, self._arriving = self._arriving, self._held
            if distance + 1 < self.group.size:
                self._pass_on(source)
            if self._lens[source]:
                assert self._held is not None
                yield source, self._held[: self._lens[source]]

    def _pass_on(self, source: int) -> None:
        """Send on the current block, of ``source``, and receive that of the preceding rank; a no-op if no rank has
        rows.
        """
        self._pending = None
        if any(self._lens):
            assert self._held is not None
            assert self._arriving is not None
            previous = (source - 1) % self.group.size
            self._pending = self.group.start_shift(
                self._arriving[: self._lens[previous]], self._held[: self._lens[source]]
            )
