"""Compilation of shared libraries from C++, once per machine. Does not import torch."""

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cluster.spec.env import CACHE_DIR

TIMEOUT_S = 120.0
FIX = "apt-get install -y g++"
_COMPILERS = ("c++", "g++", "clang++")
_OPTIONS = ("-std=c++17", "-O3", "-fPIC", "-shared")


class CannotCompileError(Exception):
    """Reason why there is no library, and a command that may fix it."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


def compiler_path() -> str:
    """Return the path of the C++ compiler. Raises CannotCompileError."""
    path = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if path is None:
        raise CannotCompileError("no C++ compiler", FIX)
    return path


def compile_once(sources: Sequence[Path], compiler: str, options: Sequence[str] = ()) -> Path:
    """Return the path of a library. Compile it first if this machine has no intact copy. Raises CannotCompileError.

    If several processes call this at the same time, only one compiles.

    Args:
        sources: files that the library depends on; those that end in ``.cpp`` are compiled.
    """
    options = (*_OPTIONS, *options)
    try:
        folder = CACHE_DIR.get() / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise CannotCompileError(f"{folder} belongs to another user")
        path = folder / f"baton-{_digest(sources, compiler, options)}.so"
        if _is_intact(path):  # the folder may be read-only
            return path
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if this process dies
            if not _is_intact(path):
                _compile(sources, compiler, options, path)
        return path
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompileError(str(error)) from error


def _digest(sources: Sequence[Path], compiler: str, options: Sequence[str]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=TIMEOUT_S, check=True).stdout
    parts = (*(source.read_bytes() for source in sources), version, " ".join((platform.machine(), *options)).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(sources: Sequence[Path], compiler: str, options: Sequence[str], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        units = [str(source) for source in sources if source.suffix == ".cpp"]
        command = [compiler, *options, "-o", str(made), *units]
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if result.returncode:
            message = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
            raise CannotCompileError(f"{compiler} failed: {message}", FIX)
        # Loading a truncated file can kill the process, so this digest is checked before every load.
        code = made.read_bytes()
        made.write_bytes(code + hashlib.sha256(code).digest())
        made.replace(path)


def _is_intact(path: Path) -> bool:
    content = path.read_bytes() if path.is_file() else b""
    size = hashlib.sha256().digest_size
    return len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]
