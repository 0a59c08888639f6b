"""The engine as a layer sees it: pages, ranks and attention backends stay behind this interface."""

from typing import Protocol

from torch import Tensor

from workers.attention.params import AttentionParams
from workers.expert_parallel.token_exchange import Lens
from workers.kernels.elementwise import KvSlots


class AttentionContext(Protocol):
    """The key-value side of one step, made by the engine.

    A layer calls `put` and then `attend`, once each, layers in order; where there is a `place`, it fills that instead
    of calling `put`. Tokens are this rank's, flattened over requests in the order of the model's `token_ids`; the calls
    are made even when there are none.
    """

    lens: Lens
    """How many tokens every attention shard has in this step."""
    last_lens: Lens
    """How many of them have queries in the last layer."""
    counted: Tensor | None
    """Tokens that belong to a request, bool ``[num_tokens, 1]``; None for all. Padding asks for no experts."""
    wanted: Tensor | None
    """Rows of the tokens that have queries, int64; None for all."""

    kv_first: bool
    """Project queries after `put`: keys and values travel to other ranks meanwhile, or fewer tokens have queries."""

    @property
    def last(self) -> "AttentionContext":
        """Context of the last layer, where only tokens whose final hidden states are wanted have queries."""

    def place(self, layer: int) -> KvSlots | None:
        """Return where a kernel stores a layer's new keys and values; None if `put` takes them, as with `kv_first`."""

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Hand over a layer's new keys (rotated) and values, each [num_tokens, num_kv_heads, head_dim].

        May return before they are stored; the tensors must not be changed afterwards.
        """

    def attend(self, layer: int, q: Tensor, params: AttentionParams) -> Tensor:
        """Causal attention of q [num_wanted, num_heads, head_dim] (rotated, not scaled) to all a token may see.

        Returns [num_wanted, num_heads, value_dim] in the dtype of q.
        """


def take(x: Tensor, wanted: Tensor | None) -> Tensor:
    """Return the rows of x that have queries."""
    return x if wanted is None else x[wanted]
