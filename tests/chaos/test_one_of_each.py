"""One replica per role on real Ray: effects of losing the last replica or the router, and the recovery."""

import time
from collections.abc import Iterator

import pytest

from cluster.bootstrap.client import BootstrapClient
from cluster.cli.running import find_running
from cluster.spec.errors import PeerUnreachableError
from tests.chaos.faults import GONE, kill, state_of, stopped
from tests.chaos.streams import Crowd, Stream
from tests.chaos.watch import RECOVERY_S, Before, assert_all_right, is_computing, pid_of
from tests.fakes.cluster import RunningCluster, listener_pid, running_cluster

pytestmark = [pytest.mark.integration, pytest.mark.chaos, pytest.mark.full, pytest.mark.timeout(900)]

NAME = "test-chaos-one"
CLIENTS = 4
NUM_TOKENS = 300
BEGIN_S = 300.0
CUT_OFF = ("failed: RemoteProtocolError", "failed: ReadError")
"""Errors of clients whose server process has died."""
AT_ONCE_S = 5.0
"""Limit for an answer without any wait, on a busy machine."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu.yaml", NAME, "kv.memory_gib=0.25") as running:
        yield running


def assert_refused_at_once(cluster: RunningCluster, missing: str) -> None:
    """Check for status 503 with Retry-After that names the role without a replica."""
    stream, start_s = Stream(5, seed=1), time.monotonic()
    stream.run(cluster.url)
    assert f"no {missing} replica is ready" in stream.end, stream.end
    assert stream.retry_after == "1"
    assert time.monotonic() - start_s < AT_ONCE_S


def assert_serves(cluster: RunningCluster) -> None:
    """Check that a request is answered."""
    stream = Stream(20, seed=2)
    stream.run(cluster.url)
    assert stream.end == "right", f"{stream.end}\n{cluster.terminal.screen}"


def is_known(client: BootstrapClient, incarnations: dict[str, int]) -> bool:
    """Return whether the service answers and shows these starts as ready."""
    try:
        replicas = client.table().replicas
    except PeerUnreachableError:
        return False
    return {entry.replica: entry.incarnation for entry in replicas if entry.ready} == incarnations


def test_the_only_decode_replica_is_killed(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=400) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before = Before(cluster, "decode-0")
        proof = kill("decode-0 rank 0", pid_of(cluster, "decode-0"))
        detection_s = before.wait_detected()
        assert_refused_at_once(cluster, "decode")
    line = before.line("kill the only decode", crowd, proof, detection_s, before.wait_recovered())
    assert (line.failed, line.hung, line.leaked_pages) == (CLIENTS, 0, 0), [stream.end for stream in crowd.streams]
    assert_serves(cluster)


def test_the_only_prefill_replica_is_killed(cluster: RunningCluster) -> None:
    """Decode's streams continue. Prompts in computation have no other replica."""
    decoding = Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=500)
    prompts = Crowd.alike(cluster.url, CLIENTS, 20, seed=550, prompt_len=12_000)
    with decoding:
        cluster.wait_until(lambda: decoding.have_tokens(5), BEGIN_S)
        cluster.wait_until(lambda: not is_computing(cluster, "prefill-0"), BEGIN_S)
        with prompts:
            cluster.wait_until(lambda: is_computing(cluster, "prefill-0"), BEGIN_S)
            before = Before(cluster, "prefill-0")
            proof = kill("prefill-0 rank 0", pid_of(cluster, "prefill-0"))
            detection_s = before.wait_detected()
            assert_refused_at_once(cluster, "prefill")
    recovery_s, ends = before.wait_recovered(), [stream.end for stream in prompts.streams]
    crowd = Crowd(cluster.url, [*decoding.streams, *prompts.streams])
    proof += f", {prompts.count('failed')} of {CLIENTS} prompts had been sent there and failed"
    line = before.line("kill the only prefill", crowd, proof, detection_s, recovery_s)
    assert decoding.count("right") == CLIENTS, [stream.end for stream in decoding.streams]
    assert prompts.count("failed") > 0, ends
    assert all("prefill" in end for end in ends if end != "right"), ends
    assert (line.success + line.failed, line.hung, line.leaked_pages) == (2 * CLIENTS, 0, 0)
    assert_serves(cluster)


def test_the_bootstrap_service_is_killed(cluster: RunningCluster) -> None:
    note = find_running(NAME)
    assert note.bootstrap_url is not None
    client = BootstrapClient(note.bootstrap_url, note.token)
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=600) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before = Before(cluster, "decode-0")
        proof = kill("bootstrap", listener_pid(note.bootstrap_url))
        cluster.wait_until(lambda: is_known(client, before.incarnations), RECOVERY_S)
        recovery_s = before.passed_s
    client.close()
    before.wait_recovered(is_new=False)
    line = before.line("kill bootstrap", crowd, proof, None, recovery_s)
    assert_all_right(cluster, line, crowd)
    assert {name: entry["incarnation"] for name, entry in cluster.replicas().items()} == before.incarnations
    assert_serves(cluster)


def test_the_router_is_killed(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=700) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before = Before(cluster, "decode-0")
        proof = kill("router", listener_pid(cluster.url))
    recovery_s = before.wait_recovered(is_new=False)
    line = before.line("kill router", crowd, proof, None, recovery_s)
    assert (line.failed, line.hung, line.leaked_pages) == (CLIENTS, 0, 0), [stream.end for stream in crowd.streams]
    assert all(stream.end in CUT_OFF for stream in crowd.streams), [stream.end for stream in crowd.streams]
    assert {name: entry["incarnation"] for name, entry in cluster.replicas().items()} == before.incarnations
    assert_serves(cluster)


def test_the_router_stands_still_for_twenty_seconds(cluster: RunningCluster) -> None:
    with Crowd.alike(cluster.url, CLIENTS, NUM_TOKENS, seed=750) as crowd:
        cluster.wait_until(lambda: crowd.have_tokens(5), BEGIN_S)
        before, pid = Before(cluster, "decode-0"), listener_pid(cluster.url)
        with stopped("router", pid) as proof:
            cluster.wait_until(lambda: state_of(pid) == GONE, RECOVERY_S)
            detection_s = before.passed_s
            recovery_s = before.wait_recovered(is_new=False)
            time.sleep(max(0.0, 20 - before.passed_s))
    line = before.line("SIGSTOP the router for 20 s", crowd, f"{proof}, and was killed", detection_s, recovery_s)
    assert (line.failed, line.hung, line.leaked_pages) == (CLIENTS, 0, 0), [stream.end for stream in crowd.streams]
    assert all(stream.end in CUT_OFF for stream in crowd.streams), [stream.end for stream in crowd.streams]
    assert {name: entry["incarnation"] for name, entry in cluster.replicas().items()} == before.incarnations
    assert_serves(cluster)
