"""What the ranks of a replica tell each other at their store while they start; nobody waits for one that has left."""

import time
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from workers.parallel.collectives import CollectiveError

_LEFT = "left"
_FIRST_LOOK_S, _LOOK_EVERY_S = 0.001, 0.01
"""Ranks mostly come at the same time, and a start has many words."""


def told_by_all(store: Store, name: str, global_rank: int, world_size: int, word: str) -> list[str]:
    """Everybody's word, by global rank; every rank of the replica calls this. ``name`` is unique in the store.

    Raises:
        CollectiveError: a rank has left, or says nothing within the store's timeout, or the store is gone.
    """
    try:
        return exchange(store, name, global_rank, world_size, word)
    except RuntimeError as exc:
        raise CollectiveError(f"{name}: not all of {world_size} ranks have told theirs: {exc}") from exc


def leave_store(store: Store, global_rank: int) -> None:
    """Let those that wait for this rank's word know that it will say none."""
    with suppress(RuntimeError):  # the store may have gone with its rank
        store.set(_LEFT, str(global_rank))


def exchange(store: Store, name: str, rank: int, size: int, word: str) -> list[str]:
    """The words of a group's ranks, by rank; RuntimeError where one does not come. ``store`` has no prefix."""
    store.set(f"{name}/{rank}", word)
    words = [word_at(store, f"{name}/{peer}") for peer in range(size)]
    # One of them may have said its word, and given up since: it would be waited for in what comes next.
    _check_all_stay(store)
    return words


def word_at(store: Store, key: str) -> str:
    """What a rank says there; RuntimeError when a rank of the replica leaves before, or at the store's timeout."""
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
