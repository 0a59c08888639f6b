"""Rotary position embedding (Su et al., 2021) and its long-context variants, with the arithmetic of transformers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from workers.kernels.elementwise import KvSlots, elementwise_kernels
from workers.layers.config import RopeConfig, RopeType
from workers.layers.rms_norm import RMSNorm


@dataclass(frozen=True)
class Rotation:
    """Pair of cos and sin of every token's angles, each [num_tokens, 1, head_dim], in the dtype of their operands."""

    cos: Tensor
    sin: Tensor

    def take(self, wanted: Tensor | None) -> "Rotation":
        """Return the rotation of some tokens, by row; None for all."""
        return self if wanted is None else Rotation(self.cos[wanted], self.sin[wanted])

    def apply(self, x: Tensor, norm: RMSNorm | None = None) -> Tensor:
        """Rotate x [num_tokens, num_heads, head_dim], after ``norm``; dimensions i, i + head_dim/2 pair up."""
        if (kernels := elementwise_kernels(x)) is not None:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            return kernels.rotate(x, self.cos, self.sin, weight, eps)
        if norm is not None:
            x = norm(x)
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin

    def apply_storing(self, heads: Tensor, q_norm: RMSNorm | None, k_norm: RMSNorm | None, kv_slots: KvSlots) -> Tensor:
        """Rotate q and k, and store k and v, in one kernel; heads of q, k and v are [num_tokens, num_heads, head_dim],
        side by side.

        Returns q, rotated.
        """
        from workers.kernels.triton_elementwise import rotate_storing

        weights, eps = None, 0.0
        if q_norm is not None and k_norm is not None:
            weights, eps = (q_norm.weight, k_norm.weight), q_norm.eps
        return rotate_storing(heads, self.cos, self.sin, weights, eps, *kv_slots)


class RotaryEmbedding(nn.Module):
    """Mapping from positions to rotations, computed in fp32 for any model dtype.

    `dynamic` scaling: the token at position p is rotated with the frequencies of length max(p + 1,
    max_position_embeddings). This depends on nothing but p, so chunks, ranks, batches and cached prefixes agree.
    transformers uses the longest length of each forward call instead and keeps cached keys as they are: the same for
    prompts up to max_position_embeddings and everything generated after them, different for longer prompts, whose
    early keys there depend on how long the prompt turned out to be.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        super().__init__()
        self.rope = rope
        self.attention_factor = _yarn_attention_factor(rope) if rope.rope_type == "yarn" else 1.0
        # Plain attributes, made on the CPU: they stay fp32 and real where parameters are cast or not yet allocated.
        self.inv_freq = inverse_frequencies(rope, head_dim).to(device)
        # On the device from the start, since nothing can be copied to a GPU while a graph is captured.
        self._exponents = _exponents(head_dim).to(device)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Map positions [num_tokens] int64 to the rotation of each, in `dtype`."""
        inv_freq = self.inv_freq
        if self.rope.rope_type == "dynamic":
            inv_freq = self._dynamic_frequencies(positions)
        angles = (positions[:, None].float() * inv_freq).repeat(1, 2)[:, None, :]
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return Rotation(cos.to(dtype), sin.to(dtype))

    def _dynamic_frequencies(self, positions: Tensor) -> Tensor:
        """Return frequencies [num_tokens, head_dim/2], their base scaled (NTK-aware) by the length to each token."""
        max_len, head_dim = self.rope.max_position_embeddings, 2 * self.inv_freq.numel()
        length = (positions[:, None] + 1).clamp(min=max_len)
        growth = self.rope.factor * length / max_len - (self.rope.factor - 1)
        base = self.rope.theta * growth ** (head_dim / (head_dim - 2))
        scaled = 1.0 / base**self._exponents
        return torch.where(length > max_len, scaled, self.inv_freq)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Return radians per position of each pair, [head_dim/2] fp32; for `dynamic`, those of short lengths."""
    return _FREQUENCIES[rope.rope_type](rope, head_dim)


def _exponents(head_dim: int) -> Tensor:
    return torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim


def _default(rope: RopeConfig, head_dim: int) -> Tensor:
    return torch.reciprocal(rope.theta ** _exponents(head_dim))


def _linear(rope: RopeConfig, head_dim: int) -> Tensor:
    return _default(rope, head_dim) / rope.factor


def _llama3(rope: RopeConfig, head_dim: int) -> Tensor:
    """Stretch long waves by `factor`, keep short ones, blend those between (Llama 3.1)."""
    inv_freq = _default(rope, head_dim)
    wavelength = 2 * math.pi / inv_freq
    original_len = rope.original_max_position_embeddings
    longest, shortest = original_len / rope.low_freq_factor, original_len / rope.high_freq_factor
    kept = (original_len / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - kept) * inv_freq / rope.factor + kept * inv_freq
    stretched = torch.where(wavelength > longest, inv_freq / rope.factor, inv_freq)
    return torch.where((wavelength >= shortest) & (wavelength <= longest), blended, stretched)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Keep pairs that turn over beta_fast times in the original length, stretch those under beta_slow times.

    Peng et al., 2023.
    """
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
    waves = rope.theta ** _exponents(head_dim)
    return 1.0 / (rope.factor * waves) * stretched_share + 1.0 / waves * (1 - stretched_share)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    """Return the scale of cos and sin that keeps the softmax as sharp as it was before stretching."""
    if rope.attention_factor is not None:
        return rope.attention_factor

    def scale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


_FREQUENCIES: Mapping[RopeType, Callable[[RopeConfig, int], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
}
