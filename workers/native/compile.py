"""Compilation of this folder's shared library for this machine's processor. Does not import torch."""

import ctypes
import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cluster.compilation import FIX, TIMEOUT_S, CannotCompileError, compile_once, compiler_path

SOURCES = tuple(sorted(path for path in Path(__file__).parent.iterdir() if path.suffix in (".cpp", ".h")))
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_AMX = ("amx_tile", "amx_bf16")
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux's system call by which a process asks for tile registers, and its arguments."""
_OPTIONS = ("-ffp-contract=fast",)


class Kind(NamedTuple):
    """Kind of processor, named for its instruction set."""

    name: str
    flags: tuple[str, ...]
    """Required CPU features, named as in /proc/cpuinfo."""
    options: tuple[str, ...]
    """Compiler options."""


_AVX512_BF16 = Kind("AVX512-BF16", (*_AVX512, "avx512_bf16"), (*(f"-m{flag}" for flag in _AVX512), "-mavx512bf16"))
KINDS = (
    Kind("AMX", (*_AVX512_BF16.flags, *_AMX), (*_AVX512_BF16.options, "-mamx-tile", "-mamx-bf16")),
    _AVX512_BF16,
    Kind("AVX512", _AVX512, ("-mfma", *(f"-m{flag}" for flag in _AVX512))),
    Kind("AVX2", ("avx2", "fma"), ("-mavx2", "-mfma")),
    Kind("NEON", ("asimd",), ()),
)
"""Kinds of processors, fastest first. The first two multiply in bf16; the others use fp32."""


class Compiler(NamedTuple):
    """C++ compiler, and the kind of processor that it compiles for."""

    path: str
    kind: Kind


def find_compiler() -> Compiler:
    """Return the compiler for the fastest kind that it and this machine support. Raises CannotCompileError."""
    kinds = runnable_kinds()
    if not kinds:
        raise CannotCompileError(f"the CPU has none of {', '.join(kind.name for kind in KINDS)}")
    path = compiler_path()
    for kind in kinds:
        if _accepts(path, kind.options):
            return Compiler(path, kind)
    raise CannotCompileError(f"{path} knows none of {', '.join(kind.name for kind in kinds)}", FIX)


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


@cache
def _accepts(path: str, options: tuple[str, ...]) -> bool:
    command = (path, *options, "-E", "-x", "c++", os.devnull)
    try:
        return subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def compiled_library(compiler: Compiler) -> Path:
    """Return the library's path. Compile it if this machine has none. Raises CannotCompileError."""
    return compile_once(SOURCES, compiler.path, (*_OPTIONS, *compiler.kind.options))
