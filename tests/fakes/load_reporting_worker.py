"""Worker that returns, between runs, the load of its last heartbeat."""

from typing import Any

from cluster.spec.registry import ReplicaLoad
from workers.loop.leader_link import LocalLink, RemoteLink
from workers.worker import Worker


class LoadReportingWorker(Worker):
    """Worker whose leader reports its last load. A follower has none."""

    _last_link: LocalLink | RemoteLink | None = None

    def last_load(self) -> ReplicaLoad:
        """Return the load as for a heartbeat."""
        return self._last_link.load if isinstance(self._last_link, LocalLink) else ReplicaLoad()

    def _link(self, *args: Any) -> LocalLink | RemoteLink:
        self._last_link = super()._link(*args)
        return self._last_link
