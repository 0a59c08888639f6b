"""The wheel contains every file that Baton reads at run time, and the pinned packages can be installed together."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import readme

pytestmark = pytest.mark.integration


def test_the_wheel_has_sources_pages_and_deploy_files(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["git", "checkout-index", "-a", f"--prefix={source}/"], cwd=readme.ROOT, check=True)
    files = [path.relative_to(source) for path in source.rglob("*.*") if path.is_file()]
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, str(source)], check=True)
    (wheel,) = tmp_path.glob("baton_serve-*.whl")
    names = {name.partition(".data/data/share/baton/")[2] or name for name in zipfile.ZipFile(wheel).namelist()}
    product = ("cluster", "workers", "transfer", "router")
    assert {str(file) for file in files if file.parts[0] in product or file.match("deploy/*.yaml")} <= names


@pytest.mark.full
def test_the_pins_are_those_of_pytorch_for_gpus() -> None:
    """Downloads PyTorch's CUDA build, which requires one version of Triton."""
    makefile = (readme.ROOT / "Makefile").read_text(encoding="utf-8")
    (version,) = re.findall(r"^TORCH +\?= (.+)\+cpu$", makefile, re.MULTILINE)
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--dry-run", "--ignore-installed", "-c", "constraints.txt"]
    subprocess.run([*pip, f"torch==={version}"], cwd=readme.ROOT, check=True)
