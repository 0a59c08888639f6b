"""A hung work loop ends its process after several missed checks, and nothing else does."""

import logging
import signal
import subprocess
import sys
import threading
import time

import pytest

from cluster.launch.kinds import WorkerActor
from cluster.logs import ProcessLog
from cluster.spec.config import DeployConfig
from cluster.spec.ids import Role
from tests.fakes.worker_specs import lone_worker
from workers.loop.watch import LoopProgress, LoopWatch

LONG_S = 30.0
LOOK_S = 0.01


def make_watch(progress: LoopProgress, limit_s: float = 5.0) -> LoopWatch:
    """Return a watch that checks only on request."""
    return LoopWatch(progress, "decode-0 rank 1", limit_s, threading.Event().set, look_s=1.0)


def test_as_many_looks_as_the_limit_has_seconds_see_it() -> None:
    watch = make_watch(LoopProgress(), limit_s=4.5)
    assert [watch.look() for _ in range(5)] == [False, False, False, False, True]


def test_a_slow_loop_continues() -> None:
    progress = LoopProgress()
    watch = make_watch(progress)
    for number in range(20):
        assert not any(watch.look() for _ in range(4))
        progress.at(f"in step {number % 2}")
        assert not watch.look(), "it begins anew"


def test_a_hung_loop_is_reported_once_and_ended(caplog: pytest.LogCaptureFixture) -> None:
    progress, ended = LoopProgress(), threading.Event()
    progress.at("in step 7")
    with LoopWatch(progress, "decode-0 rank 1", 0.05, ended.set, look_s=LOOK_S):
        assert ended.wait(LONG_S)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == (
        "decode-0 rank 1 made no progress for 0.05 s (resources.step_timeout_s) in step 7; ending this process"
    )


def test_a_loop_that_is_over_is_not_ended() -> None:
    ended = threading.Event()
    with LoopWatch(LoopProgress(), "decode-0 rank 1", 0.2, ended.set, look_s=LOOK_S):
        pass
    assert not ended.wait(0.4)


def test_a_loop_that_hangs_in_the_log_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    lock = caplog.handler.lock
    assert lock is not None
    with lock, LoopWatch(LoopProgress(), "decode-0 rank 1", 0.05, ended.set, look_s=LOOK_S):
        assert ended.wait(LONG_S)


STEP = """
import os, time
from workers.loop.watch import LoopWatch, LoopProgress, end_process
with LoopWatch(LoopProgress(), "decode-0 rank 1", 1.0, end_process, look_s=0.1):
    print("begun", flush=True)
    for _ in range({num_tenths}):
        time.sleep(0.1)
"""


def run_step(num_tenths: int) -> subprocess.Popen[str]:
    """Run a process with one long step, for which a second is allowed."""
    command = [sys.executable, "-c", STEP.format(num_tenths=num_tenths)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


def test_a_stop_during_a_step_does_not_count() -> None:
    process = run_step(num_tenths=5)
    time.sleep(0.25)  # some checks were late
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=LONG_S)
    assert (process.returncode, errors) == (0, "")


def test_a_process_in_an_endless_step_ends() -> None:
    process = run_step(num_tenths=600)
    _, errors = process.communicate(timeout=LONG_S)
    assert process.returncode == 1
    assert "decode-0 rank 1 made no progress for 1 s" in errors


class HungWorker:
    """Worker whose loop hangs. ``run`` returns when the process would have ended."""

    def __init__(self, config: DeployConfig, ended: threading.Event) -> None:
        self.spec, self.progress, self._ended, self.is_closed = (
            lone_worker(config, Role.DECODE),
            LoopProgress(),
            ended,
            False,
        )

    def run(self, rows: list[object]) -> None:
        assert rows == []
        assert self._ended.wait(LONG_S)

    def close(self) -> None:
        self.is_closed = True


def test_an_actor_watches_its_worker(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    ended = threading.Event()
    monkeypatch.setattr("workers.loop.watch.end_process", ended.set)
    config = DeployConfig()
    soon = config.resources.model_copy(update={"step_timeout_s": 1.0})
    worker = HungWorker(config.model_copy(update={"resources": soon}), ended)
    monkeypatch.setattr("cluster.launch.kinds.set_up_logs", lambda _: None)
    actor = WorkerActor(ProcessLog(process="decode-0 rank 0", config=config.log), {})
    monkeypatch.setattr(actor, "_worker", worker)
    actor.run([])
    assert worker.is_closed
    assert "decode-0 rank 0 made no progress for 1 s (resources.step_timeout_s) between two steps" in caplog.text
