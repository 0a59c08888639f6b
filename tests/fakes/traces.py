"""Traces in Mooncake's format: interleaved conversations that grow, with pauses between requests."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cluster.bench.workload import PlannedRequest
from cluster.spec.kv import page_keys

BLOCK_LEN = 512


def make_entries(num_requests: int, seed: int = 0, conversations: int = 4) -> list[dict[str, Any]]:
    """Return entries that each continue a conversation. All conversations begin with the same block."""
    rng = random.Random(seed)
    fresh = iter(range(1, 10**9))
    whole_blocks: list[list[int]] = [[0] for _ in range(conversations)]
    entries = []
    for index in range(num_requests):
        blocks = rng.choice(whole_blocks)
        blocks += [next(fresh) for _ in range(rng.randrange(3))]
        part = rng.randrange(1, BLOCK_LEN + 1)
        entries.append(
            {
                "timestamp": 250 * index,
                "input_length": len(blocks) * BLOCK_LEN + part,
                "output_length": rng.randrange(1, 300),
                "hash_ids": [*blocks, next(fresh)],
            }
        )
    return entries


def write_trace(path: Path, num_requests: int, seed: int = 0, conversations: int = 4) -> Path:
    entries = make_entries(num_requests, seed, conversations)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def unbounded_hits(prompts: Iterable[Sequence[int]], page_size: int) -> list[int]:
    """Return how many tokens of each prompt an unbounded cache would have from the preceding prompts."""
    known: set[bytes] = set()
    hits: list[int] = []
    for prompt in prompts:
        keys = page_keys(prompt, page_size, "")
        # The last token of a prompt is always computed, because its logits are needed.
        usable = (len(prompt) - 1) // page_size
        hits.append(page_size * next((page for page in range(usable) if keys[page] not in known), usable))
        known.update(keys)
    return hits


def unbounded_hit_rate(prompts: Sequence[Sequence[int]], page_size: int) -> float:
    return sum(unbounded_hits(prompts, page_size)) / sum(map(len, prompts))


def prompt_ids(request: PlannedRequest) -> list[int]:
    """Return the token ids of a request's prompt, which is not a text."""
    prompt = request.make_prompt()
    assert not isinstance(prompt, str), prompt
    return prompt
