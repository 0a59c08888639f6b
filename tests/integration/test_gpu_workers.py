"""Whole workers on a GPU of twins: prefill hands pages over to decode, and both keep them in every tier."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.sampling import Stopping
from cluster.spec.tiers import CachedTokens, Tier
from tests.fakes.gpu_ranks import start_ranks_on
from tests.fakes.gpu_twin import twin_gpu
from tests.fakes.interpreter import patch_interpreter
from tests.fakes.local_cluster import LocalCluster, Prompt
from tests.fakes.local_engine import Models
from tests.fakes.mooncake_engine import FakeFabric
from transfer.page_assignment import early_ends
from workers.handoff import kv_sender
from workers.hicache.policy import prefetcher
from workers.memory import copy
from workers.memory.peer_memory import TierMemory

pytestmark = pytest.mark.integration

NUM_TOKENS, PAGE_SIZE = 4, 8
PROMPT, OTHER = ([factor * number % 200 + 3 for number in range(length)] for factor, length in ((7, 43), (5, 34)))
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "staged, by a kernel": ({"verify": "digest"}, copy.LEAST_PIECE_BYTES),
    "direct, by the copy engine": ({"backend": "mooncake", "protocol": "rdma"}, 0),
}
"""Transfers, and the size from which the copy engine copies pages to and from the host."""


@pytest.fixture(params=WAYS)
def config(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeployConfig:
    transfer, least_piece_bytes = WAYS[request.param]
    storage = {"backend": "files", "folder": str(tmp_path), "prefetch": "wait_complete"}
    monkeypatch.setattr(copy, "LEAST_PIECE_BYTES", least_piece_bytes)
    FakeFabric.installed(monkeypatch)
    return DeployConfig.model_validate(
        {
            "resources": {"device": "cuda"},
            "model": {"max_context": 64, "dtype": "float32"},
            "kv": {"memory_gib": 0.001, "page_size": PAGE_SIZE},
            "prefill": {"chunk_tokens": 32, "max_requests": 4},
            "decode": {"chunk_tokens": 32, "max_requests": 2},
            "hicache": {"host_gib": 0.001, "storage": storage},
            "transfer": transfer,
        }
    )


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send layers early and fetch short prompts, though pages are small. Steps do not wait for the end of loads."""
    wait_loads = TierMemory.wait_loads

    def wait_later(memory: TierMemory) -> None:
        time.sleep(0.2)
        wait_loads(memory)

    patch_interpreter()
    monkeypatch.setattr(TierMemory, "wait_loads", wait_later)
    monkeypatch.setattr(kv_sender, "early_ends", lambda layout, _: early_ends(layout, 1))
    monkeypatch.setattr(prefetcher, "MIN_TOKENS", 1)


@pytest.mark.usefixtures("eager")
def test_tokens_do_not_depend_on_where_pages_were(
    config: DeployConfig, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.folder("qwen3")
    oracle = models.oracle(folder, NUM_TOKENS)
    with twin_gpu() as gpu:
        start_ranks_on(gpu, monkeypatch)
        with closing(LocalCluster()) as cluster:
            cluster.load(config, folder)

            def ask(*prompts: list[int], on_decode: bool = False) -> list[CachedTokens]:
                stopping = Stopping(max_tokens=NUM_TOKENS)
                answers = cluster.answer([Prompt(each, stopping, on_decode=on_decode) for each in prompts], 60)
                assert [answer.token_ids for answer in answers] == [oracle.tokens(prompt) for prompt in prompts]
                return [answer.cached for answer in answers]

            def ask_until(tier: str, *flushed: Tier) -> None:
                """Ask for both prompts until they are in a tier, since copies are asynchronous."""
                wanted = [CachedTokens(total=length, **{tier: length}) for length in (40, 32)]
                for _ in range(10):
                    cluster.flush(*flushed)
                    if ask(PROMPT, OTHER) == wanted:
                        return
                raise AssertionError(f"never in {tier}")

            with cluster.running():
                gpu.may_wait = False
                ask(PROMPT, OTHER)
                ask_until("host", Tier.DEVICE)
                ask_until("storage", Tier.DEVICE, Tier.HOST)
                ask(PROMPT, on_decode=True)
                gpu.may_wait = True
