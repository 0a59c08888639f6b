"""Attention shapes as plain data, and what attention costs. Does not import torch, so that the planner can use them."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cluster.spec.kv import INDEX_PART, KvPart
from workers.attention.limits import MOST_SCORED, MOST_SELECTED

MOST_EXPANDED = 4096
"""Maximum number of stored keys that a layer expands at a time. With 16 heads of 192 + 128 elements in bf16, they take
40 MiB.
"""


class MatrixShape(NamedTuple):
    outputs: int
    inputs: int

    @property
    def size(self) -> int:
        return self.outputs * self.inputs


class Activations(NamedTuple):
    """Activations of a layer that exist at one time, besides hidden states."""

    width: int = 0
    """Elements per token, sharded over TP ranks."""
    whole_width: int = 0
    """Elements per token that every TP rank holds."""
    wide_width: int = 0
    """Elements per token in fp32, sharded over TP ranks."""
    narrow_width: int = 0
    """Elements per token, sharded over TP ranks, that exist only if the model's dtype is not fp32."""
    size: int = 0
    """Elements for any number of tokens, sharded over TP ranks."""
    num_bytes: int = 0
    """Bytes for any number of tokens, which every TP rank holds."""


class AttentionForm(NamedTuple):
    """Form in which a layer computes attention: over all heads, elements per token, and FLOPs."""

    query_width: int
    """Elements of a token's queries."""
    out_width: int
    """Elements of a token's result."""
    pair_flops: int
    """FLOPs per (query, key) pair."""
    activations: tuple[Activations, ...]
    """Activations at the times when most exist. Which of them are the largest depends on the step and the dtype."""
    tile_size: int = 0
    """Elements of a tile of expanded keys, and of their expansion. 0 if keys are used as stored."""
    selects_keys: bool = False

    @property
    def merging(self) -> Activations:
        """Return queries, the sum of partials, and the partial that is being added, besides new keys and values.

        The first sum is in either dtype.
        """
        return Activations(
            width=self.query_width + self.out_width,
            wide_width=self.out_width,
            narrow_width=0 if self.tile_size else self.out_width,
            size=self.tile_size,
        )


class AttentionCost(NamedTuple):
    """Sizes of one layer's attention, over all heads: matrix elements, and FLOPs."""

    sharded: int
    """Matrix elements that are sharded over TP ranks."""
    kv: int
    """Elements of the matrices whose outputs are stored, sharded over as many TP ranks as there are KV heads."""
    whole: int
    """Elements of other matrices, which every TP rank holds."""
    forms: tuple[AttentionForm, ...]
    """Forms of attention, of which the first expands keys if any does, and the last selects keys if any does."""
    expand_flops: int = 0
    """FLOPs to expand one key. 0 if keys are used as stored."""
    top_k: int | None = None
    """Maximum number of keys per query. None if all visible keys are used."""
    index_flops: int = 0
    """FLOPs of an indexer per (query, key) pair."""
    index_row_bytes: int = 0
    """Bytes of an indexer's queries per token if they are passed, in fp32."""

    @property
    def long_form(self) -> AttentionForm:
        """Return the form of many queries and keys."""
        return self.forms[0] if self.top_k is None else self.forms[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Grouped-query attention (Ainslie et al., 2023) with rotary positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    """True to normalize each head of queries and keys before rotation."""
    rotated_share: float = 1.0
    """Share of a head's elements, from its beginning, that are rotated."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Return the number of elements in one token's keys, which is also the number in its values."""
        return self.num_kv_heads * self.head_dim

    @property
    def rope_dim(self) -> int:
        """Return the number of elements in the rotated part of a head."""
        return int(self.head_dim * self.rotated_share)

    def kv_parts(self, dtype: str) -> tuple[KvPart, ...]:
        return tuple(KvPart(name=name, dim=self.head_dim, dtype=dtype) for name in ("k", "v"))

    def projections(self, hidden_size: int) -> tuple[MatrixShape, MatrixShape]:
        """Return the shapes of the projections of queries and of attention's output."""
        return MatrixShape(self.q_size, hidden_size), MatrixShape(hidden_size, self.q_size)

    def whole_matrices(self, hidden_size: int) -> tuple[MatrixShape, ...]:  # noqa: ARG002 - there are none
        """Return the shapes of the matrices in the model's dtype that every TP rank holds, apart from stored keys'."""
        return ()

    def cost(self, hidden_size: int) -> AttentionCost:
        # Queries before and after their rotation, and keys and values before and after they are joined to rows.
        projected = Activations(width=2 * (self.q_size + 2 * self.kv_size))
        return AttentionCost(
            sharded=2 * hidden_size * self.q_size,
            kv=2 * hidden_size * self.kv_size,
            whole=0,
            forms=(AttentionForm(self.q_size, self.q_size, 4 * self.q_size, (projected,)),),
        )

    def of_rank(self, tp_size: int) -> "AttentionConfig":
        return replace(self, num_heads=self.num_heads // tp_size, num_kv_heads=max(1, self.num_kv_heads // tp_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerConfig:
    """Indexer of DeepSeek Sparse Attention (DeepSeek-V3.2, arXiv:2512.02556): chooses the keys that a query uses.

    A layer scores every visible key with small heads of its own, and attends to the ``top_k`` keys that score highest.
    """

    num_heads: int
    head_dim: int
    top_k: int
    is_interleaved: bool
    """True if checkpoint dimensions 2i and 2i + 1 of a rotated part form a pair, as in `LatentAttentionConfig`."""

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): all heads share one latent per token."""

    num_heads: int
    query_rank: int | None
    """Rank of the query projection. None if it has full rank."""
    kv_rank: int
    """Width of the latent, from which each head's keys and values follow."""
    plain_dim: int
    """Width of the part of a head's queries and keys that has no positions."""
    rope_dim: int
    """Width of the rotated part. All heads share its keys."""
    value_dim: int
    is_interleaved: bool
    """True if checkpoint dimensions 2i and 2i + 1 are rotated as a pair. If False, i and i + rope_dim/2 are."""
    bias: bool
    """True if the projections of hidden states to latents, and the output projection, have a bias."""
    indexer: IndexerConfig | None = None
    """Choice of the keys that a query uses. None if it uses all visible keys."""
    shares_selection: bool = False
    """True if a layer uses the keys that the nearest layer before it with an indexer of its own has chosen."""

    @property
    def own_indexer(self) -> IndexerConfig | None:
        return None if self.shares_selection else self.indexer

    def selected_keys(self, most_keys: int) -> int | None:
        """Return the number of keys that a query uses in a step; None if it uses all visible ones.

        ``most_keys`` is the maximum number of keys that a query of the step sees, on any rank.
        """
        return self.indexer.top_k if self.indexer is not None and most_keys > self.indexer.top_k else None

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def rotated_share(self) -> float:
        """Return the share of the part of a head that has positions, of which all is rotated."""
        return 1.0

    @property
    def head_dim(self) -> int:
        """Return the width of a head's queries and keys."""
        return self.plain_dim + self.rope_dim

    @property
    def stored_dim(self) -> int:
        """Return the number of elements stored per token."""
        return self.kv_rank + self.rope_dim

    @property
    def expanded_size(self) -> int:
        """Return the number of elements that a latent expands to: keys without positions, and values."""
        return self.num_heads * (self.plain_dim + self.value_dim)

    def kv_parts(self, dtype: str) -> tuple[KvPart, ...]:
        latent = KvPart(name="latent", dim=self.stored_dim, dtype=dtype)
        if (indexer := self.own_indexer) is None:
            return (latent,)
        return latent, KvPart(name=INDEX_PART, dim=indexer.head_dim, dtype=dtype)

    def projections(self, hidden_size: int) -> tuple[MatrixShape, MatrixShape]:
        """Return the shapes of the projections of queries and of attention's output."""
        queries = MatrixShape(self.num_heads * self.head_dim, self.query_rank or hidden_size)
        return queries, MatrixShape(hidden_size, self.num_heads * self.value_dim)

    def whole_matrices(self, hidden_size: int) -> tuple[MatrixShape, ...]:
        """Return the shapes of the matrices in the model's dtype that every TP rank holds, apart from stored keys'."""
        if self.query_rank is None:
            return ()
        low_rank = MatrixShape(self.query_rank, hidden_size)
        own = self.own_indexer
        return (low_rank,) if own is None else (low_rank, MatrixShape(own.query_size, self.query_rank))

    def cost(self, hidden_size: int) -> AttentionCost:
        query_width, out_width = self.num_heads * self.head_dim, self.num_heads * self.value_dim
        expanded = AttentionForm(
            query_width=query_width,
            out_width=out_width,
            pair_flops=2 * (query_width + out_width),
            activations=(),
            tile_size=MOST_EXPANDED * (self.expanded_size + query_width),
        )
        expanded = expanded._replace(activations=(expanded.merging._replace(whole_width=self.stored_dim),))
        stored = AttentionForm(
            query_width=self.num_heads * self.stored_dim,
            out_width=self.num_heads * self.kv_rank,
            pair_flops=2 * self.num_heads * (self.stored_dim + self.kv_rank),
            activations=(self._absorbing(self.stored_dim),),
        )
        cost = AttentionCost(
            sharded=(self.query_rank or hidden_size) * query_width
            + self.kv_rank * self.expanded_size
            + out_width * hidden_size,
            kv=hidden_size * self.stored_dim,
            whole=sum(matrix.size for matrix in self.whole_matrices(hidden_size)),
            forms=(expanded, stored),
            expand_flops=2 * self.kv_rank * self.expanded_size,
        )
        return cost if self.indexer is None else self._with_selection(cost, self.indexer, hidden_size)

    def _absorbing(self, row_width: int) -> Activations:
        """Return a token's queries of stored keys, with those before or with the sums of latents, and its rows."""
        width = self.num_heads * (self.stored_dim + max(self.head_dim, self.kv_rank))
        return Activations(width=width, whole_width=row_width)

    def _with_selection(self, cost: AttentionCost, indexer: IndexerConfig, hidden_size: int) -> AttentionCost:
        # Either an indexer's products, and its keys as stored and in fp32, or rows as stored and in fp32, and scores.
        most = max(MOST_SCORED, MOST_SELECTED, indexer.top_k * self.stored_dim)
        own = 0 if self.shares_selection else indexer.query_size + indexer.head_dim + 2 * indexer.num_heads
        stored = cost.forms[-1]
        attending = Activations(width=stored.query_width + stored.out_width, whole_width=own, num_bytes=4 * 3 * most)
        selected = stored._replace(activations=(self._absorbing(self.stored_dim + own), attending), selects_keys=True)
        cost = cost._replace(forms=(*cost.forms, selected), top_k=indexer.top_k)
        if self.shares_selection:
            return cost
        return cost._replace(
            kv=cost.kv + hidden_size * indexer.head_dim,
            whole=cost.whole + hidden_size * indexer.num_heads,
            index_flops=2 * indexer.num_heads * (indexer.head_dim + 1),
            index_row_bytes=4 * indexer.num_heads * (indexer.head_dim + 1),
        )

    def of_rank(self, tp_size: int) -> "LatentAttentionConfig":
        return replace(self, num_heads=self.num_heads // tp_size)


AnyAttentionConfig = AttentionConfig | LatentAttentionConfig
