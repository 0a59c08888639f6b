"""Differences between a CPU and a GPU are asked of a Device."""

import re
from pathlib import Path

import workers

ROOT = Path(workers.__file__).parent
QUESTION = re.compile(r"""\.is_cuda|\bdevice\.type\b|[=!]= ["'](cuda|cpu)["']|\bDevice\.(CPU|CUDA)|(Cpu|Gpu)Device""")


def test_only_the_device_module_asks_for_a_devices_kind() -> None:
    files = [file for file in ROOT.rglob("*.py") if ROOT / "bench" not in file.parents and file != ROOT / "device.py"]
    assert len(files) > 100
    lines = [f"{file.name}: {line}" for file in files for line in file.read_text("utf-8").splitlines()]
    assert [line for line in lines if QUESTION.search(line)] == []
    assert QUESTION.search((ROOT / "device.py").read_text("utf-8"))
