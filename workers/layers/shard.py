"""The part of a weight that one rank holds, and where in the stored tensor it is."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from cluster.spec.ranks import kv_heads_of


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of one dimension: ``size`` numbers from ``start`` on, of which those beyond ``whole`` are zeros."""

    whole: int
    start: int
    size: int

    @property
    def stored(self) -> slice:
        """The part that the checkpoint holds."""
        return slice(min(self.start, self.whole), min(self.start + self.size, self.whole))

    @property
    def num_stored(self) -> int:
        """How many of ``size`` are in the checkpoint."""
        return min(self.start + self.size, self.whole) - min(self.start, self.whole)


class Share(Protocol):
    """One of several ranks that divide something."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...


class TpGroup(Protocol):
    """The TP ranks that share every weight, as one of them sees them; a Communicator is one."""

    rank: int
    size: int

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """See Communicator."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """See Communicator."""


def replicated(whole: int) -> Shard:
    """All of it, on every rank."""
    return Shard(whole, 0, whole)


def even_shard(whole: int, share: Share) -> Shard:
    """Equal parts; where they do not come out even, the last ones end in zeros."""
    size = -(-whole // share.size)
    return Shard(whole, share.rank * size, size)


def kv_head_shard(num_kv_heads: int, head_dim: int, group: TpGroup) -> Shard:
    """This rank's KV heads; neighbours hold the same one where there are more ranks than heads."""
    heads = kv_heads_of(num_kv_heads, group.size, group.rank)
    return Shard(num_kv_heads * head_dim, heads.start * head_dim, len(heads) * head_dim)


@dataclass(frozen=True, slots=True)
class WeightShard:
    """A tensor of the model, and the part of a stored tensor that goes into it."""

    target: Tensor
    shards: tuple[Shard, ...]
    """By dimension."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the stored tensor."""
        return tuple(shard.whole for shard in self.shards)

    @property
    def index(self) -> tuple[slice, ...]:
        """The part of it to read."""
        return tuple(shard.stored for shard in self.shards)

    def fill(self, stored: Tensor) -> None:
        """Take the part that was read; the rest is zeros."""
        if stored.shape != self.target.shape:
            self.target.zero_()
        self.target[tuple(slice(shard.num_stored) for shard in self.shards)].copy_(stored)


class ShardedLayer(nn.Module):
    """A layer with weights of its own."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        """Yield every weight as it is stored, under its name in this layer."""
