"""A worker that tells between runs what its last heartbeat would have told."""

from cluster.spec.registry import ReplicaLoad
from workers.worker import Worker


class TellingWorker(Worker):
    """A leader's load is that of its last turn; a follower has none."""

    def told_load(self) -> ReplicaLoad:
        """As the lease takes it."""
        return self._load
