"""A trace in Mooncake's format, made by hand: conversations that grow, side by side, with pauses between."""

import json
import random
from pathlib import Path
from typing import Any

BLOCK_LEN = 512


def make_entries(num_requests: int, seed: int = 0, conversations: int = 4) -> list[dict[str, Any]]:
    """Each request takes up one of the conversations and adds to it; all begin with one common block."""
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
    """The entries as a file."""
    entries = make_entries(num_requests, seed, conversations)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path
