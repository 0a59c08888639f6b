"""Attention part of a decoder layer: projections, rotary embedding, and attention through the engine's context.

Rotary position embedding (Su et al., 2021) and its long-context variants are computed as in transformers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from workers.attention.interface import AttentionParams, AttentionShape
from workers.attention.selection import IndexQueries
from workers.kernels.elementwise import KvSlots, elementwise_kernels
from workers.layers.attention_config import AttentionConfig
from workers.layers.config import RopeConfig
from workers.layers.linear import RMSNorm
from workers.layers.projections import Projections
from workers.layers.shard import even_shard, kv_head_shard
from workers.parallel.communicator import Communicator
from workers.parallel.exchanges import Lens


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of every token's angles, each [num_tokens, 1, head_dim], in the model's dtype."""

    cos: Tensor
    sin: Tensor

    def take(self, query_rows: Tensor | None) -> "Rotation":
        """Return the rotation of some rows. None selects all rows."""
        return self if query_rows is None else Rotation(self.cos[query_rows], self.sin[query_rows])

    def apply(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Rotate x [num_tokens, num_heads, head_dim], normalized first if ``norm`` is given.

        Dimensions i and i + head_dim/2 form a pair.
        """
        if (kernels := elementwise_kernels(x)) is not None:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return kernels.rotate(x, self.cos, self.sin, weight, eps)
        if norm is not None:
            x = norm(x)
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def apply_storing(self, heads: Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None, kv_slots: KvSlots) -> Tensor:
        """Rotate q and k, store k and v, and return q, all in one kernel.

        ``heads`` are the heads of q, k and v in this order, [num_tokens, num_heads, head_dim].
        """
        weights, eps = None, 0.0
        if q_norm is not None and k_norm is not None:
            weights, eps = (q_norm.weight, k_norm.weight), q_norm.eps
        kernels = elementwise_kernels(heads)
        assert kernels is not None, "only kernels have slots"
        return kernels.rotate_storing(heads, self.cos, self.sin, weights, eps, *kv_slots)


class RotaryEmbedding(nn.Module):
    """Rotations by position, computed in fp32 for any model dtype.

    With `dynamic` scaling, the token at position p is rotated with the frequencies of length max(p + 1,
    max_position_embeddings). This depends only on p, so chunks, ranks, batches and cached prefixes agree.
    transformers instead uses the longest length in each forward call and does not rotate cached keys again. The two
    agree on prompts of up to max_position_embeddings tokens and on everything generated after them. On longer prompts
    they differ, because transformers' early keys depend on the prompt's final length.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        super().__init__()
        self.rope = rope
        self.attention_factor = _yarn_attention_factor(rope) if rope.rope_type == "yarn" else 1.0
        # Plain attributes computed on the CPU. Casting the model, or building it on the meta device, must not change
        # them.
        self.inv_freq = _inverse_frequencies(rope, head_dim).to(device)
        # Placed on the device from the start, since nothing can be copied to a GPU during a graph capture.
        self._exponents = _exponents(head_dim).to(device)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Map positions [num_tokens] int64 to their rotations in ``dtype``."""
        inv_freq = self.inv_freq
        if self.rope.rope_type == "dynamic":
            inv_freq = self._dynamic_frequencies(positions)
        angles = (positions[:, None].float() * inv_freq).repeat(1, 2)[:, None, :]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(cos.to(dtype), sin.to(dtype))

    def _dynamic_frequencies(self, positions: Tensor) -> Tensor:
        """Return frequencies [num_tokens, head_dim/2] whose base grows with each token's position (NTK-aware)."""
        max_len, head_dim = self.rope.max_position_embeddings, 2 * self.inv_freq.numel()
        length = (positions[:, None] + 1).clamp(min=max_len)
        growth = self.rope.factor * length / max_len - (self.rope.factor - 1)
        base = self.rope.theta * growth ** (head_dim / (head_dim - 2))
        scaled = 1.0 / base**self._exponents
        return torch.where(length > max_len, scaled, self.inv_freq)


class AttentionWork(NamedTuple):
    """Size of a step's attention on one rank, from which a layer can choose how to compute it."""

    num_queries: int = 0
    num_keys: int = 0
    """Number of keys of the requests that have queries."""
    num_pairs: int = 0
    """Number of (query, key) pairs."""


Expand = Callable[..., tuple[Tensor, Tensor]]
"""Function from the parts of some rows as stored, ``[rows, kv_heads, dim]`` each, to keys ``[rows, heads, D]`` and
values ``[rows, heads, V]``.
"""


class AttentionContext(Protocol):
    """Keys and values of one step, held by the engine.

    A layer calls `put` and then `attend`, once each, even without tokens. Layers make these calls in layer order. If
    `kv_slots` returns slots, the layer fills them instead of calling `put`. Tokens are this rank's tokens, concatenated
    over requests as in the model's `token_ids`.
    """

    lens: Lens = None
    """Number of tokens per attention shard in this step. None if all shards have the same tokens."""
    last_layer_lens: Lens = None
    """Number of tokens per attention shard that have queries in the last layer."""
    counted: Tensor | None = None
    """Mask of tokens that are not padding, bool ``[num_tokens, 1]``. None without padding. Padding uses no experts."""
    query_rows: Tensor | None = None
    """Rows of the tokens that have queries, int64. None if all have queries."""

    kv_first: bool = False
    """True to project queries after `put`, because keys and values are in transit or few tokens have queries."""

    @property
    def work(self) -> AttentionWork:
        """Return the size of this step's attention. Zero if keys must be used as stored."""
        return AttentionWork()

    @property
    def most_keys(self) -> int:
        """Return the maximum number of keys that a query of this step sees, on any rank. Zero if keys are never
        selected.
        """
        return 0

    @property
    def last_layer(self) -> "AttentionContext":
        """Return the context of the last layer, where only tokens whose final hidden states are needed have queries."""
        return self

    def kv_slots(self, layer: int) -> KvSlots | None:  # noqa: ARG002
        """Return the slots in which a kernel stores the layer's new keys and values. None if the layer must call `put`,
        as it must with `kv_first`.
        """
        return None

    def put(self, layer: int, *parts: Tensor) -> None:
        """Store or send the parts of a layer's new KV, each [num_tokens, num_kv_heads, dim], such as rotated K, and V.

        They may be stored later, so the caller must not change them.
        """

    def attend(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None = None) -> Tensor:
        """Return causal attention [num_queries, num_heads, value_dim] over all visible tokens, in q's dtype.

        q [num_queries, num_heads, head_dim] is rotated but not scaled. With ``expand``, the queries meet the keys and
        values that it returns, a tile of rows at a time.
        """

    def attend_selected(
        self,
        layer: int,  # noqa: ARG002
        q: Tensor,  # noqa: ARG002
        params: AttentionParams,  # noqa: ARG002
        index: IndexQueries | None,  # noqa: ARG002
        top_k: int,  # noqa: ARG002
    ) -> Tensor:
        """Return attention like `attend`, over the ``top_k`` visible keys that score highest for each query.

        A layer calls this instead of `attend`. The last part that it has put contains the keys of its indexer, and
        ``index`` are its queries. Of keys with equal scores, earlier ones are used. If ``index`` is None, the layer has
        no indexer, and the queries use the keys selected in the nearest layer before it that has one.
        """
        raise AssertionError("layers select keys only if the context says how many a query sees")


def in_pairs(x: Tensor) -> Tensor:
    """Move dimensions 2i and 2i + 1 of ``x [..., dim]`` to i and i + dim/2, so that they are rotated as a pair."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).reshape(x.shape)


def take(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x[rows]


class Attention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        config: AttentionConfig,
        rms_norm_eps: float,
        layer: int,
        group: Communicator,
        projections: Projections,
        window: int | None = None,
    ) -> None:
        """Build the layer. ``layer`` is its index in the pipeline stage."""
        super().__init__()
        self.layer, self.head_dim, self._group = layer, config.head_dim, group
        q = even_shard(config.q_size, group)
        kv = kv_head_shard(config.num_kv_heads, config.head_dim, group)
        self.q_size = q.size
        self.shape = AttentionShape(
            num_heads=q.size // config.head_dim,
            num_kv_heads=kv.size // config.head_dim,
            query_dim=config.head_dim,
            value_dim=config.head_dim,
            params=AttentionParams(config.head_dim**-0.5, window),
        )
        self.qkv = projections.queries(layer, hidden_size, {"q": q, "k": kv, "v": kv}, bias=config.qkv_bias)
        self.out = projections.output(layer, q, hidden_size, bias=config.output_bias)
        self.q_norm = RMSNorm(config.head_dim, rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        attended = context.attend(self.layer, self._queries(x, rotation, context), self.shape.params)
        out: Tensor = self.out(attended.flatten(1), self._group.all_reduce)
        return out

    def _queries(self, x: Tensor, rotation: Rotation, context: AttentionContext) -> Tensor:
        """Put keys and values into the context and return the rotated queries."""
        if context.kv_first:
            self._put(self.qkv.project(x, slice(self.q_size, None)), rotation, context)
            q = self.qkv.project(take(x, context.query_rows), slice(self.q_size))
            rotation = rotation.take(context.query_rows)
        else:
            qkv = self.qkv(x)
            if (kv_slots := context.kv_slots(self.layer)) is not None:
                return rotation.apply_storing(self._split_heads(qkv), self.q_norm, self.k_norm, kv_slots)
            q, kv = qkv.tensor_split((self.q_size,), dim=-1)
            self._put(kv, rotation, context)
        return rotation.apply(self._split_heads(q), self.q_norm)

    def _put(self, kv: Tensor, rotation: Rotation, context: AttentionContext) -> None:
        k, v = self._split_heads(kv).chunk(2, dim=1)
        context.put(self.layer, rotation.apply(k, self.k_norm), v)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.view(len(x), x.shape[1] // self.head_dim, self.head_dim)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim


def _inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return radians per position for each pair, [head_dim/2] fp32. For `dynamic`, they are unscaled."""
    waves = rope.theta ** _exponents(head_dim)
    if rope.rope_type == "yarn":
        return _yarn(rope, waves)
    inv_freq = torch.reciprocal(waves)
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq)
    return inv_freq / rope.factor if rope.rope_type == "linear" else inv_freq


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Stretch long waves by `factor`, keep short waves, and blend those in between (Llama 3.1)."""
    wavelength = 2 * math.pi / inv_freq
    original_len = rope.original_max_position_embeddings
    longest, shortest = original_len / rope.low_freq_factor, original_len / rope.high_freq_factor
    kept = (original_len / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * inv_freq / rope.factor + kept * inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), blended, stretched)


def _yarn(rope: RopeConfig, waves: Tensor) -> Tensor:
    """Keep pairs that turn at least beta_fast times within the original length, and stretch pairs that turn fewer than
    beta_slow times (Peng et al., 2023).
    """
    head_dim = 2 * len(waves)
    turns_to_dim = head_dim / (2 * math.log(rope.theta))
    low, high = (
        turns_to_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    stretched_share = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    return 1.0 / (rope.factor * waves) * stretched_share + 1.0 / waves * (1 - stretched_share)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Return the scale of cosines and sines that keeps the softmax as sharp as without stretching."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _yarn_scale(rope, rope.mscale) / _yarn_scale(rope, rope.mscale_all_dim)
    return _yarn_scale(rope, 1.0)


def score_factor(rope: RopeConfig) -> float:
    """Return the factor that DeepSeek models apply to scores, on top of the scale of cosines and sines."""
    if rope.rope_type == "default" or not rope.mscale_all_dim:
        return 1.0
    return _yarn_scale(rope, rope.mscale_all_dim) ** 2


def _yarn_scale(rope: RopeConfig, weight: float) -> float:
    return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0
