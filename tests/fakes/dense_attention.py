"""Attention context without pages or ranks: softmax attention over the keys and values of one sequence."""

import torch
from torch import Tensor

from workers.attention.interface import AttentionParams
from workers.layers.attention import AttentionWork, Expand, take


class DenseAttention:
    """Keys and values of one sequence, kept between steps so that a prompt can be computed in chunks."""

    def __init__(
        self, *, kv_first: bool = False, query_rows: Tensor | None = None, work: AttentionWork | None = None
    ) -> None:
        """Create the context. ``query_rows`` are each step's rows whose hidden states are needed, or None."""
        self.work = work or AttentionWork()
        self.kv_first, self.lens, self.last_layer_lens, self.counted = kv_first, None, None, None
        self.query_rows: Tensor | None = None
        self._last_query_rows = query_rows
        self.stored: dict[int, tuple[Tensor, ...]] = {}
        self.calls: list[tuple[str, int]] = []

    @property
    def last_layer(self) -> "DenseAttention":
        if self._last_query_rows is None:
            return self
        narrowed = DenseAttention(kv_first=True, work=self.work)
        narrowed.query_rows, narrowed.stored, narrowed.calls = self._last_query_rows, self.stored, self.calls
        return narrowed

    def kv_slots(self, layer: int) -> None: ...

    def put(self, layer: int, *parts: Tensor) -> None:
        self.calls.append(("put", layer))
        self._num_new = len(parts[0])
        if layer in self.stored:
            parts = tuple(map(torch.cat, zip(self.stored[layer], parts, strict=True)))
        self.stored[layer] = parts

    def attend(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None = None) -> Tensor:
        self.calls.append(("attend" if expand is None else "expand", layer))
        parts = self.stored[layer]
        k, v = params.key_and_value(parts) if expand is None else expand(*parts)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * params.scale
        key_positions = torch.arange(k.shape[0])
        query_positions = take(torch.arange(k.shape[0] - self._num_new, k.shape[0]), self.query_rows)
        scores = scores.masked_fill(key_positions[None, :] > query_positions[:, None], float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype)
