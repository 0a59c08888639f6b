"""Weights that the CP ranks of a stage divide among them and send before each use. Pure arithmetic."""

from dataclasses import dataclass

from cluster.spec.strategy import ShardLinear

AHEAD = 1
"""Default number of layers by which a weight is sent ahead of its use. More would take memory and hide nothing more,
because layers take equally long.
"""


@dataclass(frozen=True, slots=True)
class LinearShards:
    """Rows of a weight in each layer of a stage that each of ``num_ranks`` ranks stores, and buffers for the others."""

    way: ShardLinear
    num_ranks: int
    ahead: int = AHEAD
    """Number of layers by which a weight is sent ahead of its use."""

    @property
    def num_buffers(self) -> int:
        """Return the number of weights that a rank receives or uses at a time."""
        return self.ahead + 1

    def owner(self, layer: int) -> int:
        """Return the rank that stores a layer's weight. ``layer`` is its index in the stage."""
        return layer % self.num_ranks

    def stored_rows(self, num_rows: int, layer: int, rank: int) -> range:
        """Return the rows of a layer's weight that a rank stores. Rows from ``num_rows`` on are padding."""
        if self.way is ShardLinear.GATHER:
            size = -(-num_rows // self.num_ranks)
            return range(rank * size, (rank + 1) * size)
        return range(num_rows if self.owner(layer) == rank else 0)

    def buffer_rows(self, num_rows: int) -> int:
        """Return the number of rows that arrive together."""
        return -(-num_rows // self.num_ranks) * self.num_ranks if self.way is ShardLinear.GATHER else num_rows

    def held_rows(self, num_rows: int, num_layers: int, rank: int = 0) -> int:
        """Return the number of rows that a rank stores of all layers, or has buffers for. Rank 0 has the most."""
        stored = sum(len(self.stored_rows(num_rows, layer, rank)) for layer in range(num_layers))
        return stored + self.num_buffers * self.buffer_rows(num_rows)

    def received_rows(self, num_rows: int) -> int:
        """Return the number of rows of a weight that a rank receives if it does not store all of them."""
        return num_rows - (-(-num_rows // self.num_ranks) if self.way is ShardLinear.GATHER else 0)
