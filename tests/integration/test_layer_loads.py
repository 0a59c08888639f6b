"""A step that begins before its cached pages are there gives the tokens that it would give after."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.lifecycle import Role
from cluster.spec.tiers import FlushCache, Tier, TierPage
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.held_engine import HeldEngine
from tests.fakes.model_folder import write_model_folder
from workers.device import Event
from workers.hicache.copier import Copier
from workers.memory.layerwise_load import LayerwiseLoad

pytestmark = pytest.mark.integration

PAGE_SIZE, NUM_LAYERS = 16, 6
PROMPT = [5, *range(3, 203)]
LATE_S = 0.05
"""By which each group of layers comes later than the step could read it."""


class LateLoad(LayerwiseLoad):
    """Passes on what has come after a while."""

    def __init__(self, load: LayerwiseLoad) -> None:
        super().__init__()
        self._load = load

    def add(self, num_layers: int, event: Event | None) -> None:
        self._load.add(num_layers, event)
        time.sleep(LATE_S)


def config_of(folder: Path, **settings: Any) -> DeployConfig:
    make_checkpoint(write_model_folder(folder), "llama", num_hidden_layers=NUM_LAYERS)
    return DeployConfig.model_validate(
        {
            "model": {"path": str(folder), "served_name": "m", "dtype": "float32"},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "hicache": {"host_gib": 0.01},
            "router": {"port": 0},
            **settings,
        }
    )


def ask(http: httpx.Client) -> dict[str, Any]:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    reply = http.post("/v1/completions", content=json.dumps(body))
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def test_each_layer_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fills: list[int] = []
    load_layerwise = Copier.load_layerwise

    def load_late(self: Copier, pages: Sequence[TierPage], after: Event | None, load: LayerwiseLoad) -> int:
        """Into pages that hold nonsense."""
        for page in pages:
            self._memory._memory.pool.bytes[page.device] = 0xFF
        time.sleep(LATE_S)
        num_bytes = load_layerwise(self, pages, after, LateLoad(load))
        fills.append(len(pages))
        return num_bytes

    monkeypatch.setattr(Copier, "load_layerwise", load_late)
    config = config_of(tmp_path)
    with HeldEngine(config, tmp_path).running() as engine, engine.served(config, tmp_path) as http:
        (expected,) = ask(http)["choices"]
        for _ in range(50):
            for role in Role:
                engine.send(role, FlushCache(tiers=(Tier.DEVICE,)))
            answer = ask(http)
            (choice,) = answer["choices"]
            assert choice["text"] == expected["text"]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(
                expected["logprobs"]["token_logprobs"], abs=1e-4
            )
            if fills:
                break
        assert set(fills) == {len(PROMPT) // PAGE_SIZE}
        details = answer["usage"]["prompt_tokens_details"]
        assert details["cached_tokens"] == fills[0] * PAGE_SIZE
        engine.check_integrity()


@pytest.mark.parametrize("write", ["write_through", "write_through_selective"])
def test_decode_takes_what_it_computes_itself_from_the_tiers_too(tmp_path: Path, write: str) -> None:
    """Its prompts are such, and it keeps what it has generated."""
    storage = {
        "backend": "files",
        "folder": str(tmp_path / "kv"),
        "prefetch_min_tokens": 1,
        "prefetch": "wait_complete",
    }
    hicache = {"host_gib": 0.01, "write": write, "selective_hits": 1, "storage": storage}
    config = config_of(tmp_path, hicache=hicache, prefill={"skip_below_tokens": 100_000})
    all_tokens = len(PROMPT) // PAGE_SIZE * PAGE_SIZE
    with HeldEngine(config, tmp_path).running() as engine, engine.served(config, tmp_path) as http:
        (expected,) = ask(http)["choices"]
        ask(http)
        for flushed, told in (((Tier.DEVICE,), "host_tokens"), ((Tier.DEVICE, Tier.HOST), "storage_tokens")):
            for _ in range(50):
                engine.send(Role.DECODE, FlushCache(tiers=flushed))
                answer = ask(http)
                assert answer["choices"][0]["text"] == expected["text"]
                if answer["usage"]["prompt_tokens_details"].get(told) == all_tokens:
                    break
            else:
                pytest.fail(f"never {told}: {answer['usage']}")
        engine.check_integrity()
