"""Batches of single tokens, as in decode: each is one call on a CPU, over keys padded to one length."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from workers.attention.flash import flash, gather
from workers.attention.merge import Partial
from workers.attention.pieces import Piece, pages_of


class SingleTokens(NamedTuple):
    """R queries of different requests, each of which sees all keys of its piece."""

    rows: Tensor
    """``[R]``: rows of the queries."""
    tables: Tensor
    """``[R, pages]``, filled up with page 0."""
    bias: Tensor | None
    """``[R, 1, 1, slots]`` fp32: -inf for slots that a query does not see, otherwise 0; None if all are seen."""
    unseen: tuple[Tensor, ...]
    """(request, slot) of all unseen slots."""

    @classmethod
    def build(cls, pieces: Sequence[Piece], page_tables: Sequence[Tensor], page_size: int) -> "SingleTokens":
        """Lay out a batch of pieces of one query each."""
        held = [pages_of(piece, page_size) for piece in pieces]
        tables = [page_tables[piece.request][pages] for piece, (pages, _) in zip(pieces, held, strict=True)]
        padded = pad_sequence(tables, batch_first=True)
        rows = torch.tensor([piece.query.start for piece in pieces])
        num_slots = padded.shape[1] * page_size
        if all(piece.num_keys == num_slots for piece in pieces):
            return cls(rows, padded, None, ())
        begins = torch.tensor([begin for _, begin in held])[:, None]
        lens = torch.tensor([piece.num_keys for piece in pieces])[:, None]
        slots = torch.arange(num_slots)
        is_unseen = (slots < begins) | (slots >= begins + lens)
        bias = torch.zeros(is_unseen.shape).masked_fill_(is_unseen, -torch.inf)[:, None, None]
        unseen = is_unseen.nonzero(as_tuple=True)
        return cls(rows, padded, bias, unseen)

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, scale: float) -> Partial:
        """Return the partial of this batch's rows of ``query [tokens, heads, dim]``, in fp32."""
        key, value = (gather(pages, self.tables).float() for pages in (key_pages, value_pages))
        if self.bias is not None:
            # Other requests' memory may hold NaN, which no bias hides.
            request, slot = self.unseen
            key[request, :, slot] = value[request, :, slot] = 0.0
        rows = query[self.rows].float().view(len(self.rows), key.shape[1], -1, query.shape[2])
        found = flash(rows, key, value, scale, bias=self.bias)
        return Partial(*(x.flatten(1, 2) for x in found))


def batches(pieces: Sequence[Piece], most_keys: int) -> list[list[Piece]]:
    """Put pieces with about equally many keys together, at most ``most_keys`` with padding."""
    result: list[list[Piece]] = []
    longest = 0
    for piece in sorted(pieces, key=lambda piece: -piece.num_keys):
        is_alike = longest - piece.num_keys <= max(longest // 4, 128)
        if result and is_alike and (len(result[-1]) + 1) * longest <= most_keys:
            result[-1].append(piece)
        else:
            result.append([piece])
            longest = piece.num_keys
    return result
