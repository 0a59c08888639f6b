"""Return of partials to their ranks: each CP rank has attended the queries of all ranks over its own keys."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workers.attention.merge import Partial
from workers.parallel.collectives import Communicator, Pending


class HomewardPartials:
    """Partials of all ranks for each rank's queries, in transit; out and lse travel together, in fp32."""

    def __init__(self, group: Communicator, found: Partial, homes: Sequence[Tensor]) -> None:
        """Send ``found``, this rank's partial of the queries of all ranks.

        ``homes[rank]`` are int64 indices into it: the queries of a rank, in the order that it wants them in.
        """
        packed = torch.cat((found.out.float(), found.lse[..., None]), dim=-1)
        self._own = packed[homes[group.rank]]
        self._arriving: list[tuple[Tensor, Pending]] = []
        for distance in range(1, group.size):
            out = torch.empty_like(self._own)
            theirs = packed[homes[(group.rank + distance) % group.size]]
            self._arriving.append((out, group.start_shift(out, theirs, distance)))

    def wait(self) -> Iterator[Partial]:
        """Yield the partials of this rank's own queries over the keys of each rank, including its own."""
        yield _unpacked(self._own)
        for packed, pending in self._arriving:
            pending.wait()
            yield _unpacked(packed)


def _unpacked(packed: Tensor) -> Partial:
    return Partial(packed[..., :-1], packed[..., -1])
