"""Log files of processes, and `baton logs`, which reads them."""

import faulthandler
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster import log_files
from cluster.cli.app import app
from cluster.cli.logs import Tails
from cluster.log_files import KEPT_SESSIONS, LogSession, cluster_names, open_log, sessions_of
from cluster.logs import ProcessLog, set_up_logs
from cluster.spec.config import LogConfig, LogFormat
from cluster.spec.errors import UserError

BEFORE, NOW = (LogSession(cluster="demo", name=f"2026-11-2{day}T10-00-00-7") for day in (5, 6))


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(faulthandler, "enable", os.close)
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    yield tmp_path
    for handler in set(root.handlers) - set(handlers):
        with suppress(OSError):  # as logging.shutdown does
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def write(session: LogSession, name: str, *lines: str) -> None:
    session.folder.mkdir(parents=True, exist_ok=True)
    with (session.folder / name).open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def logs(*arguments: str) -> list[str]:
    """Return the lines that `baton logs` prints, or the message of its error."""
    done = CliRunner().invoke(app, ["logs", *arguments])
    return [str(done.exception)] if isinstance(done.exception, UserError) else done.output.splitlines()


def test_records_go_to_a_private_file(cache: Path) -> None:
    log = ProcessLog(process="prefill-0 rank 1", config=LogConfig(), session=NOW)
    set_up_logs(log, to_stderr=False)
    logging.getLogger("workers").warning("hello")
    file = cache / "logs/demo/2026-11-26T10-00-00-7/prefill-0-rank-1.log"
    assert file.read_text().endswith(" WARNING prefill-0 rank 1: hello\n")
    assert file.parent.stat().st_mode & 0o777 == file.parent.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_disk_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    NOW.folder.mkdir(parents=True)
    (NOW.folder / "router.log").symlink_to("/dev/full")
    set_up_logs(ProcessLog(process="router", config=LogConfig(), session=NOW), to_stderr=False)
    for _ in range(3):
        logging.getLogger("router").warning("hello")
    file = NOW.folder / "router.log"
    assert capsys.readouterr().err == f"{file}: log lines are lost: No space left on device\n"


def test_a_full_file_replaces_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "MAX_FILE_BYTES", 300)
    set_up_logs(ProcessLog(process="router", config=LogConfig(), session=NOW), to_stderr=False)
    tails = Tails(NOW.folder, "router")
    read: list[str] = []
    for number in range(50):
        logging.getLogger("router").info("record %d", number)
        read += tails.new()
    assert sorted(path.name for path in NOW.folder.iterdir()) == ["router.log", "router.log.1"]
    assert all(path.stat().st_size <= 300 for path in NOW.folder.iterdir())
    assert [line.rpartition(" ")[2] for line in read] == [str(number) for number in range(50)]


def test_a_file_renamed_while_it_is_opened_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write(NOW, "router.log", "one")
    theirs = Path.open

    def open_and_rename(path: Path, mode: str) -> object:
        opened = theirs(path, mode)
        if path.name == "router.log" and mode == "rb":
            path.rename(path.with_name("router.log.1"))
            write(NOW, "router.log", "two")
        return opened

    tails = Tails(NOW.folder, "router")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_and_rename)
        assert list(tails.new()) == ["one"]
    assert list(tails.new()) == ["two"]


def test_only_the_last_sessions_are_kept() -> None:
    names = [f"2026-11-{day}T00-00-00-1" for day in range(10, 20)]
    for name in names:
        handler = open_log(LogSession(cluster="demo", name=name), "router")
        assert handler is not None
        handler.close()
    assert [path.name for path in sessions_of("demo")] == names[: -KEPT_SESSIONS - 1 : -1]


def test_a_start_keeps_its_logs_after_the_clock_was_set_back() -> None:
    for day in range(10, 10 + KEPT_SESSIONS):
        write(LogSession(cluster="demo", name=f"2027-11-{day}T00-00-00-1"), "router.log", "before")
    for process in ("driver", "router"):
        handler = open_log(NOW, process)
        assert handler is not None
        handler.close()
    assert [path.name for path in sorted(NOW.folder.iterdir())] == ["driver.log", "router.log"]
    assert len(sessions_of("demo")) == KEPT_SESSIONS


def test_a_folder_that_cannot_be_written_costs_only_the_files(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cache / "logs").write_text("in the way")
    assert open_log(NOW, "router") is None
    assert capsys.readouterr().err == f"router: no log file in {NOW.folder}: Not a directory\n"


@pytest.mark.parametrize("form", LogFormat)
def test_files_are_merged_by_time(form: LogFormat) -> None:
    stamp = '{{"time":"2026-11-26T10:00:0{}.000+00:00"}}' if form is LogFormat.JSON else "2026-11-26 10:00:0{},000 INFO"
    first, second, third, fourth = (stamp.format(second) for second in range(4))
    write(NOW, "router.log", first, "a traceback", third)
    write(NOW, "prefill-0-rank-0.log", second, fourth)
    assert logs() == [first, "a traceback", second, third, fourth]
    assert logs("-n", "2") == [third, fourth]


def test_a_process_is_chosen_by_replica_or_rank() -> None:
    for name in ("prefill-1-rank-0", "prefill-1-rank-10", "prefill-10-rank-0", "router"):
        write(NOW, f"{name}.log", name)
    assert logs("prefill-1") == ["prefill-1-rank-0", "prefill-1-rank-10"]
    assert logs("prefill-1/10") == ["prefill-1-rank-10"]
    assert logs("router") == ["router"]
    (error,) = logs("prefill-2")
    assert error.endswith(
        "no log of 'prefill-2'; allowed: prefill-1, prefill-10, router. Processes on other machines log on those."
    )


def test_the_last_start_of_any_cluster_is_shown_unless_another_is_named() -> None:
    write(BEFORE, "router.log", "before")
    write(NOW, "router.log", "now")
    write(LogSession(cluster="other", name="2026-11-24T10-00-00-7"), "router.log", "other")
    assert cluster_names() == ["demo", "other"]
    assert logs() == ["now"]
    assert logs("--previous") == ["before"]
    assert logs("--cluster", "other") == ["other"]
    assert logs("--cluster", "other", "-p") == ["no earlier logs of other on this machine; known: demo, other"]
    for name in ("third", "*", "/etc"):
        assert logs("--cluster", name) == [f"no logs of {name} on this machine; known: demo, other"]


def test_an_incomplete_line_is_read_when_it_is_complete() -> None:
    write(NOW, "router.log", "one")
    tails = Tails(NOW.folder, None)
    assert tails.last(5) == ["one"]
    with (NOW.folder / "router.log").open("a") as file:
        file.write("tw\N{LATIN SMALL LETTER O WITH DIAERESIS}")
        file.flush()
        assert list(tails.new()) == []
        file.write("!\n")
    assert list(tails.new()) == ["tw\N{LATIN SMALL LETTER O WITH DIAERESIS}!"]
    write(NOW, "decode-0-rank-0.log", "a new process")
    assert list(tails.new()) == ["a new process"]
