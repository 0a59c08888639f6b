"""Scheduling with `pytest -n`: test files run in parallel, except those that start whole clusters."""

from xdist.scheduler import LoadFileScheduling

_CLUSTERS = ("tests/chaos/", "tests/clients/", "tests/integration/clusters/")


class OneClusterAtATime(LoadFileScheduling):  # type: ignore[misc]  # untyped
    """Clusters on one machine see each other, and some use the ports that README names."""

    def _split_scope(self, nodeid: str) -> str:
        return "clusters" if nodeid.startswith(_CLUSTERS) else super()._split_scope(nodeid)
