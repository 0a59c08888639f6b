"""Indexers of transformers' models that choose the earlier of two keys with equal scores.

transformers leaves this choice to ``topk``, which makes it arbitrarily. Nothing else about the models changes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def break_ties_by_position(model: nn.Module) -> None:
    """Patch the indexers of a model, if it has any."""
    for module in model.modules():
        if type(module).__name__.endswith("Indexer"):
            module.forward = partial(_with_stable_topk, module.forward)


def _with_stable_topk(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with _StableTopk():
        return forward(*args, **kwargs)


class _StableTopk(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, count = args
        ordered = scores.sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((ordered.values[..., :count], ordered.indices[..., :count]))
