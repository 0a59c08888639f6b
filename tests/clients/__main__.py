"""Test every client and print a table: ``python -m tests.clients [PYTEST'S OPTIONS]``. Packages come from PyPI."""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["-m", "full", *sys.argv[1:], str(Path(__file__).parent)]))
