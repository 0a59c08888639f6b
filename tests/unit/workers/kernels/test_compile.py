"""Every kernel compiles for an H200, fits its shared memory, and spills no registers in matrix loops. Needs no GPU."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.kernel_compiler import MOST_SHARED_BYTES, spills_among_products
from tests.fakes.kernel_launches import LAUNCHES

ORDINARY = {
    "attention",
    "attention of latents",
    "gate of experts",
    "copy of a pool",
    "decode of one head",
    "decode of narrow heads",
}
ANY_SIZE = {
    "merges of any length",
    "draws of any number",
    "FP8 products of any length",
    "selections of any size",
    "sums of any choices",
}
USUAL = ORDINARY | ANY_SIZE
"""Kernels compiled in one process, which most tests share."""
MOST_SPILLED_BYTES = {
    "attention of five heads each": 32,
    "attention of latents in fp32": 32,
    "attention of odd heads": 32,
    "attention of a rank's latents": 8,
    "attention of latents in small pages": 72,
    "decode of five heads each": 32,
    "decode of narrow heads": 16,
    "decode of pairs of wide heads": 8,
    "decode of three wide heads each": 32,
    "decode without groups": 8,
    "selection in decode": 8,
    "selection in prefill": 8,
    "selections of any size": 8,
}
"""Kernels that may spill, with their limit in bytes. They save a few values before or during the loop over keys, which
lets one more program run per multiprocessor, or because queries take all registers.
"""


def compiled(name: str) -> list[dict[str, Any]]:
    return compiled_together(frozenset(USUAL) if name in USUAL else frozenset([name]))[name]


@cache
def compiled_together(names: frozenset[str]) -> dict[str, list[dict[str, Any]]]:
    """Compile kernels in a process that does not interpret them."""
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.fakes.kernel_launches", *sorted(names)]
    run = subprocess.run(
        command, cwd=Path(__file__).parents[4], env=environ, capture_output=True, text=True, timeout=250, check=False
    )
    assert run.returncode == 0, run.stderr
    launches: dict[str, list[dict[str, Any]]] = json.loads(run.stdout)
    return launches


def kernels_that_join() -> list[str]:
    """Return the merging kernels for prompts and for decoded tokens."""
    kernels = [launch["asm"] for launch in compiled("attention") if launch["name"] == "_attend_kernel"]
    assert len(kernels) == 2
    return kernels


def order_of(asm: str) -> tuple[list[str], list[int]]:
    """Return branches, memory accesses and barriers in order, and which accesses count programs, for two rounds."""
    steps = re.findall(r"^\$L__BB|st\.global|bar\.sync|atom\.global\.gpu\.acq_rel|ld\.global\.cg", asm, re.MULTILINE)
    counts = [at for at, step in enumerate(steps) if step.startswith("atom")]
    assert len(counts) == 2
    return steps, counts


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in ORDINARY else pytest.mark.full) for n in LAUNCHES])
def test_launch(name: str) -> None:
    launches = compiled(name)
    assert launches
    for launch in launches:
        assert launch["shared_bytes"] <= MOST_SHARED_BYTES, launch["name"]
        assert launch["spilled_bytes"] <= MOST_SPILLED_BYTES.get(name, 0), launch["name"]
        assert launch["spills_among_products"] == 0, launch["name"]


def test_spills_in_matrix_loops_are_distinguished() -> None:
    """The examples are two nested loops, of which the outer one multiplies, and a loop that does not."""
    lines = ["STL [R1], R2", "HMMA.16816.F32.BF16 R4, R8, R12, R4", "STL.64 [R1+0x8], R4", "@P0 BRA 0x0020"]
    lines += ["LDL.LU R3, [R1]", "@!P1 BRA 0x0010", "LDL R3, [R1]", "@P2 BRA 0x0060", "LDL R3, [R1]", "BRA 0x0090"]
    code = [f"  /*{16 * at:04x}*/      {line} ;   /* 0x0000040001057387 */" for at, line in enumerate(lines)]
    assert spills_among_products("\n".join(code)) == 2
    assert spills_among_products("\n".join(code[6:])) == 0


def test_keys_are_loaded_while_others_are_multiplied() -> None:
    """Wherever a copy is awaited, another one may still be in flight, for prompts and for decoded tokens."""
    assert all(re.search(r"cp\.async\.wait_group\s+[1-9]", asm) for asm in kernels_that_join())


def test_a_program_counts_itself_after_all_its_threads_have_written_and_looks_before_any_reads() -> None:
    """Otherwise the last program would merge parts that are not written yet."""
    for steps, counts in map(order_of, kernels_that_join()):
        assert all(steps[at - 1] == steps[at + 1] == "bar.sync" for at in counts)
        assert steps.count("ld.global.cg") >= 2 * len(counts)


def test_a_block_is_written_over_its_parts_after_all_threads_have_read_them() -> None:
    """Otherwise some threads would merge merged results. The code is behind a branch that single blocks skip."""
    for steps, (first, second) in map(order_of, kernels_that_join()):
        branch = second - steps[second::-1].index("$L__BB")
        assert "ld.global.cg" in steps[first:branch]
        assert steps[branch + 1] == "bar.sync"
        assert steps.index("st.global", branch) < second


def test_batches_do_not_recompile() -> None:
    for name in ANY_SIZE:
        launches = compiled(name)
        assert len({launch["asm"] for launch in launches}) == len({launch["name"] for launch in launches}), name


@pytest.mark.full
def test_prompts_are_multiplied_by_the_units_that_hopper_has_for_it() -> None:
    assert any("wgmma" in launch["asm"] for launch in compiled("attention"))
