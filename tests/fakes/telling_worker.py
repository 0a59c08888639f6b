"""A worker that tells between runs what its last heartbeat would have told."""

from typing import Any

from cluster.spec.registry import ReplicaLoad
from workers.loop.leader_link import LocalLeader, RemoteLeader
from workers.worker import Worker


class TellingWorker(Worker):
    """A leader's load is that of its last round; a follower has none."""

    _last_link: LocalLeader | RemoteLeader | None = None

    def told_load(self) -> ReplicaLoad:
        """As the lease takes it."""
        return self._last_link.load if isinstance(self._last_link, LocalLeader) else ReplicaLoad()

    def _link(self, *args: Any) -> LocalLeader | RemoteLeader:
        self._last_link = super()._link(*args)
        return self._last_link
