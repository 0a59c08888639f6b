"""Attention context without pages or ranks: softmax attention over the keys and values of one sequence."""

import torch
from torch import Tensor

from workers.attention.interface import AttentionParams
from workers.attention.selection import IndexQueries
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
        self.most_keys = 0
        self._selected: Tensor | None = None
        """Whether a query uses a key, bool ``[queries, keys]``, in the latest layer with an indexer."""

    @property
    def last_layer(self) -> "DenseAttention":
        if self._last_query_rows is None:
            return self
        narrowed = DenseAttention(kv_first=True, work=self.work)
        narrowed.query_rows, narrowed.stored, narrowed.calls = self._last_query_rows, self.stored, self.calls
        narrowed._selected = None if self._selected is None else self._selected[self._last_query_rows]
        return narrowed

    def kv_slots(self, layer: int) -> None: ...

    def put(self, layer: int, *parts: Tensor) -> None:
        self.calls.append(("put", layer))
        self._num_new = len(parts[0])
        if layer in self.stored:
            parts = tuple(map(torch.cat, zip(self.stored[layer], parts, strict=True)))
        self.stored[layer] = parts
        self.most_keys = len(parts[0])

    def attend_selected(
        self, layer: int, q: Tensor, params: AttentionParams, index: IndexQueries | None, top_k: int
    ) -> Tensor:
        """Sort every query's keys by score, and those of equal scores by position."""
        self.calls.append(("select", layer))
        rows, *index_keys = (part[:, 0] for part in self.stored[layer])
        if index is not None:
            scores = torch.einsum("qhd,kd->hqk", index.q.float(), index_keys[0].float()).relu()
            scores = self._visible(torch.einsum("qh,hqk->qk", index.weights, scores))
            order = scores.argsort(dim=-1, descending=True, stable=True)
            self._selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[:, :top_k], value=True)
        assert self._selected is not None, "a layer before has an indexer"
        attended = self._visible(torch.einsum("qhd,kd->hqk", q.float(), rows.float()) * params.scale)
        weights = attended.masked_fill(~self._selected, -torch.inf).softmax(-1)
        return torch.einsum("hqk,kd->qhd", weights, rows[:, : params.value_dim].float()).to(q.dtype)

    def attend(self, layer: int, q: Tensor, params: AttentionParams, expand: Expand | None = None) -> Tensor:
        self.calls.append(("attend" if expand is None else "expand", layer))
        parts = self.stored[layer]
        k, v = params.key_and_value(parts) if expand is None else expand(*parts)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * params.scale
        return torch.einsum("hqk,khd->qhd", self._visible(scores).softmax(-1), v.float()).to(q.dtype)

    def _visible(self, scores: Tensor) -> Tensor:
        """Mask the keys after each query, of scores ``[..., queries, keys]``."""
        num_keys = scores.shape[-1]
        positions = take(torch.arange(num_keys - self._num_new, num_keys), self.query_rows)
        return scores.masked_fill(torch.arange(num_keys) > positions[:, None], -torch.inf)
