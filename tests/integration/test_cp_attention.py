"""Context-parallel attention in real processes.

Ranks take seconds to start, so one set of processes serves all cases.
"""

import multiprocessing
from collections.abc import Iterator
from datetime import timedelta
from itertools import product
from multiprocessing.connection import Connection

import numpy as np
import pytest
import torch
from torch._C._distributed_c10d import PrefixStore, Store

from cluster.spec.errors import PeerLostError
from cluster.spec.strategy import Passing, Strategy
from tests.fakes.attention_oracle import Scenario, ScenarioRun, StepResult, check_scenario
from workers.parallel.communicator import Communicator
from workers.parallel.groups import join_group
from workers.parallel.store import join_store, open_store
from workers.parallel.torch_groups import GlooBackend

pytestmark = pytest.mark.integration

HOST, TIMEOUT_S = "127.0.0.1", 60.0
CHUNKS = {
    "one_token": ((1,),),
    "shorter_than_cp": ((1, 2, 3), (2, 1, 1)),
    "prefixes_and_pauses": ((13, 1, 0), (0, 7, 5), (9, 1, 21)),
    "long": ((65, 3),),
}


def serve_rank(rank: int, world_size: int, address: str, connection: Connection) -> None:
    """Run scenarios from the pipe in groups of 1 to ``world_size`` ranks until the pipe closes."""
    torch.set_num_threads(1)
    store = join_store(address, TIMEOUT_S)
    groups: dict[tuple[str, int], Communicator] = {}
    for size in range(rank + 1, world_size + 1):
        groups["shared", size] = join_group(store, f"cp{size}", range(size), rank, host=HOST, timeout_s=TIMEOUT_S)
        groups["tcp", size] = tcp_group(store, rank, size)
    try:
        while True:
            scenario, kind = connection.recv()
            connection.send(ScenarioRun(scenario, groups[kind, scenario.cp]).run())
    except EOFError:
        for group in groups.values():
            group.destroy()


def tcp_group(store: Store, rank: int, size: int) -> Communicator:
    if size == 1:
        return Communicator("tcp1")
    backend = GlooBackend(PrefixStore(f"tcp{size}", store), rank, size, HOST, timedelta(seconds=TIMEOUT_S))
    return Communicator(f"tcp{size}", rank, size, backend)


class Ranks:
    """Rank processes and their pipes."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.fakes.attention_oracle"])  # with torch, once for all ranks
        self.store, port = open_store(HOST, TIMEOUT_S)
        pipes = [context.Pipe() for _ in range(size)]
        self.connections = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=serve_rank, args=(rank, size, f"{HOST}:{port}", theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self.processes, pipes, strict=True):
            process.start()
            theirs.close()

    def run(self, scenario: Scenario, kind: str = "shared") -> list[list[StepResult]]:
        """Return the results of every rank in the scenario's group, over shared memory or TCP."""
        members = self.connections[: scenario.cp]
        for connection in members:
            connection.send((scenario, kind))
        for connection in members:
            assert connection.poll(TIMEOUT_S), "a rank did not answer"
        return [connection.recv() for connection in members]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(TIMEOUT_S)
            process.kill()


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()
    assert [process.exitcode for process in ranks.processes] == [0] * 4


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    ranks = Ranks(8)
    yield ranks
    ranks.close()
    assert [process.exitcode for process in ranks.processes] == [0] * 8


@pytest.mark.full
@pytest.mark.parametrize("passing", [None, *Passing])
@pytest.mark.parametrize("name", CHUNKS)
def test_every_strategy_over_eight_ranks_equals_the_oracle(
    eight_ranks: Ranks, name: str, passing: Passing | None
) -> None:
    """Eight is the size in deploy/h200-2x8-ring.yaml, and five divides nothing."""
    for strategy, cp, kind in product(Strategy, (5, 8), ("shared", "tcp")):
        scenario = Scenario(CHUNKS[name], strategy, cp, passing, seed=cp)
        check_scenario(scenario, eight_ranks.run(scenario, kind))


@pytest.mark.parametrize("passing", [None, *Passing])
def test_every_strategy_over_tcp_equals_the_oracle(ranks: Ranks, passing: Passing | None) -> None:
    for strategy in Strategy:
        scenario = Scenario(CHUNKS["prefixes_and_pauses"], strategy, 3, passing)
        check_scenario(scenario, ranks.run(scenario, "tcp"))


@pytest.mark.parametrize(
    "length", [1000, pytest.param(16384, marks=pytest.mark.full, id="16384")], ids=lambda length: str(length)
)
def test_long_prompts_agree_with_one_rank(ranks: Ranks, length: int) -> None:
    """The second of two chunks has the first as its prefix. Every rank sees the joined outputs of all."""
    chunks = ((length // 2,), (length - length // 2,))
    alone = ranks.run(Scenario(chunks, Strategy.NONE, 1, page_size=64))[0]
    for passing, strategy in product((None, *Passing), (Strategy.ZIGZAG, Strategy.INTERLEAVE)):
        together = ranks.run(Scenario(chunks, strategy, 4, passing, page_size=64))
        for step, expected in enumerate(alone):
            for results in together:
                np.testing.assert_allclose(results[step].joined, expected.joined, atol=1e-5)
                np.testing.assert_allclose(results[step].last, expected.last, atol=1e-5)


def test_a_group_with_missing_members_is_an_error() -> None:
    store, _ = open_store(HOST, 1)
    with pytest.raises(PeerLostError, match=r"group lonely of ranks \[0, 1\] could not be formed"):
        join_group(store, "lonely", [0, 1], 0, host=HOST, timeout_s=1)


def test_a_missing_store_is_an_error() -> None:
    with pytest.raises(PeerLostError, match=r"no store answered at 127\.0\.0\.1:1 within 1 s"):
        join_store("127.0.0.1:1", 1)


def test_a_group_of_one_needs_no_store_entry() -> None:
    store, port = open_store(HOST, 1)
    group = join_group(join_store(f"{HOST}:{port}", 1), "one", [3], 3, host=HOST, timeout_s=1)
    out = torch.empty(2)
    group.all_gather(out, torch.ones(2))
    group.broadcast(out, 0)
    group.barrier()
    assert out.tolist() == [1.0, 1.0]
    assert store.num_keys() <= 1
