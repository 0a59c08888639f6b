"""Digests of the bytes that a handoff moves, page by page: told by the sender, checked by the receiver. No I/O."""

from collections.abc import Collection, Iterable, Sequence

from cluster.spec.kv import PoolLayout
from cluster.spec.registry import RankRow
from cluster.spec.transfer_messages import PageDigests
from transfer.plan import PagePair, make_spans


def digest_pages(pool: memoryview, source: PoolLayout, target: RankRow, pages: Sequence[PagePair]) -> PageDigests:
    """What one sender writes into pages of one decode rank.

    Args:
        pool: the sender's own.
        pages: by their ids in the two pools.
    """
    piece = make_spans(source, target.layout, [(0, 0)])
    return PageDigests(
        rank=target.global_rank,
        spans=[(span.target_offset, span.num_bytes) for span in piece],
        pages=[page for _, page in pages],
        digests=[
            _digest(pool, page * source.page_bytes, ((span.source_offset, span.num_bytes) for span in piece))
            for page, _ in pages
        ],
    )


def wrong_pages(pool: memoryview, layout: PoolLayout, told: Iterable[PageDigests]) -> list[int]:
    """The pages of the receiver's own pool whose bytes are not those that were told, ascending."""
    return sorted(
        {
            page
            for part in told
            for page, digest in zip(part.pages, part.digests, strict=True)
            if _digest(pool, page * layout.page_bytes, part.spans) != digest
        }
    )


def coverage_problem(
    told: Sequence[PageDigests], pages: Collection[int], num_bytes: int, num_ranks: int, num_copies: int = 1
) -> str | None:
    """Why digests do not speak for every byte of some pages, once; None if they do.

    Args:
        pages: those of the ticket; each decode rank has its own part of each.
        num_bytes: of these pages on all ranks together, those that hold the same heads counted once.
        num_ranks: of the decode replica.
        num_copies: ranks that hold the same heads, each of which is sent its part of the pages.
    """
    places = sorted(
        ((part.rank, page), offset, length) for part in told for page in part.pages for offset, length in part.spans
    )
    if any(len(part.pages) != len(part.digests) for part in told):
        return "their number is not that of their pages"
    if unknown := {page for (_, page), _, _ in places} - set(pages):
        return f"pages {sorted(unknown)} are not in the ticket"
    if strangers := {part.rank for part in told if not 0 <= part.rank < num_ranks}:
        return f"there are no ranks {sorted(strangers)}; allowed: 0 to {num_ranks - 1}"
    # Ranks that hold the same heads are neighbours.
    if astray := {(rank, page) for (rank, page), _, _ in places if (rank - page) % num_copies}:
        return f"{sorted(astray)} are ranks and pages of other ranks"
    ends: dict[tuple[int, int], int] = {}
    for place, offset, length in places:
        if offset != ends.get(place, 0) or length <= 0:
            return f"page {place[1]} of rank {place[0]}: none speaks for byte {ends.get(place, 0)} alone"
        ends[place] = offset + length
    covered = sum(ends.values())
    return None if covered == num_bytes else f"they speak for {covered} of {num_bytes} bytes"


def _digest(pool: memoryview, start: int, spans: Iterable[tuple[int, int]]) -> bytes:
    """XXH3, some twenty times as fast as SHA-256: against accidents, not against somebody who wants to deceive."""
    # Loaded only where digests are made.
    from xxhash import xxh3_128

    digest = xxh3_128()
    for offset, length in spans:
        digest.update(pool[start + offset : start + offset + length])
    return digest.digest()
