"""Loads of host pages into device pages. Sans I/O."""

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from cluster.spec.tiers import TierJobKind, TierPage
from workers.hicache.policy.host_index import HostIndex
from workers.hicache.policy.jobs import Outcome, TierJobs


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
        prefix: Sequence[bytes],
        pages: Sequence[TierPage],
        on_end: Callable[[bool], None],
        *,
        layerwise: bool = False,
    ) -> int:
        """Fill the device pages of a prefix that host memory has; return how many positions in it storage delivered.

        ``on_end`` is called with whether all pages were loaded. A layerwise load runs along with the next step, which
        waits for each layer, so its pages can be counted on.
        """
        pages = [replace(page, host=self._host.page_of(page.key)) for page in pages]
        wanted = [page.key for page in pages]
        self._host.hold(wanted)
        self._host.touch(prefix)
        fetched = self._host.note_used(wanted)
        self._loading.update(wanted)

        def on_loaded(outcome: Outcome) -> None:
            self._host.release(wanted)
            self._loading.difference_update(wanted)
            on_end(all(outcome.done))

        if layerwise:
            self._jobs.submit_layerwise(pages, on_loaded)
        else:
            self._jobs.submit(TierJobKind.LOAD, pages, on_loaded)
        return len({page.depth for page, is_fetched in zip(pages, fetched, strict=True) if is_fetched})
