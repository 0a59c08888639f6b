"""Bytes that a rank counts as received are those of the formulas for each collective, whichever backend moves them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cluster.spec.strategy import Collectives
from workers.parallel.collectives import Communicator
from workers.parallel.gloo import GlooBackend
from workers.parallel.groups import join_group, join_store, open_store
from workers.parallel.shared_memory import SharedMemoryBackend

pytestmark = pytest.mark.integration

HOST, TIMEOUT_S = "127.0.0.1", 30.0
LARGE, SMALL = 3 << 14, 12
"""Numbers of a tensor, of which 2, 3 and 4 ranks have equal shares."""
LARGE_BYTES, SMALL_BYTES = 4 * LARGE, 4 * SMALL
BACKENDS = {Collectives.AUTO: SharedMemoryBackend, Collectives.TCP: GlooBackend}


def received(collectives: Collectives, size: int, call: Callable[[Communicator], object]) -> list[int]:
    """By every rank of a group in one call."""
    _store, port = open_store(HOST, TIMEOUT_S)

    def rank(number: int) -> int:
        store = join_store(f"{HOST}:{port}", TIMEOUT_S)
        group = join_group(
            store, "counted", range(size), number, host=HOST, timeout_s=TIMEOUT_S, collectives=collectives
        )
        assert isinstance(group._backend, BACKENDS[collectives])
        before = group.received_bytes
        call(group)
        num_bytes = group.received_bytes - before
        group.barrier()
        group.destroy()
        return num_bytes

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))


@pytest.mark.parametrize("collectives", BACKENDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_collective_takes_what_its_formula_says(collectives: Collectives, size: int) -> None:
    def all_gather(group: Communicator) -> None:
        group.all_gather(torch.empty(size * LARGE), torch.zeros(LARGE))

    def broadcast(group: Communicator) -> None:
        group.broadcast(torch.zeros(LARGE), 1)

    def shift(group: Communicator) -> None:
        theirs = (group.rank - 1) % size
        group.start_shift(torch.empty(LARGE + theirs), torch.zeros(LARGE + group.rank)).wait()

    ranks = range(size)
    assert received(collectives, size, all_gather) == [(size - 1) * LARGE_BYTES] * size
    assert received(collectives, size, broadcast) == [0 if rank == 1 else LARGE_BYTES for rank in ranks]
    assert received(collectives, size, shift) == [LARGE_BYTES + 4 * ((rank - 1) % size) for rank in ranks]
    assert received(collectives, size, Communicator.barrier) == [0] * size


@pytest.mark.parametrize("collectives", BACKENDS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_large_sum_takes_what_a_ring_does(collectives: Collectives, size: int) -> None:
    def add_up(group: Communicator) -> None:
        group.all_reduce(torch.ones(LARGE))

    assert received(collectives, size, add_up) == [2 * (size - 1) * LARGE_BYTES // size] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_of_a_small_sum_every_rank_reads_all_terms_where_memory_is_shared(size: int) -> None:
    def add_up(group: Communicator) -> None:
        group.all_reduce(torch.ones(SMALL))

    assert received(Collectives.AUTO, size, add_up) == [(size - 1) * SMALL_BYTES] * size
    assert received(Collectives.TCP, size, add_up) == [2 * (size - 1) * SMALL_BYTES // size] * size
