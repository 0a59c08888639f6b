"""Ring communication in a group: blocks of any length, and partial results that return to their queries."""

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cluster.spec.errors import PeerLostError
from tests.fakes.thread_group import on_thread_ranks
from workers.attention.merge import Partial
from workers.context_parallel.exchange import HomewardPartials, Ring
from workers.parallel.communicator import Communicator, Work


class UncalledBackend:
    """Backend that fails when called. Tests replace the methods that they expect."""

    in_background = True

    def all_gather(self, output: Tensor, tensor: Tensor, /) -> Work:
        raise AssertionError(f"all_gather {output.shape} {tensor.shape}")

    def open_all_gather(self, num_bytes: int, /) -> None: ...

    def all_reduce(self, tensor: Tensor, /) -> Work:
        raise AssertionError(f"all_reduce {tensor.shape}")

    def broadcast(self, tensor: Tensor, root: int, /) -> Work:
        raise AssertionError(f"broadcast {tensor.shape} {root}")

    def barrier(self) -> Work:
        raise AssertionError("barrier")

    def shift(self, output: Tensor, tensor: Tensor, distance: int, /) -> Work:
        raise AssertionError(f"shift {output.shape} {tensor.shape} {distance}")

    def leave(self) -> None: ...


LIKE = torch.empty(0)


def block_of(rank: int, length: int, turn: int) -> Tensor:
    return torch.arange(length * 2.0).view(length, 2) + 1000 * rank + 10000 * turn


rounds = st.integers(1, 5).flatmap(
    lambda size: st.lists(st.lists(st.integers(0, 6), min_size=size, max_size=size), min_size=1, max_size=4)
)


@settings(deadline=None, max_examples=60)
@given(rounds, st.integers(0, 3))
def test_every_rank_sees_every_other_block_once_nearest_first(lens_of_rounds: list[list[int]], kept: int) -> None:
    """``kept`` rows of a rank's own block do not move."""
    size = len(lens_of_rounds[0])

    def go_round(group: Communicator) -> list[list[tuple[int, Tensor]]]:
        ring, seen = Ring(group), []
        for turn, lens in enumerate(lens_of_rounds):
            mine = lens[group.rank]
            own = ring.own(mine + kept, lens, (2,), LIKE)
            own[:mine], own[mine:] = block_of(group.rank, mine, turn), -1.0
            ring.start()
            assert torch.equal(own[:mine], block_of(group.rank, mine, turn))
            seen.append([(rank, block.clone()) for rank, block in ring.others()])
        return seen

    for rank, rounds_seen in enumerate(on_thread_ranks(size, go_round)):
        for turn, (lens, seen) in enumerate(zip(lens_of_rounds, rounds_seen, strict=True)):
            others = [(rank - distance) % size for distance in range(1, size)]
            assert [source for source, _ in seen] == [source for source in others if lens[source]]
            assert all(torch.equal(block, block_of(source, lens[source], turn)) for source, block in seen)


def test_nothing_is_sent_when_no_rank_has_anything() -> None:
    ring = Ring(Communicator("cannot shift", 1, 3, UncalledBackend()))
    ring.own(3, [0, 0, 0], (2,), LIKE)
    ring.start()
    assert list(ring.others()) == []


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_partials_return_in_query_order(counts: list[int]) -> None:
    """Rank r returns 100 * r + query for each query."""
    order = torch.randperm(sum(counts))
    homes = torch.split(order, counts)

    def found_at_home(group: Communicator) -> list[Partial]:
        lse = 100.0 * group.rank + torch.arange(float(sum(counts)))[:, None].expand(-1, 2)
        out = lse[..., None].expand(-1, -1, 3).to(torch.bfloat16)
        return list(HomewardPartials(group, Partial(out, lse), homes).wait())

    for rank, partials in enumerate(on_thread_ranks(len(counts), found_at_home)):
        assert len(partials) == len(counts)
        for distance, (out, lse) in enumerate(partials):
            source = (rank - distance) % len(counts)
            expected = 100.0 * source + homes[rank].float()[:, None].expand(-1, 2)
            assert torch.equal(lse, expected)
            assert torch.equal(out, expected[..., None].expand(-1, -1, 3).bfloat16().float())


class _SlowWork(UncalledBackend):
    """Backend with a barrier only, which takes 1 s to start and 5 s to wait for, on its own clock."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def barrier(self) -> "_SlowWork":
        self.now_s += 1.0
        return self

    def wait(self) -> bool:
        self.now_s += 5.0
        return True


def test_only_what_is_spent_inside_calls_counts_as_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _SlowWork()
    monkeypatch.setattr(time, "monotonic", lambda: backend.now_s)
    group = Communicator("slow", 0, 2, backend)
    pending = group._start("barrier", 0, backend.barrier)
    backend.now_s += 100.0
    assert group.waited_s == 1.0
    pending.wait()
    pending.wait()
    assert group.waited_s == 6.0


class _Failing(_SlowWork):
    def wait(self) -> bool:
        self.now_s += 5.0
        raise RuntimeError("the peer is gone")


def test_a_failure_is_raised_in_the_wait_and_its_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _Failing()
    monkeypatch.setattr(time, "monotonic", lambda: backend.now_s)
    group = Communicator("slow", 1, 2, backend)
    with pytest.raises(PeerLostError, match="barrier in group slow, rank 1 of 2: the peer is gone"):
        group.barrier()
    assert group.waited_s == 6.0


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_an_error_of_this_ranks_gpu_is_no_lost_peer(kind: type[RuntimeError]) -> None:
    """A rank's own error must not look like the effect of another rank's."""

    class Broken(_SlowWork):
        def barrier(self) -> "_SlowWork":
            raise kind("CUDA error")

    with pytest.raises(kind, match="CUDA error"):
        Communicator("broken", 1, 2, Broken()).barrier()


def test_received_bytes_are_those_of_other_ranks() -> None:
    """Each call hands over 6 elements of 2 bytes. Sums travel in fp32, and twice."""

    def received(group: Communicator, *, in_background: bool) -> list[int]:
        own, counts = torch.ones(6, dtype=torch.bfloat16), [0]
        calls: list[Callable[[], object]] = [
            lambda: group.all_gather(own.new_empty(18), own),
            lambda: group.start_shift(own.new_empty(6), own).wait(),
            lambda: group.broadcast(own.clone(), 1),
            lambda: group.all_reduce(own.clone()),
            group.barrier,
        ]
        assert group.in_background == in_background
        for call in calls:
            call()
            counts.append(group.received_bytes)
        return [after - before for before, after in pairwise(counts)]

    for in_background, summed in ((True, 32), (False, 16)):
        by_rank = on_thread_ranks(3, partial(received, in_background=in_background), in_background=in_background)
        assert by_rank == [[24, 12, 0 if rank == 1 else 12, summed, 0] for rank in range(3)]
