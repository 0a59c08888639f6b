"""Part of a weight that one rank holds, and its location in the stored tensor."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from cluster.spec.ranks import kv_heads_of


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of one dimension: ``size`` elements from ``start`` on; those beyond ``whole`` are zeros."""

    whole: int
    start: int
    size: int

    @property
    def stored(self) -> slice:
        """Return the slice that the checkpoint holds."""
        return slice(min(self.start, self.whole), min(self.start + self.size, self.whole))

    @property
    def num_stored(self) -> int:
        """Return how many of ``size`` are in the checkpoint."""
        return min(self.start + self.size, self.whole) - min(self.start, self.whole)


class Share(Protocol):
    """Rank among several that divide something."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class TpGroup(Protocol):
    """The TP ranks that share every weight, as one of them sees them; a Communicator is one."""

    rank: int
    size: int

    def all_gather(self, out: Tensor, tensor: Tensor) -> None: ...

    def all_reduce(self, tensor: Tensor) -> Tensor: ...


def replicated(whole: int) -> Shard:
    """Return a shard of everything, on every rank."""
    return Shard(whole, 0, whole)


def even_shard(whole: int, share: Share) -> Shard:
    """Return one of equal parts; if they do not divide evenly, the last ones end in zeros."""
    size = -(-whole // share.size)
    return Shard(whole, share.rank * size, size)


def kv_head_shard(num_kv_heads: int, head_dim: int, group: TpGroup) -> Shard:
    """Return this rank's KV heads; neighbours hold the same one if there are more ranks than heads."""
    heads = kv_heads_of(num_kv_heads, group.size, group.rank)
    return Shard(num_kv_heads * head_dim, heads.start * head_dim, len(heads) * head_dim)


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Tensor of the model, and the part of a stored tensor that goes into it."""

    target: Tensor
    shards: tuple[Shard, ...]
    """Shards by dimension."""

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(shard.whole for shard in self.shards)

    @property
    def index(self) -> tuple[slice, ...]:
        """Return the index of the part to read."""
        return tuple(shard.stored for shard in self.shards)

    def fill(self, stored: Tensor) -> None:
        """Copy in the part that was read, and fill the rest with zeros."""
        if stored.shape != self.target.shape:
            self.target.zero_()
        self.target[tuple(slice(shard.num_stored) for shard in self.shards)].copy_(stored)


class ShardedLayer(nn.Module):
    """Layer with weights of its own."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        """Yield every weight as it is stored, under its name in this layer."""
