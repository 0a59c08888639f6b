"""What a pipeline makes of the times that its stages take for each step, with nothing else on the machine."""

from collections.abc import Sequence

from workers.context_parallel.cost_model import ChunkLen


def bubble(times_s: Sequence[Sequence[float]], depth: int) -> float:
    """Part of all stages' time in which they wait, from the first step's begin to the last one's end.

    Args:
        times_s: of every step, by stage.
        depth: most steps under way; the next one begins when the oldest has ended.
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
    """Of equal steps on equal stages."""
    return (num_stages - 1) / (num_stages - 1 + num_steps)


def chunk_lens(chunk: ChunkLen, num_chunks: int) -> list[int]:
    """Of a prompt that is alone, as the scheduler of a pipeline cuts it, when its length comes out even."""
    lens = list[int]()
    for _ in range(num_chunks):
        lens.append(chunk(sum(lens)))
    return lens
