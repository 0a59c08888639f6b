"""A rank that is gone shows as PeerLostError wherever another one needs it, so that only its own error is told."""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from cluster.spec.errors import PeerLostError, PeerUnreachableError
from cluster.spec.messages import Drain, Message
from tests.fakes.thread_group import on_thread_ranks
from workers.parallel.groups import leave_store, told_by_all
from workers.post import send_to_ranks


def test_every_rank_learns_what_all_say() -> None:
    store = HashStore()
    told = on_thread_ranks(3, lambda group: told_by_all(store, "rates", group.rank, 3, f"of {group.rank}"))
    assert told == [["of 0", "of 1", "of 2"]] * 3


def test_a_rank_that_says_nothing_is_lost() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(PeerLostError, match=r"^rates: not all of 2 ranks have told theirs: "):
        told_by_all(store, "rates", 0, 2, "mine")


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    store = HashStore()
    leave_store(store, 1)
    with pytest.raises(PeerLostError, match=r"^rates: not all of 2 ranks have told theirs: rank 1 has left$"):
        told_by_all(store, "rates", 0, 2, "mine")


def test_a_rank_that_does_not_read_is_lost() -> None:
    class Full:
        def broadcast(self, addresses: Iterable[str], message: Message) -> None:
            raise PeerUnreachableError(f"nobody reads at {addresses}; {type(message).__name__} not sent")

    outbox: Any = Full()
    with pytest.raises(PeerLostError, match=r"^nobody reads at \['a', 'b'\]; Drain not sent$"):
        send_to_ranks(outbox, ["a", "b"], Drain())
