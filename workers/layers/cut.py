"""Which part of a weight one tensor parallel rank holds, and where in the checkpoint it is."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cluster.spec.ranks import kv_heads_of


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of one dimension: ``size`` numbers from ``start`` on, of which those beyond ``whole`` are zeros."""

    whole: int
    start: int
    size: int

    @property
    def stored(self) -> slice:
        """What the checkpoint holds of it."""
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


def uncut(whole: int) -> Cut:
    """All of it, on every rank."""
    return Cut(whole, 0, whole)


def even_cut(whole: int, share: Share) -> Cut:
    """Equal parts; where they do not come out even, the last ones end in zeros."""
    size = -(-whole // share.size)
    return Cut(whole, share.rank * size, size)


def kv_head_cut(num_kv_heads: int, head_dim: int, group: TpGroup) -> Cut:
    """This rank's KV heads; neighbours hold the same one where there are more ranks than heads."""
    heads = kv_heads_of(num_kv_heads, group.size, group.rank)
    return Cut(num_kv_heads * head_dim, heads.start * head_dim, len(heads) * head_dim)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of the model, and the part of a tensor of the checkpoint that goes into it."""

    target: Tensor
    cuts: tuple[Cut, ...]
    """By dimension."""

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        return tuple(cut.whole for cut in self.cuts)

    @property
    def index(self) -> tuple[slice, ...]:
        """What to read of it."""
        return tuple(cut.stored for cut in self.cuts)

    def fill(self, stored: Tensor) -> None:
        """Take what was read; the rest is zeros."""
        if stored.shape != self.target.shape:
            self.target.zero_()
        self.target[tuple(slice(cut.num_stored) for cut in self.cuts)].copy_(stored)
