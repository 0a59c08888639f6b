"""Edge cases of `baton up`, `down` and `status`: checks before a start, stop signals, refused waits, lists."""

import importlib.abc
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import running, status, up
from cluster.cli.app import app
from cluster.cli.running import Note, RunningCluster, running_clusters
from cluster.cli.start import check_files, check_model
from cluster.cli.stop_signals import StopSignals
from cluster.machine_memory import MachineMemory
from cluster.processes import ProcessId, process_id, this_process
from cluster.spec.errors import BatonError, UserError
from cluster.spec.loader import parse_config
from cluster.spec.memory import GIB
from tests.fakes.checkpoints import make_checkpoint
from tests.fakes.model_folder import write_model_folder
from tests.unit.cluster.conftest import RunBaton

WAIT_S = 60.0


@pytest.fixture
def reports() -> "queue.SimpleQueue[str]":
    return queue.SimpleQueue()


@pytest.fixture
def signals(reports: "queue.SimpleQueue[str]") -> Iterator[StopSignals]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup
    yield StopSignals(reports.put)
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_noted_until_the_next_check(
    signals: StopSignals, reports: "queue.SimpleQueue[str]", number: signal.Signals
) -> None:
    signals.check()
    signal.raise_signal(number)
    signal.raise_signal(number)
    assert reports.get(timeout=WAIT_S) == number.name
    with pytest.raises(KeyboardInterrupt, match=number.name):
        signals.check()
    assert reports.empty()


def test_signals_raise_only_where_it_is_safe(signals: StopSignals) -> None:
    with pytest.raises(KeyboardInterrupt), signals.interrupting():
        signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals.pass_on(lambda _: None)


def test_signals_are_passed_on_even_after_handlers_were_replaced(signals: StopSignals) -> None:
    reported: list[str] = []
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.pass_on(reported.append)
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
    assert reported == ["SIGTERM", "SIGINT"]


def test_a_second_signal_ends_the_process_if_nothing_runs(signals: StopSignals) -> None:
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    signals.leave_at_second(left.put)
    signal.raise_signal(signal.SIGINT)
    assert left.empty()
    signal.raise_signal(signal.SIGTERM)
    assert left.get(timeout=WAIT_S) == signal.SIGTERM
    with pytest.raises(KeyboardInterrupt):
        signals.pass_on(lambda _: None)
    signal.raise_signal(signal.SIGINT)
    assert left.empty()


@pytest.mark.parametrize("given", ["-3", "nan", "soon"])
def test_an_invalid_timeout_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.cli.commands.find_running", lambda name: pytest.fail(f"looked for {name}"))
    result = CliRunner().invoke(app, ["down", "--timeout", given])
    assert result.exit_code == 2
    assert "--timeout" in result.output


def test_down_waits_for_as_long_as_a_cluster_drains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver limits its own stop, by `router.drain_s`."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr("cluster.cli.commands.wait_gone", lambda _, timeout_s: timeout_s > 100_000)
    with Note(_cluster("one")):
        assert CliRunner().invoke(app, ["down"]).exit_code == 0
        assert CliRunner().invoke(app, ["down", "--timeout", "5"]).exit_code == 1


def test_keys_that_cannot_be_read_stop_the_start_before_ray(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    result = CliRunner().invoke(app, ["up", "local-cpu", "--set", f"router.api_keys_file={keys}"])
    assert str(result.exception) == f"router.api_keys_file: {keys} cannot be read: No such file or directory"


def test_status_ends_with_the_routers_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    process = process_id(os.getpid())
    assert process is not None
    cluster = RunningCluster(name="one", process=process, model="m", logs="", token="", router_url="http://127.0.0.1:9")
    figures = status.RouterFigures("router", 6, 2, 1024.4, 84.2, 0.345, 1)
    monkeypatch.setattr(status, "read_figures", lambda _: figures)
    monkeypatch.setattr(status, "_ask_driver", lambda _: [])
    with Note(cluster):
        lines = CliRunner().invoke(app, ["status"]).stdout.splitlines()
    assert lines[-2:] == [
        "router: 6 open, 2 waiting, 1,024 prompt tokens/s, 84 output tokens/s, cache hits 34%",
        "mismatches found by parity probes: 1; see `baton logs router`",
    ]


@pytest.mark.parametrize("command", [["status"], ["drain", "decode-0"]])
def test_no_running_cluster_is_reported(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = CliRunner().invoke(app, command)
    assert str(result.exception) == "no cluster that you started is running on this machine"


ROOMY = MachineMemory(total=64 * GIB, available=64 * GIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", num_hidden_layers=2)


def machine(total_gib: float, available_gib: float, *, is_limited: bool = False) -> MachineMemory:
    return MachineMemory(total=int(total_gib * GIB), available=int(available_gib * GIB), is_limited=is_limited)


def said(text: str, folder: Path, memory: MachineMemory = ROOMY) -> list[str]:
    lines: list[str] = []
    check_model(parse_config(text, "f.yaml"), folder, lines.append, memory)
    return lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prefill: {parallel: {cp: 2, moe_dp: 2}}", "prefill.parallel.moe_dp: got 2; allowed: 1, since"),
        ("decode: {parallel: {tp: 2, ep: 2}}", "decode.parallel.ep: got 2; allowed: 1, since"),
        ("prefill: {parallel: {pp: 3}}", "prefill.parallel.pp: got 3; allowed: at most the model's 2 layers"),
        ("prefill: {parallel: {tp: 5}}", "prefill.parallel.tp: got 5; allowed: a divisor of"),
        ("resources: {device: cuda}\nprefill: {parallel: {pp: 3}}", "at most the model's 2 layers"),
        ("model: {max_context: 1000000000}", "model.max_context: got 1000000000; allowed: at most"),
        ("kv: {memory_gib: 0.5}\nresources: {machine_memory_gib: 1}", "resources.machine_memory_gib: got 1; allowed"),
    ],
)
def test_a_refused_plan_does_not_start(text: str, words: str, folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        said(text, folder)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; allowed: "),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; allowed: 'sigmoid'"),
        ("deepseek_v32", {"index_topk": None}, "config.json must give index_topk as a positive integer"),
        ("glm_moe_dsa", {"indexer_types": ["shared"] * 4}, "indexer_types begins with shared; allowed: full"),
        ("deepseek_v32", {"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is None; allowed: "),
    ],
)
def test_an_unsupported_variant_does_not_start(
    tmp_path: Path, family: str, changes: dict[str, object], words: str
) -> None:
    path = make_checkpoint(tmp_path, family)
    for key, value in changes.items():
        edit_config(path, key, value)
    with pytest.raises(UserError) as refused:
        said("{}", path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_pool_that_does_not_hold_the_longest_requests_is_said(folder: Path) -> None:
    (line,) = said("kv: {memory_gib: 0.001}", folder)
    assert re.fullmatch(r"context: \d+ tokens fit, but a request can have \d+: set kv\.memory_gib to .*", line)


def test_gpu_memory_is_not_checked_before_the_worker(folder: Path) -> None:
    assert said("resources: {device: cuda, gpu_memory_gib: 0.001}", folder) == []


SIX_GIB = "kv: {memory_gib: 3}\nprefill: {replicas: 1}"


def test_a_cluster_larger_than_the_machine_does_not_start(folder: Path) -> None:
    with pytest.raises(UserError, match=r"this machine has 5 GiB of memory; needed: at least 6.*, for 1 prefill wor"):
        said(SIX_GIB, folder, machine(5, 4))
    with pytest.raises(UserError, match=r"^this container has 5 GiB of memory; needed: at least 6"):
        said(SIX_GIB, folder, machine(5, 4, is_limited=True))
    assert said(SIX_GIB, folder, machine(7, 8)) == []


def test_insufficient_free_memory_is_a_warning(folder: Path) -> None:
    (line,) = said(SIX_GIB, folder, machine(8, 4))
    assert line.startswith("memory: 4 GiB is available on this machine now; needed: at least 6")
    assert said(SIX_GIB, folder, machine(8, 7)) == []


@pytest.mark.parametrize("elsewhere", ["transfer: {backend: mooncake}", "resources: {machine_memory_gib: 8}"])
def test_this_machine_is_not_checked_for_other_or_several_machines(elsewhere: str, folder: Path) -> None:
    assert said(f"{SIX_GIB}\n{elsewhere}", folder, machine(1, 1)) == []
    assert said(SIX_GIB, folder, machine(0, 0)) == []


def test_a_bad_key_is_refused_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_ADMIN_KEY", "ü x")
    result = CliRunner().invoke(app, ["up", "--set", "router.port=0"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception).startswith("BATON_ADMIN_KEY: got 3 characters; allowed: 8 or more printable ASCII")


def test_sound_files_pass_the_check(tmp_path: Path) -> None:
    check_files(make_checkpoint(write_model_folder(tmp_path / "model"), "llama"))


@pytest.mark.parametrize(
    ("break_files", "line"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json; Baton needs a fast tokenizer"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"a'), "tokenizer.json is not a tokenizer: "),
        (lambda folder: os.truncate(folder / "model.safetensors", 100_000), "model.safetensors is damaged: "),
        (
            lambda folder: edit_config(folder, "quantization_config", {"quant_method": "awq"}),
            "quant_method is 'awq'; allowed: 'fp8', or an unquantized checkpoint",
        ),
    ],
)
def test_missing_and_damaged_files_are_found_before_the_start(
    break_files: Callable[[Path], object], line: str, tmp_path: Path
) -> None:
    folder = make_checkpoint(write_model_folder(tmp_path / "model"), "llama")
    break_files(folder)
    with pytest.raises(UserError, match=re.escape(line)) as caught:
        check_files(folder)
    assert "\n" not in str(caught.value)


def edit_config(folder: Path, key: str, value: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0 s"), (0.9, "0 s"), (59, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (200_000, "2 d 7 h")],
)
def test_ages_have_two_units(seconds: float, text: str) -> None:
    assert status._age(seconds) == text


def test_status_lists_several_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(status, "read_figures", lambda url: f"figures of {url}")
    process = process_id(os.getpid())
    assert process is not None
    assert 0 < process.age_s < 86_400
    notes = [
        Note(RunningCluster(name=name, process=process, model="m", logs=f"/logs/{name}", token=""))
        for name in ("one", "two")
    ]
    with notes[0], notes[1]:
        notes[1].update(router_url="http://127.0.0.1:81")
        lines = CliRunner().invoke(app, ["status"]).stdout.splitlines()
    assert [line.split()[:4] for line in lines] == [
        ["one", "starting", "model", "m"],
        ["logs:", "/logs/one"],
        ["two", "http://127.0.0.1:81/v1", "model", "m"],
        ["logs:", "/logs/two"],
        ["figures", "of", "http://127.0.0.1:81"],
    ]


def _cluster(name: str) -> RunningCluster:
    return RunningCluster(name=name, process=this_process(), model="m", logs="", token="")


def test_a_folder_for_notes_that_cannot_be_used_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    result = CliRunner().invoke(app, ["status"])
    assert str(result.exception) == (
        f"{tmp_path}/file/baton: Not a directory; set XDG_RUNTIME_DIR to a folder that you own"
    )


def test_a_full_disk_stops_a_start_but_no_running_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "baton"
    with Note(_cluster("one")) as note:
        for name in ("one", "two"):
            (folder / f"{name}.{os.getpid()}").symlink_to("/dev/full")
        note.update(router_url="http://127.0.0.1:81")
        assert [cluster.router_url for cluster in running_clusters()] == [None]
        with pytest.raises(UserError, match=r"two\.json: No space left on device; set XDG_RUNTIME_DIR"):
            Note(_cluster("two"))
        note.update(bootstrap_url="http://127.0.0.1:82")
        assert [cluster.router_url for cluster in running_clusters()] == ["http://127.0.0.1:81"]
    assert list(folder.iterdir()) == []


def test_of_two_starts_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find the note of a driver that was killed."""
    outcomes = queue.SimpleQueue[bool]()
    read = running._read

    def read_slowly(path: Path) -> RunningCluster | None:
        found = read(path)
        time.sleep(0.1)
        return found

    def start() -> None:
        try:
            Note(_cluster("one"))
            outcomes.put(True)
        except UserError:
            outcomes.put(False)

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(running, "_read", read_slowly)
    monkeypatch.setattr(os, "getpid", threading.get_native_id)
    killed = RunningCluster(name="one", process=ProcessId(pid=1, start_ticks=-1), model="m", logs="", token="")
    Note(killed)
    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert sorted(outcomes.get(timeout=WAIT_S) for _ in threads) == [False, True]


def test_an_error_with_an_endless_chain_of_causes_is_explained(
    baton: RunBaton, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cause = Exception("no dashboard")
    cause.__cause__ = cause
    cause.add_note("last words")

    def fail(*_: object) -> None:
        raise BatonError("Ray did not start") from cause

    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(up, "_check_port", lambda _: None)
    monkeypatch.setattr(up, "_run", fail)
    assert baton("up") == (1, "", "error: Ray did not start\nlast words\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_exit_code_of_an_interrupted_start_names_the_signal(
    baton: RunBaton, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: signal.Signals
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt(number.name)

    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(up, "_check_port", lambda _: None)
    monkeypatch.setattr(up, "_run", interrupted)
    assert baton("up") == (128 + number, "", "stopped while starting\n")


def test_an_interrupt_while_importing_prints_nothing(baton: RunBaton, monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupting(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: object) -> None:
            if name == "cluster.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "cluster.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert baton("--version") == (130, "", "")
