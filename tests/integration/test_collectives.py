"""Collectives through shared memory against those of gloo, between real processes, and what happens when one goes."""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from workers.parallel import same_host
from workers.parallel.checked import CheckedBackend, Notes
from workers.parallel.collectives import CollectiveError, Communicator
from workers.parallel.gloo import GlooBackend
from workers.parallel.groups import join_group, join_store, open_store
from workers.parallel.shared_memory import SharedMemoryBackend

pytestmark = pytest.mark.integration

T = TypeVar("T")

HOST, TIMEOUT_S, SIZE = "127.0.0.1", 30.0, 3
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]


def shared_group(address: str, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Communicator:
    return join_group(join_store(address, TIMEOUT_S), "shared", range(size), rank, host=HOST, timeout_s=timeout_s)


def serve_rank(rank: int, address: str, pipe: Connection) -> None:
    """For every seed that comes down the pipe, tell what one sequence of calls did on both kinds of group."""
    torch.set_num_threads(1)
    group = shared_group(address, rank, SIZE)
    scope = PrefixStore("oracle", join_store(address, TIMEOUT_S))
    backend = GlooBackend(scope, rank, SIZE, HOST, timedelta(seconds=TIMEOUT_S))
    oracle = Communicator("gloo", rank, SIZE, backend)
    pipe.send(type(group._backend).__name__)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(differences(random.Random(pipe.recv()), rank, group, oracle))


CALLS = ["all_gather", "shift", "broadcast", "barrier", "all_reduce"]


def differences(rng: random.Random, rank: int, group: Communicator, oracle: Communicator) -> list[str]:
    """The calls of a random sequence whose results are not the same, bit for bit."""
    wrong = []
    for _ in range(16):
        call, dtype, root = rng.choice(CALLS), rng.choice(DTYPES), rng.randrange(SIZE)
        num_rows, width = [int(2 ** rng.uniform(0, 12)) - 1 for _ in range(SIZE)], rng.choice([1, 3, 128])
        torch.manual_seed(rng.randrange(1 << 30) + rank)
        mine = torch.randint(0, 255, (num_rows[rank if call == "shift" else 0], width)).to(dtype)
        start_others, work_s = rng.random() < 0.5, rng.random() * 0.01 * (rng.random() < 0.2)
        ours, theirs = (
            result_of(communicator, call, mine, root, num_rows, start_others) for communicator in (group, oracle)
        )
        if not torch.equal(ours, theirs):
            wrong.append(f"{call} of {dtype} {tuple(mine.shape)}, root or distance {root}")
        time.sleep(work_s)
    return wrong


def result_of(
    group: Communicator, call: str, mine: Tensor, root: int, num_rows: list[int], start_others: bool
) -> Tensor:
    """One call, in flight together with a second one of its kind or alone."""
    if call == "broadcast":
        out = mine.clone()
        group.broadcast(out, root)
        return out
    if call == "all_reduce":
        # Numbers of 8 bits, so that the order in which gloo adds them up changes nothing.
        return group.all_reduce(mine.clone() if mine.is_floating_point() else mine.float())
    if call == "barrier":
        group.barrier()
        return mine
    if call == "all_gather":
        outs = [mine.new_zeros(SIZE * len(mine), mine.shape[1]) for _ in range(1 + start_others)]
        own = outs[-1][group.rank * len(mine) :][: len(mine)]
        own.copy_(mine)
        pending = [
            group.start_all_gather(out, part) for out, part in zip(outs, [*[mine] * start_others, own], strict=True)
        ]
    else:
        rows = num_rows[(group.rank - root) % SIZE]
        outs = [mine.new_zeros(rows, mine.shape[1]) for _ in range(1 + start_others)]
        pending = [group.start_shift(out, mine, root) for out in outs]
    for work in pending:
        work.wait()
    return torch.cat(outs)


@contextlib.contextmanager
def processes(
    target: Callable[..., None], ranks: Sequence[int], address: str
) -> Iterator[list[tuple[BaseProcess, Connection]]]:
    context = multiprocessing.get_context("forkserver")
    started: list[tuple[BaseProcess, Connection]] = []
    for rank in ranks:
        ours, theirs = context.Pipe()
        process: BaseProcess = context.Process(target=target, args=(rank, address, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        yield started
    finally:
        for _, pipe in started:
            pipe.close()
        for process, _ in started:
            process.join(0.5 if process.exitcode is None and target is not serve_rank else TIMEOUT_S)
            process.kill()
            process.join()


def test_results_equal_those_of_gloo_bit_for_bit() -> None:
    _store, port = open_store(HOST, TIMEOUT_S)
    with processes(serve_rank, range(SIZE), f"{HOST}:{port}") as ranks:
        assert [pipe.recv() for _, pipe in ranks] == ["SharedMemoryBackend"] * SIZE
        for seed in range(8):
            for _, pipe in ranks:
                pipe.send(seed)
            for _, pipe in ranks:
                assert pipe.poll(TIMEOUT_S), "a rank did not answer"
                assert pipe.recv() == []
    assert [process.exitcode for process, _ in ranks] == [0] * SIZE


def both_groups(address: str, rank: int, size: int, tcp_timeout_s: float) -> list[Communicator]:
    """The same ranks over shared memory and over TCP."""
    shared = shared_group(address, rank, size)
    scope = PrefixStore("tcp", join_store(address, TIMEOUT_S))
    shared.barrier()
    backend = GlooBackend(scope, rank, size, HOST, timedelta(seconds=tcp_timeout_s))
    return [shared, Communicator("tcp", rank, size, backend)]


def answer_once(rank: int, address: str, pipe: Connection) -> None:
    """Take part in one shift on each kind of group, and never again."""
    pipe.send(os.getpid())
    groups = both_groups(address, rank, 2, TIMEOUT_S)
    for group in groups:
        group.start_shift(torch.empty(2), torch.ones(2)).wait()
    with contextlib.suppress(EOFError):
        pipe.recv()


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (signal.SIGKILL, 0, r"rank 1 \(process \d+\) is gone"),
        (signal.SIGSTOP, 0, r"rank 1 \(process \d+\) did not answer in 1.0 s"),
        (signal.SIGKILL, 1, "."),
        (signal.SIGSTOP, 1, r".*Timed out waiting 4000ms"),
    ],
    ids=["shared-killed", "shared-stopped", "tcp-killed", "tcp-stopped"],
)
def test_a_peer_that_goes_while_it_is_waited_for_is_an_error(
    number: signal.Signals, kind: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = time.sleep

    def noted_sleep(seconds: float) -> None:
        pauses.append(seconds)
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", noted_sleep)
    _store, port = open_store(HOST, TIMEOUT_S)
    with processes(answer_once, [1], f"{HOST}:{port}") as [(process, pipe)]:
        pid = pipe.recv()
        groups = both_groups(f"{HOST}:{port}", 0, 2, TIMEOUT_S if number == signal.SIGKILL else 4.0)
        for group in groups:
            group.start_shift(torch.empty(2), torch.zeros(2)).wait()
        if number == signal.SIGSTOP and kind == 0:
            backend = groups[0]._backend
            assert isinstance(backend, SharedMemoryBackend)
            monkeypatch.setattr(backend._flags, "_timeout_s", 1.0)
        pauses.clear()
        pending = groups[kind].start_shift(torch.empty(2), torch.zeros(2))
        timer = threading.Timer(0.3, os.kill, (pid, number))
        timer.start()
        with pytest.raises(CollectiveError, match=rf"shift in group {groups[kind].name}, rank 0 of 2: {words}"):
            pending.wait()
        assert kind == 1 or pauses, "a spinning wait would take all of a core"
        pending.wait()
        with pytest.raises(CollectiveError):
            groups[kind].barrier()
        timer.join()
        process.kill()


WHOLE_SUM_BYTES = 32


def on_threads(function: Callable[[SharedMemoryBackend], T], piece_bytes: int) -> list[T]:
    """What a function returns as each rank of a group inside this process, whose memory is moved in small pieces."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, SharedMemoryBackend.num_bytes(SIZE))
    with ThreadPoolExecutor(SIZE) as threads:
        backends = [
            SharedMemoryBackend(os.dup(descriptor), rank, [os.getpid()] * SIZE, TIMEOUT_S, piece_bytes, WHOLE_SUM_BYTES)
            for rank in range(SIZE)
        ]
        os.close(descriptor)
        return list(threads.map(function, backends))


WRONG: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "kind": (
        lambda group: group.barrier() if group.rank == 2 else group.all_reduce(torch.zeros(3)),
        "collective 2 differs: rank 0 calls all_reduce of torch.float32 [3], rank 2 calls barrier",
    ),
    "size": (
        lambda group: group.all_reduce(torch.zeros(3 + (group.rank == 1), 2)),
        "rank 0 calls all_reduce of torch.float32 [3, 2], rank 1 calls all_reduce of torch.float32 [4, 2]",
    ),
    "dtype": (
        lambda group: group.broadcast(torch.zeros(2, dtype=DTYPES[group.rank]), 1),
        "rank 0 calls broadcast from rank 1 of torch.bfloat16 [2], rank 1 calls broadcast from rank 1 of torch.float16",
    ),
    "nothing and something": (
        lambda group: group.all_reduce(torch.zeros(int(group.rank == 2), 4)),
        "rank 0 calls all_reduce of torch.float32 [0, 4], rank 2 calls all_reduce of torch.float32 [1, 4]",
    ),
    "nothing and nothing": (
        lambda group: group.broadcast(torch.zeros(0), 0) if group.rank == 1 else None,
        "collective 2 differs: rank 0 calls barrier, rank 1 calls broadcast from rank 0 of torch.float32 [0]",
    ),
    "shift": (
        lambda group: group.start_shift(torch.zeros(1), torch.zeros(1 + (group.rank == 0))),
        "sends 2 elements in shift by 1 of torch.float32, rank 1 takes 1",
    ),
}


def notes_of(rank: int) -> Notes:
    return Notes(HashStore(), "checked", range(SIZE), rank)


def test_checked_groups_pass_over_what_moves_nothing() -> None:
    def moved(backend: SharedMemoryBackend) -> int:
        checked = CheckedBackend(backend, backend._rank, SIZE, notes_of(backend._rank))
        group = Communicator("checked", backend._rank, SIZE, checked, skips_empty=False)
        group.all_gather(torch.zeros(0, 3), torch.zeros(0, 3))
        group.broadcast(group.all_reduce(torch.zeros(0)), 1)
        group.barrier()
        return group.received_bytes

    assert len(set(on_threads(moved, piece_bytes=1 << 12))) == 1


@pytest.mark.parametrize("wrong", WRONG)
def test_checked_groups_name_the_first_collective_that_differs(wrong: str) -> None:
    call, words = WRONG[wrong]

    def reason(backend: SharedMemoryBackend) -> str:
        checked = CheckedBackend(backend, backend._rank, SIZE, notes_of(backend._rank))
        group = Communicator("checked", backend._rank, SIZE, checked, skips_empty=False)
        assert group.all_reduce(torch.ones(2)).tolist() == [SIZE, SIZE]
        try:
            call(group)
            group.barrier()
        except CollectiveError as error:
            return str(error)
        finally:
            group.destroy()
        return ""

    reasons = on_threads(reason, piece_bytes=64)
    assert any(words in reason for reason in reasons), reasons
    assert all(reasons)


def test_groups_entered_in_another_order_are_named_with_what_each_rank_waits_in() -> None:
    def reason(rank: int) -> str:
        store = join_store(address, TIMEOUT_S)
        joined = [
            join_group(store, name, [4, 5], 4 + rank, host=HOST, timeout_s=5.0, check=True) for name in ("tp/0", "ep/0")
        ]
        tensor = torch.ones(3)
        for group in joined if rank == 0 else reversed(joined):
            try:
                group.all_reduce(tensor) if group.name == "tp/0" else group.barrier()
            except CollectiveError as error:
                return str(error)
        return ""

    _store, port = open_store(HOST, TIMEOUT_S)
    address = f"{HOST}:{port}"
    with ThreadPoolExecutor(2) as threads:
        reasons = list(threads.map(reason, range(2)))
    sum_words = "all_reduce of torch.float32 [3]"
    begun = f"; last calls: global rank 4: {sum_words} in group tp/0, global rank 5: barrier in group ep/0"
    assert all(reason.endswith(begun) for reason in reasons), reasons
    assert reasons[0].startswith(f"all_reduce in group tp/0, rank 0 of 2: collective 1, {sum_words}: ")
    assert reasons[1].startswith("barrier in group ep/0, rank 1 of 2: collective 1, barrier: ")


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_parts_larger_than_a_piece_and_calls_in_flight(lengths: list[int]) -> None:
    def call(backend: SharedMemoryBackend) -> list[Tensor]:
        outs = []
        for number, length in enumerate(lengths):
            word = torch.full((length,), 10 * number, dtype=torch.int16)
            works = [backend.broadcast(word, number % SIZE)]
            out = torch.empty(SIZE * length, dtype=torch.int16)
            works.append(backend._allgather_base(out, torch.arange(length, dtype=torch.int16) + backend._rank))
            passed = torch.empty(length * ((backend._rank - 1) % SIZE), dtype=torch.int16)
            works.append(backend.shift(passed, torch.full((length * backend._rank,), backend._rank).short(), 1))
            works += [backend.barrier()] * (number % 2)
            total = torch.arange(length) + torch.tensor(backend._rank / 7)
            works.append(backend.allreduce(total))
            for work in reversed(works):
                work.wait()
            outs += [word, out, passed, total]
        return outs

    for rank, outs in enumerate(on_threads(call, piece_bytes=64)):
        source = (rank - 1) % SIZE
        for number, length in enumerate(lengths):
            assert torch.equal(outs[4 * number], torch.full((length,), 10 * number, dtype=torch.int16))
            parts = [torch.arange(length, dtype=torch.int16) + rank for rank in range(SIZE)]
            assert torch.equal(outs[4 * number + 1], torch.cat(parts))
            assert torch.equal(outs[4 * number + 2], torch.full((length * source,), source).short())
            terms = [torch.arange(length) + torch.tensor(peer / 7) for peer in range(SIZE)]
            assert torch.equal(outs[4 * number + 3], sum(terms[1:], start=terms[0]))


def test_nothing_stays_open_when_a_group_is_destroyed() -> None:
    def rank(number: int) -> int:
        group = shared_group(address, number, 2)
        group.barrier()
        group.destroy()
        return number

    def descriptors() -> list[str]:
        targets = []
        for entry in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                targets.append(str(entry.readlink()))
        return [target for target in targets if "baton-" in target or "pidfd" in target]

    before = descriptors()
    _store, port = open_store(HOST, TIMEOUT_S)
    address = f"{HOST}:{port}"
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [0, 1]
    assert descriptors() == before


@pytest.mark.parametrize("obstacle", ["other_host", "no_memory", "no_watching"])
def test_ranks_that_cannot_share_memory_use_gloo(obstacle: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("refused")

    if obstacle == "other_host":
        monkeypatch.setattr(same_host, "host_identity", lambda: None)
    elif obstacle == "no_memory":
        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)

    def rank(number: int) -> list[float]:
        group = shared_group(address, number, 2)
        assert not isinstance(group._backend, SharedMemoryBackend)
        out = torch.empty(2)
        group.all_gather(out, torch.tensor([float(number)]))
        return out.tolist()

    _store, port = open_store(HOST, TIMEOUT_S)
    address = f"{HOST}:{port}"
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [[0.0, 1.0]] * 2
