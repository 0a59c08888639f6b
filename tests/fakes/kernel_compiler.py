"""Compilation of kernels for an H200 instead of launching them. It needs Triton, but no driver and no GPU.

Use it in a separate process: on import, Triton decides whether to interpret kernels.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

H200 = GPUTarget("cuda", 90, 32)
MOST_SHARED_BYTES = 227 << 10
MOST_BESIDE = 65_535
"""Programs along the second and third axes of a launch. Only the first axis can count tokens and pages."""
_TYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass(frozen=True)
class Compiled:
    """Compiled kernel of one launch."""

    name: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    spills_among_products: int
    """Number of instructions that spill registers in a loop that multiplies matrices."""
    asm: str


def compile_launches(launch: Callable[[], object]) -> list[Compiled]:
    """Compile the kernels that ``launch`` would launch for CPU tensors."""
    compiled: list[Compiled] = []

    def compile_instead(self: Any, *args: Any, grid: tuple[int, ...], **kwargs: Any) -> None:
        assert all(0 < size <= MOST_BESIDE for size in grid[1:]), f"{self.__name__} cannot be launched: {grid}"
        compiled.append(_compile(self, args, kwargs))

    run = JITFunction.run
    JITFunction.run = compile_instead
    try:
        launch()
    finally:
        JITFunction.run = run
    return compiled


def _compile(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
    options = {name: kwargs[name] for name in _OPTIONS if name in kwargs}
    given = dict(zip(kernel.arg_names, args, strict=False))
    given |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = given[param.name]
        is_specialized = not param.do_not_specialize
        if param.is_constexpr or value is None or (type(value) is int and value == 1 and is_specialized):
            signature[param.name], constants[(index,)] = "constexpr", value
            continue
        signature[param.name] = _type_of(value)
        parts = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for at, part in parts:
            is_aligned = isinstance(part, torch.Tensor) and part.data_ptr() % 16 == 0
            is_multiple = isinstance(part, int) and part % 16 == 0 and is_specialized
            if is_multiple or (is_aligned and not param.do_not_specialize_on_alignment):
                attributes[(index,) if at is None else (index, at)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=H200, options=options)
    shown = _disassembled(result.asm["cubin"])
    resources = _resources(shown)
    return Compiled(
        kernel.__name__, result.metadata.shared, *resources, spills_among_products(shown), result.asm["ptx"]
    )


def _type_of(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_type_of(part) for part in value)
    if isinstance(value, torch.Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _disassembled(cubin: bytes) -> str:
    """Return a kernel's resources and instructions as text."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _resources(shown: str) -> tuple[int, int]:
    """Return registers per thread, and bytes of its stack, which holds spilled registers."""
    registers, stack = re.search(r"REG:(\d+)", shown), re.search(r"STACK:(\d+)", shown)
    assert registers is not None, shown
    assert stack is not None, shown
    return int(registers[1]), int(stack[1])


def spills_among_products(shown: str) -> int:
    """Count stack accesses in loops that also multiply matrices."""
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]+);", shown)]
    assert code, shown[:1000]
    branches = [(at, re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", text)) for at, text in code]
    loops = [(int(to[1], 16), at) for at, to in branches if to is not None and int(to[1], 16) < at]
    products, accesses = ([at for at, text in code if re.search(which, text)] for which in ("MMA", r"\b(LDL|STL)\b"))
    loops = [(begin, end) for begin, end in loops if any(begin <= at <= end for at in products)]
    return sum(any(begin <= at <= end for begin, end in loops) for at in accesses)
