"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). See ``LatentAttentionConfig`` for its sizes.

A token stores one row for all heads: a normalized latent c, and a rotated key r that the heads share. Head h has the
key [K_h c, r] and the value V_h c. Both forms of attention give the same result:

- Expanded: keys and values of every head are computed from the rows. A pair costs little, but every visible row must be
  expanded. Suits long extends.
- Stored: since q · K_h c = (K_h^T q) · c, queries meet the rows themselves, as in attention with a single KV head, and
  V_h is applied to the result. Suits decode and short extends.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from workers.attention.interface import AttentionParams, AttentionShape
from workers.layers.attention import AttentionContext, AttentionWork, Rotation, score_factor, take
from workers.layers.config import LatentAttentionConfig, RopeConfig
from workers.layers.linear import FusedLinear, RMSNorm, SummedLinear, multiply
from workers.layers.shard import Shard, ShardedLayer, WeightShard, even_shard, replicated
from workers.parallel.collectives import Communicator

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

    def expand(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Map stored rows [n, 1, kv_rank + rope_dim] to K [n, heads, head_dim] and V [n, heads, value_dim]."""
        config, num_heads = self._config, len(self.weight)
        latent, rotated = rows[:, 0].split_with_sizes((config.kv_rank, config.rope_dim), -1)
        expanded = multiply(latent, self.weight.flatten(0, 1)).view(len(rows), num_heads, self.weight.shape[1])
        plain, values = expanded.split_with_sizes((config.plain_dim, config.value_dim), -1)
        return torch.cat((plain, rotated[:, None].expand(-1, num_heads, -1)), dim=-1), values

    def absorb(self, q: Tensor) -> Tensor:
        """Map queries [n, heads, head_dim] to queries of stored rows [n, heads, kv_rank + rope_dim]."""
        config = self._config
        plain, rotated = q.split_with_sizes((config.plain_dim, config.rope_dim), -1)
        latent = torch.bmm(plain.transpose(0, 1), self.weight[:, : config.plain_dim])
        return torch.cat((latent.transpose(0, 1), rotated), dim=-1)

    def values(self, latents: Tensor) -> Tensor:
        """Map sums of latents [n, heads, kv_rank] to sums of values [n, heads, value_dim]."""
        matrices = self.weight[:, self._config.plain_dim :].transpose(1, 2)
        return torch.bmm(latents.transpose(0, 1), matrices).transpose(0, 1)

    def weights(self) -> Iterator[tuple[str, WeightShard]]:
        rank = replicated(self._config.kv_rank)
        yield "weight", WeightShard(self.weight.flatten(0, 1), (self._rows, rank))


class LatentAttention(nn.Module):
    def __init__(
        self, hidden_size: int, config: LatentAttentionConfig, rope: RopeConfig, layer: int, group: Communicator
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
        first = {"q": q} if config.query_rank is None else {"q_a": replicated(config.query_rank)}
        self._num_first = sum(shard.size for shard in first.values())
        outputs: dict[str, Shard] = {**first, "kv_a": replicated(config.stored_dim)}
        self.latents = FusedLinear(hidden_size, outputs, bias=config.bias)
        self.q_a_norm: RMSNorm | None = None
        if config.query_rank is not None:
            self.q_a_norm = RMSNorm(config.query_rank, _EPS)
            self.query_heads = FusedLinear(config.query_rank, {"q_b": q}, bias=False)
        self.kv_a_norm = RMSNorm(config.kv_rank, _EPS)
        self.kv_b = LatentHeads(config, group)
        self.out = SummedLinear(even_shard(config.num_heads * config.value_dim, group), hidden_size, bias=config.bias)

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        q = self._queries(x, rotation, context)
        if self._expands(context.work):
            attended = context.attend(self.layer, q, self._expanded_params, self.kv_b.expand)
        else:
            attended = self.kv_b.values(context.attend(self.layer, self.kv_b.absorb(q), self.shape.params))
        out: Tensor = self.out(attended.flatten(1), self._group.all_reduce)
        return out

    def _expands(self, work: AttentionWork) -> bool:
        """Return whether expanded keys need fewer FLOPs than stored ones. Factors common to both sides are omitted."""
        config = self._config
        head_size = config.plain_dim + config.value_dim
        # Each stored query, and the output of each, needs as many FLOPs as the expansion of a key.
        expansion = (work.num_keys - work.num_queries) * config.kv_rank * head_size
        return work.num_pairs * (2 * config.kv_rank - head_size) > expansion

    def _queries(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Put new rows into the context and return the rotated queries ``[num_queries, heads, head_dim]``."""
        if context.kv_first:
            self._put(self.latents.project(x, slice(self._num_first, None)), rotation, context)
            q = self.latents.project(take(x, context.query_rows), slice(self._num_first))
            rotation = rotation.take(context.query_rows)
        else:
            q, kv = self.latents(x).tensor_split((self._num_first,), dim=-1)
            self._put(kv, rotation, context)
        if self.q_a_norm is not None:
            q = self.query_heads(self.q_a_norm(q.contiguous()))
        config = self._config
        heads = q.reshape(len(q), self.shape.num_heads, config.head_dim)
        plain, turned = heads.split_with_sizes((config.plain_dim, config.rope_dim), -1)
        return torch.cat((plain, rotation.apply(self._in_pairs(turned))), dim=-1)

    def _put(self, kv: Tensor, rotation: Rotation, context: AttentionContext) -> None:
        latent, turned = kv.split_with_sizes((self._config.kv_rank, self._config.rope_dim), -1)
        rotated = rotation.apply(self._in_pairs(turned[:, None]))
        context.put(self.layer, torch.cat((self.kv_a_norm(latent.contiguous())[:, None], rotated), dim=-1))

    def _in_pairs(self, x: Tensor) -> Tensor:
        """Move the two dimensions of each pair in ``x [..., rope_dim]`` to i and i + rope_dim/2."""
        if not self._config.is_interleaved:
            return x.contiguous()
        return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).reshape(x.shape)
