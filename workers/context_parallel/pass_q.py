"""Bringing partials home: each CP rank has attended the queries of all ranks over keys of its own."""

from collections.abc import Iterator

import torch
from torch import Tensor

from workers.context_parallel.merge import Partial
from workers.context_parallel.shard_plan import ShardPlan
from workers.parallel.collectives import Communicator, Pending


class HomewardPartials:
    """What every rank found for the queries of every other, on its way."""

    def __init__(self, group: Communicator, plan: ShardPlan, found: Partial) -> None:
        """Send ``found``, this rank's partial of all tokens of the flattened batch, to where the queries are."""
        packed = torch.cat((found.out.float(), found.lse[..., None]), dim=-1)
        self._own = packed[_indices(plan, group.rank, packed.device)]
        self._arriving: list[tuple[Tensor, Pending]] = []
        for distance in range(1, group.size):
            theirs = _indices(plan, (group.rank + distance) % group.size, packed.device)
            out = torch.empty_like(self._own)
            self._arriving.append((out, group.start_shift(out, packed[theirs], distance)))

    def wait(self) -> Iterator[Partial]:
        """The partials of this rank's own queries over the keys of each rank, its own among them."""
        yield _unpacked(self._own)
        for packed, pending in self._arriving:
            pending.wait()
            yield _unpacked(packed)


def _indices(plan: ShardPlan, cp_rank: int, device: torch.device) -> Tensor:
    return torch.from_numpy(plan.local(cp_rank)).to(device)


def _unpacked(packed: Tensor) -> Partial:
    return Partial(packed[..., :-1], packed[..., -1])
