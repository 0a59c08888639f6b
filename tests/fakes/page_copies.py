"""Page copies, complete or of some layers, compared with the spans of a transfer on any device."""

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.memory import page_layout
from cluster.spec.registry import AxisSizes, RankCoords
from tests.fakes.kv import kv_geometry, two_groups
from workers.device import device_between
from workers.memory.copy import PageMemory, copy

_ONE, _FIRST = AxisSizes(dp=1, cp=1, tp=1, pp=1), RankCoords(dp=0, cp=0, tp=0, pp=0)


def layout_of(geometry: KvGeometry, num_pages: int) -> PoolLayout:
    """Return the layout of a rank that holds a complete model."""
    return page_layout(geometry, _ONE, _FIRST, num_pages)


def check_copies(data: st.DataObject, device: torch.device) -> None:
    num_pages, num_heads, num_layers = 6, data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    makes = [
        lambda: two_groups(num_layers, num_heads),
        lambda: kv_geometry(num_layers=num_layers, num_kv_heads=num_heads, head_dim=8),
    ]
    layout = layout_of(data.draw(st.sampled_from(makes))(), num_pages - 1)
    first, last = data.draw(st.integers(0, num_layers)), data.draw(st.integers(0, num_layers))
    layers = data.draw(st.sampled_from([None, range(first, last)]))
    of = data.draw(st.lists(st.integers(0, num_pages - 1), max_size=num_pages))
    to = data.draw(st.permutations(range(num_pages)))[: len(of)]
    content = torch.randint(256, (layout.pool_bytes,), dtype=torch.uint8)
    expected = np.zeros(layout.pool_bytes, dtype=np.uint8)
    pages = PageMemory(content, layout).at(of, layers).range
    for start, end, num_bytes in pages.spans_to(PageMemory(content, layout).at(to, layers).range):
        expected[end : end + num_bytes] = content[start : start + num_bytes]
    for is_from_host, is_to_host in data.draw(st.permutations([(False, False), (True, False), (False, True)])):
        there = PageMemory(_put(content, None if is_from_host else device), layout)
        target = PageMemory(_put(torch.zeros_like(content), None if is_to_host else device), layout)
        copy(there.at(of, layers), target.at(to, layers))
        # The reader must wait for a copy to the host.
        device_between(there.bytes, target.bytes).synchronize()
        assert torch.equal(target.bytes.cpu().flatten(), torch.from_numpy(expected))


def _put(x: Tensor, device: torch.device | None) -> Tensor:
    """Return a tensor on the device, or in host memory that a GPU can reach."""
    if device is not None:
        return x.to(device)
    return x.pin_memory() if torch.cuda.is_available() else x
