"""Findings of `baton doctor`, good and bad, on fake machines."""

import errno
import json
import pwd
import shutil
import socket
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import typer
from typer.testing import CliRunner, Result

from cluster.cli import doctor
from cluster.cli.doctor import Finding, Status
from cluster.machine_memory import MachineMemory


def test_python() -> None:
    assert doctor.check_python((3, 10, 1), "/venv").status is Status.FAIL
    assert doctor.check_python((3, 11, 0), "/venv") == Finding("python", Status.OK, "3.11.0 in /venv")
    assert "no virtual environment" in doctor.check_python((3, 12, 0), sys.base_prefix).found


def test_packages() -> None:
    assert doctor.check_packages(["pytest>=9", "absent; extra == 'dev'"]).status is Status.OK
    finding = doctor.check_packages(["pytest>=9", "no-such-package[x]>=1"])
    assert (finding.status, finding.found) == (Status.FAIL, "missing: no-such-package")


@pytest.mark.parametrize(
    ("environ", "token_file", "status", "part"),
    [
        ({}, False, Status.OK, "RAY_AUTH_MODE not set, no token"),
        ({}, True, Status.OK, "RAY_AUTH_MODE not set, a token"),
        ({"RAY_AUTH_MODE": "token"}, True, Status.OK, "RAY_AUTH_MODE token, a token"),
        ({"RAY_AUTH_MODE": "TOKEN", "RAY_AUTH_TOKEN": "x"}, False, Status.OK, "RAY_AUTH_MODE token, a token"),
        ({"RAY_AUTH_MODE": "token"}, False, Status.WARN, "no token"),
        ({"RAY_AUTH_MODE": "disabled"}, False, Status.OK, "RAY_AUTH_MODE disabled"),
        ({"RAY_AUTH_MODE": "off"}, False, Status.FAIL, "RAY_AUTH_MODE off"),
    ],
)
def test_ray_auth(environ: dict[str, str], token_file: bool, status: Status, part: str, tmp_path: Path) -> None:
    if token_file:
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").write_text("secret")
    finding = doctor.check_ray(environ, tmp_path)
    assert finding.status is status
    assert part in finding.found
    assert bool(finding.fix) == (status is not Status.OK)


@pytest.mark.parametrize(
    ("version", "num_gpus", "status"),
    [("2.13.0+cpu", 0, Status.OK), ("2.13.0+cu130", 8, Status.OK), ("2.13.0+cpu", 1, Status.WARN)],
)
def test_torch(version: str, num_gpus: int, status: Status) -> None:
    assert doctor.check_torch(version, num_gpus, list).status is status


def test_what_triton_needs_is_checked_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert doctor.check_torch("2.13.0+cu130", 0).status is Status.OK
    bare = doctor.check_torch("2.13.0+cu130", 8)
    assert (bare.status, bare.fix) == (Status.WARN, "to use the GPU: apt-get install -y gcc python3-dev")


def test_mooncake_names_what_to_install() -> None:
    absent = doctor.check_mooncake(lambda _: None, list)
    assert (absent.status, absent.found) == (Status.WARN, "not installed")
    bare = doctor.check_mooncake(lambda _: "0.3", lambda: ["libibverbs1", "libnuma1"])
    assert bare.status is Status.WARN
    assert bare.fix.endswith("apt-get install -y libibverbs1 libnuma1")
    assert doctor.check_mooncake(lambda _: "0.3", list) == Finding("mooncake", Status.OK, "0.3")


def test_missing_libraries_are_named_by_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = {"libc.so.6": "libc6", "libbaton-has-none.so.9": "libnone9"}
    monkeypatch.setattr(doctor, "MOONCAKE_LIBRARIES", libraries)
    assert doctor.missing_mooncake_packages() == ["libnone9"]


def test_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: None)
    assert doctor.check_port() == Finding("port", Status.OK, "127.0.0.1:8000 is free")
    monkeypatch.setattr(socket.socket, "bind", Mock(side_effect=OSError(98, "Address already in use")))
    assert doctor.check_port().found == "127.0.0.1:8000: Address already in use"


def test_memory() -> None:
    assert doctor.check_memory(MachineMemory(total=0, available=8 << 30)).found == "8.0 GiB available"
    assert doctor.check_memory(MachineMemory(total=0, available=1 << 30)).status is Status.WARN


@pytest.mark.parametrize(
    ("script", "finding"),
    [
        ("print('native; decode: native 1 ms')", Finding("attention", Status.OK, "native; decode: native 1 ms")),
        ("print('native is unavailable: x')", Finding("attention", Status.WARN, "native is unavailable: x")),
        (
            "import sys; sys.exit('first\\nImportError: no torch')",
            Finding("attention", Status.WARN, "cannot be measured: ImportError: no torch", "run `make venv`"),
        ),
    ],
)
def test_attention(script: str, finding: Finding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    assert doctor.check_attention([sys.executable, "-c", script]) == finding


def test_attention_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_compiler", lambda: None)
    monkeypatch.setattr(doctor, "_MEASURE_S", 0.1)
    finding = doctor.check_attention([sys.executable, "-c", "import time; time.sleep(60)"])
    assert (finding.status, "timed out" in finding.found) == (Status.WARN, True)


def test_an_account_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("BATON_CACHE_DIR", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert doctor.check_ray({}).status is Status.OK
    assert doctor.check_cache().status is Status.FAIL


def test_a_home_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.delenv("BATON_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Path, "stat", refuse)
    assert doctor.check_ray({}, tmp_path).status is Status.OK
    assert doctor.check_cache().status is Status.OK


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "cache"
    assert doctor.check_cache(folder).found.startswith(f"{folder}, ")
    assert not (tmp_path / "new").exists()
    (tmp_path / "new").touch()
    assert doctor.check_cache(folder).found == f"{tmp_path}/new cannot be written: Not a directory"
    assert doctor.check_cache(Path("/proc/cache")).status is Status.FAIL
    monkeypatch.setenv("BATON_CACHE_DIR", "here")
    assert doctor.check_cache().status is Status.FAIL
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert doctor.check_cache(tmp_path).status is Status.WARN


@pytest.mark.parametrize(("status", "code"), [(Status.OK, 0), (Status.WARN, 0), (Status.FAIL, 1)])
def test_exit_code_and_output(status: Status, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = Finding("thing", status, "[found] so", "fix it" if status is not Status.OK else "")
    monkeypatch.setattr(doctor, "CHECKS", (lambda: finding,))
    text, as_json = _run([]), _run(["--json"])
    assert text.exit_code == as_json.exit_code == code
    assert "[found] so" in text.stdout
    assert ("-> fix it" in text.stdout) == (status is not Status.OK)
    assert json.loads(as_json.stdout) == {
        "ok": code == 0,
        "findings": [{"name": "thing", "status": status, "found": "[found] so", "fix": finding.fix}],
    }


def _run(arguments: list[str]) -> Result:
    app = typer.Typer()
    app.command()(doctor.doctor)
    return CliRunner().invoke(app, arguments)
