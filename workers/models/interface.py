"""What a model asks of the engine. Models know layers and weights; pages, ranks and backends stay behind this."""

from typing import Protocol

from torch import Tensor


class AttentionContext(Protocol):
    """The key-value side of one step; one instance a step, made by the engine.

    A layer calls `put` and then `attend`, once each, layers in order. Tokens are this rank's, flattened over
    requests in the order of the model's `token_ids`; there may be none, and the calls are made all the same.
    """

    kv_first: bool
    """Keys and values travel to other ranks after `put`, so that queries are better projected after it."""

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Hand over a layer's new keys (rotated) and values, each [num_tokens, num_kv_heads, head_dim].

        May return before they are stored; the tensors must not be changed afterwards.
        """

    def attend(self, layer: int, q: Tensor) -> Tensor:
        """Causal attention of q [num_tokens, num_heads, head_dim] (rotated, not scaled) to all a token may see.

        Scores are scaled by 1/sqrt(head_dim). Returns the shape and dtype of q.
        """
