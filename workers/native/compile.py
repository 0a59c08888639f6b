"""Compilation of this folder's shared library, once per machine. Does not import torch."""

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from cluster.spec.env import CACHE_DIR

SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in (
        *("bf16.cpp", "fp32.cpp", "attention.h", "elementwise.h", "linear.h", "select.h"),
        *("block.h", "block_bf16.h", "panel_amx.h", "panel_avx512.h", "rows_bf16.h", "block_fp32.h"),
        *("vectors.h", "common.h"),
    )
)
_TIMEOUT_S = 120.0
_FIX = "apt-get install -y g++"
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AMX = ("amx_tile", "amx_bf16")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux's system call by which a process asks for tile registers, and its arguments."""
_OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fPIC", "-shared")


class Kind(NamedTuple):
    """Kind of processor, named for its instruction set."""

    name: str
    flags: tuple[str, ...]
    """Required CPU features, named as in /proc/cpuinfo."""
    options: tuple[str, ...]
    """Compiler options."""

    @property
    def multiplies_bf16(self) -> bool:
        return "avx512_bf16" in self.flags


_AVX512_BF16 = Kind("AVX512-BF16", (*_AVX512, "avx512_bf16"), (*(f"-m{flag}" for flag in _AVX512), "-mavx512bf16"))
KINDS = (
    Kind("AMX", (*_AVX512_BF16.flags, *_AMX), (*_AVX512_BF16.options, "-mamx-tile", "-mamx-bf16")),
    _AVX512_BF16,
    Kind("AVX512", _AVX512, ("-mfma", *(f"-m{flag}" for flag in _AVX512))),
    Kind("AVX2", ("avx2", "fma"), ("-mavx2", "-mfma")),
    Kind("NEON", ("asimd",), ()),
)
"""Kinds of processors, fastest first. The first two multiply in bf16; the others use fp32."""


class CannotCompileError(Exception):
    """Reason why there is no library, and a command that may fix it."""

    def __init__(self, reason: str, fix: str = "") -> None:
        super().__init__(reason)
        self.fix = fix


class Compiler(NamedTuple):
    """C++ compiler, and the kind of processor that it compiles for."""

    path: str
    kind: Kind


def find_compiler() -> Compiler:
    """Return the compiler for the fastest kind that this machine supports. Raises CannotCompileError."""
    return find_compilers()[0]


def find_compilers() -> list[Compiler]:
    """Return the compiler for each kind that it and this machine support, fastest first. Raises CannotCompileError."""
    kinds = runnable_kinds()
    if not kinds:
        raise CannotCompileError(f"the CPU has none of {', '.join(kind.name for kind in KINDS)}")
    path = shutil.which("c++")
    if path is None:
        raise CannotCompileError("no C++ compiler", _FIX)
    compilers = [Compiler(path, kind) for kind in kinds if _accepts(path, kind.options)]
    if not compilers:
        raise CannotCompileError(f"{path} knows none of {', '.join(kind.name for kind in kinds)}", _FIX)
    return compilers


def runnable_kinds(cpu_info: Path = Path("/proc/cpuinfo")) -> list[Kind]:
    flags: set[str] = set()
    if platform.machine() in ("aarch64", "arm64"):
        flags = {"asimd"}  # all such CPUs have it, and macOS has no /proc/cpuinfo
    elif cpu_info.is_file():
        lines = cpu_info.read_text(errors="replace").splitlines()
        flags = set(next((line for line in lines if line.startswith("flags")), "").split())
    if flags.issuperset(_AMX) and not _may_use_tiles():
        flags.difference_update(_AMX)
    return [kind for kind in KINDS if flags.issuperset(kind.flags)]


def _may_use_tiles() -> bool:
    """Ask Linux for tile registers, for this process. Kernels before 5.16, and some sandboxes, refuse."""
    found: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return found == 0


def _accepts(path: str, options: Sequence[str]) -> bool:
    command = (path, *options, "-E", "-x", "c++", os.devnull)
    try:
        return subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def compiled_library(compiler: Compiler) -> Path:
    """Return the library's path. Compile it first if this machine has no intact copy. Raises CannotCompileError.

    If several processes call this at the same time, only one compiles.
    """
    try:
        folder = CACHE_DIR.get() / "native"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise CannotCompileError(f"{folder} belongs to another user")
        path = folder / f"baton-{_digest(compiler)}.so"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by the system if this process dies
            if not _is_intact(path):
                _compile(compiler, path)
        return path
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompileError(str(error)) from error


def _digest(compiler: Compiler) -> str:
    version = subprocess.run([compiler.path, "--version"], capture_output=True, timeout=_TIMEOUT_S, check=True).stdout
    options = " ".join((*_OPTIONS, *compiler.kind.options)).encode()
    parts = (*(source.read_bytes() for source in SOURCES), version, options)
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(compiler: Compiler, path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        units = [str(source) for source in SOURCES if source.suffix == ".cpp"]
        command = [compiler.path, *_OPTIONS, *compiler.kind.options, "-o", str(made), *units]
        result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if result.returncode:
            message = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
            raise CannotCompileError(f"{compiler.path} failed: {message}", _FIX)
        # Loading a truncated file can kill the process, so this digest is checked before every load.
        code = made.read_bytes()
        made.write_bytes(code + hashlib.sha256(code).digest())
        made.replace(path)


def _is_intact(path: Path) -> bool:
    content = path.read_bytes() if path.is_file() else b""
    size = hashlib.sha256().digest_size
    return len(content) > size and hashlib.sha256(content[:-size]).digest() == content[-size:]
