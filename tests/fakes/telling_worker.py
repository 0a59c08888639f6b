"""A worker that tells between runs what its last heartbeat would have told."""

from typing import Any

from cluster.spec.registry import ReplicaLoad
from workers.loop.leader_link import LocalLink, RemoteLink
from workers.worker import Worker


class TellingWorker(Worker):
    """A leader's load is that of its last round; a follower has none."""

    _last_link: LocalLink | RemoteLink | None = None

    def told_load(self) -> ReplicaLoad:
        """As the lease takes it."""
        return self._last_link.load if isinstance(self._last_link, LocalLink) else ReplicaLoad()

    def _link(self, *args: Any) -> LocalLink | RemoteLink:
        self._last_link = super()._link(*args)
        return self._last_link
