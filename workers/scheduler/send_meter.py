"""Totals sent by the ranks of a replica, from their reports."""

from cluster.spec.registry import SendTimes
from cluster.spec.step_messages import SendReport


class SendMeter:
    """Totals by rank."""

    def __init__(self) -> None:
        self._by_rank: dict[int, SendTimes] = {}

    @property
    def times(self) -> tuple[SendTimes, ...]:
        """Return the totals by global rank."""
        return tuple(self._by_rank[rank] for rank in sorted(self._by_rank))

    def add(self, report: SendReport) -> None:
        """Add a rank's report of a finished transfer."""
        if not report.num_bytes:
            return
        rank = report.sender_rank
        before = self._by_rank.get(rank, SendTimes(global_rank=rank))
        self._by_rank[rank] = SendTimes(
            global_rank=rank,
            num_transfers=before.num_transfers + 1,
            num_bytes=before.num_bytes + report.num_bytes,
            write_s=before.write_s + report.write_s,
        )
