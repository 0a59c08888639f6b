"""Attention in products and sums of fp32, for devices other than the CPU: what faster kernels are compared with."""

import math

import torch
from torch import Tensor

from workers.context_parallel.merge import Partial

MOST_SCORES = 1 << 26
"""That exist at once, 256 MiB of them, beside their likelihoods and keys and values in fp32."""


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool = False, bias: Tensor | None = None
) -> Partial:
    """``[batch, heads, T or S, D]`` of any strides; query i sees keys 0..i when causal, each query one at least.

    ``bias [batch, 1, 1, S]`` is added to scores.
    """
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    num_queries, num_keys = query.shape[2], key.shape[2]
    step = max(MOST_SCORES // (query.shape[1] * num_keys), 1)
    places = torch.arange(max(num_queries, num_keys), device=query.device)
    for place in range(len(query)):
        keys, values = key[place].float().transpose(1, 2), value[place].float()
        for part in (slice(begin, min(begin + step, num_queries)) for begin in range(0, num_queries, step)):
            scores = (query[place, :, part].float() / math.sqrt(query.shape[3])) @ keys
            if bias is not None:
                scores += bias[place]
            if causal:
                scores.masked_fill_(places[part, None] < places[:num_keys], -torch.inf)
            lse[place, :, part] = scores.logsumexp(-1)
            out[place, :, part] = scores.softmax(-1) @ values
    return Partial(out, lse)
