"""The memory that the router processes of a cluster share: the driver's, so that it outlives each of them."""

import os

from cluster.spec.ids import router_names
from cluster.spec.worker_spec import RouterPlace


class RouterBoard:
    """Nothing for a router that is one process."""

    def __init__(self, num_processes: int) -> None:
        # Without a name in any file system, so that a killed driver leaves nothing behind; as long as it needs to be.
        self._descriptor = os.memfd_create("baton-routers") if num_processes > 1 else None
        path = "" if self._descriptor is None else f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self.places = [
            RouterPlace(name=name, index=index, num_processes=num_processes, board=path)
            for index, name in enumerate(router_names(num_processes))
        ]
        """Of every process."""

    def beats(self) -> dict[str, int]:
        """Numbers that change as long as the processes live."""
        if self._descriptor is None:
            return {}
        from router.board import PAGE_BYTES

        # A page begins with its number.
        return {
            place.name: int.from_bytes(os.pread(self._descriptor, 8, place.index * PAGE_BYTES), "little")
            for place in self.places
        }
