"""Overload: with four times decode's capacity, some requests are refused immediately, and the rest is right."""

from collections.abc import Iterator

import httpx
import pytest

from tests.chaos.streams import Crowd, Stream
from tests.chaos.watch import Before
from tests.fakes.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

POOL_TOKENS = 8192
TIMES = 4
PROMPT_LEN, NUM_TOKENS = 600, 90
SETTINGS = (
    "kv.memory_gib=0.02",
    f"model.max_context={POOL_TOKENS}",
    "decode.max_fill=1.0",
    "router.max_waiting_requests=8",
)
LARGE_BYTES = 65 << 20
BEGIN_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu.yaml", "test-chaos-overload", *SETTINGS) as running:
        yield running


def pool_tokens(cluster: RunningCluster) -> int:
    """Return the capacity of the decode replica in tokens."""
    entry = cluster.replicas()["decode-0"]
    return int(entry["load"]["total_pages"] * entry["ranks"][0]["layout"]["page_size"])


def status_of(cluster: RunningCluster, **body: object) -> int:
    """Return the status of a response."""
    answer = httpx.post(f"{cluster.url}/v1/completions", json={"model": "recall", **body}, timeout=60, trust_env=False)
    return answer.status_code


def test_more_than_decode_can_hold(cluster: RunningCluster) -> None:
    cluster.wait_until(cluster.is_empty, BEGIN_S)
    size = pool_tokens(cluster)
    number = TIMES * size // (PROMPT_LEN + NUM_TOKENS)
    before = Before(cluster, "decode-0")
    with Crowd.alike(cluster.url, number, NUM_TOKENS, seed=1500, prompt_len=PROMPT_LEN) as crowd:
        pass
    recovery_s = before.wait_recovered(is_new=False)
    proof = f"{number} requests of {PROMPT_LEN + NUM_TOKENS} tokens at once, to a pool of {size} tokens"
    line = before.line(f"overload, {TIMES} times the pool", crowd, proof, None, recovery_s)
    ends = [stream.end for stream in crowd.streams]
    assert line.success + line.refused == number, ends
    assert all("429" in stream.end and stream.retry_after for stream in crowd.streams if stream.end != "right"), ends
    assert min(line.refused, line.success - size // (PROMPT_LEN + NUM_TOKENS)) > 0, (
        "nobody waited, or nobody was refused"
    )
    assert (line.hung, line.leaked_pages) == (0, 0)


def test_requests_that_are_too_large(cluster: RunningCluster) -> None:
    before = Before(cluster, "decode-0")
    with Crowd(cluster.url, [Stream(NUM_TOKENS, 1600, PROMPT_LEN), Stream(1, 1601, POOL_TOKENS)]) as crowd:
        statuses = [
            status_of(cluster, prompt="x" * LARGE_BYTES),
            status_of(cluster, prompt=[20] * POOL_TOKENS, max_tokens=1),
            status_of(cluster, prompt=[20, 21], max_tokens=POOL_TOKENS),
            status_of(cluster, prompt=[20, 21], n=10_000),
        ]
    recovery_s = before.wait_recovered(is_new=False)
    asked = "a body of 65 MiB, a prompt as long as the context, an answer as long as the context, and 10,000 choices"
    line = before.line("oversize", crowd, f"{asked} are answered with {statuses}", None, recovery_s)
    assert statuses == [413, 400, 400, 400]
    assert (line.success, line.refused, line.hung, line.leaked_pages) == (1, 1, 0, 0)
