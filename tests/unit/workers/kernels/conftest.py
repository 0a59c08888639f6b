"""Tests of kernels in Triton's interpreter. tests/gpu runs the same cases on a GPU."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    # Imported late: on import, Triton reads an environment variable that is set when the session begins.
    from tests.fakes.interpreter import patch_interpreter

    patch_interpreter()
