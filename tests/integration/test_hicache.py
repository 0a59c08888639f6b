"""Greedy fp32 tokens equal transformers' whichever tier holds a prompt, and the answer names the tier."""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cluster.spec.config import DeployConfig, KvConfig
from cluster.spec.hicache_config import WritePolicy
from cluster.spec.ids import Role
from cluster.spec.kv import page_keys
from cluster.spec.strategy import CpMode
from cluster.spec.tiers import CachedTokens, PinPages, Tier
from tests.fakes.local_cluster import Answer, LocalCluster
from tests.fakes.local_engine import LocalEngine, Models, Oracle, asked
from tests.fakes.pairwise import all_pairs
from tests.fakes.recall_prompts import chain_prompt, recall_oracle
from tests.fakes.waits import wait_until
from workers.models.recall import build_recall_checkpoint

pytestmark = pytest.mark.integration

WORKERS = "tests.fakes.tier_workers"
WORKER = f"{WORKERS}:EagerWorker"

Way = tuple[int, CpMode, int]
EMPTY: Mapping[str, Any] = {}
PAGE_SIZE = 16
NUM_TOKENS = 20
GATHER, RING = CpMode
SHARDINGS: dict[str, Sequence[Any]] = {"cp": (1, 2, 3, 4), "mode": tuple(CpMode), "tp": (1, 2)}
SOME: list[Way] = [(way["cp"], way["mode"], way["tp"]) for way in all_pairs(SHARDINGS | {"cp": (1, 2, 3)})]
ALL: list[Way] = list(product(*SHARDINGS.values()))
"""Layouts of prefill: cp, mode, tp."""


def draw(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 250) for _ in range(length)]


LONG = draw(1, 9 * PAGE_SIZE + 3)
KEYS = page_keys(LONG, PAGE_SIZE)
HALF = LONG[: 4 * PAGE_SIZE + 1]
QUARTER = LONG[: 2 * PAGE_SIZE + 1]


def config_of(
    way: Way,
    folder: Path,
    pp: int = 1,
    transfer: Mapping[str, Any] = EMPTY,
    resources: Mapping[str, Any] = EMPTY,
    **hicache: Any,
) -> DeployConfig:
    cp, mode, tp = way
    storage = {"backend": "files", "folder": str(folder), "prefetch": "wait_complete"}
    return DeployConfig.model_validate(
        {
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.01},
            "prefill": {"parallel": {"cp": cp, "tp": tp, "pp": pp}, "mode": mode, "chunk_tokens": 50},
            "decode": {"parallel": {"tp": tp, "pp": pp}},
            "hicache": {"host_gib": 0.01, "storage": storage, **hicache},
            "transfer": transfer,
            "resources": resources,
        }
    )


@pytest.fixture(scope="module")
def checkpoint(models: Models) -> Path:
    return models.folder("llama")


@pytest.fixture(scope="module")
def oracle(models: Models, checkpoint: Path) -> Oracle:
    return models.oracle(checkpoint, NUM_TOKENS)


def ask(cluster: LocalCluster, prompt: list[int]) -> Answer:
    (answer,) = cluster.answer(asked([prompt], NUM_TOKENS), timeout_s=120)
    return answer


def ask_until(cluster: LocalCluster, prompt: list[int], oracle: Oracle, *flushed: Tier, **tokens: int) -> None:
    """Ask until the prompt is cached. Copies are asynchronous, so the first answers may be early. All must be right."""
    for _ in range(50):
        cluster.flush(*flushed)
        answer = ask(cluster, prompt)
        assert answer.token_ids == oracle.tokens(prompt)
        if (answer.cached.host, answer.cached.storage) == (tokens["host"], tokens["storage"]):
            return
    raise AssertionError(f"never {tokens}, at last {answer}")


def ask_until_in_all_tiers(cluster: LocalCluster, oracle: Oracle) -> None:
    """Ask for a prompt that is cached on the device, then in host memory, and then in storage."""
    wanted = CachedTokens(total=9 * PAGE_SIZE, host=2 * PAGE_SIZE, storage=5 * PAGE_SIZE)
    for _ in range(50):
        cluster.flush(Tier.DEVICE, Tier.HOST)
        ask(cluster, HALF)
        cluster.flush(Tier.DEVICE)
        ask(cluster, QUARTER)
        answer = ask(cluster, LONG)
        assert answer.token_ids == oracle.tokens(LONG)
        if answer.cached == wanted:
            return
    raise AssertionError(f"never {wanted}, at last {answer}")


def check_tiers(
    way: Way,
    checkpoint: Path,
    oracle: Oracle,
    engine: LocalEngine,
    folder: Path,
    pp: int = 1,
    transfer: Mapping[str, Any] = EMPTY,
    resources: Mapping[str, Any] = EMPTY,
) -> None:
    all_pages, half_pages = 9 * PAGE_SIZE, 4 * PAGE_SIZE
    with engine.running(checkpoint, config_of(way, folder, pp, transfer, resources)) as cluster:
        assert ask(cluster, LONG).token_ids == oracle.tokens(LONG)
        again = ask(cluster, LONG)
        assert (again.token_ids, again.cached) == (oracle.tokens(LONG), CachedTokens(total=all_pages))
        ask_until(cluster, LONG, oracle, Tier.DEVICE, host=all_pages, storage=0)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=all_pages)
        ask_until(cluster, HALF, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=half_pages)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, host=half_pages, storage=all_pages - half_pages)
        ask_until_in_all_tiers(cluster, oracle)


def check_restarted(way: Way, checkpoint: Path, oracle: Oracle, engine: LocalEngine, folder: Path, pp: int = 1) -> None:
    with engine.running(checkpoint, config_of(way, folder, pp)) as cluster:
        answer = ask(cluster, LONG)
    assert answer.token_ids == oracle.tokens(LONG)
    assert answer.cached == CachedTokens(total=9 * PAGE_SIZE, storage=9 * PAGE_SIZE)


@pytest.mark.parametrize(
    "way", [(1, GATHER, 4), pytest.param((2, GATHER, 2), marks=pytest.mark.full), (2, RING, 2)], ids=str
)
def test_tp_ranks_with_the_same_latents_keep_them_together(
    way: Way, models: Models, engine: LocalEngine, tmp_path: Path
) -> None:
    checkpoint = models.folder("deepseek_v2")
    oracle = models.oracle(checkpoint, NUM_TOKENS)
    check_tiers(way, checkpoint, oracle, engine, tmp_path)
    check_restarted(way, checkpoint, oracle, engine, tmp_path)


@pytest.mark.parametrize(
    "ways", [pytest.param(SOME, id="any-two-meet"), pytest.param(ALL, id="all", marks=pytest.mark.full)]
)
def test_tokens_do_not_depend_on_the_tiers_that_have_a_prompt_and_every_process_may_have_ended_since(
    ways: list[Way], checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    for number, way in enumerate(ways):
        check_tiers(way, checkpoint, oracle, engine, tmp_path / f"{number}")
    engine.restart()
    for number, way in enumerate(ways):
        check_restarted(way, checkpoint, oracle, engine, tmp_path / f"{number}")


def test_layers_that_store_different_parts_keep_them(models: Models, engine: LocalEngine, tmp_path: Path) -> None:
    checkpoint = models.folder("glm_moe_dsa")
    ways: list[Way] = [(2, GATHER, 1), (2, RING, 1)]
    for number, way in enumerate(ways):
        check_tiers(way, checkpoint, models.oracle(checkpoint, NUM_TOKENS), engine, tmp_path / f"{number}")


@pytest.mark.parametrize(
    "ways", [[(1, GATHER, 1), (2, RING, 1)], pytest.param([(2, GATHER, 2)], marks=pytest.mark.full)], ids=str
)
def test_stages_of_a_pipeline_keep_their_layers(
    ways: list[Way], checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    prompts = [LONG, HALF, *([*LONG[: number * PAGE_SIZE], *draw(number, 3 + 9 * number)] for number in range(1, 8))]
    for number, way in enumerate(ways):
        check_tiers(way, checkpoint, oracle, engine, tmp_path / f"{number}", pp=2)
        with engine.running(checkpoint, config_of(way, tmp_path / f"{number}", pp=2)) as cluster:
            for tiers in ((Tier.DEVICE, Tier.HOST), (Tier.DEVICE,)):
                answers = cluster.generate(asked(prompts, NUM_TOKENS), timeout_s=120)
                assert answers == [oracle.tokens(prompt) for prompt in prompts]
                cluster.flush(*tiers)
                for prompt in prompts:
                    assert ask(cluster, prompt).token_ids == oracle.tokens(prompt)
                    cluster.flush(Tier.DEVICE)
    engine.restart()
    for number, way in enumerate(ways):
        check_restarted(way, checkpoint, oracle, engine, tmp_path / f"{number}", pp=2)


def test_no_page_of_a_corrupt_object_is_served(
    checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    way, rng = (2, GATHER, 1), random.Random(1)
    with engine.running(checkpoint, config_of(way, tmp_path)) as cluster:
        ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)
    corrupt = [path for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith(".")]
    for path in corrupt:
        whole = bytearray(path.read_bytes())
        whole[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(whole)
    with engine.running(checkpoint, config_of(way, tmp_path)) as cluster:
        answer = ask(cluster, LONG)
        assert (answer.token_ids, answer.cached) == (oracle.tokens(LONG), CachedTokens())
        ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)


def test_dp_ranks_have_tiers_of_their_own(
    checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    side, router = {"parallel": {"dp": 2}}, {"dp_policy": "follow_room"}
    config = config_of((1, GATHER, 1), tmp_path)
    config = DeployConfig.model_validate({**config.model_dump(), "prefill": side, "decode": side, "router": router})
    with engine.running(checkpoint, config) as cluster:
        ask_until(cluster, LONG, oracle, Tier.DEVICE, host=9 * PAGE_SIZE, storage=0)
        ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)


def num_stored(folder: Path) -> int:
    """Return the number of stored pages."""
    return sum(path.is_file() and not path.name.startswith(".") for path in folder.rglob("*"))


def test_stored_pages_outlive_every_process_and_serve_other_cp_sizes_and_modes(
    checkpoint: Path, oracle: Oracle, engine: LocalEngine, tmp_path: Path
) -> None:
    next_turn = [*LONG, *oracle.tokens(LONG), *draw(2, 5)]
    all_pages = 10 * PAGE_SIZE
    with engine.running(checkpoint, config_of((2, GATHER, 1), tmp_path)) as cluster:
        ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)
        attempts = 0
        while num_stored(tmp_path) == 9:
            assert (attempts := attempts + 1) < 50, "decode has stored nothing of what it generated"
            ask(cluster, LONG)
    engine.restart()
    assert num_stored(tmp_path) == 10, "a page is stored twice"
    with engine.running(checkpoint, config_of((3, RING, 1), tmp_path)) as cluster:
        answer = ask(cluster, next_turn)
    assert answer.token_ids == oracle.tokens(next_turn)
    assert answer.cached == CachedTokens(total=all_pages, storage=all_pages)


@pytest.mark.full
@pytest.mark.parametrize("way", [(2, GATHER, 1), (2, RING, 1)], ids=str)
def test_a_chain_through_every_page_of_32k_tokens_is_followed_from_storage(
    way: Way, engine: LocalEngine, tmp_path: Path
) -> None:
    page_size = 64
    num_pages = (32_768 - 1) // page_size
    prompt = chain_prompt(32_768, page_size)
    expected = recall_oracle(prompt, num_pages)
    build_recall_checkpoint(tmp_path / "recall")
    config = config_of(way, tmp_path / "kv", host_gib=0.15)
    config = config.model_copy(update={"kv": KvConfig(page_size=page_size, memory_gib=0.3)})
    with engine.running(tmp_path / "recall", config) as cluster:
        attempts = 0
        while num_stored(tmp_path / "kv") < num_pages:
            assert (attempts := attempts + 1) < 50, "not everything was stored"
            assert cluster.generate(asked([prompt], num_pages)) == [expected]
    engine.restart()
    with engine.running(tmp_path / "recall", config) as cluster:
        (answer,) = cluster.answer(asked([prompt], num_pages))
    assert answer.token_ids == expected
    assert answer.cached == CachedTokens(total=num_pages * page_size, storage=num_pages * page_size)


def test_slow_and_failing_storage_fails_no_request_and_changes_no_token(
    checkpoint: Path, oracle: Oracle, tmp_path: Path
) -> None:
    storage = {"backend": "files", "folder": str(tmp_path)}
    config = config_of((2, GATHER, 1), tmp_path, storage=storage)
    prompts = [[*draw(seed % 3, 4 * PAGE_SIZE), *draw(seed, 20)] for seed in range(10)]
    with (
        closing(LocalEngine(f"{WORKERS}:WorkerWithFaultyStorage")) as engine,
        engine.running(checkpoint, config) as cluster,
    ):
        for _ in range(2):
            answers = cluster.generate(asked(prompts, NUM_TOKENS), timeout_s=120)
            assert answers == [oracle.tokens(prompt) for prompt in prompts]
            cluster.flush(Tier.DEVICE, Tier.HOST)


def test_hanging_storage_fails_no_request_and_is_used_again_after_recovery(
    checkpoint: Path, oracle: Oracle, tmp_path: Path
) -> None:
    storage = {"backend": "files", "folder": str(tmp_path)}
    config = config_of((1, GATHER, 1), tmp_path, storage=storage)
    prompts = [[*LONG[: 4 * PAGE_SIZE], *draw(seed, 20)] for seed in range(4)]
    hangs = tmp_path / "hangs"
    with closing(LocalEngine(f"{WORKERS}:WorkerWithHangingStorage")) as engine, ExitStack() as after:
        after.callback(hangs.unlink, missing_ok=True)
        with engine.running(checkpoint, config) as cluster:
            ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)
            hangs.touch()
            for _ in range(2):
                cluster.flush(Tier.DEVICE, Tier.HOST)
                answers = cluster.answer(asked(prompts, NUM_TOKENS), timeout_s=120)
                assert [answer.token_ids for answer in answers] == [oracle.tokens(prompt) for prompt in prompts]
                assert not any(answer.cached.storage for answer in answers)
            hangs.unlink()
            ask_until(cluster, LONG, oracle, Tier.DEVICE, Tier.HOST, host=0, storage=9 * PAGE_SIZE)


@pytest.mark.parametrize("way", [(2, GATHER, 1), (2, RING, 1)], ids=str)
@pytest.mark.parametrize(
    ("worker", "transfer"),
    [
        ("WorkerWithStagedPool", EMPTY),
        pytest.param(
            "WorkerWithRegisteredPool", {"backend": "mooncake", "verify": "counts"}, marks=pytest.mark.mooncake
        ),
    ],
)
def test_pools_that_peers_reach_as_they_reach_a_gpus_have_the_same_tiers(
    way: Way, worker: str, transfer: Mapping[str, Any], checkpoint: Path, oracle: Oracle, tmp_path: Path
) -> None:
    with closing(LocalEngine(f"{WORKERS}:{worker}")) as engine:
        check_tiers(way, checkpoint, oracle, engine, tmp_path, transfer=transfer)


def pin(cluster: LocalCluster, *, is_pinned: bool = True) -> int:
    answer = cluster.run_command(Role.PREFILL, PinPages(keys=KEYS, is_pinned=is_pinned), timeout_s=60)
    assert not answer.refusal
    return answer.num_pinned


@pytest.mark.parametrize("policy", [WritePolicy.WRITE_THROUGH_SELECTIVE, WritePolicy.WRITE_BACK])
def test_a_prompt_that_is_pinned_before_it_is_computed_is_found_in_host_memory_after_a_flush(
    policy: WritePolicy, checkpoint: Path, engine: LocalEngine, tmp_path: Path
) -> None:
    config = config_of((2, GATHER, 1), tmp_path, write=policy, storage={"backend": "none"})
    all_tokens = len(KEYS) * PAGE_SIZE
    with engine.running(checkpoint, config) as cluster:
        assert pin(cluster) == 0
        first = ask(cluster, LONG)
        wait_until(lambda: pin(cluster) == len(KEYS), "the pinned prompt was not copied to host memory")
        cluster.flush(Tier.DEVICE, Tier.HOST)
        again = ask(cluster, LONG)
        assert (again.token_ids, again.cached) == (first.token_ids, CachedTokens(total=all_tokens, host=all_tokens))
        assert pin(cluster, is_pinned=False) == 0
        deadline_s = time.monotonic() + 60
        cluster.flush(Tier.DEVICE, Tier.HOST)
        while ask(cluster, LONG).cached.total:
            # The request before may still have held its pages.
            assert time.monotonic() < deadline_s, "the unpinned prompt stays in host memory"
            cluster.flush(Tier.DEVICE, Tier.HOST)
