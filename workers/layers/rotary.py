"""Rotary position embedding (Su et al., 2021) and its long-context variants, computed as in transformers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.kernels.elementwise import KvSlots, elementwise_kernels
from workers.layers.config import RopeConfig
from workers.layers.linear import RMSNorm


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of every token's angles, each [num_tokens, 1, rope_dim], in the model's dtype."""

    cos: Tensor
    sin: Tensor

    def take(self, query_rows: Tensor | None) -> "Rotation":
        """Return the rotation of some rows. None selects all rows."""
        return self if query_rows is None else Rotation(self.cos[query_rows], self.sin[query_rows])

    def apply(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Rotate the first rope_dim elements of the heads x [num_tokens, num_heads, head_dim].

        If ``norm`` is given, heads are normalized first. Dimensions i and i + rope_dim/2 form a pair.
        """
        if (kernels := elementwise_kernels(x)) is not None:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return kernels.rotate(x, self.cos, self.sin, weight, eps)
        if norm is not None:
            x = norm(x)
        rope_dim, head_dim = self.cos.shape[-1], x.shape[-1]
        turned, rest = x.split_with_sizes((rope_dim, head_dim - rope_dim), dim=-1)
        first, second = turned.chunk(2, dim=-1)
        rotated = turned * self.cos + torch.cat((-second, first), dim=-1) * self.sin
        return torch.cat((rotated, rest), dim=-1) if rope_dim < head_dim else rotated

    def apply_storing(self, heads: Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None, kv_slots: KvSlots) -> Tensor:
        """Rotate q and k like ``apply``, store k and v, and return q, all in one kernel.

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

    def __init__(self, rope: RopeConfig, rope_dim: int, device: torch.device) -> None:
        super().__init__()
        self.rope = rope
        self.attention_factor = _yarn_attention_factor(rope) if rope.rope_type == "yarn" else 1.0
        # Plain attributes computed on the CPU. Casting the model, or building it on the meta device, must not change
        # them. Both dimensions of a pair have its frequency.
        self.inv_freq = _inverse_frequencies(rope, rope_dim).repeat(2).to(device)
        # Placed on the device from the start, since nothing can be copied to a GPU during a graph capture.
        self._exponents = _exponents(rope_dim).repeat(2).to(device)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Map positions [num_tokens] int64 to their rotations in ``dtype``."""
        inv_freq = self.inv_freq
        if self.rope.rope_type == "dynamic":
            inv_freq = self._dynamic_frequencies(positions)
        angles = (positions[:, None] * inv_freq)[:, None, :]
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return Rotation(cos.to(dtype), sin.to(dtype))

    def _dynamic_frequencies(self, positions: Tensor) -> Tensor:
        """Return frequencies [num_tokens, rope_dim] whose base grows with each token's position (NTK-aware)."""
        max_len, rope_dim = self.rope.max_position_embeddings, self.inv_freq.numel()
        length = (positions[:, None] + 1).clamp(min=max_len)
        growth = self.rope.factor * length / max_len - (self.rope.factor - 1)
        base = self.rope.theta * growth ** (rope_dim / (rope_dim - 2))
        scaled = 1.0 / base**self._exponents
        return torch.where(length > max_len, scaled, self.inv_freq)


def in_pairs(x: Tensor) -> Tensor:
    """Move dimensions 2i and 2i + 1 of ``x [..., dim]`` to i and i + dim/2, so that they are rotated as a pair."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2).transpose(-1, -2).reshape(x.shape)


def _exponents(rope_dim: int) -> Tensor:
    return torch.arange(0, rope_dim, 2, dtype=torch.float32, device="cpu") / rope_dim


def _inverse_frequencies(rope: RopeConfig, rope_dim: int) -> Tensor:
    """Return radians per position for each pair, [rope_dim/2] fp32. For `dynamic`, they are unscaled."""
    waves = rope.theta ** _exponents(rope_dim)
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
    rope_dim = 2 * len(waves)
    turns_to_dim = rope_dim / (2 * math.log(rope.theta))
    low, high = (
        turns_to_dim * math.log(rope.original_max_position_embeddings / (turns * 2 * math.pi))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope_dim - 1)
    width = (high - low) or 0.001
    stretched_share = ((torch.arange(rope_dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
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
