"""Digests of transferred pages, computed by the sender and checked by the receiver. No I/O."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from xxhash import xxh3_128

from cluster.spec.kv import PoolLayout
from cluster.spec.transfer_messages import PageDigests
from transfer.page_range import PageRange


def digest_pages(pool: memoryview, source: PageRange, rank: int, target: PageRange) -> PageDigests:
    """Return a digest per page of the bytes that a sender writes from its pool to one decode rank."""
    piece = replace(source, pages=[0]).spans_to(replace(target, pages=[0]))
    page_bytes = source.layout.page_bytes
    return PageDigests(
        rank=rank,
        spans=[(span.target_offset, span.num_bytes) for span in piece],
        pages=list(target.pages),
        digests=[
            _digest(pool, page * page_bytes, ((span.source_offset, span.num_bytes) for span in piece))
            for page in source.pages
        ],
    )


def wrong_pages(pool: memoryview, layout: PoolLayout, reported: Iterable[PageDigests]) -> list[int]:
    """Return the ascending ids of pages whose bytes in the receiver's pool do not match the reported digests."""
    return sorted(
        {
            page
            for part in reported
            for page, digest in zip(part.pages, part.digests, strict=True)
            if _digest(pool, page * layout.page_bytes, part.spans) != digest
        }
    )


def coverage_problem(
    reported: Sequence[PageDigests], pages: Collection[int], num_bytes: int, num_ranks: int, num_copies: int = 1
) -> str | None:
    """Return why digests do not cover every byte of a ticket's pages exactly once, or None if they do.

    Args:
        num_bytes: total bytes of these pages on all ranks, counting ranks that hold the same heads once.
        num_copies: number of ranks that hold the same heads; each receives its share of the pages.
    """
    ranges = sorted(
        ((part.rank, page), offset, length) for part in reported for page in part.pages for offset, length in part.spans
    )
    if any(len(part.pages) != len(part.digests) for part in reported):
        return "the number of digests differs from the number of pages"
    if unknown := {page for (_, page), _, _ in ranges} - set(pages):
        return f"pages {sorted(unknown)} are not in the ticket"
    if strangers := {part.rank for part in reported if not 0 <= part.rank < num_ranks}:
        return f"ranks {sorted(strangers)} do not exist; allowed: 0 to {num_ranks - 1}"
    # Ranks that hold the same heads have consecutive numbers.
    if astray := {(rank, page) for (rank, page), _, _ in ranges if (rank - page) % num_copies}:
        return f"pages were sent to the wrong ranks; (rank, page): {sorted(astray)}"
    ends: dict[tuple[int, int], int] = {}
    for owner, offset, length in ranges:
        if offset != ends.get(owner, 0) or length <= 0:
            return f"page {owner[1]} of rank {owner[0]}: byte {ends.get(owner, 0)} is not covered exactly once"
        ends[owner] = offset + length
    covered = sum(ends.values())
    return None if covered == num_bytes else f"{covered} of {num_bytes} bytes are covered"


def _digest(pool: memoryview, start: int, spans: Iterable[tuple[int, int]]) -> bytes:
    """Return the XXH3 digest of byte ranges. It is much faster than SHA-256, but not secure against attackers."""
    digest = xxh3_128()
    for offset, length in spans:
        digest.update(pool[start + offset : start + offset + length])
    return digest.digest()
