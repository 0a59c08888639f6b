"""Which way of adding up in shared memory is faster for sums of each size: python -m tests.bench.sum_sizes [--ranks 2]

Every rank adds up all of a sum (whole), or one share of it and reads the others' (shares), alternately in the same
processes. A line for each size: the median time of a sum, by the slowest rank.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection

import torch

from workers.parallel.collectives import Communicator
from workers.parallel.shared_memory import SharedMemoryBackend

SIZES = [1 << exponent for exponent in range(10, 23)]
"""Bytes."""
ROUNDS, TIMEOUT_S = 11, 60.0
WAYS = {"whole": 1 << 30, "shares": 0}
"""The largest sum of which every rank adds up all."""


def serve_rank(rank: int, size: int, descriptors: tuple[str, str], pipe: Connection) -> None:
    """Tell the median seconds of a sum, for each size and way."""
    torch.set_num_threads(1)
    pipe.send(os.getpid())
    pids = pipe.recv()
    groups = []
    for path, whole_sum_bytes in zip(descriptors, WAYS.values(), strict=True):
        backend = SharedMemoryBackend(os.open(path, os.O_RDWR), rank, pids, TIMEOUT_S, whole_sum_bytes=whole_sum_bytes)
        groups.append(Communicator("bench", rank, size, backend))
    pipe.send([[statistics.median(times) for times in rounds(groups, num_bytes)] for num_bytes in SIZES])
    groups[0].barrier()


def rounds(groups: list[Communicator], num_bytes: int) -> list[list[float]]:
    """Seconds of a sum in every round, for each group; the first round is not counted."""
    tensor = torch.zeros(num_bytes // 4)
    count = max(4, min(200, (4 << 20) // num_bytes))
    times: list[list[float]] = [[] for _ in groups]
    for _ in range(ROUNDS + 1):
        for group, taken in zip(groups, times, strict=True):
            group.barrier()
            start_s = time.perf_counter()
            for _ in range(count):
                group.all_reduce(tensor)
            taken.append((time.perf_counter() - start_s) / count)
    return [taken[1:] for taken in times]


def measure(size: int) -> list[list[float]]:
    """Seconds by size and way, of the slowest rank."""
    files = [os.memfd_create("bench") for _ in WAYS]
    for file in files:
        os.ftruncate(file, SharedMemoryBackend.num_bytes(size))
    paths = [f"/proc/{os.getpid()}/fd/{file}" for file in files]
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve_rank, args=(rank, size, tuple(paths), theirs)))
        processes[-1].start()
        pipes.append(ours)
    pids = [pipe.recv() for pipe in pipes]
    for pipe in pipes:
        pipe.send(pids)
    by_rank = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return [[max(times) for times in zip(*of_size, strict=True)] for of_size in zip(*by_rank, strict=True)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    print(f"{'KiB':>6}  " + "  ".join(f"{way:>8} µs" for way in WAYS) + f"  {'whole / shares':>14}")
    for num_bytes, (whole, shares) in zip(SIZES, measure(parser.parse_args().ranks), strict=True):
        print(f"{num_bytes >> 10:>6}  {whole * 1e6:>11.1f}  {shares * 1e6:>11.1f}  {whole / shares:>14.2f}")


if __name__ == "__main__":
    main()
