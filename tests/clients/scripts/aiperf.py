"""NVIDIA's AIPerf: streamed chats of a given length."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients.demo import MODEL
from tests.clients.tool import run_tool

NUM_REQUESTS = 16
OUTPUT_LEN = 16


def check(url: str, tokenizer: Path) -> str:
    # The demo model ends an answer that repeats nothing. If that end is ignored and hidden, the answer has no text.
    extra = ("--extra-inputs", "ignore_eos:true", "skip_special_tokens:false")
    load = ("--request-count", f"{NUM_REQUESTS}", "--concurrency", "4")
    lengths = ("--synthetic-input-tokens-mean", "200", "--output-tokens-mean", f"{OUTPUT_LEN}")
    server = ("--url", url, "--model", MODEL, "--tokenizer", f"{tokenizer}", "--endpoint-type", "chat", "--streaming")
    with TemporaryDirectory() as folder:
        run_tool(Path(folder), "aiperf", "profile", *server, *load, *lengths, *extra, "--use-server-token-count")
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        found: dict[str, Any] = json.loads(report.read_text())
    assert found["request_count"]["avg"] == NUM_REQUESTS, found["error_summary"]
    assert not found["error_summary"]
    lengths_out = found["output_sequence_length"]
    assert lengths_out["min"] == lengths_out["max"] == OUTPUT_LEN
    return f"{NUM_REQUESTS} streamed chats"
