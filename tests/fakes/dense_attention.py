"""An attention context without pages or ranks: one sequence, its keys and values whole, attention by softmax."""

import torch
from torch import Tensor


class DenseAttention:
    """Keeps one sequence's keys and values from step to step, so that a prompt may come in pieces."""

    def __init__(self, *, kv_first: bool = False) -> None:
        self.kv_first = kv_first
        self.stored: dict[int, tuple[Tensor, Tensor]] = {}
        self.calls: list[tuple[str, int]] = []

    def put(self, layer: int, k: Tensor, v: Tensor) -> None:
        self.calls.append(("put", layer))
        if layer in self.stored:
            earlier_k, earlier_v = self.stored[layer]
            k, v = torch.cat((earlier_k, k)), torch.cat((earlier_v, v))
        self.stored[layer] = (k, v)

    def attend(self, layer: int, q: Tensor) -> Tensor:
        self.calls.append(("attend", layer))
        k, v = self.stored[layer]
        num_new, num_heads, head_dim = q.shape
        group = num_heads // k.shape[1]
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) / head_dim**0.5
        key_positions = torch.arange(k.shape[0])
        query_positions = torch.arange(k.shape[0] - num_new, k.shape[0])
        scores = scores.masked_fill(key_positions[None, :] > query_positions[:, None], float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).to(q.dtype)
