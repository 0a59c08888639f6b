"""Everything that one GPU can show, without Ray: tests, kernels and the engine. Writes one dated record in Markdown.

python -m tests.gpu [--parts tests,kernels,engine] [FILE]
"""

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import date
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.etree import ElementTree

import torch

PARTS = ("tests", "kernels", "engine")
_TRUNCATED = 300
"""Maximum number of characters of a failure's message."""


class FileResult(NamedTuple):
    passed: int
    failed: int
    skipped: int
    seconds: float


def main(argv: list[str]) -> int:
    """Run the parts and write the record. Return 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"parts to run: {', '.join(PARTS)}")
    parser.add_argument("file", nargs="?", type=Path, default=Path(f"gpu-{date.today()}.md"), help="the record")
    given = parser.parse_args(argv)
    parts = given.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts: got {unknown[0]}; allowed: {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU; install a CUDA build on a machine with a GPU")
    status = 0
    with given.file.open("w") as record:
        for line in heading():
            print(line, file=record, flush=True)
        for part in parts:
            begin_s = time.monotonic()
            lines, has_failed = run_tests() if part == "tests" else run_bench(part)
            status |= has_failed
            print(f"\n## {part}, {time.monotonic() - begin_s:.0f} s\n", *lines, sep="\n", file=record, flush=True)
    print(f"record: {given.file}")
    return status


def heading() -> list[str]:
    gpu = torch.cuda.get_device_properties(0)
    versions = f"torch {torch.__version__}, Triton {metadata.version('triton')}, Python {platform.python_version()}"
    return [f"# {gpu.name}, {date.today()}", "", f"{gpu.total_memory / 2**30:.1f} GiB, {versions}, Baton {commit()}"]


def commit() -> str:
    """Return the commit, unless this is no checkout, or the image has no git."""
    command, found = ["git", "describe", "--always", "--dirty"], ""
    with suppress(FileNotFoundError):
        found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return found or "of unknown revision"


def run_tests() -> tuple[list[str], bool]:
    """Return the rows of a table of test files, and whether a test failed."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", f"--junitxml={report}"]
        status = subprocess.run(command, check=False).returncode
        if not report.exists():
            return [f"pytest ended with status {status} and no report."], True
        return list(test_lines(ElementTree.parse(report).iter("testcase"))), status != 0


def test_lines(cases: Iterable[ElementTree.Element]) -> Iterator[str]:
    files: dict[str, FileResult] = {}
    problems = []
    for case in cases:
        name = case.get("classname", "").rpartition(".")[2]
        before = files.get(name, FileResult(0, 0, 0, 0.0))
        failure = next((each for each in case if each.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if failure is not None:
            problems.append(f"- `{name}::{case.get('name')}`: {failure.get('message', '')[:_TRUNCATED]!r}")
        files[name] = FileResult(
            before.passed + (failure is None and skipped is None),
            before.failed + (failure is not None),
            before.skipped + (skipped is not None),
            before.seconds + float(case.get("time", 0)),
        )
    yield "| file | passed | failed | skipped | seconds |"
    yield "|---|---|---|---|---|"
    for name, result in files.items():
        yield f"| {name} | {result.passed} | {result.failed} | {result.skipped} | {result.seconds:.0f} |"
    if problems:
        yield from ["", "Failed:", "", *problems]


def run_bench(name: str) -> tuple[list[str], bool]:
    """Return the output of `baton bench NAME`, and whether it failed."""
    command = [sys.executable, "-m", "cluster.cli", "bench", name]
    output = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line.rstrip())
    return ["```", *output, "```"], process.returncode != 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
