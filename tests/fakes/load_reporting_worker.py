"""Worker that returns, between runs, the load of its last heartbeat, and what its weights take."""

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

    def matrix_bytes(self) -> dict[str, int]:
        """Return the memory of this rank's matrices by name, without routers, which every rank has in full."""
        assert self._rank is not None
        weights = self._rank.model.named_parameters()
        return {
            name: weight.untyped_storage().nbytes()
            for name, weight in weights
            if weight.dim() > 1 and not name.endswith("router.weight")
        }

    def communication_s(self) -> tuple[float, float]:
        """Return the time that this rank has spent on projections of other ranks, and in all collectives."""
        assert self._rank is not None
        return self._rank.groups.model.projections.waited_s, self._rank.step_recorder.communication_s

    def _link(self, *args: Any) -> LocalLink | RemoteLink:
        self._last_link = super()._link(*args)
        return self._last_link
