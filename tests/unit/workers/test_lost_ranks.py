"""A lost rank raises PeerLostError on its peers, so that only its own error is reported."""

from collections.abc import Iterable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore

from cluster.channel import send_to_ranks
from cluster.spec.config import DeployConfig
from cluster.spec.errors import PeerLostError, PeerUnreachableError
from cluster.spec.ids import Role
from cluster.spec.messages import Drain, Message
from cluster.spec.strategy import Collectives
from tests.fakes.kv import kv_geometry
from tests.fakes.thread_group import on_thread_ranks
from tests.fakes.worker_specs import worker_of
from workers.device import CPU
from workers.engine.rank_groups import join_groups
from workers.parallel.communicator import Communicator
from workers.parallel.groups import join_group
from workers.parallel.store import exchange_at_start, leave_store


def test_every_rank_gets_all_values() -> None:
    store = HashStore()
    reported = on_thread_ranks(3, lambda group: exchange_at_start(store, "rates", group.rank, 3, f"of {group.rank}"))
    assert reported == [["of 0", "of 1", "of 2"]] * 3


def test_a_silent_rank_is_lost() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(PeerLostError, match=r"^rates: not all 2 ranks have responded: "):
        exchange_at_start(store, "rates", 0, 2, "mine")


def test_a_rank_that_has_left_is_not_awaited() -> None:
    store = HashStore()
    leave_store(store, 1)
    with pytest.raises(PeerLostError, match=r"^rates: not all 2 ranks have responded: rank 1 has left$"):
        exchange_at_start(store, "rates", 0, 2, "mine")


@pytest.mark.parametrize("collectives", Collectives)
def test_a_rank_that_leaves_before_it_joins_its_group_is_not_awaited(collectives: Collectives) -> None:
    def meet_or_leave(group: Communicator) -> None:
        if group.rank == 0:
            with pytest.raises(PeerLostError, match=r"group tp/4 of ranks \[4, 5\] could not be formed: rank 5"):
                join_group(store, "tp/4", [4, 5], 4, host="127.0.0.1", timeout_s=3600, collectives=collectives)
        else:
            store.wait(["tp/4/here/0"])
            leave_store(store, 5)

    store = HashStore()
    on_thread_ranks(2, meet_or_leave)


def test_the_stores_timeout_bounds_the_wait_for_a_group() -> None:
    store = HashStore()
    store.set_timeout(timedelta(milliseconds=10))
    with pytest.raises(PeerLostError, match=r"could not be formed: no response within 0\.01 s$"):
        join_group(store, "tp/0", [0, 1], 0, host="127.0.0.1", timeout_s=3600)


@pytest.mark.parametrize("collectives", Collectives)
def test_an_established_group_keeps_the_stores_timeout(collectives: Collectives) -> None:
    def meet(group: Communicator) -> None:
        found = join_group(store, "tp/0", [0, 1], group.rank, host="127.0.0.1", timeout_s=3600, collectives=collectives)
        found.barrier()
        found.destroy()

    store: Any = HashStore()
    store.set_timeout(timedelta(seconds=60))
    on_thread_ranks(2, meet)
    assert store.timeout == timedelta(seconds=60)


def test_a_lost_rank_fails_other_groups_too() -> None:
    config = DeployConfig.model_validate({"prefill": {"parallel": {"cp": 2, "tp": 2}}})
    model: Any = SimpleNamespace(experts_per_token=0, dtype="float32", kv_groups=lambda _: kv_geometry().groups)

    def join(group: Communicator) -> None:
        if group.rank != 3:
            with pytest.raises(PeerLostError, match=r"rank \d has left$"):
                join_groups(worker_of(config, Role.PREFILL, group.rank), store, model, CPU)
        leave_store(store, group.rank)

    store: Any = HashStore()
    on_thread_ranks(4, join)


def test_a_rank_that_joined_and_left_is_not_awaited() -> None:
    """Rank 2 joined the group, then left because a third rank had failed."""
    store = HashStore()
    store.set("tp/0/here/1", "here")
    leave_store(store, 2)
    with pytest.raises(PeerLostError, match=r"rank 2 has left$"):
        join_group(store, "tp/0", [0, 1], 0, host="127.0.0.1", timeout_s=3600)


def test_a_rank_that_does_not_read_is_lost() -> None:
    class Full:
        def broadcast(self, addresses: Iterable[str], message: Message) -> None:
            raise PeerUnreachableError(f"no process is listening at {addresses}; {type(message).__name__} not sent")

    outbox: Any = Full()
    with pytest.raises(PeerLostError, match=r"^no process is listening at \['a', 'b'\]; Drain not sent$"):
        send_to_ranks(outbox, ["a", "b"], Drain())
