"""NVIDIA's AIPerf in its AgentX scenario: agents' sessions from a trace, whose prompts begin with those before."""

import json
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients.demo import MODEL
from tests.clients.tool import run_tool

BLOCK_SIZE = 64
OUTPUT_LEN = 16
TURNS = (4, 2, 3, 1, 2)
"""Number of blocks that each request of a session adds to the prompt."""
NUM_SESSIONS = 4
SECONDS = 20
CACHED, CACHEABLE = "overall_usage_prompt_cache_read_pct", "theoretical_prefix_cache_hit"
LEAST_SHARE = 0.9
"""Least share of what an unlimited cache would hold; pages and the prompts' last tokens cost some."""


def trace(number: int) -> dict[str, Any]:
    """Return a session in AIPerf's ``weka_trace`` form."""

    def turn(seconds: float, num_blocks: int) -> dict[str, Any]:
        return {
            "t": seconds,
            "type": "s",
            "model": "any",
            "in": num_blocks * BLOCK_SIZE,
            "out": OUTPUT_LEN,
            "hash_ids": list(range(1, num_blocks + 1)),
            "think_time": 0.1,
        }

    return {
        "id": f"session-{number}",
        "models": ["any"],
        "block_size": BLOCK_SIZE,
        "hash_id_scope": "local",
        "requests": [turn(2.0 * index, num_blocks) for index, num_blocks in enumerate(accumulate(TURNS))],
    }


def check(url: str, tokenizer: Path) -> str:
    with TemporaryDirectory() as name:
        folder = Path(name)
        traces = folder / "traces"
        traces.mkdir()
        for number in range(NUM_SESSIONS):
            (traces / f"{number}.json").write_text(json.dumps(trace(number)))
        # A trace of one's own cannot be submitted, which the override accepts.
        scenario = ("--scenario", "inferencex-agentx-mvp", "--unsafe-override", "--benchmark-duration", f"{SECONDS}")
        data = ("--input-file", f"{traces}", "--custom-dataset-type", "weka_trace", "--concurrency", "2")
        server = ("--url", url, "--model", MODEL, "--tokenizer", f"{tokenizer}", "--endpoint-type", "chat")
        session = ("--session-header", "x-session-id")
        extra = ("--extra-inputs", "ignore_eos:true", "skip_special_tokens:false", "--use-server-token-count")
        run_tool(folder, "aiperf", "profile", *server, "--streaming", *session, *scenario, *data, *extra)
        (report,) = folder.rglob("profile_export_aiperf.json")
        found: dict[str, Any] = json.loads(report.read_text())
    assert not found["error_summary"], found["error_summary"]
    assert found["is_complete"]
    assert found["osl_mismatch_count"]["avg"] == 0
    cached, cacheable = (found[name]["avg"] for name in (CACHED, CACHEABLE))
    assert cached > LEAST_SHARE * cacheable, (cached, cacheable)
    return "sessions of agents (AgentX), with over 90% of the possible cache hits"
