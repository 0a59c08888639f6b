"""Pauses of one router process while it reads a long prompt.

    python -m tests.bench.long_texts [--tokens 500000] [--rounds 3]

Prints one JSON object per round and kind of prompt: the time until the answer, and the longest round trip of a
``GET /health`` that another client sent meanwhile. The replicas compute nothing.
"""

import argparse
import json
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from cluster.spec.config import DeployConfig, ModelConfig
from cluster.spec.router_config import RouterConfig
from tests.bench.router import call
from tests.fakes.model_folder import write_model_folder
from tests.fakes.router_cluster import wait_ready
from workers.bench.process import WorkerProcess

_EVERY_S = 0.002
_WAIT_S = 120.0


class Pinger(threading.Thread):
    """Client that asks for ``/health`` over and over."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._is_over = threading.Event()
        self.longest_s = 0.0

    def run(self) -> None:
        with httpx.Client(base_url=self._url, trust_env=False) as http:
            while not self._is_over.wait(_EVERY_S):
                begin_s = time.perf_counter()
                http.get("/health").raise_for_status()
                self.longest_s = max(self.longest_s, time.perf_counter() - begin_s)

    def end(self) -> float:
        """Return the longest round trip."""
        self._is_over.set()
        self.join()
        return self.longest_s


def measure(url: str, kind: str, prompt: Any) -> dict[str, Any]:
    body = json.dumps({"model": "mock", "prompt": prompt, "max_tokens": 1})
    pinger = Pinger(url)
    pinger.start()
    time.sleep(1.0)
    before_s, pinger.longest_s, begin_s = pinger.longest_s, 0.0, time.perf_counter()
    reply = httpx.post(f"{url}/v1/completions", content=body, timeout=_WAIT_S, trust_env=False)
    took_s = time.perf_counter() - begin_s
    figures = {"alone_ms": before_s * 1e3, "pause_ms": pinger.end() * 1e3, "answered_ms": took_s * 1e3}
    num_tokens = reply.raise_for_status().json()["usage"]["prompt_tokens"]
    return {"prompt": kind, "tokens": num_tokens} | {name: round(ms, 1) for name, ms in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=500_000, help="of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    prompts = {"text": "abcd" * (args.tokens // 4), "ids": [97] * args.tokens}
    with (
        tempfile.TemporaryDirectory() as temporary,
        closing(WorkerProcess("tests.bench.router:MockReplicas")) as replicas,
        closing(WorkerProcess("tests.fakes.router_host:RouterHost")) as router,
    ):
        folder = write_model_folder(Path(temporary), max_context=2 * args.tokens)
        config = DeployConfig(model=ModelConfig(path=str(folder), served_name="mock"), router=RouterConfig(port=0))
        call(replicas, "make")
        call(router, "make", config, folder, call(replicas, "start"))
        url: str = call(router, "start")
        with httpx.Client(base_url=url, trust_env=False) as http:
            wait_ready(http)
        for _ in range(args.rounds):
            for kind, prompt in prompts.items():
                print(json.dumps(measure(url, kind, prompt)), flush=True)


if __name__ == "__main__":
    main()
