"""GuideLLM: streamed chats of a given length."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.clients.demo import MODEL
from tests.clients.tool import run_tool

NUM_REQUESTS = 24
OUTPUT_LEN = 32


def check(url: str, tokenizer: Path) -> str:
    server = ("--backend", f"kind=openai_http,target={url},model={MODEL}")
    load = ("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={NUM_REQUESTS}")
    data = ("--data", f"kind=synthetic_text,prompt_tokens=200,output_tokens={OUTPUT_LEN}")
    tokens = ("--tokenizer", f"kind=huggingface_auto,model={tokenizer}")
    with TemporaryDirectory() as folder:
        run_tool(Path(folder), "guidellm", "run", *server, *tokens, *load, *data, HF_HUB_OFFLINE="1", HF_HOME=folder)
        (benchmark,) = json.loads(Path(folder, "benchmarks.json").read_text())["benchmarks"]
    found: dict[str, Any] = benchmark["metrics"]
    totals = found["request_totals"]
    unfinished = [benchmark["requests"][kind] for kind in ("errored", "incomplete")]
    assert totals["successful"] == totals["total"] == NUM_REQUESTS, f"{totals}: {unfinished}"
    lengths = found["output_token_count"]["successful"]
    assert lengths["min"] == lengths["max"] == OUTPUT_LEN
    return f"{NUM_REQUESTS} streamed chats"
