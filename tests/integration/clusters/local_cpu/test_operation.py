"""Operation of a whole cluster on real Ray: log files, secrets, commands of the administrator, lost processes."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
import torch

from cluster.channel import Outbox, draw_key
from cluster.cli.running import find_running
from cluster.log_files import sessions_of
from cluster.spec.config import AttentionSetting
from cluster.spec.messages import Drain
from tests.fakes.clients import NEEDLE_TOKENS, crowd, streaming_clients
from tests.fakes.cluster import BATON, RunningCluster, is_ready, listener_pid
from tests.fakes.recall_prompts import needle_prompt, recall_oracle
from tests.integration.clusters.local_cpu.conftest import ADMIN_KEY, NAME
from workers.device import CPU
from workers.engine.native_kernels import num_helpers_of

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


def test_every_process_has_a_log_file_and_a_title(cluster: RunningCluster) -> None:
    files = {path.name for path in Path(find_running(NAME).logs).iterdir()}
    services = {"bootstrap.log", "driver.log", "router.log"}
    assert files == services | {"decode-0-rank-0.log", "prefill-0-rank-0.log", "prefill-0-rank-1.log"}
    shown = subprocess.run([*BATON, "logs", "router", "--cluster", NAME], capture_output=True, text=True, check=True)
    assert "INFO router: a replica joined replica=decode-0" in shown.stdout
    addresses = [record["address"] for record in cluster.replicas()["prefill-0"]["ranks"]]
    titles = [Path(f"/proc/{listener_pid(address)}/cmdline").read_bytes() for address in (cluster.url, *addresses)]
    assert [title.strip(b"\0") for title in titles] == [
        f"ray::baton {name}".encode() for name in ("router", "prefill-0 cp0", "prefill-0 cp1")
    ]


@pytest.mark.native
@pytest.mark.parametrize(("replica", "num_ranks"), [("decode-0", 1), ("prefill-0", 2)])
def test_workers_have_helpers_for_cores_that_may_be_idle(
    cluster: RunningCluster, replica: str, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    expected = num_helpers_of(AttentionSetting.AUTO, CPU, num_ranks)
    for record in cluster.replicas()[replica]["ranks"]:
        threads = Path(f"/proc/{listener_pid(record['address'])}/task").iterdir()
        policies = [os.sched_getscheduler(int(thread.name)) for thread in threads]
        assert policies.count(os.SCHED_IDLE) == expected


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("option", "said"),
    [
        (f"--set=name={NAME}", f"a cluster named '{NAME}' is already running"),
        ("--set=name=other", "model.path: got '/nowhere'"),
    ],
)
def test_a_start_that_is_refused_leaves_all_logs(option: str, said: str) -> None:
    before = sessions_of(NAME), sessions_of("other")
    start = subprocess.run(
        [*BATON, "up", "--model=/nowhere", "--set=router.port=0", option], capture_output=True, text=True, timeout=60
    )
    assert start.returncode == 2
    assert said in start.stderr
    assert (sessions_of(NAME), sessions_of("other")) == before


@pytest.mark.parametrize(("replica", "rank"), [("decode-0", 0), ("prefill-0", 1)])
def test_unknown_senders_at_a_rank_are_counted(cluster: RunningCluster, replica: str, rank: int) -> None:
    def is_counted() -> bool:
        dropped: dict[str, int] = cluster.replicas()[replica]["load"]["dropped"]
        return dropped.get("stranger", 0) > 0

    with closing(Outbox(draw_key())) as outbox:
        outbox.send(cluster.replicas()[replica]["ranks"][rank]["address"], Drain())
        cluster.wait_until(is_counted, 60)
    counted = f'baton_replica_message_dropped_total{{kind="stranger",replica="{replica}"}}'
    assert counted in httpx.get(f"{cluster.url}/metrics").text


def test_no_secret_is_in_a_command_line(cluster: RunningCluster) -> None:
    del cluster
    token = find_running(NAME).token
    commands = _command_lines()
    assert any(NAME.encode() in command for command in commands)
    assert not any(token.encode() in command for command in commands)


def test_the_admin_key_is_in_no_environment_but_the_drivers(cluster: RunningCluster) -> None:
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    assert httpx.get(f"{cluster.url}/admin/load", headers=headers, trust_env=False).status_code == 200
    holding = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            if ADMIN_KEY.encode() in (folder / "environ").read_bytes():
                holding.add(int(folder.name))
    driver = find_running(NAME).process.pid
    assert holding == {driver, *_parents(driver, cluster.terminal.pid)}


def test_scaling_and_restarts_under_load_fail_no_request(cluster: RunningCluster) -> None:
    first = cluster.replicas()["decode-0"]["incarnation"]

    def are(*names: str) -> None:
        cluster.wait_until(lambda: sorted(cluster.replicas()) == sorted(names), 60)

    with streaming_clients(cluster.url, num_clients=2) as outcomes:
        assert _order("scale", "prefill=2", "decode=2") == (0, f"{NAME}: prefill: 2, decode: 2\n")
        are("prefill-0", "prefill-1", "decode-0", "decode-1")
        assert _order("restart", "--rolling", "decode-0") == (0, f"{NAME}: decode-0: restarting\n{NAME}: restarted\n")
        cluster.wait_until(lambda: _is_renewed(cluster, "decode-0", first), 60)
        assert _order("drain", "decode-0") == (0, f"{NAME}: decode-0: drained\n")
        assert _order("scale", "decode=1")[0] == 2, "the one that would stay takes no requests"
        assert _order("resume", "decode-0")[0] == 0
        # Refused until the driver knows that decode-0 accepts requests again.
        done = (0, f"{NAME}: prefill: 1, decode: 1\n")
        cluster.wait_until(lambda: _order("scale", "prefill=1", "decode=1") == done, 120)
        are("prefill-0", "decode-0")
    assert set(outcomes) == {"right"}
    cluster.wait_until(cluster.is_empty, 60)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (("drain", "decode-9"), f"{NAME}: replica: got 'decode-9'; allowed: prefill-0, decode-0"),
        (
            ("restart", "--rolling"),
            f"{NAME}: prefill-0: no other prefill replica takes requests; `baton scale prefill=2` adds one",
        ),
        (("scale", "decode=0"), f"{NAME}: scale: got decode=0; allowed: prefill and decode from 1 to 4096"),
        (("scale", "decode=2", "decode=3"), "scale: got decode=2 decode=3; allowed: each role once"),
        (("scale", "decode=900"), f"{NAME}: resources: wanted: 899 workers with 0.25 CPUs each; capacity for "),
    ],
)
def test_an_impossible_command_changes_nothing(cluster: RunningCluster, order: tuple[str, ...], said: str) -> None:
    before = {name: entry["incarnation"] for name, entry in cluster.replicas().items()}
    code, answer = _order(*order)
    assert (code, answer.count("\n"), answer[: len(said)]) == (2, 1, said)
    assert {name: entry["incarnation"] for name, entry in cluster.replicas().items()} == before


def test_dead_services_restart_without_reloading_replicas(cluster: RunningCluster) -> None:
    before = {name: entry["incarnation"] for name, entry in cluster.replicas().items()}
    bootstrap = find_running(NAME).bootstrap_url
    assert bootstrap is not None
    with streaming_clients(cluster.url, num_clients=2) as outcomes:
        _kill_listener(bootstrap)
        cluster.wait_until(lambda: "bootstrap: running, incarnation" in cluster.terminal.output, 60)
    assert set(outcomes) == {"right"}
    _kill_listener(cluster.url)
    cluster.wait_until(lambda: "router: running, incarnation" in cluster.terminal.output, 60)
    cluster.wait_until(lambda: is_ready(cluster.url), 60)
    prompt = needle_prompt(500, 0.25)
    assert cluster.complete(prompt, NEEDLE_TOKENS) == recall_oracle(prompt, NEEDLE_TOKENS)
    assert {name: entry["incarnation"] for name, entry in cluster.replicas().items()} == before
    cluster.wait_until(cluster.is_empty, 60)


@pytest.mark.parametrize(
    ("replica", "number"),
    [
        pytest.param("prefill-0", signal.SIGKILL, marks=pytest.mark.full),
        ("decode-0", signal.SIGKILL),
        ("prefill-0", signal.SIGSTOP),
    ],
)
def test_a_lost_rank_restarts_its_replica(cluster: RunningCluster, replica: str, number: int) -> None:
    """Running requests end with the right answer or with an error. A follower is stopped."""
    before = cluster.replicas()[replica]
    victim = listener_pid(before["ranks"][-1]["address"])
    outcomes = asyncio.run(crowd(cluster.url, num_clients=12, seed=number, leavers=0, after_s=(0.5, victim, number)))
    assert outcomes.count("right") + outcomes.count("failed") == 12
    assert outcomes.count("failed") >= 1
    cluster.wait_until(lambda: _is_renewed(cluster, replica, before["incarnation"]), 180)
    prompt = needle_prompt(500, 0.5)
    assert cluster.complete(prompt, NEEDLE_TOKENS) == recall_oracle(prompt, NEEDLE_TOKENS)
    cluster.wait_until(cluster.is_empty, 60)


def _parents(pid: int, last: int) -> Iterator[int]:
    """Yield the parents of a process up to the last, which were given the same environment."""
    while pid != last:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
        yield pid


def _kill_listener(url: str) -> None:
    os.kill(listener_pid(f"tcp://{httpx.URL(url).netloc.decode()}"), signal.SIGKILL)


def _command_lines() -> list[bytes]:
    """Return the command line of every process on this machine."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            commands.append(path.read_bytes())
    return commands


def _order(*arguments: str) -> tuple[int, str]:
    """Return exit code and output."""
    command = [sys.executable, "-m", "cluster.cli", *arguments, "--cluster", NAME]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stderr


def _is_renewed(cluster: RunningCluster, replica: str, incarnation: int) -> bool:
    entry = cluster.replicas().get(replica)
    return entry is not None and entry["ready"] and entry["incarnation"] > incarnation
