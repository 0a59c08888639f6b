"""Compatibility of a prefill and a decode replica, and of a ticket and its prompt. Pure."""

from collections.abc import Callable

from cluster.spec.kv import NO_PAGE, KvGeometry, pages_for
from cluster.spec.registry import KvOwnership, RankRecord, TransferMode
from cluster.spec.transfer_messages import Ticket


def geometry_refusal(prefill: str, prefill_kv: KvGeometry, decode: str, decode_kv: KvGeometry) -> str | None:
    """Describe the first difference between two replicas' KV layouts. Return None if they agree."""

    def unequal(name: str, value: Callable[[KvGeometry], object]) -> str | None:
        return _unequal(name, prefill, value(prefill_kv), decode, value(decode_kv))

    return (
        unequal("model", lambda kv: kv.model)
        or unequal("page size", lambda kv: kv.page_size)
        or unequal("number of layers", lambda kv: kv.num_layers)
        or unequal("KV groups", lambda kv: ", ".join(map(str, kv.groups)))
    )


def refusal(prefill: RankRecord, decode: RankRecord) -> str | None:
    """Return why a prefill and a decode replica cannot exchange KV, or None if they can.

    The record of any rank will do, because each describes its replica. Prefill replicas can shard KV across ranks;
    decode replicas cannot.
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
        or _unequal("transfer mode", prefill.replica, prefill.transfer_mode, decode.replica, decode.transfer_mode)
        or _unequal(
            "transfer backend", prefill.replica, prefill.endpoint.backend, decode.replica, decode.endpoint.backend
        )
    )


def ticket_refusal(ticket: Ticket, prompt_len: int) -> str | None:
    """Return why a ticket does not fit its prompt, or None if it does."""
    lifetimes, page_size = ticket.geometry.lifetimes, ticket.geometry.page_size
    if len(ticket.pages) != len(lifetimes):
        return f"{ticket.decode.replica} sent {len(ticket.pages)} page lists; its KV groups need {len(lifetimes)}"
    needed, held = pages_for(prompt_len, page_size), ticket.num_held_pages
    for lifetime, pages in zip(lifetimes, ticket.pages, strict=True):
        num_passed = max(0, lifetime.first_page(prompt_len, page_size) - held)
        seen = pages[num_passed:]
        if len(pages) + held != needed or held < 0 or NO_PAGE in seen or pages.count(NO_PAGE) != num_passed:
            return (
                f"{ticket.decode.replica} sent {len(seen)} pages and already holds {held}; "
                f"a prompt of {prompt_len} tokens needs {needed - num_passed} new pages"
            )
    return None


def _unequal(name: str, prefill: str, ours: object, decode: str, theirs: object) -> str | None:
    if ours == theirs:
        return None
    return f"{prefill} has {name} {ours}, {decode} has {theirs}; they must be equal"
