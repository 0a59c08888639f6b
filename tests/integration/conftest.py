"""Settings of the processes of local engines."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def checked_collectives() -> Iterator[None]:
    """Have ranks compare every collective; requested before a module's engine starts its processes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATON_CHECK_COLLECTIVES", "1")
        yield
