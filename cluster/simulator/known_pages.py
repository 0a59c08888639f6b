"""What the router knows of the caches: it asks and hears as ``router.relay`` does, and is right once it heard all."""

from collections.abc import Callable

from cluster.simulator.leader_process import LeaderProcess
from cluster.simulator.memory import Violation
from cluster.spec.messages import FollowPages, Message, PageNews
from cluster.spec.peer import Peer
from router.directory import Directory
from router.picker import Picker


class KnownPages:
    """Of one start of the router."""

    def __init__(self, me: Peer, directory: Directory, picker: Picker, send: Callable[[str, Message], None]) -> None:
        self._me, self._directory, self._picker, self._send = me, directory, picker, send

    def on_table(self, now_s: float) -> None:
        """Ask the replicas that are new in the table."""
        for peer in self._picker.pages.update(self._peers, now_s):
            self._follow(peer)

    def on_news(self, news: PageNews, now_s: float) -> None:
        """A replica tells; where some of it is missing, it is asked again."""
        if self._picker.pages.on_news(news, now_s):
            for peer in self._peers:
                if (peer.replica, peer.incarnation) == (news.replica, news.incarnation):
                    self._follow(peer)

    def check(self, leader: LeaderProcess) -> None:
        """See that the index is right where it has heard all that a leader told."""
        pages, me = self._picker.pages, leader.me
        number = pages.next_number(me)
        if number is None or number != leader.num_news[self._me.address]:
            return
        known, cached = pages.keys_of(me), leader.cached_keys()
        # Of a page in the caches of several DP ranks nothing is known any more when one of them has given it up.
        if not known <= cached or (known != cached and leader.row.sizes.dp == 1):
            raise Violation(
                f"the router has heard all of {me.replica}'s news, and knows other pages than it has cached"
            )

    @property
    def _peers(self) -> list[Peer]:
        return self._directory.peers(*self._picker.prefix_roles)

    def _follow(self, peer: Peer) -> None:
        self._send(peer.address, FollowPages(router=self._me, incarnation=peer.incarnation))
