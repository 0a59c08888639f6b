"""Attention of single tokens, as in decode: their G query heads are the rows of a product, requests its batch.

R: requests, H: kv heads, G: query heads a kv head, S: keys, D: head dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from workers.attention.paged import PlacedRun, flash, gather_key_value, gather_pages, page_rows
from workers.context_parallel.merge import Partial
from workers.cpu import multiplies_bf16
from workers.device import index_on, on_device

BLOCK_SLOTS = 1 << 13
"""Keys copied out of the pages at once: they are used while the copy is still in a cache."""
MIN_SLOTS = 1 << 12
MIN_SLOTS_FP32 = 1 << 14
"""Below it torch's own kernel, which is one call, is as fast; that kernel is good in fp32 and poor in bf16."""
_SAMPLE = 64
"""Keys looked at for the reference."""


@dataclass(frozen=True, slots=True)
class SingleBatch:
    """Runs of one token each: several short requests, or one of any length."""

    rows: Tensor
    tables: Tensor
    """``[R, pages]``; shorter tables are filled up with page 0."""
    num_keys: int
    """Of the longest request."""
    num_common: int
    """Of the shortest."""
    beyond: Tensor
    """``[R, num_keys]``, true past the end of a request."""
    tails: tuple[Tensor, Tensor]
    """(request, place) of all that is past the end: other requests' tokens, which must not spread a NaN."""

    @classmethod
    def build(cls, items: list[PlacedRun], page_tables: Sequence[Tensor], page_size: int) -> "SingleBatch":
        """Put together runs of one token each."""
        lens = [item.run.first_position + 1 for item in items]
        num_keys = max(lens)
        tables = [page_tables[item.run.request][: -(-num // page_size)] for item, num in zip(items, lens, strict=True)]
        padded = pad_sequence(tables, batch_first=True)
        rows = index_on([item.first_row for item in items], padded.device)
        beyond = torch.arange(num_keys, device="cpu") >= torch.tensor(lens, device="cpu")[:, None]
        request, place = (on_device(of_tails, padded.device) for of_tails in beyond.nonzero(as_tuple=True))
        return cls(rows, padded, num_keys, min(lens), on_device(beyond, padded.device), (request, place))

    def attend_into(self, result: Partial, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
        """Fill this batch's rows of ``result``."""
        folded = query[self.rows].view(len(self.rows), key_pages.shape[1], -1, query.shape[2])
        min_slots = MIN_SLOTS_FP32 if query.dtype == torch.float32 else MIN_SLOTS
        is_short = self.tables.numel() * key_pages.shape[2] < min_slots
        # One query a kv head is where torch's own kernel is worst in bf16, also beside products that are slow.
        is_slow = query.dtype == torch.bfloat16 and folded.shape[2] > 1 and not multiplies_bf16()
        is_elsewhere = query.device.type != "cpu"
        attend = self._attend_flash if is_short or is_slow or is_elsewhere else self._attend_folded
        out, lse = attend(folded, key_pages, value_pages)
        result.out[self.rows] = out.flatten(1, 2).to(query.dtype)
        result.lse[self.rows] = lse.flatten(1, 2)

    def _attend_flash(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Partial:
        rows = page_rows(self.tables, query.shape[1])
        key, value = gather_key_value(rows, key_pages, value_pages)
        bias = None
        if len(self.tails[0]):
            bias = query.new_zeros(self.beyond.shape).masked_fill_(self.beyond, -torch.inf)[:, None, None]
            self._clear_tails(key)
            self._clear_tails(value)
        return flash(query, key[:, :, : self.num_keys], value[:, :, : self.num_keys], bias=bias)

    def _attend_folded(self, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Partial:
        """Queries ``[R, H, G, D]``; all scores, then one softmax in fp32, then all values. Out is fp32."""
        rows = page_rows(self.tables, query.shape[1])
        blocks = self._blocks(key_pages.shape[2])
        flat = (query / query.shape[3] ** 0.5).flatten(0, 1)
        scores = flat.new_empty((*flat.shape[:2], self.num_keys), dtype=torch.float32)
        reference: Tensor | None = None
        for pages, places in blocks:
            key = gather_pages(rows[:, :, pages], key_pages).flatten(0, 1)[:, : places.stop - places.start]
            reference = self._reference(flat, key) if reference is None else reference
            # Subtracted inside the product, in fp32, so that scores near it lose nothing when rounded to bf16.
            scores[:, :, places] = torch.baddbmm(reference, flat, key.transpose(1, 2), beta=-1.0)
        assert reference is not None, "a token that sees no key"
        if len(self.tails[0]):
            scores.view(*query.shape[:3], -1).masked_fill_(self.beyond[:, None, None], -torch.inf)
        peak = scores.amax(-1, keepdim=True)
        exponentials = scores.sub_(peak).exp_()
        weight_sum, weights = exponentials.sum(-1, keepdim=True), exponentials.to(query.dtype)
        out = flat.new_zeros(flat.shape, dtype=torch.float32)
        for pages, places in blocks:
            value = gather_pages(rows[:, :, pages], value_pages)
            self._clear_tails(value)
            out += torch.bmm(weights[:, :, places], value.flatten(0, 1)[:, : places.stop - places.start])
        lse = weight_sum.log() + peak + reference
        return Partial(out.div_(weight_sum).view(query.shape), lse.view(query.shape[:3]))

    def _blocks(self, page_size: int) -> list[tuple[slice, slice]]:
        """Pages copied at once, the largest first, and the keys in them; a batch of several requests is one block."""
        num_pages = self.tables.shape[1]
        step = num_pages if len(self.tables) > 1 else max(BLOCK_SLOTS // page_size, 1)
        begins = range(0, num_pages, step)
        return [
            (slice(at, min(at + step, num_pages)), slice(at * page_size, min((at + step) * page_size, self.num_keys)))
            for at in begins
        ]

    def _reference(self, query: Tensor, key: Tensor) -> Tensor:
        """``[R * H, G, 1]``: a score that is not far from the largest as a rule, in the query's dtype."""
        sample = key[:, : min(self.num_common, _SAMPLE)]
        return torch.bmm(query, sample.transpose(1, 2)).amax(-1, keepdim=True)

    def _clear_tails(self, gathered: Tensor) -> None:
        """Zero what is past the end of each request in ``gathered [R, H, slots, D]``."""
        request, place = self.tails
        if len(request):
            num_heads, num_slots = gathered.shape[1:3]
            heads = torch.arange(num_heads, device=request.device)[:, None]
            rows = (request * num_heads + heads) * num_slots + place
            gathered.view(-1, gathered.shape[3]).index_fill_(0, rows.flatten(), 0.0)
