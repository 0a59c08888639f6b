"""A whole cluster on real Ray, through its HTTP API: exact answers, many clients, lost clients, lost ranks."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.channel import Outbox, draw_key
from cluster.cli.running import find_running
from cluster.spec.messages import Drain
from tests.fakes.clients import NEEDLE_TOKENS, crowd, streaming_clients
from tests.fakes.cluster import BATON, RunningCluster, is_ready, listener_pid, running_cluster
from tests.fakes.recall_prompts import chain_prompt, needle_prompt, recall_oracle
from workers.models.recall import DEMO_ANSWER, DEMO_PROMPT, MAX_NEW_TOKENS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PAGE_SIZE = 64
LONG = 32_768
NAME = "test-endpoint"
ADMIN_KEY = "key-of-the-administrator"


@pytest.fixture(scope="module")
def cluster() -> Iterator[RunningCluster]:
    with running_cluster("deploy/local-cpu.yaml", NAME, env={"BATON_ADMIN_KEY": ADMIN_KEY}) as running:
        yield running


@pytest.fixture
def client(cluster: RunningCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused") as client:
        yield client


def test_the_openai_client_works_unchanged(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="recall", messages=[{"role": "user", "content": DEMO_PROMPT}])
    assert answer.choices[0].message.content == DEMO_ANSWER
    assert answer.choices[0].finish_reason == "stop"
    stream = client.completions.create(
        model="recall", prompt=DEMO_PROMPT, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == DEMO_ANSWER
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 1


def test_the_demo_model_calls_a_function_and_reads_the_result(client: openai.OpenAI) -> None:
    floor = {"type": "integer", "minimum": 0, "maximum": 99}
    properties = {"code": {"enum": ["tango", "zulu"]}, "floor": floor}
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    given: Any = {
        "model": "recall",
        "tools": [{"type": "function", "function": {"name": "open_door", "parameters": parameters}}],
    }
    messages: list[Any] = [{"role": "user", "content": "Open the door with zulu."}]
    answer = client.chat.completions.create(messages=messages, tool_choice="required", temperature=1, seed=5, **given)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "open_door"
    arguments = json.loads(call.function.arguments)
    assert arguments["code"] in ("tango", "zulu")
    assert 0 <= arguments["floor"] <= 99
    # The text before it has a full stop too, so that the token after one is not certain.
    result = {"role": "tool", "tool_call_id": call.id, "content": DEMO_PROMPT.replace(".", "")}
    messages += [answer.choices[0].message, result]
    answer = client.chat.completions.create(messages=messages, **given)
    assert answer.choices[0].message.content == DEMO_ANSWER.removesuffix(".")


def test_sampled_json_has_little_white_space(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 5, "maxItems": 5}
    for seed in range(4):
        answer = client.chat.completions.create(
            model="recall",
            messages=[{"role": "user", "content": "Count."}],
            response_format={"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
            temperature=2,
            seed=seed,
        )
        text = answer.choices[0].message.content or ""
        assert len(json.loads(text)) == 5
        assert re.fullmatch(r"\S(( |\n[ \t]{0,40})?\S)*", text), text


def test_an_answer_without_an_end_stops_at_the_models_default(cluster: RunningCluster) -> None:
    body = {"model": "recall", "messages": [{"role": "user", "content": "one two one two one"}]}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=120).raise_for_status().json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == MAX_NEW_TOKENS


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


def test_an_answer_of_a_given_form(client: openai.OpenAI) -> None:
    schema: dict[str, object] = {
        "properties": {"code": {"enum": ["tango", "zulu"]}, "sure": {"type": "boolean"}},
        "type": "object",
        "required": ["code", "sure"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="recall",
        messages=[{"role": "user", "content": DEMO_PROMPT}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}},
        max_tokens=400,
        seed=5,
    )
    assert answer.choices[0].finish_reason == "stop"
    said = json.loads(answer.choices[0].message.content or "")
    assert said["code"] in ("tango", "zulu")
    assert isinstance(said["sure"], bool)
    chosen = client.completions.create(
        model="recall", prompt="x", stream=True, extra_body={"guided_choice": ["yes", "maybe"]}
    )
    assert "".join(chunk.choices[0].text for chunk in chosen) in ("yes", "maybe")


@pytest.mark.parametrize(
    "depth", [0.5, *(pytest.param(depth, marks=pytest.mark.full) for depth in (0.0, 0.25, 0.75, 1.0))]
)
def test_a_needle_in_a_long_prompt_is_recalled(cluster: RunningCluster, depth: float) -> None:
    prompt = needle_prompt(LONG, depth)
    assert cluster.complete(prompt, NEEDLE_TOKENS) == recall_oracle(prompt, NEEDLE_TOKENS)


@pytest.mark.parametrize("length", [LONG // 4, pytest.param(LONG, marks=pytest.mark.full)])
def test_a_chain_through_every_page_is_followed(cluster: RunningCluster, length: int) -> None:
    prompt = chain_prompt(length, PAGE_SIZE)
    num_pages = (length - 1) // PAGE_SIZE
    assert cluster.complete(prompt, num_pages) == recall_oracle(prompt, num_pages)


def test_an_earlier_prompt_is_cached_and_counted(cluster: RunningCluster) -> None:
    prompt = needle_prompt(3000, 0.5, seed=99)
    body = {"model": "recall", "max_tokens": NEEDLE_TOKENS, "ignore_eos": True, "return_token_ids": True}
    for asked, num_cached in [(prompt, 0), (prompt, 2944), ([*prompt[:200], *prompt[300:]], 192)]:
        answer = httpx.post(
            f"{cluster.url}/v1/completions", json={**body, "prompt": asked, "temperature": 0}, timeout=300
        )
        assert answer.json()["choices"][0]["token_ids"] == recall_oracle(asked, NEEDLE_TOKENS)
        assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": num_cached}


def test_many_clients_with_disconnects(cluster: RunningCluster) -> None:
    outcomes = asyncio.run(crowd(cluster.url, num_clients=32, seed=7, leavers=4))
    assert outcomes.count("left") >= 3
    assert outcomes.count("right") == 32 - outcomes.count("left")
    cluster.wait_until(cluster.is_empty, 60)


def test_a_client_that_leaves_during_prefill_frees_its_pages_on_both_sides(cluster: RunningCluster) -> None:
    body = {"model": "recall", "prompt": needle_prompt(LONG, 0.5, seed=98), "max_tokens": 10}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=1.5)
    cluster.wait_until(cluster.is_empty, 60)


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(cluster: RunningCluster) -> None:
    answer = httpx.post(
        f"{cluster.url}/v1/completions", json={"model": "recall", "prompt": [5] * 140_000, "max_tokens": 1}, timeout=300
    )
    assert answer.status_code == 400
    assert "140000" in answer.json()["error"]["message"]
    assert "131072" in answer.json()["error"]["message"]


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
    assert holding == {find_running(NAME).process.pid}


def test_scaling_and_restarts_under_load_fail_no_request(cluster: RunningCluster) -> None:
    first = cluster.replicas()["prefill-0"]["incarnation"]

    def are(*names: str) -> None:
        cluster.wait_until(lambda: sorted(cluster.replicas()) == sorted(names), 60)

    with streaming_clients(cluster.url, num_clients=2) as outcomes:
        assert _order("scale", "prefill=2", "decode=2") == (0, f"{NAME}: prefill: 2, decode: 2\n")
        are("prefill-0", "prefill-1", "decode-0", "decode-1")
        assert _order("restart", "--rolling", "prefill-0") == (0, f"{NAME}: prefill-0: restarting\n{NAME}: restarted\n")
        cluster.wait_until(lambda: _is_renewed(cluster, "prefill-0", first), 60)
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
    outcomes = asyncio.run(crowd(cluster.url, num_clients=12, seed=3, leavers=0, after_s=(0.5, victim, number)))
    assert outcomes.count("right") + outcomes.count("failed") == 12
    assert outcomes.count("failed") >= 1
    cluster.wait_until(lambda: _is_renewed(cluster, replica, before["incarnation"]), 180)
    prompt = needle_prompt(500, 0.5)
    assert cluster.complete(prompt, NEEDLE_TOKENS) == recall_oracle(prompt, NEEDLE_TOKENS)
    cluster.wait_until(cluster.is_empty, 60)


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
