"""Ring mode shards a prefill replica's KV over its ranks: the content of each pool, and the prompts that then fit."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from cluster.spec.kv import pages_for
from cluster.spec.memory import GIB
from cluster.spec.registry import RankRecord
from cluster.spec.strategy import CpMode
from tests.fakes.checkpoints import SMALL
from tests.fakes.local_cluster import LocalCluster
from tests.fakes.local_engine import KV_WAYS, NUM_LOGPROBS, KvWay, LocalEngine, Models, Oracle, asked, prompts_of
from tests.fakes.recall_prompts import chain_prompt, recall_oracle
from workers.bench.process import RemoteError
from workers.models.recall import build_recall_checkpoint

pytestmark = pytest.mark.integration

PAGE_SIZE = 16
PAGE_BYTES = 2 * SMALL["num_hidden_layers"] * SMALL["num_key_value_heads"] * SMALL["head_dim"] * PAGE_SIZE * 4
NUM_TOKENS = 8
LENGTHS = (300, 1, 47, 160, 5)
NUM_DECODE_PAGES = 300


@pytest.fixture(scope="module")
def folder(models: Models) -> Path:
    return models.folder("llama")


@pytest.fixture(scope="module")
def oracle(models: Models, folder: Path) -> Oracle:
    return models.oracle(folder, NUM_TOKENS)


def config_of(cp: int, mode: CpMode, pages_per_rank: int) -> DeployConfig:
    kv = {"page_size": PAGE_SIZE, "memory_gib": (pages_per_rank + 1.5) * PAGE_BYTES / GIB}
    prefill = {"parallel": {"cp": cp}, "mode": mode, "chunk_tokens": 100}
    return DeployConfig.model_validate({"kv": kv, "prefill": prefill})


@contextmanager
def running(engine: LocalEngine, folder: Path, cp: int, mode: CpMode, pages_per_rank: int) -> Iterator[LocalCluster]:
    """Run a cluster whose decode rank has room for every prompt."""
    configs = (config_of(cp, mode, num_pages) for num_pages in (pages_per_rank, NUM_DECODE_PAGES))
    with engine.running(folder, *configs) as cluster:
        yield cluster


def written_pages(record: RankRecord) -> int:
    """Return the pages in a rank's pool that hold data. The shared-memory backend opens a pool by path and name."""
    path, _ = record.endpoint.session.split()
    memory = Path(path).read_bytes()
    assert record.layout.page_bytes == PAGE_BYTES
    pages = (memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] for page in range(record.layout.num_pages))
    return sum(any(page) for page in pages)


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_each_rank_of_a_ring_keeps_its_part_of_every_request(
    cp: int, folder: Path, oracle: Oracle, engine: LocalEngine
) -> None:
    prompts = prompts_of(LENGTHS)
    written = {}
    for mode in CpMode:
        with running(engine, folder, cp, mode, 100) as cluster:
            assert cluster.generate(asked(prompts, NUM_TOKENS)) == [oracle.tokens(prompt) for prompt in prompts]
            written[mode] = [written_pages(record) for record in cluster.records(Role.PREFILL)]
    num_pages = sum(pages_for(length, PAGE_SIZE) for length in LENGTHS)
    assert written[CpMode.GATHER] == [num_pages] * cp
    assert sum(written[CpMode.RING]) == num_pages
    assert all(abs(count - num_pages / cp) < len(LENGTHS) for count in written[CpMode.RING])


def test_a_prompt_that_fits_into_no_rank_is_served_by_a_ring(folder: Path, oracle: Oracle, engine: LocalEngine) -> None:
    (prompt,) = prompts_of((500,))
    with (
        running(engine, folder, 2, CpMode.GATHER, 20) as cluster,
        pytest.raises(RemoteError, match="the prompt needs 32 pages, but prefill-0 has 20"),
    ):
        cluster.generate(asked([prompt], NUM_TOKENS))
    with running(engine, folder, 2, CpMode.RING, 20) as cluster:
        assert cluster.generate(asked([prompt], NUM_TOKENS)) == [oracle.tokens(prompt)]


def test_a_full_ring_evicts_and_continues(folder: Path, oracle: Oracle, engine: LocalEngine) -> None:
    """Three prompts with a common prefix alternate with three others, in a pool for two of them."""
    prefix, *others = prompts_of((170, 250, 180, 300))
    alike = [[*prefix, *range(3, 3 + length)] for length in (5, 70, 100)]
    prompts = [prompt for pair in zip(alike, others, strict=True) for prompt in pair]
    with running(engine, folder, 3, CpMode.RING, 14) as cluster:
        for prompt in [*prompts, *prompts]:
            assert cluster.generate(asked([prompt], NUM_TOKENS)) == [oracle.tokens(prompt)]
        assert cluster.generate(asked(prompts, NUM_TOKENS)) == [oracle.tokens(prompt) for prompt in prompts]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_every_mode_equals_one_rank_on_16k_tokens(models: Models, engine: LocalEngine) -> None:
    """Compare the twenty most likely tokens at each position to 1e-5, and the tokens with transformers'."""
    length = 16_384
    folder = models.folder("qwen3", max_position_embeddings=2 * length)
    (prompt,) = prompts_of((length,))
    oracle = Oracle(folder, NUM_TOKENS)
    found = {}
    for cp, way in [(1, KvWay()), *((2, way) for way in KV_WAYS[1:])]:
        prefill = {"parallel": {"cp": cp}, "mode": way.mode, "passing": way.passing, "chunk_tokens": 5000}
        kv = {"page_size": 64, "memory_gib": 0.1}
        with engine.running(folder, DeployConfig.model_validate({"kv": kv, "prefill": prefill})) as cluster:
            (answer,) = cluster.answer(asked([prompt], NUM_TOKENS, NUM_LOGPROBS), timeout_s=1800)
        oracle.check(prompt, answer, f"{cp} {way}")
        found[cp, way] = torch.tensor([entry.top_logprobs for entry in answer.logprobs])
    alone = found.pop((1, KvWay()))
    assert len(found) == 3
    for layout, logprobs in found.items():
        torch.testing.assert_close(logprobs, alone, atol=1e-5, rtol=0, msg=partial("{}: {}".format, layout))


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_a_chain_through_every_page_of_128k_tokens_is_followed(tmp_path: Path, engine: LocalEngine) -> None:
    """Four ranks each have a quarter of the prompt's pages. The answer is right only if every page was read."""
    page_size, context = 256, 131_072
    num_pages = context // page_size - 3
    prompt = chain_prompt(num_pages * page_size + 1, page_size)
    build_recall_checkpoint(tmp_path)
    prefill = {"parallel": {"cp": 4}, "mode": "ring"}
    kv = {"page_size": page_size, "memory_gib": 0.3}
    config = DeployConfig.model_validate({"kv": kv, "prefill": prefill})
    with engine.running(tmp_path, config) as cluster:
        (answer,) = cluster.generate(asked([prompt], num_pages), timeout_s=3600)
    assert answer == recall_oracle(prompt, num_pages)
