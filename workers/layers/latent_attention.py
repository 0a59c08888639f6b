"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). See ``LatentAttentionConfig`` for its sizes.

A token stores one row for all heads: a normalized latent c, and a rotated key r that the heads share. Head h has the
key [K_h c, r] and the value V_h c. Both forms of attention give the same result:

- Expanded: keys and values of every head are computed from the rows. A pair costs little, but every visible row must be
  expanded. Suits long extends.
- Stored: since q · K_h c = (K_h^T q) · c, queries meet the rows themselves, as in attention with a single KV head, and
  V_h is applied to the result. Suits decode and short extends.

With an indexer (DeepSeek Sparse Attention), a step in which a query sees more keys than it may use attends to the
stored rows of the keys that the indexer chooses. Other steps attend to all visible keys, in either form.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.attention.interface import AttentionParams, AttentionShape
from workers.attention.selection import IndexQueries
from workers.layers.attention import AttentionContext, AttentionWork, take
from workers.layers.attention_config import LatentAttentionConfig
from workers.layers.config import RopeConfig
from workers.layers.indexer import Indexer
from workers.layers.linear import FusedLinear, RMSNorm
from workers.layers.matmul import PackedMatrix, multiply, packed, weights_of
from workers.layers.projections import Projections, SplitLinear
from workers.layers.rotary import Rotation, in_pairs, score_factor
from workers.layers.shard import ShardedLayer, WeightShard, even_shard, replicated
from workers.native.library import Library
from workers.parallel.communicator import Communicator

_EPS = 1e-6
"""Epsilon of the norms of latents, independent of the other norms'."""


class LatentHeads(ShardedLayer):
    """Matrices K_h and V_h of this rank's heads."""

    def __init__(self, config: LatentAttentionConfig, group: Communicator) -> None:
        super().__init__()
        self._rows = even_shard(config.expanded_size, group)
        self._config, head_size = config, config.plain_dim + config.value_dim
        shape = (self._rows.size // head_size, head_size, config.kv_rank)
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
        self._absorbing: list[PackedMatrix] = []
        self._valuing: list[PackedMatrix] = []
        """Each head's K_h^T and V_h, packed. Empty if there is nothing to gain."""

    def pack(self, library: Library | None) -> None:
        """Rearrange each head's matrices for ``absorb`` and ``values``, whose products take torch long on CPUs."""
        for matrices in self.weight:
            keys, values = matrices.split_with_sizes((self._config.plain_dim, self._config.value_dim))
            absorbing, valuing = packed(keys.T.contiguous(), library), packed(values, library)
            if isinstance(absorbing, PackedMatrix) and isinstance(valuing, PackedMatrix):
                self._absorbing.append(absorbing)
                self._valuing.append(valuing)

    def expand(self, rows: Tensor, *index: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Map stored rows [n, 1, kv_rank + rope_dim] to K [n, heads, head_dim] and V [n, heads, value_dim].

        ``index`` are the indexer's keys, which are not needed.
        """
        config, num_heads = self._config, len(self.weight)
        latent, rotated = rows[:, 0].split_with_sizes((config.kv_rank, config.rope_dim), -1)
        expanded = multiply(latent, self.weight.flatten(0, 1)).view(len(rows), num_heads, self.weight.shape[1])
        plain, values = expanded.split_with_sizes((config.plain_dim, config.value_dim), -1)
        return torch.cat((plain, rotated[:, None].expand(-1, num_heads, -1)), dim=-1), values

    def absorb(self, q: Tensor) -> Tensor:
        """Map queries [n, heads, head_dim] to queries of stored rows [n, heads, kv_rank + rope_dim]."""
        config = self._config
        plain, rotated = q.split_with_sizes((config.plain_dim, config.rope_dim), -1)
        absorbed = q.new_empty(*q.shape[:2], config.stored_dim)
        latent, last = absorbed.split_with_sizes((config.kv_rank, config.rope_dim), -1)
        _multiply_heads(plain, self.weight[:, : config.plain_dim], self._absorbing, latent)
        last.copy_(rotated)
        return absorbed

    def values(self, latents: Tensor) -> Tensor:
        """Map sums of latents [n, heads, kv_rank] to sums of values [n, heads, value_dim], contiguous."""
        config = self._config
        values = latents.new_empty(*latents.shape[:2], config.value_dim)
        _multiply_heads(latents, self.weight[:, config.plain_dim :].transpose(1, 2), self._valuing, values)
        return values

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        rank = replicated(self._config.kv_rank)
        yield "weight", WeightShard(self.weight.flatten(0, 1), (self._rows, rank))


def _multiply_heads(x: Tensor, matrices: Tensor, packs: list[PackedMatrix], out: Tensor) -> None:
    """Write products of x [n, heads, inputs] and matrices [heads, inputs, outputs] into out [n, heads, outputs]. If
    native code multiplies by the packed matrices, it is faster for any number of rows.
    """
    if packs and (native := packs[0].native) is not None:
        native.library.products.linear_of_heads(x, weights_of(packs), out)
    else:
        torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))


class LatentAttention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        config: LatentAttentionConfig,
        rope: RopeConfig,
        layer: int,
        group: Communicator,
        projections: Projections,
    ) -> None:
        """Build the layer. ``layer`` is its index in the pipeline stage."""
        super().__init__()
        self.layer, self._config, self._group = layer, config, group
        q = even_shard(config.num_heads * config.head_dim, group)
        scale = config.head_dim**-0.5 * score_factor(rope)
        self.shape = AttentionShape(
            num_heads=q.size // config.head_dim,
            num_kv_heads=1,
            query_dim=config.stored_dim,
            value_dim=config.kv_rank,
            params=AttentionParams(scale, value_dim=config.kv_rank),
        )
        self._expanded_params = AttentionParams(scale, value_dim=config.value_dim)
        self._num_first, kv_a = config.query_rank or q.size, replicated(config.stored_dim)
        self.latents: FusedLinear | SplitLinear
        self.q_a_norm: RMSNorm | None = None
        if config.query_rank is None:
            self.latents = projections.queries(layer, hidden_size, {"q": q, "kv_a": kv_a}, bias=config.bias)
        else:
            outputs = {"q_a": replicated(config.query_rank), "kv_a": kv_a}
            self.latents = FusedLinear(hidden_size, outputs, bias=config.bias)
            self.q_a_norm = RMSNorm(config.query_rank, _EPS)
            self.query_heads = projections.queries(layer, config.query_rank, {"q_b": q}, bias=False)
        self.kv_a_norm = RMSNorm(config.kv_rank, _EPS)
        self.kv_b = LatentHeads(config, group)
        self.indexer: Indexer | None = None
        if (own := config.own_indexer) is not None:
            self.indexer = Indexer(hidden_size, own, config)
        attended = even_shard(config.num_heads * config.value_dim, group)
        self.out = projections.output(layer, attended, hidden_size, bias=config.bias)

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        q, index = self._queries(x, rotation, context)
        top_k = self._config.selected_keys(context.most_keys)
        if top_k is None and self._expands(context.work):
            attended = context.attend(self.layer, q, self._expanded_params, self.kv_b.expand)
        else:
            # Only one form of the queries exists during attention.
            q = self.kv_b.absorb(q)
            if top_k is None:
                latents = context.attend(self.layer, q, self.shape.params)
            else:
                latents = context.attend_selected(self.layer, q, self.shape.params, index, top_k)
            del q
            attended = self.kv_b.values(latents)
            del latents
        out: Tensor = self.out(attended.flatten(1), self._group.all_reduce)
        return out

    def _expands(self, work: AttentionWork) -> bool:
        """Return whether expanded keys need fewer FLOPs than stored ones. Factors common to both sides are omitted."""
        config = self._config
        head_size = config.plain_dim + config.value_dim
        # Each stored query, and the output of each, needs as many FLOPs as the expansion of a key.
        expansion = (work.num_keys - work.num_queries) * config.kv_rank * head_size
        return work.num_pairs * (2 * config.kv_rank - head_size) > expansion

    def _queries(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> tuple[Tensor, IndexQueries | None]:
        """Put new rows into the context. Return the rotated queries ``[num_queries, heads, head_dim]``, and those of
        the layer's own indexer if the step needs them.
        """
        if context.kv_first:
            self._put(x, self.latents.project(x, slice(self._num_first, None)), rotation, context)
            x, rotation = take(x, context.query_rows), rotation.take(context.query_rows)
            q = self.latents.project(x, slice(self._num_first))
        else:
            q, kv = self.latents(x).tensor_split((self._num_first,), dim=-1)
            self._put(x, kv, rotation, context)
        index: IndexQueries | None = None
        if self.q_a_norm is not None:
            low_rank = self.q_a_norm(q.contiguous())
            if self.indexer is not None and self._config.selected_keys(context.most_keys):
                index = self.indexer.queries(x, low_rank, rotation)
            q = self.query_heads(low_rank)
        config = self._config
        heads = q.reshape(len(q), self.shape.num_heads, config.head_dim)
        plain, turned = heads.split_with_sizes((config.plain_dim, config.rope_dim), -1)
        return torch.cat((plain, rotation.apply(self._in_pairs(turned))), dim=-1), index

    def _put(self, x: Tensor, kv: Tensor, rotation: Rotation, context: AttentionContext) -> None:
        latent, turned = kv.split_with_sizes((self._config.kv_rank, self._config.rope_dim), -1)
        rotated = rotation.apply(self._in_pairs(turned[:, None]))
        parts = [torch.cat((self.kv_a_norm(latent.contiguous())[:, None], rotated), dim=-1)]
        if self.indexer is not None:
            parts.append(self.indexer.keys(x, rotation))
        context.put(self.layer, *parts)

    def _in_pairs(self, x: Tensor) -> Tensor:
        return in_pairs(x) if self._config.is_interleaved else x.contiguous()
