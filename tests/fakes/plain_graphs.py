"""Captured attention in plain torch, for ranks that are threads, which cannot interpret kernels in parallel."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.attention.interface import AttentionParams, GraphAttention, GraphShape
from workers.attention.merge import Partial
from workers.attention.runs import Run
from workers.attention.selection import IndexQueries
from workers.attention.torch_backend import TorchAttention
from workers.engine.owned_pages import OwnedPages
from workers.engine.selected_keys import SelectableKeys


class PlainGraphs(TorchAttention):
    """Torch backend whose attention a fake graph can capture."""

    def prepare_graph(self, shape: GraphShape) -> GraphAttention:  # type: ignore[override]
        return PlainDecode(shape.page_size)


class PlainDecode:
    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def fill(self, num_keys: Sequence[int] | NDArray[np.int64], tables: Sequence[NDArray[np.int64]]) -> None:
        self._runs = [Run(request, int(length) - 1, 1, 1) for request, length in enumerate(num_keys)]
        self._tables = [torch.from_numpy(table) for table in tables]

    def best_keys(self, index: IndexQueries, keys: Tensor, top_k: int) -> Tensor:
        return self._selectable.select(index, keys, top_k)

    def attend_selected(self, query: Tensor, keys: Tensor, selected: Tensor, params: AttentionParams) -> Partial:
        return self._selectable.attend(query, keys, selected, params)

    @property
    def _selectable(self) -> SelectableKeys:
        owned = OwnedPages(1, (0,) * len(self._tables), self._page_size)
        return SelectableKeys(TorchAttention(), self._runs, self._tables, owned)

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        step = TorchAttention().prepare(self._runs, self._tables, self._page_size)
        return step.attend(query, key_pages, value_pages, params)
