"""Greedy tokens of transformers' models, whose types omit the ``generate`` of a mixin."""

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from transformers._typing import GenerativePreTrainedModel


def generate(model: PreTrainedModel, prompt: Tensor, num_tokens: int) -> Tensor:
    """Return a prompt ``[n]`` with its output, which is shorter if the model stops by itself."""
    able = cast("GenerativePreTrainedModel", model)
    mask = torch.ones(1, len(prompt), dtype=torch.int64)
    out = able.generate(prompt[None], attention_mask=mask, do_sample=False, max_new_tokens=num_tokens)
    assert isinstance(out, Tensor)
    return out[0]
