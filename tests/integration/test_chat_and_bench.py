"""`baton chat` and `baton bench serve` with an endpoint that answers immediately."""

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.progress import Progress
from typer.testing import CliRunner, Result

from cluster.bench.workload import Workload
from cluster.cli.app import app
from cluster.cli.running import Note, RunningCluster
from cluster.processes import process_id
from cluster.spec.errors import UserError
from tests.fakes import openai_server
from tests.fakes.traces import unbounded_hit_rate, write_trace

pytestmark = pytest.mark.integration


@pytest.fixture
def server() -> Iterator[openai_server.FakeServer]:
    with openai_server.serve() as running:
        yield running


def test_one_message(server: openai_server.FakeServer) -> None:
    result = _chat("--url", server.url, "-m", "hello there", "--max-tokens", "7")
    assert (result.exit_code, result.stdout) == (0, "hello there \n")
    assert server.bodies[0]["model"] == "fake"
    assert server.bodies[0]["max_tokens"] == 7


def test_conversation_remembers_until_cleared(server: openai_server.FakeServer) -> None:
    result = _chat("--url", server.url, typed="one\ntwo\n\n/clear\n/help\n/reset\nthree\n")
    assert result.exit_code == 0
    assert "fake at" in result.stdout
    assert result.stdout.count("/clear starts a new conversation") == 3
    assert "Unknown command /reset." in result.stdout
    assert re.search(r"> two \n\[1 token, first after 0\.\d\d s\]\n", result.stdout), result.stdout
    said = [[message["content"] for message in body["messages"]] for body in server.bodies]
    assert said == [["one"], ["one", "one ", "two"], ["three"]]


def test_reasoning_is_shown_and_not_sent_back(server: openai_server.FakeServer) -> None:
    result = _chat("--url", server.url, typed=f"{openai_server.THINK}\ntwo\n")
    assert "> hm think first \n" in result.stdout
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["think first", "think first ", "two"]


def test_a_failed_message_is_reported_and_forgotten(server: openai_server.FakeServer) -> None:
    result = _chat("--url", server.url, typed=f"{openai_server.REFUSED}\n{openai_server.CUT}\nagain\n")
    assert result.exit_code == 0
    assert "HTTP 503: nothing is ready" in result.stderr
    assert "the replica is gone" in result.stderr
    assert [message["content"] for message in server.bodies[-1]["messages"]] == ["again"]


def test_one_message_that_fails_ends_with_an_error(server: openai_server.FakeServer) -> None:
    result = _chat("--url", server.url, "-m", openai_server.REFUSED)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"baton chat: {server.url}: HTTP 503: nothing is ready\n"


def test_an_event_of_another_kind_is_reported_in_one_line(server: openai_server.FakeServer) -> None:
    result = _chat("--url", server.url, "-m", openai_server.ODD)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    (line,) = result.stderr.splitlines()
    assert 'the stream has the event \'data: {"choices": [{"index": 0' in line


def test_an_unreachable_url_is_reported() -> None:
    for result in (_chat("--url", "http://127.0.0.1:9", "-m", "x"), _bench("--url", "http://127.0.0.1:9")):
        assert result.exit_code == 1
        assert "http://127.0.0.1:9: " in result.stderr


@pytest.mark.parametrize("command", [["chat", "-m", "hi"], ["bench", "serve"]])
def test_a_url_whose_host_is_no_name_is_reported(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--url", "http://localhost..:8000"])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "http://localhost..:8000: " in result.stderr


@pytest.mark.parametrize("loop", [("--concurrency", "2"), ("--request-rate", "200")])
def test_bench_as_json(server: openai_server.FakeServer, loop: tuple[str, str]) -> None:
    result = _bench(
        "--url", server.url, "--json", "--num-requests", "6", "--input-len", "5", "--output-len", "3", *loop,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert (report["model"], report["completed"], report["failed"]) == ("fake", 6, 0)
    assert (report["prompt_tokens"], report["output_tokens"]) == (30, 18)
    assert report["ttft_ms"]["p50"] > 0
    assert report["e2el_ms"]["p99"] >= report["ttft_ms"]["p99"]
    assert len(server.bodies) == 7
    assert server.bodies[-1]["ignore_eos"] is True
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 7


def test_bench_as_a_table(server: openai_server.FakeServer) -> None:
    result = _bench("--url", server.url, "--num-requests", "3", "--input-len", "20", "--output-len", "2")
    assert result.exit_code == 0, result.stderr
    assert "time to first token" in result.stdout
    assert "3 completed, 0 failed" in result.stdout


def test_failures_are_counted_and_a_run_without_success_fails(
    server: openai_server.FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = _bench("--url", server.url, "--num-requests", "3", "--input-len", str(openai_server.REFUSED_LEN))
    assert (warm.exit_code, warm.stdout) == (1, "")
    assert "the warm-up request failed: HTTP 503" in warm.stderr
    monkeypatch.setattr(Workload, "warm_up", property(lambda load: replace(load.requests[0], prompt="x")))
    result = _bench("--url", server.url, "--num-requests", "3", "--input-len", str(openai_server.REFUSED_LEN))
    assert result.exit_code == 1
    assert "0 completed, 3 failed" in result.stdout
    assert "3 x HTTP 503: nothing is ready" in result.stdout


def test_a_trace_is_replayed(server: openai_server.FakeServer, tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", num_requests=30)
    result = _bench(
        "--url", server.url, "--json", "--dataset", str(trace), "--trace-scale", "0.25", "--trace-speed", "1000",
        "--concurrency", "1", "--num-requests", "25",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    report, prompts = json.loads(result.stdout), [body["prompt"] for body in server.bodies[1:]]
    assert report["completed"] == 25
    assert report["hit_rate"] > 0.2
    assert report["hit_rate"] == pytest.approx(unbounded_hit_rate(prompts, openai_server.PAGE_SIZE))


def test_texts_of_a_dataset_with_goals_and_a_file(server: openai_server.FakeServer, tmp_path: Path) -> None:
    dataset, saved = tmp_path / "share.json", tmp_path / "report.json"
    turns = [{"from": "human", "value": "Say it."}, {"from": "gpt", "value": "It is said so."}]
    dataset.write_text(json.dumps([{"conversations": turns}]))
    result = _bench("--url", server.url, "--dataset", str(dataset), "--goodput", "ttft:60000", "--save", str(saved))
    assert result.exit_code == 0, result.stderr
    assert "reach all goals" in result.stdout
    assert [body["prompt"] for body in server.bodies if "stream" in body][1:] == ["Say it."]
    assert server.bodies[-1]["max_tokens"] == 4, "as many as the answer has words"
    report = json.loads(saved.read_text())
    assert report["workload"] == "1 request of share.json, closed loop, concurrency 4"
    assert report["goodput"] == report["requests_per_s"] > 0
    assert [request["num_output_tokens"] for request in report["requests"]] == [4]


@pytest.mark.parametrize("given", ["ttft", "ttft:x", "itl:5", "tpot:-1"])
def test_a_goal_that_is_none(given: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--goodput", given])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == f"--goodput: got {given!r}; allowed: ttft:MS, tpot:MS, e2el:MS"


def test_options_of_traces_need_a_trace() -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--trace-scale", "0.5"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "--trace-scale, --trace-speed: allowed only with a trace, as --dataset"


def test_a_wrong_rate_is_no_error_of_the_endpoint(server: openai_server.FakeServer) -> None:
    result = _bench("--url", server.url, "--request-rate", "0")
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "--request-rate: got 0.0; allowed: a finite number greater than 0"


def test_ctrl_c_reports_what_has_finished(server: openai_server.FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Progress, "update", lambda *_, **__: os.kill(os.getpid(), signal.SIGINT))
    result = _bench("--url", server.url, "--num-requests", "9", "--request-rate", "0.001", "--output-len", "2")
    assert result.exit_code == 130
    assert "1 completed, 0 failed" in result.stdout
    assert result.stderr.endswith("baton bench: interrupted after 1 of 9 requests\n")


def test_the_running_cluster_is_found(
    server: openai_server.FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    notes = {name: _note(name) for name in ("one", "two")}
    with notes["one"] as one, notes["two"]:
        several = _chat("-m", "hello")
        assert str(several.exception) == "--cluster: got no name; allowed: one, two"
        starting = _chat("-m", "hello", "--cluster", "one")
        assert str(starting.exception) == "one is still starting; `baton status` shows its state"
        one.update(router_url=server.url)
        assert _chat("-m", "hello", "--cluster", "one").stdout == "hello \n"
        notes["two"].remove()
        assert _chat("-m", "hello").stdout == "hello \n"
    both = _chat("-m", "hello", "--cluster", "one", "--url", server.url)
    assert str(both.exception) == "got both --url and --cluster; allowed: one of them"


def _note(name: str) -> Note:
    process = process_id(os.getpid())
    assert process is not None
    return Note(RunningCluster(name=name, process=process, model="fake", logs="", token=""))


def test_the_middle_request_is_timed(server: openai_server.FakeServer, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    result = _bench("--url", server.url, "--num-requests", "5", "--concurrency", "1", "--trace-out", str(out))
    assert result.exit_code == 0, result.stderr
    assert json.loads(out.read_text()) == {"traceEvents": []}
    assert [body.get("trace") for body in server.bodies[1:]] == [None, None, True, None, None]


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(server: openai_server.FakeServer) -> None:
    result = _bench("--url", server.url, "--trace-out", "/nowhere/trace.json")
    assert (result.exit_code, "No such file" in result.stderr) == (2, True)
    assert server.bodies == []


def test_a_run_that_fails_keeps_the_report_of_an_earlier_one(tmp_path: Path) -> None:
    saved = tmp_path / "report.json"
    saved.write_text("earlier")
    assert _bench("--url", "http://127.0.0.1:9", "--save", str(saved)).exit_code == 1
    assert saved.read_text() == "earlier"


@pytest.mark.parametrize("option", ["--save", "--trace-out"])
def test_a_full_disk_costs_the_file_but_not_the_report(server: openai_server.FakeServer, option: str) -> None:
    result = _bench("--url", server.url, "--num-requests", "2", option, "/dev/full")
    assert (result.exit_code, "2 completed" in result.stdout) == (1, True)
    assert result.stderr.splitlines()[-1] == "baton bench: /dev/full: No space left on device"


def _chat(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=typed)


def _bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "serve", *arguments])
