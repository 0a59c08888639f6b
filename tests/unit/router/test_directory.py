"""Readiness and loss of replicas: immediate with proof, otherwise after a grace period."""

import pytest
from msgspec.structs import replace

from cluster.spec.ids import Peer, Role
from cluster.spec.registry import TableSnapshot
from router.directory import LOOK_S, Directory
from tests.fakes.bootstrap import entry_of, peer_of, table_of

DECODE = peer_of("decode-0")
GRACE_S = 3.0


def known(*names: str) -> Directory:
    directory = Directory(grace_s=3.0)
    directory.update(table_of(*[entry_of(peer_of(name)) for name in names]), 0.0)
    return directory


def listen(directory: Directory, since_s: float, until_s: float) -> list[Peer]:
    """Return the peers lost between two times, while the table answers that nothing has changed."""
    lost: list[Peer] = []
    while since_s < until_s:
        lost += directory.update(None, since_s)
        since_s += LOOK_S
    return lost + directory.update(None, until_s)


def test_ready_by_role_in_order() -> None:
    directory = known("decode-10", "decode-9", "prefill-0")
    assert [peer.replica for peer in directory.ready(Role.DECODE)] == ["decode-9", "decode-10"]
    assert directory.ready(Role.PREFILL) == [peer_of("prefill-0")]


def test_nothing_before_the_first_snapshot() -> None:
    directory = Directory(grace_s=3.0)
    assert directory.ready(Role.DECODE) == []
    assert directory.update(None, 100.0) == []
    assert not directory.is_missing_any


def test_draining_and_half_registered_replicas_get_no_new_requests() -> None:
    directory = known("decode-0")
    assert directory.update(table_of(entry_of(DECODE, draining=True)), 1.0) == []
    assert directory.ready(Role.DECODE) == []
    assert not directory.is_missing_any
    directory.update(table_of(entry_of(DECODE, ready=False)), 2.0)
    assert directory.ready(Role.DECODE) == []


def test_missing_is_lost_after_the_grace() -> None:
    directory = known("decode-0")
    assert directory.update(table_of(), 10.0) == []
    assert directory.is_missing_any
    assert listen(directory, 10.0, 12.9) == []
    assert directory.ready(Role.DECODE) == [DECODE]
    assert listen(directory, 12.9, 13.0) == [DECODE]
    assert directory.ready(Role.DECODE) == []
    assert directory.update(None, 14.0) == []
    assert not directory.is_missing_any


@pytest.mark.parametrize("answer", [None, table_of()])
def test_a_missing_replica_is_not_lost_while_the_table_is_not_heard(answer: TableSnapshot | None) -> None:
    """The router may be stalled, and the table may be a new one that has heard of few replicas yet."""
    directory = known("decode-0")
    directory.update(table_of(), 10.0)
    assert listen(directory, 10.0, 12.9) == []
    assert directory.update(answer, 42.0) == []
    assert listen(directory, 42.0, 42.0 + GRACE_S - 0.1) == []
    assert directory.update(table_of(entry_of(DECODE)), 45.1) == []
    directory.update(table_of(), 50.0)
    assert listen(directory, 50.0, 50.0 + GRACE_S) == [DECODE]


def test_a_missing_replica_gets_no_new_requests_while_another_is_ready() -> None:
    directory = known("decode-0", "decode-1")
    directory.update(table_of(entry_of(peer_of("decode-1"))), 10.0)
    assert directory.ready(Role.DECODE) == [peer_of("decode-1")]


def test_a_draining_and_then_missing_replica_gets_no_new_requests() -> None:
    directory = known("decode-0")
    directory.update(table_of(entry_of(DECODE, draining=True)), 1.0)
    directory.update(table_of(), 2.0)
    assert directory.ready(Role.DECODE) == []


def test_a_lease_that_ran_out_is_not_forgiven_when_the_table_loses_the_replica() -> None:
    directory = known("decode-0")
    directory.update(table_of(entry_of(DECODE, ready=False)), 1.0)
    directory.update(table_of(), 2.0)
    assert directory.ready(Role.DECODE) == []
    directory.update(table_of(entry_of(DECODE)), 3.0)
    assert directory.ready(Role.DECODE) == [DECODE]


def test_an_expired_lease_is_a_loss_if_another_replica_can_continue() -> None:
    directory, other = known("decode-0", "decode-1", "prefill-0"), entry_of(peer_of("decode-1"))
    silent = entry_of(DECODE, ready=False)
    assert directory.update(table_of(silent, replace(other, ready=False)), 1.0) == []
    assert directory.update(table_of(silent, replace(other, load=replace(other.load, draining=True))), 1.5) == []
    assert directory.update(table_of(silent, other), 2.0) == [DECODE]
    assert directory.update(table_of(entry_of(DECODE), other), 3.0) == []
    assert directory.ready(Role.DECODE) == [DECODE, peer_of("decode-1")]


def test_half_back_in_a_table_that_has_had_no_heartbeat() -> None:
    directory = Directory(grace_s=3.0)
    directory.update(table_of(entry_of(DECODE, total_pages=8)), 0.0)
    directory.update(table_of(entry_of(DECODE, ready=False)), 1.0)
    assert directory.ready(Role.DECODE) == [DECODE]
    directory.update(table_of(entry_of(DECODE, ready=False, total_pages=8)), 2.0)
    assert directory.ready(Role.DECODE) == []


def test_a_request_has_the_pages_of_one_dp_rank() -> None:
    entry = entry_of(DECODE, total_pages=8)
    record = replace(entry.leader, sizes=replace(entry.leader.sizes, dp=2))
    directory = Directory(grace_s=3.0)
    directory.update(table_of(replace(entry, ranks=(record,))), 0.0)
    assert directory.pool_tokens == 16
    assert directory.pool_tokens_of(DECODE) == 32


def test_a_request_has_a_list_of_pages_for_each_lifetime() -> None:
    entry = entry_of(DECODE, total_pages=9)
    record = replace(entry.leader, layout=replace(entry.leader.layout, num_lifetimes=2))
    directory = Directory(grace_s=3.0)
    directory.update(table_of(replace(entry, ranks=(record,))), 0.0)
    assert directory.pool_tokens == directory.pool_tokens_of(DECODE) == 16


def test_capacity_is_that_of_the_smallest_usable_pool() -> None:
    directory = Directory(grace_s=3.0)
    assert directory.pool_tokens is None
    small, large = entry_of(DECODE, total_pages=8), entry_of(peer_of("prefill-0"), total_pages=16)
    silent = entry_of(peer_of("prefill-1"))
    directory.update(table_of(small, large, silent), 0.0)
    assert directory.pool_tokens == 32
    directory.update(table_of(large, silent), 1.0)
    assert directory.pool_tokens == 32, "the only decode replica may still be there"
    directory.update(table_of(large, silent, reaped={"decode-0": 1}), 2.0)
    assert directory.pool_tokens == 64


def test_back_within_the_grace_as_after_a_restart_of_the_bootstrap() -> None:
    directory = known("decode-0")
    directory.update(table_of(), 10.0)
    directory.update(table_of(entry_of(DECODE, ready=False)), 11.0)
    assert directory.is_missing_any
    assert directory.update(table_of(entry_of(DECODE)), 12.0) == []
    assert directory.update(None, 100.0) == []
    assert directory.ready(Role.DECODE) == [DECODE]


def test_reaped_is_lost_at_once() -> None:
    directory = known("decode-0")
    assert directory.update(table_of(reaped={"decode-0": 1}), 1.0) == [DECODE]
    assert directory.ready(Role.DECODE) == []


def test_an_older_start_that_was_reaped_proves_nothing() -> None:
    directory = Directory(grace_s=3.0)
    directory.update(table_of(entry_of(peer_of("decode-0", 2))), 0.0)
    assert directory.update(table_of(reaped={"decode-0": 1}), 1.0) == []


def test_a_later_start_proves_the_end_of_the_earlier_one() -> None:
    directory = known("decode-0")
    later = peer_of("decode-0", 2)
    assert directory.update(table_of(entry_of(later, ready=False)), 1.0) == [DECODE]
    assert directory.ready(Role.DECODE) == []
    assert directory.update(table_of(entry_of(later)), 2.0) == []
    assert directory.ready(Role.DECODE) == [later]
