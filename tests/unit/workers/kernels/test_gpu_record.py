"""Record of `python -m tests.gpu`."""

from pathlib import Path

import pytest

from tests.gpu.__main__ import commit


def test_a_record_needs_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images with CUDA often lack it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "of unknown revision"
