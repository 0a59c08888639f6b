"""Compatibility check of two replicas when they first meet, with the reason for a refusal."""

from collections.abc import Callable

from cluster.spec.kv import NO_PAGE, KvGeometry, pages_for
from cluster.spec.ranks import kv_heads_of
from cluster.spec.registry import KvOwnership, RankRow, TransferMode
from cluster.spec.transfer_messages import Ticket


def geometry_refusal(prefill: str, prefill_kv: KvGeometry, decode: str, decode_kv: KvGeometry) -> str | None:
    """Return the first difference between two replicas' KV, or None if they agree."""

    def unequal(words: str, value: Callable[[KvGeometry], object]) -> str | None:
        return _unequal(words, prefill, value(prefill_kv), decode, value(decode_kv))

    return (
        unequal("model", lambda kv: kv.model)
        or unequal("page size", lambda kv: kv.page_size)
        or unequal("number of layers", lambda kv: kv.num_layers)
        or unequal("KV groups", lambda kv: ", ".join(map(str, kv.groups)))
    )


def refusal(prefill: RankRow, decode: RankRow) -> str | None:
    """Return why a prefill and a decode replica cannot exchange KV, or None if they can.

    Any row represents its whole replica, except for the heads in its pool. Prefill may shard its KV; decode may not.
    """
    if decode.sizes.cp != 1:
        return f"{decode.replica} has cp {decode.sizes.cp}; a decode replica must have cp 1"
    if decode.ownership is not KvOwnership.REPLICATED:
        return f"{decode.replica} has {decode.ownership} KV; each rank of a decode replica must hold all pages"
    if prefill.ownership is not KvOwnership.REPLICATED and prefill.transfer_mode is not TransferMode.ALL_RANKS:
        # Only the rank that holds a page can send it.
        return (
            f"{prefill.replica} has transfer mode {prefill.transfer_mode} and sharded KV, which only all_ranks can send"
        )
    return (
        geometry_refusal(prefill.replica, prefill.geometry, decode.replica, decode.geometry)
        or _wrong_heads(prefill)
        or _wrong_heads(decode)
        or _unequal("transfer mode", prefill.replica, prefill.transfer_mode, decode.replica, decode.transfer_mode)
        or _unequal(
            "transfer backend", prefill.replica, prefill.endpoint.backend, decode.replica, decode.endpoint.backend
        )
    )


def ticket_refusal(ticket: Ticket, prompt_len: int) -> str | None:
    """Return why a ticket does not fit its prompt, or None if it does."""
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


def _unequal(words: str, prefill: str, ours: object, decode: str, theirs: object) -> str | None:
    if ours == theirs:
        return None
    return f"{prefill} has {words} {ours}, {decode} has {theirs}; they must be equal"


def _wrong_heads(row: RankRow) -> str | None:
    """Return which heads a rank holds against its axes, which decide who sends what."""
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
