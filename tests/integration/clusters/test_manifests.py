"""Every manifest of deploy/ for one machine, started with ``baton up``: an exact answer, and no leaked pages."""

import openai
import pytest
import yaml

from tests import readme
from tests.fakes.clients import NEEDLE_TOKENS
from tests.fakes.cluster import running_cluster
from tests.fakes.recall_prompts import needle_prompt, recall_oracle
from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(600)]

MANIFESTS = sorted(path.name for path in (readme.ROOT / "deploy").glob("local-*.yaml"))
SETTINGS = ("resources.cpus_per_worker=0.25", "kv.memory_gib=0.25")
"""Settings that fit any machine."""
PROMPT = needle_prompt(3000, 0.5)


def test_there_are_manifests_for_one_machine() -> None:
    assert len(MANIFESTS) > 10


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.mooncake if "mooncake" in name else ()) for name in MANIFESTS],
)
def test_a_manifest_answers(name: str) -> None:
    model = yaml.safe_load((readme.ROOT / "deploy" / name).read_text(encoding="utf-8"))["model"]["path"]
    with running_cluster(f"deploy/{name}", f"test-{name.removesuffix('.yaml')}", *SETTINGS) as cluster:
        assert cluster.complete(PROMPT, NEEDLE_TOKENS, model=model) == recall_oracle(PROMPT, NEEDLE_TOKENS)
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0) as client:
            answer = client.chat.completions.create(model=model, messages=[{"role": "user", "content": DEMO_PROMPT}])
        assert answer.choices[0].message.content == DEMO_ANSWER
        cluster.wait_until(cluster.is_empty, 60)
