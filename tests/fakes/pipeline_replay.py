"""Idle time of a pipeline that runs steps with given stage times."""

from collections.abc import Sequence

from workers.context_parallel.chunk_sizes import ChunkLen


def bubble(times_s: Sequence[Sequence[float]], depth: int) -> float:
    """Return the idle fraction of all stages' time, from the start of the first step to the end of the last one.

    Args:
        times_s: times of every step, by stage.
        depth: limit on steps in flight. The next step begins when the oldest one has ended.
    """
    num_stages = len(times_s[0])
    stage_ends_s, step_ends_s = [0.0] * num_stages, list[float]()
    for number, step in enumerate(times_s):
        ready_s = step_ends_s[number - depth] if number >= depth else 0.0
        for stage, time_s in enumerate(step):
            stage_ends_s[stage] = ready_s = max(ready_s, stage_ends_s[stage]) + time_s
        step_ends_s.append(ready_s)
    return 1 - sum(map(sum, times_s)) / (num_stages * step_ends_s[-1])


def least_bubble(num_stages: int, num_steps: int) -> float:
    """Return the idle fraction of equal steps on equal stages."""
    return (num_stages - 1) / (num_stages - 1 + num_steps)


def chunk_lens(chunk: ChunkLen, num_chunks: int) -> list[int]:
    """Return the chunk lengths of a single prompt in a pipeline, if its length divides evenly."""
    lens = list[int]()
    for _ in range(num_chunks):
        lens.append(chunk(sum(lens)))
    return lens
