"""Collectives through shared memory compared with gloo between real processes, and the loss of a process."""

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
from torch._C._distributed_c10d import PrefixStore

from cluster.spec.errors import PeerLostError
from workers.parallel.communicator import Communicator
from workers.parallel.groups import join_group
from workers.parallel.shared_memory import SharedMemoryCollectives
from workers.parallel.store import join_store, open_store
from workers.parallel.torch_groups import GlooBackend

pytestmark = pytest.mark.integration

T = TypeVar("T")

HOST, TIMEOUT_S, SIZE = "127.0.0.1", 30.0, 3
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8]


def shared_group(address: str, rank: int, size: int, timeout_s: float = TIMEOUT_S) -> Communicator:
    return join_group(join_store(address, TIMEOUT_S), "shared", range(size), rank, host=HOST, timeout_s=timeout_s)


def serve_rank(rank: int, address: str, pipe: Connection) -> None:
    """Report for every seed from the pipe how the results of both kinds of groups differ."""
    torch.set_num_threads(1)
    group = shared_group(address, rank, SIZE)
    scope = PrefixStore("oracle", join_store(address, TIMEOUT_S))
    backend = GlooBackend(scope, rank, SIZE, HOST, timedelta(seconds=TIMEOUT_S))
    oracle = Communicator("gloo", rank, SIZE, backend)
    pipe.send(type(group._backend).__name__)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(differences(random.Random(pipe.recv()), rank, group, oracle))


CALLS = ["all_gather", "open_all_gather", "shift", "broadcast", "barrier", "all_reduce"]


def differences(rng: random.Random, rank: int, group: Communicator, oracle: Communicator) -> list[str]:
    """Return the calls in a random sequence whose results differ in any bit."""
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
    """Run one call, alone or in flight together with a second one of its kind."""
    if call == "broadcast":
        out = mine.clone()
        group.broadcast(out, root)
        return out
    if call == "all_reduce":
        # Eight-bit numbers make the result independent of gloo's order of addition.
        return group.all_reduce(mine.clone() if mine.is_floating_point() else mine.float())
    if call == "barrier":
        group.barrier()
        return mine
    if call == "open_all_gather" and (opened := group.open_all_gather(mine.nbytes)) is not None:
        parts = [part.view(mine.dtype).view(mine.shape) for part in opened.parts]
        parts[group.rank].copy_(mine)
        opened.start().wait()
        return torch.cat(parts)
    if call.endswith("all_gather"):
        start_others = start_others and call == "all_gather"
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


def test_results_equal_gloos_bit_for_bit() -> None:
    _store, port = open_store(HOST, TIMEOUT_S)
    with processes(serve_rank, range(SIZE), f"{HOST}:{port}") as ranks:
        assert [pipe.recv() for _, pipe in ranks] == ["SharedMemoryCollectives"] * SIZE
        for seed in range(8):
            for _, pipe in ranks:
                pipe.send(seed)
            for _, pipe in ranks:
                assert pipe.poll(TIMEOUT_S), "a rank did not answer"
                assert pipe.recv() == []
    assert [process.exitcode for process, _ in ranks] == [0] * SIZE


def both_groups(address: str, rank: int, size: int, tcp_timeout_s: float) -> list[Communicator]:
    """Return groups of the same ranks over shared memory and over TCP."""
    shared = shared_group(address, rank, size)
    scope = PrefixStore("tcp", join_store(address, TIMEOUT_S))
    shared.barrier()
    backend = GlooBackend(scope, rank, size, HOST, timedelta(seconds=tcp_timeout_s))
    return [shared, Communicator("tcp", rank, size, backend)]


def answer_once(rank: int, address: str, pipe: Connection) -> None:
    """Take part in one shift on each kind of group, and then hang."""
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
        (signal.SIGSTOP, 0, r"rank 1 \(process \d+\) did not answer within 1.0 s"),
        (signal.SIGKILL, 1, "."),
        (signal.SIGSTOP, 1, r".*Timed out waiting 4000ms"),
    ],
    ids=["shared-killed", "shared-stopped", "tcp-killed", "tcp-stopped"],
)
def test_a_peer_that_leaves_during_a_wait_is_an_error(
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
            assert isinstance(backend, SharedMemoryCollectives)
            monkeypatch.setattr(backend._flags, "_timeout_s", 1.0)
        pauses.clear()
        pending = groups[kind].start_shift(torch.empty(2), torch.zeros(2))
        timer = threading.Timer(0.3, os.kill, (pid, number))
        timer.start()
        with pytest.raises(PeerLostError, match=rf"shift in group {groups[kind].name}, rank 0 of 2: {words}"):
            pending.wait()
        assert kind == 1 or pauses, "a spinning wait would take all of a core"
        pending.wait()
        with pytest.raises(PeerLostError):
            groups[kind].barrier()
        timer.join()
        process.kill()


WHOLE_SUM_BYTES = 32


def on_threads(function: Callable[[SharedMemoryCollectives], T], piece_bytes: int) -> list[T]:
    """Return each rank's result for a group of threads, whose memory is moved in small pieces."""
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, SharedMemoryCollectives.num_bytes(SIZE))
    with ThreadPoolExecutor(SIZE) as threads:
        backends = [
            SharedMemoryCollectives(
                os.dup(descriptor), rank, [os.getpid()] * SIZE, TIMEOUT_S, piece_bytes, WHOLE_SUM_BYTES
            )
            for rank in range(SIZE)
        ]
        os.close(descriptor)
        return list(threads.map(function, backends))


def test_parts_are_shared_unless_they_are_larger_than_a_piece() -> None:
    def call(backend: SharedMemoryCollectives) -> None:
        assert backend.open_all_gather(65) is None
        for number in range(5):
            opened = backend.open_all_gather(64)
            assert opened is not None
            opened.parts[backend._rank].fill_(10 * number + backend._rank)
            opened.start().wait()
            expected = [[10 * number + rank] * 64 for rank in range(SIZE)]
            assert [part.tolist() for part in opened.parts] == expected
            # The parts stay as they are until this rank begins another call, however far ahead the others are.
            time.sleep(0.002 * backend._rank)
            assert [part.tolist() for part in opened.parts] == expected

    on_threads(call, piece_bytes=64)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=8))
def test_parts_larger_than_a_piece_and_calls_in_flight(lengths: list[int]) -> None:
    def call(backend: SharedMemoryCollectives) -> list[Tensor]:
        outs = []
        for number, length in enumerate(lengths):
            word = torch.full((length,), 10 * number, dtype=torch.int16)
            works = [backend.broadcast(word, number % SIZE)]
            out = torch.empty(SIZE * length, dtype=torch.int16)
            works.append(backend.all_gather(out, torch.arange(length, dtype=torch.int16) + backend._rank))
            passed = torch.empty(length * ((backend._rank - 1) % SIZE), dtype=torch.int16)
            works.append(backend.shift(passed, torch.full((length * backend._rank,), backend._rank).short(), 1))
            works += [backend.barrier()] * (number % 2)
            total = torch.arange(length) + torch.tensor(backend._rank / 7)
            works.append(backend.all_reduce(total))
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
        monkeypatch.setattr("workers.parallel.groups.host_identity", lambda: None)
    elif obstacle == "no_memory":
        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.setattr(os, "pidfd_open", refuse)

    def rank(number: int) -> list[float]:
        group = shared_group(address, number, 2)
        assert not isinstance(group._backend, SharedMemoryCollectives)
        out = torch.empty(2)
        group.all_gather(out, torch.tensor([float(number)]))
        return out.tolist()

    _store, port = open_store(HOST, TIMEOUT_S)
    address = f"{HOST}:{port}"
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank, range(2))) == [[0.0, 1.0]] * 2
