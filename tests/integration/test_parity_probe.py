"""Parity probes of real replicas: right answers match on every path, and a page lost after its check is found."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Incarnation
from cluster.spec.tiers import Tier
from cluster.spec.worker_spec import Rendezvous
from router.server import RouterServer
from tests.chaos.faulty_worker import FOLDER, Fault, order, proofs
from tests.fakes.bootstrap import FakeTable
from tests.fakes.local_cluster import LocalCluster
from tests.fakes.local_engine import Models, prompts_of
from tests.fakes.recall_prompts import chain_prompt
from tests.fakes.router_cluster import wait_ready
from workers.models.resolve import resolve_model

pytestmark = pytest.mark.integration

WORKER = "tests.fakes.forgetful_worker:ForgetfulWorker"
PAGE_SIZE = 64
PERIOD_S = 0.1
PROMPT_LEN, NUM_TOKENS = 1000, 24
PENALTIES = {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.2, "logit_bias": {"7": 2.0}}
GREEDY = {"temperature": 0.0}


class Probed:
    """Cluster behind a router that probes an answer every tenth of a second."""

    def __init__(self, cluster: LocalCluster, http: httpx.Client, prompt_of: Callable[[int], list[int]]) -> None:
        self.cluster = cluster
        self.prompt_of = prompt_of
        self._http = http

    def counts(self) -> dict[str, float]:
        """Return the number of probes by result."""
        lines = self._http.get("/metrics").text.splitlines()
        values = {kind: f'baton_parity_probes_total{{result="{kind}"}} ' for kind in ("match", "mismatch", "failed")}
        return {
            kind: float(line.split()[-1]) for kind, name in values.items() for line in lines if line.startswith(name)
        }

    def result(self, prompt: list[int], **sampling: Any) -> tuple[str, Any]:
        """Answer a prompt. Return the result of its probe, and the response."""
        time.sleep(2 * PERIOD_S)  # the next answer is recorded by then
        before = self.counts()
        body: dict[str, Any] = {
            "ignore_eos": True,
            "model": "recall",
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "return_token_ids": True,
        }
        reply = self._http.post("/v1/completions", json=body | sampling)
        assert reply.status_code == 200, reply.text
        deadline_s = time.monotonic() + 120
        while (after := self.counts()) == before:
            assert time.monotonic() < deadline_s, "no probe"
            time.sleep(0.05)
        (kind,) = (kind for kind in after if after[kind] > before[kind])
        return kind, reply.json()


def config_of(dtype: str) -> DeployConfig:
    """Return two CP ranks whose prompts take several chunks, and a router on a free port."""
    return DeployConfig.model_validate(
        {
            "model": {"served_name": "recall", "dtype": dtype},
            "kv": {"page_size": PAGE_SIZE, "memory_gib": 0.05},
            "prefill": {"parallel": {"cp": 2}, "strategy": "zigzag", "chunk_tokens": 300},
            "decode": {"chunk_tokens": 81_920},
            "router": {"port": 0, "parity_probe_s": PERIOD_S},
        }
    )


@contextmanager
def router_of(cluster: LocalCluster, config: DeployConfig) -> Iterator[httpx.Client]:
    """Serve a cluster. The router has the recall model's tokenizer, and prompts are token ids."""
    table = FakeTable()
    table.show(cluster.snapshot)
    rendezvous = Rendezvous(bootstrap_url="http://nowhere", token="token")
    folder = resolve_model("recall")
    server = RouterServer(config, folder, rendezvous, "127.0.0.1", Incarnation(1), watch=table.watch)
    url = server.start()
    try:
        with httpx.Client(base_url=url, timeout=120, trust_env=False) as http:
            wait_ready(http)
            yield http
    finally:
        server.stop()


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder in which faults are requested."""
    with pytest.MonkeyPatch.context() as patched:
        folder = tmp_path_factory.mktemp("faults")
        patched.setenv(FOLDER, str(folder))
        yield folder


@pytest.fixture(scope="module", params=["recall-float32", "recall-bfloat16", "qwen3-float32"])
def probed(request: pytest.FixtureRequest, models: Models, faults: Path) -> Iterator[Probed]:
    """Yield replicas of a model whose answers depend on every page of their prompts."""
    assert faults.is_dir()
    name, dtype = request.param.split("-")
    folder = resolve_model(name) if name == "recall" else models.folder(name)
    config = config_of(dtype)

    def prompt_of(seed: int) -> list[int]:
        if name == "recall":
            return chain_prompt(PROMPT_LEN, PAGE_SIZE, seed=seed)
        return prompts_of([PROMPT_LEN, seed])[0]

    with closing(LocalCluster(WORKER)) as cluster:
        cluster.load(config, folder)
        with cluster.running(), router_of(cluster, config) as http:
            yield Probed(cluster, http, prompt_of)


def test_right_answers_match_on_every_path(probed: Probed) -> None:
    """The first prompt is new, the second is cached, and the third continues the second's answer."""
    for seed, sampling in ((1, GREEDY), (2, PENALTIES)):
        prompt = probed.prompt_of(seed)
        kind, first = probed.result(prompt, **sampling)
        assert (kind, first["usage"]["prompt_tokens_details"]["cached_tokens"]) == ("match", 0)
        kind, second = probed.result(prompt, **sampling)
        assert (kind, second["choices"][0]["token_ids"]) == ("match", first["choices"][0]["token_ids"])
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        longer = [*prompt, *second["choices"][0]["token_ids"], *probed.prompt_of(3)[:200]]
        kind, third = probed.result(longer, **sampling)
        assert kind == "match"
        assert third["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_page_zeroed_after_its_check_is_found(probed: Probed, faults: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Decode keeps the page in its cache, so the prompt's next answer is wrong too, until the cache is flushed."""
    prompt, num_proofs = probed.prompt_of(10), len(proofs(faults))
    order(faults, Fault.ZERO, 1)
    kind, wrong = probed.result(prompt, **GREEDY)
    assert len(proofs(faults)) == num_proofs + 1
    assert kind == "mismatch"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith(f"parity mismatch: log-probabilities of {NUM_TOKENS} tokens after a prompt of {PROMPT_LEN}")
    assert probed.result(prompt, **GREEDY)[0] == "mismatch"
    probed.cluster.flush(Tier.DEVICE)
    kind, right = probed.result(prompt, **GREEDY)
    assert kind == "match"
    assert right["choices"][0]["token_ids"] != wrong["choices"][0]["token_ids"]
    assert probed.counts()["failed"] == 0
