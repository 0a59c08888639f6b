"""Attention in plain torch: the reference on any device, and the fallback for CPUs without the native library.

T: queries, S: keys, H: kv heads, G: query heads per kv head, D and V: dims of a key and of a value.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import gcd
from operator import add

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from workers.attention.interface import AttentionParams, GraphShape
from workers.attention.merge import Partial, empty_partial, merge_into
from workers.attention.runs import Piece, Run, paged_pieces, pages_of, row_pieces, split_keys
from workers.attention.torch_selection import TorchSelection
from workers.device import device_of

MOST_KEYS = 1 << 12
"""Maximum number of keys copied out of a request's pages in one piece; few enough to stay in CPU caches."""
MOST_SINGLE_KEYS = 1 << 14
"""Maximum number of keys in one call for a single token. A second call and a merge cost more than cache misses."""
MOST_SCORES = 1 << 24
"""Maximum number of scores (64 MiB) that exist at the same time, unless a single query has more."""


def _has_flash(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return device_of(query).has_torch_flash and key.shape[-1] >= value.shape[-1]


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, bias: Tensor | None = None
) -> Partial:
    """Compute attention of ``query [batch, heads, T, D]`` over ``[batch, heads, S, D]`` with torch's kernel.

    If causal, query i sees keys 0..i. ``bias``, which broadcasts to ``[batch, heads, T, S]``, is added to scores. The
    kernel needs values as wide as keys: narrower ones are padded, or replaced by the keys that contain them.
    """
    dim, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
    if missing:
        value = key if _is_inside(value, key) else functional.pad(value, (0, missing))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    return Partial(out[..., :dim], lse)


def _is_inside(value: Tensor, key: Tensor) -> bool:
    """Return whether values are the first elements of their keys."""
    return (value.data_ptr(), value.stride()) == (key.data_ptr(), key.stride())


class _PageRows:
    """Page tables ``[..., n]``, whose pages can be copied from any layer."""

    def __init__(self, tables: Tensor) -> None:
        self._tables = tables
        self._rows: dict[tuple[int, int], Tensor] = {}
        """Row indices of the pages' heads, by the page and head strides of a layer."""

    def gather(self, pages: Tensor) -> Tensor:
        """Copy the pages from ``pages [page, H, slot, dim]`` to ``[..., H, n * slots, dim]``."""
        num_pages, num_heads, page_size, dim = pages.shape
        page_stride, head_stride, slot_stride, _ = pages.stride()
        # Pages and heads are merged into one dimension, so that one call copies all. Its stride divides both strides.
        stride = gcd(page_stride, head_stride)
        rows = self._rows.get((page_stride, head_stride))
        if rows is None:
            heads = torch.arange(num_heads, device=self._tables.device)[:, None] * (head_stride // stride)
            rows = self._tables[..., None, :] * (page_stride // stride) + heads
            self._rows[page_stride, head_stride] = rows
        num_rows = ((num_pages - 1) * page_stride + (num_heads - 1) * head_stride) // stride + 1
        strided = pages.as_strided((num_rows, page_size, dim), (stride, slot_stride, 1))
        return strided.index_select(0, rows.flatten()).view(*rows.shape[:-1], -1, dim)

    def gather_both(
        self, key_pages: Tensor, value_pages: Tensor, dtype: torch.dtype | None = None
    ) -> tuple[Tensor, Tensor]:
        """Copy the pages of keys and of values as ``dtype``, only once if values are the first elements of their keys.

        Without ``dtype``, they keep theirs.
        """
        dtype = dtype or key_pages.dtype
        key = self.gather(key_pages).to(dtype)
        if _is_inside(value_pages, key_pages):
            return key, key[..., : value_pages.shape[-1]]
        return key, self.gather(value_pages).to(dtype)


class _SingleTokens:
    """R single queries of different requests, as in decode, computed in one call over padded keys."""

    def __init__(
        self, pieces: Sequence[Piece], page_tables: Sequence[Tensor], page_size: int, num_queries: int
    ) -> None:
        pieces = sorted(pieces, key=lambda piece: piece.query.start)
        held = [pages_of(piece, page_size) for piece in pieces]
        tables = [page_tables[piece.request][pages] for piece, (pages, _) in zip(pieces, held, strict=True)]
        self._pages = _PageRows(pad_sequence(tables, batch_first=True))
        rows = [piece.query.start for piece in pieces]
        self.queries = None if rows == list(range(num_queries)) else torch.tensor(rows)
        """``[R]``: rows of the queries. None if these are all queries of the step."""
        begins, lens = [begin for _, begin in held], [piece.num_keys for piece in pieces]
        self._slots = slice(min(begins), max(map(add, begins, lens)))
        self._bias: Tensor | None = None
        """``[R, 1, 1, slots]`` fp32: -inf for slots that a query does not see, otherwise 0. None if all are seen."""
        if len(set(begins)) > 1 or len(set(lens)) > 1:
            slots, starts = torch.arange(self._slots.start, self._slots.stop), torch.tensor(begins)[:, None]
            is_unseen = (slots < starts) | (slots >= starts + torch.tensor(lens)[:, None])
            self._unseen = is_unseen.nonzero(as_tuple=True)
            self._bias = torch.zeros(is_unseen.shape).masked_fill_(is_unseen, -torch.inf)[:, None, None]

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, scale: float) -> Partial:
        gathered = self._pages.gather_both(key_pages, value_pages, torch.float32)
        key, value = (x[:, :, self._slots] for x in gathered)
        if self._bias is not None:
            # Slots that a query does not see may hold NaN, which no bias can hide.
            request, slot = self._unseen
            key[request, :, slot] = value[request, :, slot] = 0.0
        rows = query if self.queries is None else query[self.queries]
        folded = rows.float().view(len(rows), key.shape[1], -1, query.shape[2])
        found = _flash(folded, key, value, scale, bias=self._bias)
        return Partial(*(x.flatten(1, 2) for x in found))


def _batches(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Group pieces of similar length. Each group has at most ``MOST_KEYS`` keys, including padding."""
    result: list[list[Piece]] = []
    longest = 0
    for piece in sorted(pieces, key=lambda piece: -piece.num_keys):
        is_alike = longest - piece.num_keys <= max(longest // 4, 128)
        if result and is_alike and (len(result[-1]) + 1) * longest <= MOST_KEYS:
            result[-1].append(piece)
        else:
            result.append([piece])
            longest = piece.num_keys
    return result


class TorchAttention(TorchSelection):
    """Attention in fp32. Where torch's own kernel is supported, it computes prompts in the dtype of their queries."""

    def prepare(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None = None
    ) -> "_PagedStep":
        return _PagedStep(runs, page_tables, page_size, key_lens)

    def prepare_rows(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> "_Rows":
        return _Rows(query_runs, key_runs)

    def prepare_graph(self, shape: GraphShape) -> None:
        """Return None, since the shapes of tensors depend on request lengths."""


class _PagedStep:
    """Queries over pages: single tokens run in batches, other queries request by request."""

    def __init__(
        self, runs: Sequence[Run], page_tables: Sequence[Tensor], page_size: int, key_lens: Sequence[int] | None
    ) -> None:
        self._tables, self._page_size = page_tables, page_size
        self._work = cache(partial(_divide, runs, page_tables, page_size, key_lens))

    def attend(self, query: Tensor, key_pages: Tensor, value_pages: Tensor, params: AttentionParams) -> Partial:
        def keys_of(piece: Piece) -> tuple[Tensor, Tensor]:
            pages, begin = pages_of(piece, self._page_size)
            rows, keys = _PageRows(self._tables[piece.request][pages]), slice(begin, begin + piece.num_keys)
            key, value = rows.gather_both(key_pages, value_pages)
            return key[:, keys], value[:, keys]

        singles, pieces = self._work(params.window, _has_flash(query, key_pages, value_pages))
        if singles and singles[0].queries is None:
            out, lse = singles[0].attend(query, key_pages, value_pages, params.scale)
            return Partial(out.to(query.dtype), lse)
        result = _attend_pieces(query, pieces, keys_of, value_pages.shape[-1], params.scale)
        for batch in singles:
            found = batch.attend(query, key_pages, value_pages, params.scale)
            for whole, part in zip(result, found, strict=True):
                whole[batch.queries] = part
        return Partial(result.out.to(query.dtype), result.lse)


class _Rows:
    """Queries over rows. Several pieces may have the same queries."""

    def __init__(self, query_runs: Sequence[Run], key_runs: Sequence[Run]) -> None:
        self._pieces = cache(partial(row_pieces, query_runs, key_runs))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams) -> Partial:
        def keys_of(piece: Piece) -> tuple[Tensor, Tensor]:
            return key[piece.key].transpose(0, 1), value[piece.key].transpose(0, 1)

        out, lse = _attend_pieces(query, self._pieces(params.window), keys_of, value.shape[-1], params.scale)
        return Partial(out.to(query.dtype), lse)


def _divide(
    runs: Sequence[Run],
    tables: Sequence[Tensor],
    page_size: int,
    key_lens: Sequence[int] | None,
    window: int | None,
    is_batched: bool,
) -> tuple[list[_SingleTokens], list[Piece]]:
    singles: list[Piece] = []
    others: list[Piece] = []
    for piece in paged_pieces(runs, key_lens, window):
        is_single = is_batched and piece.num_queries == 1 and piece.num_keys <= MOST_SINGLE_KEYS
        (singles if is_single else others).append(piece)
    num_queries = sum(run.count for run in runs)
    built = [_SingleTokens(batch, tables, page_size, num_queries) for batch in _batches(singles)]
    return built, [block for piece in others for block in split_keys(piece, MOST_KEYS)]


def _attend_pieces(
    query: Tensor,
    pieces: Sequence[Piece],
    keys_of: Callable[[Piece], tuple[Tensor, Tensor]],
    value_dim: int,
    scale: float,
) -> Partial:
    """Join the pieces' partials in fp32. Pieces with the same queries must be adjacent."""
    result = empty_partial(query.float(), value_dim)
    num_done = 0
    for piece in pieces:
        found = _attend_piece(query[piece.query], *keys_of(piece), piece, scale)
        joined = Partial(*(x[piece.query] for x in result))
        if piece.query.start < num_done:
            merge_into(joined, found)
        else:
            joined.out.copy_(found.out)
            joined.lse.copy_(found.lse)
        num_done = max(num_done, piece.query.stop)
    return result


def _attend_piece(query: Tensor, key: Tensor, value: Tensor, piece: Piece, scale: float) -> Partial:
    """Compute attention of a piece's queries ``[T, heads, D]`` over its keys ``[H, S, D]`` and values ``[H, S, V]``."""
    if piece.behind is None and _has_flash(query, key, value):
        if len(query) == 1:
            query, key, value = (x.float() for x in (query, key, value))
        return _by_flash(query, key, value, piece, scale)
    step = max(MOST_SCORES // (query.shape[1] * piece.num_keys), 1)
    parts = [
        _attend_queries(query[first : first + step].float() * scale, key, value, piece, first)
        for first in range(0, len(query), step)
    ]
    out, lse = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Partial(out, lse)


def _attend_queries(query: Tensor, key: Tensor, value: Tensor, piece: Piece, first: int) -> Partial:
    """Compute attention of scaled fp32 queries. ``first`` is the index of the first query within the piece."""
    last = first + len(query) - 1
    begin = 0 if piece.behind is None else max(piece.behind + first * piece.step, 0)
    keys = slice(begin, min(piece.ahead + last * piece.step + 1, piece.num_keys))
    key, value = key[:, keys].float(), value[:, keys].float()
    num_queries, num_heads, head_dim = query.shape
    rows = query.view(num_queries, len(key), -1, head_dim).permute(1, 2, 0, 3).flatten(1, 2)
    scores = (rows @ key.transpose(1, 2)).view(num_heads, num_queries, -1)
    if not piece.is_full:
        steps = torch.arange(first, last + 1, device=query.device)[:, None] * piece.step
        indices = torch.arange(keys.start, keys.stop, device=query.device)
        seen = indices <= piece.ahead + steps
        if piece.behind is not None:
            seen &= indices >= piece.behind + steps
        scores.masked_fill_(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    out = scores.softmax(-1).view(*rows.shape[:2], -1) @ value
    return Partial(out.view(num_heads, num_queries, -1).transpose(0, 1).contiguous(), lse.T.contiguous())


def _by_flash(query: Tensor, key: Tensor, value: Tensor, piece: Piece, scale: float) -> Partial:
    """Compute attention with torch's kernel, which supports only triangles and rectangles of visible pairs.

    From ``ahead`` on, keys fall into ``step`` classes by index modulo step. Query i sees the first i + 1 keys of the
    first class and the first i of every other class.
    """
    if piece.is_full:
        return _rectangle(query, key, value, scale)
    ahead, step = piece.ahead, piece.step
    found = _triangle(query, key[:, ahead::step], value[:, ahead::step], scale)
    if ahead:
        merge_into(found, _rectangle(query, key[:, :ahead], value[:, :ahead], scale))
    for first in range(ahead + 1, min(ahead + step, piece.num_keys)):
        later = Partial(*(x[1:] for x in found))
        merge_into(later, _triangle(query[1:], key[:, first::step], value[:, first::step], scale))
    return found


def _triangle(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    rows = query.view(len(query), len(key), -1, query.shape[2]).permute(1, 2, 0, 3)
    keys, values = (x[:, None].expand(-1, rows.shape[1], -1, -1) for x in (key, value))
    out, lse = _flash(rows, keys, values, scale, causal=True)
    return Partial(out.permute(2, 0, 1, 3).flatten(1, 2), lse.permute(2, 0, 1).flatten(1, 2))


def _rectangle(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Partial:
    """Compute attention of every query over every key. The G heads of a kv head are rows, so each key is read once."""
    rows = query.view(len(query), len(key), -1, query.shape[2]).transpose(0, 1).flatten(1, 2)
    out, lse = _flash(rows[None], key[None], value[None], scale)
    shape = len(key), len(query), -1
    out, lse = out[0].view(*shape, out.shape[-1]), lse[0].view(shape)
    return Partial(out.transpose(0, 1).flatten(1, 2), lse.transpose(0, 1).flatten(1, 2))
