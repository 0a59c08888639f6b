"""One start of a replica: its processes, and the real leaders in the first of them."""

from collections.abc import Callable

from cluster.simulator.bootstrap import Bootstrap
from cluster.simulator.leader_process import LeaderProcess
from cluster.simulator.leaders import make_leader
from cluster.simulator.network import machine_of
from cluster.simulator.rank_process import Follower, RankProcess
from cluster.simulator.surroundings import Surroundings
from cluster.spec.ids import Peer
from cluster.spec.registry import RankRow


class Replica:
    """Processes that live and die together, if the supervisor works correctly."""

    def __init__(
        self, around: Surroundings, bootstrap: Bootstrap, rows: list[RankRow], on_failed: Callable[[str], None]
    ) -> None:
        """Start the processes; ``on_failed`` is called when one has ended."""
        first = rows[0]
        self.machine = machine_of(first.address)
        self.incarnation = first.incarnation
        self._on_failed = on_failed
        me = Peer(replica=first.replica, incarnation=first.incarnation, address=first.address)
        made = [make_leader(around, me, rows, dp_rank) for dp_rank in range(first.sizes.dp)]
        self.leader = LeaderProcess(around, bootstrap, rows, me, made, self._on_refused)
        self.ranks: list[RankProcess] = [self.leader]
        """Processes by global rank."""
        for row in rows[1:]:
            _, allocator = made[row.coords.dp]
            self.ranks.append(Follower(around, rows, row.global_rank, me, allocator))
        for rank in self.ranks:
            rank.shard += [other for other in self.ranks if other.row.coords.dp == rank.row.coords.dp]

    @property
    def is_idle(self) -> bool:
        return all(rank.is_idle for rank in self.ranks)

    def lose_rank(self, rank: int) -> bool:
        """Kill one process; False if it was dead."""
        process = self.ranks[rank % len(self.ranks)]
        if process.is_dead:
            return False
        process.kill()
        self._on_failed(f"rank {process.address} died")
        return True

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()

    def _on_refused(self, reason: str) -> None:
        self.leader.kill()
        self._on_failed(reason)
