"""Copies of host pages on the device, for sequences that start behind them. Sans I/O."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.spec.page_key import first_place
from cluster.spec.tiers import MoveKind, TierPage
from workers.hicache.host_index import HostIndex
from workers.hicache.orders import Orders, Outcome


@dataclass(frozen=True, slots=True)
class Loaded:
    """What has come to the device, or surely will."""

    num_pages: int
    num_fetched: int
    """Those of them that host memory had from storage for this."""


class Loader:
    """One replica's. The device pages belong to the sequence, which must not give them back before the end."""

    def __init__(self, host: HostIndex, orders: Orders) -> None:
        self._host = host
        self._orders = orders
        self._coming: set[bytes] = set()

    def is_coming(self, key: bytes) -> bool:
        """Whether the page is on its way to the device."""
        return key in self._coming

    def load(
        self,
        keys: Sequence[bytes],
        pages: Sequence[int],
        first: int,
        on_end: Callable[[Loaded], None],
        *,
        joins: bool = False,
    ) -> Loaded:
        """Fill the device pages from ``first`` on, as far as host memory has them; to what that comes.

        ``on_end`` is told how many leading ones of these have been filled, unless there are none to fill; all have
        where the copies join the next step, which waits for them.
        """
        found = self._host.find(keys[first:])
        if not found:
            return Loaded(0, 0)
        wanted = list(keys[first : first + len(found)])
        place = first_place(keys[0]) + first
        orders = [
            TierPage(key=key, place=place + number, device=pages[first + number], host=host)
            for number, (key, host) in enumerate(zip(wanted, found, strict=True))
        ]
        self._host.hold(wanted)
        self._host.touch(keys[: first + len(found)])
        fetched = self._host.note_used(wanted)
        self._coming.update(wanted)

        def on_loaded(outcome: Outcome) -> None:
            self._host.release(wanted)
            self._coming.difference_update(wanted)
            on_end(Loaded(outcome.num_leading, sum(fetched[: outcome.num_leading])))

        if joins:
            self._orders.join(MoveKind.LOAD, orders, on_loaded)
        else:
            self._orders.give(MoveKind.LOAD, orders, on_loaded)
        return Loaded(len(found), sum(fetched))
