"""These tests run kernels in Triton's interpreter; tests/gpu runs the same cases on a GPU."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> None:
    # Imported late: Triton asks the environment when it is imported, which is set when the session begins.
    from tests.fakes.interpreter import mend_interpreter

    mend_interpreter()
