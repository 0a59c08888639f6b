"""Data exchange between the ranks of a replica at their store during start; a rank that has left ends all waits."""

import time
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.collectives import CollectiveError

_LEFT = "left"
_FIRST_LOOK_S, _LOOK_EVERY_S = 0.001, 0.01
"""Poll intervals: ranks mostly arrive together, and a start has many exchanges."""


def exchange_at_start(store: Store, name: str, global_rank: int, world_size: int, word: str) -> list[str]:
    """Return every rank's word by global rank; every rank of the replica calls this. ``name`` is unique in the
    store.

    Raises:
        CollectiveError: a rank has left, or says nothing within the store's timeout, or the store is gone.
    """
    try:
        return exchange(store, name, global_rank, world_size, word)
    except RuntimeError as exc:
        raise CollectiveError(f"{name}: not all of {world_size} ranks have answered: {exc}") from exc


def leave_store(store: Store, global_rank: int) -> None:
    """Announce that this rank leaves, which ends the others' waits for it."""
    with suppress(RuntimeError):  # the store may have gone with its rank
        store.set(_LEFT, str(global_rank))


def exchange(store: Store, name: str, rank: int, size: int, word: str) -> list[str]:
    """Return the words of a group's ranks, by rank; RuntimeError if one does not come. ``store`` has no prefix."""
    store.set(f"{name}/{rank}", word)
    words = [word_at(store, f"{name}/{peer}") for peer in range(size)]
    # A rank may have written its word and given up since: the next exchange would wait for it.
    _check_all_stay(store)
    return words


def word_at(store: Store, key: str) -> str:
    """Return a rank's word; RuntimeError if a rank of the replica leaves first, or at the store's timeout."""
    limit_s: float = store.timeout.total_seconds()  # type: ignore[attr-defined]  # the stubs leave it out
    end_s, pause_s = time.monotonic() + limit_s, _FIRST_LOOK_S
    while not store.check([key]):
        _check_all_stay(store)
        if time.monotonic() > end_s:
            raise RuntimeError(f"nothing within {limit_s:g} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LOOK_EVERY_S)
    return bytes(store.get(key)).decode()


def _check_all_stay(store: Store) -> None:
    if store.check([_LEFT]):
        raise RuntimeError(f"rank {bytes(store.get(_LEFT)).decode()} has left")
