"""Build of the native library: once, atomic, and its failure never prevents a start. The compiler is a fake."""

import logging
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cluster.cli.doctor import Status, check_attention
from cluster.compilation import CannotCompileError
from cluster.spec.config import AttentionSetting
from workers.attention import registry
from workers.attention.interface import AttentionBackend
from workers.attention.torch_backend import TorchAttention
from workers.attention.triton.backend import TritonAttention
from workers.device import CPU, GPU, Device
from workers.native import compile as native
from workers.native.compile import KINDS, SOURCES, Kind, compiled_library, find_compiler, runnable_kinds

COMPILER = """#!/bin/sh
case "$*" in --version) echo 1; exit;; *-mfuture*) exit 1;; *-E*) exit;; esac
while [ "$1" != -o ]; do shift; done
sleep 0.2
echo code > "$2"
echo "$2" >> "$(dirname "$0")/compiled"
"""
KIND = Kind("any", (), ())
AMX_KINDS = ["AMX", "AVX512-BF16", "AVX512", "AVX2"]
REAL_KINDS = runnable_kinds()
BUILD = """
from workers.native.compile import Compiler, Kind, compiled_library
print(compiled_library(Compiler("c++", Kind("any", (), ()))))
"""


@pytest.fixture(autouse=True)
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a compiler, on a CPU with all required features, with an empty cache."""
    folder = tmp_path / "bin"
    folder.mkdir()
    set_compiler(folder, COMPILER)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("BATON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "KINDS", (KIND,))
    monkeypatch.setattr(registry._log, "disabled", False)  # import-linter disables loggers
    return folder


def set_compiler(folder: Path, script: str) -> None:
    (folder / "c++").write_text(script)
    (folder / "c++").chmod(0o755)


def num_compiled(tools: Path) -> int:
    made = tools / "compiled"
    return len(made.read_text().splitlines()) if made.exists() else 0


def test_it_is_compiled_once(tools: Path) -> None:
    path = compiled_library(find_compiler())
    assert path.read_bytes().startswith(b"code\n")
    assert compiled_library(find_compiler()) == path
    assert num_compiled(tools) == 1


def test_processes_that_start_at_once_compile_once(tools: Path) -> None:
    command = [sys.executable, "-c", BUILD]
    root = Path(native.__file__).parents[3]
    started = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(paths) == num_compiled(tools) == 1


@pytest.mark.parametrize("damage", [b"", b"code\n", b"x" * 100])
def test_a_broken_file_is_compiled_again(damage: bytes, tools: Path) -> None:
    path = compiled_library(find_compiler())
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert compiled_library(find_compiler()).read_bytes() == whole
    assert num_compiled(tools) == 2


def test_another_source_compiler_option_or_processor_is_another_library(
    tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {compiled_library(find_compiler())}
    set_compiler(tools, COMPILER.replace("echo 1", "echo 2"))
    paths.add(compiled_library(find_compiler()))
    monkeypatch.setattr(platform, "machine", lambda: "other")
    paths.add(compiled_library(find_compiler()))
    (tools / "other.cpp").write_text("other")
    monkeypatch.setattr(native, "KINDS", (Kind("any", (), ("-O1",)),))
    paths.add(compiled_library(find_compiler()))
    monkeypatch.setattr(native, "SOURCES", (tools / "other.cpp",))
    paths.add(compiled_library(find_compiler()))
    assert len(paths) == 5


def test_a_failed_build_leaves_nothing(tools: Path) -> None:
    set_compiler(
        tools, "#!/bin/sh\ncase \"$*\" in --version|*-E*) exit;; esac\necho 'x.cpp:1: error: no' >&2; exit 1\n"
    )
    with pytest.raises(CannotCompileError, match=r"c\+\+ failed: x.cpp:1: error: no") as failure:
        compiled_library(find_compiler())
    assert failure.value.fix == "apt-get install -y g++"
    folder = tools.parent / "cache" / "native"
    assert [path.name for path in folder.iterdir()] == ["lock"]


@pytest.mark.usefixtures("tools")
def test_an_intact_library_is_used_from_a_folder_that_cannot_be_written() -> None:
    path = compiled_library(find_compiler())
    (path.parent / "lock").unlink()
    (path.parent / "lock").mkdir()  # cannot be opened, not even by root
    assert compiled_library(find_compiler()) == path


def test_a_cache_that_cannot_be_written_is_a_reason(tools: Path) -> None:
    (tools.parent / "cache").mkdir()
    (tools.parent / "cache" / "native").write_text("in the way")
    with pytest.raises(CannotCompileError, match="native"):
        compiled_library(find_compiler())


def test_another_users_code_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(CannotCompileError, match="belongs to another user"):
        compiled_library(find_compiler())


def fastest(device: Device, dtype: torch.dtype) -> AttentionBackend:
    """Return the backend that ``auto`` selects."""
    return registry.choose_backend(AttentionSetting.AUTO, device, dtype).backend


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert isinstance(fastest(CPU, torch.bfloat16), TorchAttention)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message == "attention uses plain torch, at half the speed: no C++ compiler; apt-get install -y g++"
    finding = check_attention()
    assert (finding.status, finding.found) == (Status.WARN, "plain torch: no C++ compiler")
    assert finding.fix.endswith("apt-get install -y g++")


def test_a_library_that_cannot_be_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert isinstance(fastest(CPU, torch.bfloat16), TorchAttention)
    assert "at half the speed: cannot load /" in caplog.text


@pytest.mark.parametrize(
    ("flags", "kinds"),
    [
        ("fpu avx2", []),
        ("fpu avx2 fma", ["AVX2"]),
        ("fma avx2 avx512f avx512bw avx512vl avx512dq", ["AVX512", "AVX2"]),
        ("fma avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16", ["AVX512-BF16", "AVX512", "AVX2"]),
        ("fma avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16 amx_int8", AMX_KINDS),
    ],
)
def test_the_fastest_supported_build_is_used(
    flags: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(native, "_may_use_tiles", lambda: True)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\n")
    assert [kind.name for kind in runnable_kinds(info)] == kinds
    assert runnable_kinds(tmp_path / "absent") == []
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert [kind.name for kind in runnable_kinds(tmp_path / "absent")] == ["NEON"]


def test_tile_registers_that_linux_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(native, "_may_use_tiles", lambda: False)
    info = tmp_path / "cpuinfo"
    info.write_text("flags\t\t: fma avx2 avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16\n")
    assert [kind.name for kind in runnable_kinds(info)] == AMX_KINDS[1:]


def test_tile_registers_are_refused_where_there_are_none() -> None:
    if any("amx_tile" in kind.flags for kind in REAL_KINDS):
        pytest.skip("this CPU has AMX")
    assert not native._may_use_tiles()


def test_a_compiler_that_does_not_know_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    future = Kind("future", (), ("-mfuture",))
    monkeypatch.setattr(native, "KINDS", (future, KIND))
    assert find_compiler().kind == KIND
    monkeypatch.setattr(native, "KINDS", (future,))
    with pytest.raises(CannotCompileError, match=r"c\+\+ knows none of future$") as failure:
        find_compiler()
    assert failure.value.fix == "apt-get install -y g++"


@pytest.mark.skipif(shutil.which("g++-11") is None, reason="apt-get install -y g++-11")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_the_compiler_of_ubuntu_22_understands_the_sources(kind: Kind) -> None:
    if not native._accepts("g++-11", kind.options):
        pytest.skip("for another architecture")
    units = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    command = ["g++-11", "-std=c++17", "-fsyntax-only", *kind.options, *units]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_on_an_unsupported_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "KINDS", (Kind("this", ("that",), ()), Kind("other", ("that",), ())))
    with pytest.raises(CannotCompileError, match=r"the CPU has none of this, other$"):
        find_compiler()
    finding = check_attention()
    assert (finding.status, finding.fix) == (Status.OK, "")


def test_gpus_never_ask_for_it(tools: Path) -> None:
    assert isinstance(fastest(GPU, torch.bfloat16), TritonAttention)
    assert num_compiled(tools) == 0
