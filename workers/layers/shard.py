"""Shards of weights, and their location in the stored tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from cluster.spec.ranks import kv_heads_of
from workers.parallel.communicator import Communicator
from workers.parallel.model_groups import Part
from workers.quant.fp8_matrix import Fp8Matrix


@dataclass(frozen=True, slots=True)
class Shard:
    """Range of ``size`` elements of one dimension, starting at ``start``. Elements beyond ``whole`` are zeros."""

    whole: int
    start: int
    size: int

    @property
    def stored(self) -> slice:
        """Return the slice of the stored tensor that this shard holds."""
        return slice(min(self.start, self.whole), min(self.start + self.size, self.whole))


def replicated(whole: int) -> Shard:
    return Shard(whole, 0, whole)


def even_shard(whole: int, part: Part | Communicator) -> Shard:
    """Return one of ``part.size`` equal shards. If ``whole`` does not divide evenly, the last shards end in zeros."""
    size = -(-whole // part.size)
    return Shard(whole, part.rank * size, size)


def kv_head_shard(num_kv_heads: int, head_dim: int, group: Communicator) -> Shard:
    """Return this rank's KV heads. If there are more ranks than heads, neighbouring ranks hold the same head."""
    heads = kv_heads_of(num_kv_heads, group.size, group.rank)
    return Shard(num_kv_heads * head_dim, heads.start * head_dim, len(heads) * head_dim)


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Tensor of the model, and the shard of a stored tensor to copy into it."""

    target: Tensor | Fp8Matrix
    shards: tuple[Shard, ...]
    matrix: str | None = None
    """Parameter of the layer that contains the target, if it can be replaced by an Fp8Matrix."""

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(shard.whole for shard in self.shards)

    @property
    def index(self) -> tuple[slice, ...]:
        """Return the index of the stored elements to read."""
        return tuple(shard.stored for shard in self.shards)

    @property
    def plain(self) -> Tensor:
        """Return the target, which must be a plain tensor."""
        assert isinstance(self.target, Tensor), "the matrix is in FP8"
        return self.target

    def cleared(self) -> Tensor | Fp8Matrix:
        """Return the part of the target that the stored elements at ``index`` fill, and fill the rest with zeros."""
        sizes = tuple(stored.stop - stored.start for stored in self.index)
        if isinstance(self.target, Fp8Matrix):
            return self.target.cleared(sizes)
        if sizes != self.target.shape:
            self.target.zero_()
        return self.target[tuple(map(slice, sizes))]


class ShardedLayer(nn.Module):
    """Layer with its own weights. Each rank holds a shard of them, or by default all of them."""

    wide: frozenset[str] = frozenset()
    """Names of weights that are in fp32 for any model dtype."""

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        """Yield every weight with its name within this layer."""
        for name, parameter in self.named_parameters(recurse=False):
            yield name, WeightShard(parameter, tuple(map(replicated, parameter.shape)))
