"""Builds the shared library of attention.cpp, once for a machine, or says why it cannot. Imports no torch."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.spec.env import CACHE_DIR

SOURCES = tuple(Path(__file__).with_name(name) for name in ("attention.cpp", "block.h"))
"""The first is compiled, and includes the rest."""
CPU_FLAGS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16")
"""What the processor must have, as Linux names it in /proc/cpuinfo."""
_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared", *(f"-m{flag.replace('_', '')}" for flag in CPU_FLAGS))
_TIMEOUT_S = 120.0
_MEND = "apt-get install -y g++"


class CannotCompileError(Exception):
    """There will be no library: why, and how to change that where a user can."""

    def __init__(self, reason: str, mend: str = "") -> None:
        super().__init__(reason)
        self.mend = mend


def find_compiler(cpu_info: Path = Path("/proc/cpuinfo")) -> str:
    """The C++ compiler, on a machine that can run what it makes; raises CannotCompileError."""
    flags = _cpu_flags(cpu_info)
    if lacking := [flag for flag in CPU_FLAGS if flag not in flags]:
        raise CannotCompileError(f"the CPU has no {', '.join(lacking)}")
    compiler = shutil.which("c++")
    if compiler is None:
        raise CannotCompileError("no C++ compiler", _MEND)
    return compiler


def compiled_library() -> Path:
    """The library; compiles it if this machine has none that is whole. Raises CannotCompileError.

    Of several processes that ask at once, one compiles.
    """
    compiler = find_compiler()
    try:
        folder = CACHE_DIR.get() / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise CannotCompileError(f"{folder} belongs to another user")
        path = folder / f"attention-{_digest(compiler)}.so"
        with _locked(folder / "lock"):
            if not _is_whole(path):
                _compile(compiler, path)
        return path
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompileError(str(error)) from error


def _cpu_flags(cpu_info: Path) -> set[str]:
    if not cpu_info.is_file():
        return set()
    lines = cpu_info.read_text(errors="replace").splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def _digest(compiler: str) -> str:
    """Of everything that the library is made from."""
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True).stdout
    parts = (*(source.read_bytes() for source in SOURCES), version, *(option.encode() for option in _OPTIONS))
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *_OPTIONS, "-o", str(made), str(SOURCES[0])]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if result.returncode:
            message = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
            raise CannotCompileError(f"{compiler} failed: {message}", _MEND)
        # Loading a file that was cut short can end the process, so that it must be known whole before.
        code = made.read_bytes()
        made.write_bytes(code + hashlib.sha256(code).digest())
        made.replace(path)


def _is_whole(path: Path) -> bool:
    content = path.read_bytes() if path.is_file() else b""
    size = hashlib.sha256().digest_size
    return len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among the processes of this machine; the system lets go for one that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
