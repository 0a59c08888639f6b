"""What a model asks of the engine. Models know layers and weights; pages, ranks and backends stay behind this."""

from typing import Protocol

from torch import Tensor

from workers.expert_parallel.sharing import Lens
from workers.row_kernels import KvPlace


class AttentionContext(Protocol):
    """The key-value side of one step, made by the engine.

    A layer calls `put` and then `attend`, once each, layers in order; where there is a `place`, it fills that instead
    of `put`. Tokens are this rank's, flattened over
    requests in the order of the model's `token_ids`; there may be none, and the calls are made all the same.
    """

    lens: Lens
    """How many tokens every attention shard has in this step."""
    last_lens: Lens
    """How many of them have queries in the last layer."""
    counted: Tensor | None
    """bool ``[num_tokens, 1]``: the tokens that are of a request; None for all. Others ask for no experts."""
    wanted: Tensor | None
    """int64 rows of the tokens that have queries; None for all."""

    kv_first: bool
    """Queries are projected after `put`: keys and values travel to other ranks meanwhile, or fewer tokens have any."""

    @property
    def last(self) -> "AttentionContext":
        """The context of the last layer, where only the tokens have queries whose final hidden states are wanted."""

    def place(self, layer: int) -> KvPlace | None:
        """Where a kernel is to store a layer's new keys and values; None where `put` takes them. Not for `kv_first`."""

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Hand over a layer's new keys (rotated) and values, each [num_tokens, num_kv_heads, head_dim].

        May return before they are stored; the tensors must not be changed afterwards.
        """

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of q [num_wanted, num_heads, head_dim] (rotated, not scaled) to all a token may see.

        Scores are scaled by 1/sqrt(head_dim). Returns the shape and dtype of q.
        """


def take(x: Tensor, wanted: Tensor | None) -> Tensor:
    """The rows of x that have queries."""
    return x if wanted is None else x[wanted]
