"""Copies of pages, of all layers or some, against the same by an index; on any device, also from and to host memory."""

import torch
from hypothesis import strategies as st
from torch import Tensor
from workers.cache.page_copies import PageCopies

from workers.device import synchronize


def check_copies(data: st.DataObject, device: torch.device) -> None:
    num_heads, num_layers, num_pages = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5)), 6
    first, last = data.draw(st.integers(0, num_layers)), data.draw(st.integers(0, num_layers))
    of = data.draw(st.lists(st.integers(0, num_pages - 1), max_size=num_pages))
    to = data.draw(st.permutations(range(num_pages)))[: len(of)]
    source = torch.randint(256, (num_pages, num_heads, num_layers, 64), dtype=torch.uint8)
    expected = torch.zeros_like(source)
    expected[to, :, first:last] = source[of, :, first:last]
    for is_from_host, is_to_host in data.draw(st.permutations([(False, False), (True, False), (False, True)])):
        there = _put(source, None if is_from_host else device)
        target = _put(torch.zeros_like(source), None if is_to_host else device)
        PageCopies(there, of, target, to).layers(slice(first, last)).start()
        # A copy to the host is waited for by whoever reads it.
        synchronize(device)
        assert torch.equal(target.cpu(), expected)


def _put(x: Tensor, device: torch.device | None) -> Tensor:
    """On the device, or in host memory that a GPU can reach."""
    if device is not None:
        return x.to(device)
    return x.pin_memory() if torch.cuda.is_available() else x
