"""The wheel contains every file that Baton reads at run time."""

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
