"""Leading pages that are on the device, or will be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.spec.page_key import first_place
from cluster.spec.tiers import TierJobKind, TierPage
from workers.hicache.policy.host_index import HostIndex
from workers.hicache.policy.jobs import Outcome, TierJobs


@dataclass(frozen=True, slots=True)
class Loaded:
    """Leading pages that are on the device, or will be."""

    num_pages: int
    num_fetched: int
    """Number of these pages that host memory got from storage for this request."""


class HostLoader:
    """Loader of device pages for sequences, which must not free them before a load has ended."""

    def __init__(self, host: HostIndex, jobs: TierJobs) -> None:
        self._host = host
        self._jobs = jobs
        self._loading: set[bytes] = set()

    def is_loading(self, key: bytes) -> bool:
        """Return whether the page is on its way to the device."""
        return key in self._loading

    def load(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        first: int,
        on_end: Callable[[Loaded], None],
        *,
        layerwise: bool = False,
    ) -> Loaded:
        """Fill the device pages from ``first`` on, as far as host memory has them; return what is being loaded.

        ``on_end`` is called with the pages that were loaded, unless there are none to load. A layerwise load runs
        along with the next step, which waits for each layer, so all its pages can be counted on.
        """
        found = self._host.find(keys[first:])
        if not found:
            return Loaded(0, 0)
        wanted = list(keys[first : first + len(found)])
        index = first_place(keys[0]) + first
        tier_pages = [
            TierPage(key=key, index=index + number, device=pages[first + number], host=host)
            for number, (key, host) in enumerate(zip(wanted, found, strict=True))
        ]
        self._host.hold(wanted)
        self._host.touch(keys[: first + len(found)])
        fetched = self._host.note_used(wanted)
        self._loading.update(wanted)

        def on_loaded(outcome: Outcome) -> None:
            self._host.release(wanted)
            self._loading.difference_update(wanted)
            on_end(Loaded(outcome.num_leading, sum(fetched[: outcome.num_leading])))

        if layerwise:
            self._jobs.submit_layerwise(tier_pages, on_loaded)
        else:
            self._jobs.submit(TierJobKind.LOAD, tier_pages, on_loaded)
        return Loaded(len(found), sum(fetched))
