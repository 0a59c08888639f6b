"""Cost of a leader's round: it searches its caches only after they have changed."""

from collections.abc import Callable
from typing import Any

import pytest

from cluster.spec.hicache_config import WritePolicy
from cluster.spec.tiers import TierJobKind, TierJobResult
from tests.unit.workers.test_tiers import world_of
from workers.hicache.policy.host_index import HostIndex


def counted(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[Any]:
    """Return the list of a method's calls from now on."""
    calls, method = list[Any](), getattr(owner, name)

    def call(*arguments: object) -> object:
        calls.append(arguments)
        return method(*arguments)

    monkeypatch.setattr(owner, name, call)
    return calls


def test_unchanged_caches_are_not_searched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(WritePolicy.WRITE_BACK, backend="files")
    looks = [
        counted(monkeypatch, world.tree, "oldest_idle"),
        counted(monkeypatch, world.tiers.host, "oldest"),
    ]
    for number in range(2):
        world.submit([number] * 8)
        world.drain()
        world.finish(0)
        world.drain()
        world.advance()
        assert len(world.ranks[0].stored) == 4 * (number + 1)
        num_looks = [len(calls) for calls in looks]
        assert all(num_looks)
        for _ in range(10):
            world.advance()
        assert [len(calls) for calls in looks] == num_looks


def test_a_page_whose_copy_failed_is_copied_again_under_write_back() -> None:
    world = world_of(WritePolicy.WRITE_BACK)
    world.start([0] * 8)
    world.drain()
    world.finish(0)
    while world.ranks[0].copies or world.ranks[0].inbox:
        world.step(0, fails=True)
        if world.tiers.state().num_lost:
            break
    world.drain()
    assert world.tiers.host.num_used == 4


def test_pinned_pages_are_not_scanned_and_are_evictable_after_unpinning() -> None:
    index = HostIndex(4, 2)
    keys = [bytes([number]) for number in range(8)]
    for number, key in enumerate(keys):
        assert index.reserve(key, number) is not None
        index.fill(key)
    index.pin(keys[:4], is_pinned=True)
    index.pin(keys[:1], is_pinned=True)
    assert index.num_pinned == 4
    assert [index.oldest(owner, 9) for owner in range(2)] == [[keys[4], keys[6]], [keys[5], keys[7]]]
    index.touch(keys)
    index.flush()
    assert index.filled_keys() == keys[:4]
    index.pin(keys[:1], is_pinned=False)
    index.pin(keys[:1], is_pinned=False)
    index.check_integrity()
    assert index.num_pinned == 4, "another prompt begins with the page"
    index.pin(keys[:4], is_pinned=False)
    index.check_integrity()
    assert (index.num_pinned, index.oldest(0, 9)) == (0, [keys[0], keys[2]])


@pytest.mark.parametrize(
    ("done", "failures", "is_broken"),
    [
        (lambda count: [False] * count, {"late": 4}, True),
        (lambda count: [True] * (count - 1) + [False], {"late": 1}, False),
        (lambda count: [True] * count, {}, False),
        (lambda count: [False] * count, {"error": 4}, True),
    ],
)
def test_storage_that_times_out_is_paused(
    done: Callable[[int], list[bool]], failures: dict[str, int], *, is_broken: bool
) -> None:
    world = world_of(backend="files", device_pages=40, host_pages=40)
    for number in range(3):
        world.start([number] * 8)
        while not (orders := [order for order in world.ranks[0].copies if order.kind is TierJobKind.STORE]):
            world.step(0, fails=False)
        (order,) = orders
        world.ranks[0].copies.remove(order)
        answer = TierJobResult(job_id=order.job_id, global_rank=0, done=done(len(order.pages)), failures=failures)
        world.tiers.jobs.on_result(answer, world.now_s)
    assert bool(world.tiers.state().num_opened) is is_broken
