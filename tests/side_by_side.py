"""Which tests run side by side with `pytest -n`: those of different files, but for whole clusters."""

from xdist.scheduler import LoadFileScheduling

_CLUSTERS = ("tests/chaos/", "tests/integration/clusters/")


class OneClusterAtATime(LoadFileScheduling):  # type: ignore[misc]  # untyped
    """Clusters of one machine see each other, and some have the ports that README names."""

    def _split_scope(self, nodeid: str) -> str:
        return "clusters" if nodeid.startswith(_CLUSTERS) else super()._split_scope(nodeid)
