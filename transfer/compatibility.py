"""Compatibility check of two replicas when they first meet, with the reason for a refusal."""

from cluster.spec.kv import NO_PAGE, KvGeometry, pages_for
from cluster.spec.ranks import kv_heads_of
from cluster.spec.registry import KvOwnership, RankRow, TransferMode
from cluster.spec.transfer_messages import Ticket

_GEOMETRY_WORDS = {
    "model": "model",
    "page_size": "page size",
    "num_layers": "number of layers",
}


def geometry_refusal(prefill: str, prefill_kv: KvGeometry, decode: str, decode_kv: KvGeometry) -> str | None:
    """Return the first difference between two replicas' KV, or None when they agree."""
    for field, words in _GEOMETRY_WORDS.items():
        if reason := _unequal(words, prefill, getattr(prefill_kv, field), decode, getattr(decode_kv, field)):
            return reason
    groups = (", ".join(map(str, kv.groups)) for kv in (prefill_kv, decode_kv))
    return _unequal("KV groups", prefill, next(groups), decode, next(groups))


def refusal(prefill: RankRow, decode: RankRow) -> str | None:
    """Return why a prefill and a decode replica cannot exchange KV, or None when they can.

    Any row of a replica represents the whole, except for the heads in its pool. KV may be sharded in prefill and whole
    in decode.
    """
    if decode.sizes.cp != 1:
        return f"{decode.replica} has cp {decode.sizes.cp}; a decode replica must have cp 1"
    return (
        geometry_refusal(prefill.replica, prefill.geometry, decode.replica, decode.geometry)
        or _other_heads(prefill)
        or _other_heads(decode)
        or _sharded_decode(decode)
        or _unequal_settings(prefill, decode)
        or _unsendable_shards(prefill)
    )


def ticket_refusal(ticket: Ticket, prompt_len: int) -> str | None:
    """Return why a ticket does not fit its prompt, or None when it does."""
    lifetimes, page_size = ticket.geometry.lifetimes, ticket.geometry.page_size
    if len(ticket.pages) != len(lifetimes):
        return f"{ticket.decode.replica} gave {len(ticket.pages)} lists of pages; its KV groups take {len(lifetimes)}"
    needed, held = pages_for(prompt_len, page_size), ticket.num_held_pages
    for lifetime, pages in zip(lifetimes, ticket.pages, strict=True):
        num_passed = max(0, lifetime.first_page(prompt_len, page_size) - held)
        seen = pages[num_passed:]
        if len(pages) + held != needed or held < 0 or NO_PAGE in seen or pages.count(NO_PAGE) != num_passed:
            return (
                f"{ticket.decode.replica} gave {len(seen)} pages after {held} held ones; "
                f"a prompt of {prompt_len} tokens takes {needed - num_passed}"
            )
    return None


def _unequal_settings(prefill: RankRow, decode: RankRow) -> str | None:
    pairs = {
        "transfer mode": (prefill.transfer_mode, decode.transfer_mode),
        "transfer backend": (prefill.endpoint.backend, decode.endpoint.backend),
    }
    for words, (ours, theirs) in pairs.items():
        if reason := _unequal(words, prefill.replica, ours, decode.replica, theirs):
            return reason
    return None


def _sharded_decode(decode: RankRow) -> str | None:
    if decode.ownership is KvOwnership.REPLICATED:
        return None
    return f"{decode.replica} has {decode.ownership} KV; each rank of a decode replica must hold all pages"


def _unsendable_shards(prefill: RankRow) -> str | None:
    """Return the problem of sharded KV that not every rank sends: only the rank that holds a page can send it."""
    if prefill.ownership is KvOwnership.REPLICATED:
        return None
    if prefill.transfer_mode is not TransferMode.ALL_RANKS:
        return (
            f"{prefill.replica} has transfer mode {prefill.transfer_mode} and sharded KV, which only all_ranks can send"
        )
    return None


def _unequal(words: str, prefill: str, ours: object, decode: str, theirs: object) -> str | None:
    if ours == theirs:
        return None
    return f"{prefill} has {words} {ours}, {decode} has {theirs}; they must be equal"


def _other_heads(row: RankRow) -> str | None:
    """Return the problem of a pool whose heads do not follow from the axes, which determine who sends what."""
    held = {group.name: group.heads for group in row.layout.groups}
    for group in row.geometry.groups:
        try:
            heads = kv_heads_of(group.num_heads, row.sizes.tp, row.coords.tp)
        except ValueError as error:
            return f"{row.replica}: {error}"
        if (has := held.get(group.name, heads)) != heads:
            return (
                f"{row.replica} holds {group.name} heads {has.start} to {has.stop - 1} on tp_rank {row.coords.tp}; "
                f"by its axes it must hold {heads.start} to {heads.stop - 1}"
            )
    return None
