"""Interface between layers and the engine, which hides pages, ranks and attention backends."""

from typing import Protocol

from torch import Tensor

from workers.attention.params import AttentionParams
from workers.expert_parallel.token_exchange import Lens
from workers.kernels.elementwise import KvSlots


class AttentionContext(Protocol):
    """Key-value side of one step, made by the engine.

    A layer calls `put` and then `attend`, once each, layers in order; if `kv_slots` returns some, it fills them instead
    of calling `put`. Tokens are this rank's, flattened over requests in the order of the model's `token_ids`; the
    calls are made even when there are none.
    """

    lens: Lens
    """Token counts of every attention shard in this step."""
    last_lens: Lens
    """Counts of the tokens that have queries in the last layer."""
    counted: Tensor | None
    """Mask of tokens that belong to a request, bool ``[num_tokens, 1]``; None for all. Padding uses no experts."""
    wanted: Tensor | None
    """Rows of the tokens that have queries, int64; None for all."""

    kv_first: bool
    """Whether to project queries after `put`: keys and values travel to other ranks meanwhile, or fewer tokens have
    queries.
    """

    @property
    def last(self) -> "AttentionContext":
        """Context of the last layer, where only tokens whose final hidden states are wanted have queries."""

    def kv_slots(self, layer: int) -> KvSlots | None:
        """Return the slots where a kernel stores a layer's new keys and values; None if `put` takes them, as with
        `kv_first`.
        """

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Hand over a layer's new keys (rotated) and values, each [num_tokens, num_kv_heads, head_dim].

        May return before they are stored; the tensors must not be changed afterwards.
        """

    def attend(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        """Return causal attention of q [num_wanted, num_heads, head_dim] (rotated, not scaled) over all visible
        tokens.

        Returns [num_wanted, num_heads, value_dim] in the dtype of q.
        """


def take(x: Tensor, wanted: Tensor | None) -> Tensor:
    """Return the rows of x that have queries."""
    return x if wanted is None else x[wanted]
