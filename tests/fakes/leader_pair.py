"""A prefill and a decode leader that receive only a test's messages. Their ranks compute nothing."""

from collections.abc import Mapping

from cluster.spec.ids import ROUTER, Incarnation, Peer, ReplicaId, Role, Room
from cluster.spec.messages import Message, Submit, TableUpdate
from cluster.spec.registry import ReplicaEntry, ReplicaLoad, TableSnapshot
from cluster.spec.sampling import Sampling, Stopping
from cluster.spec.wire import TokenIds
from tests.fakes.paged_ranks import PAGE_SIZE, record
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.strategy_chooser import undivided
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.decode_request import DecodeSettings
from workers.scheduler.prefill import PrefillLeader
from workers.scheduler.prefill_request import PrefillSettings
from workers.scheduler.step_scheduler import StepLimits, StepScheduler

ME = Peer(replica=ROUTER, incarnation=Incarnation(1), address=ROUTER)
"""Router of every request."""
PROMPT = list(range(1, 4 * PAGE_SIZE + 1))


class LeaderPair:
    """One prefill replica with two ranks and one decode replica with one. Both know the table."""

    def __init__(self, num_pages: int = 40, *, prefix_cache: bool = True) -> None:
        self._prefill_records = [record(Role.PREFILL, rank, 2, num_pages) for rank in range(2)]
        self._decode_record = record(Role.DECODE, 0, 1, num_pages)
        self._num_rooms = self._version = 0
        self.allocators = {role: PageAllocator(num_pages, PrefixTree() if prefix_cache else None) for role in Role}
        steps = {
            role: StepScheduler(allocator, StepLimits(PAGE_SIZE, 16, 4), undivided)
            for role, allocator in self.allocators.items()
        }
        self.prefill_peer, self.decode_peer = self._prefill_records[0].peer, self._decode_record.peer
        self.prefill = PrefillLeader(self._prefill_settings(), steps[Role.PREFILL])
        self.decode = DecodeLeader(self._decode_settings(), steps[Role.DECODE])
        self.leaders: dict[Role, PrefillLeader | DecodeLeader] = {Role.PREFILL: self.prefill, Role.DECODE: self.decode}
        for leader in self.leaders.values():
            leader.on_message(self.table(), 0.0)

    def table(self, reaped: Mapping[ReplicaId, Incarnation] | None = None) -> TableUpdate:
        """Return a new table in which both replicas are ready."""
        self._version += 1
        entries = [
            ReplicaEntry(
                replica=records[0].replica,
                incarnation=Incarnation(1),
                ready=True,
                ranks=tuple(records),
                load=ReplicaLoad(),
            )
            for records in (self._prefill_records, [self._decode_record])
        ]
        snapshot = TableSnapshot(version=self._version, replicas=tuple(entries), reaped=dict(reaped or {}))
        return TableUpdate(snapshot=snapshot)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        priority: int = 0,
        cache_salt: str = "",
        prompt_of: Room | None = None,
        tenant: str = "",
    ) -> Submit:
        """Return the message of a new request without sending it."""
        self._num_rooms += 1
        return Submit(
            room=Room(self._num_rooms),
            prompt_ids=TokenIds.of(prompt),
            sampling=Sampling(),
            stopping=Stopping(max_tokens=max_tokens),
            prefill=None if prompt_of else self.prefill_peer,
            decode=self.decode_peer,
            router=ME,
            prompt_of=prompt_of,
            cache_salt=cache_salt,
            priority=priority,
            tenant=tenant,
        )

    def deliver(self, role: Role, *messages: Message, now_s: float = 0.0) -> list[Message]:
        """Deliver messages as one round of the worker's loop. Return what the leader sends in response."""
        leader = self.leaders[role]
        leader.outgoing = []
        for message in messages:
            leader.on_message(message, now_s)
        leader.tick(now_s)
        return [message for _, message in leader.outgoing]

    def _prefill_settings(self) -> PrefillSettings:
        return PrefillSettings(
            me=self.prefill_peer,
            record=self._prefill_records[0],
            rank_addresses=tuple(rank_record.address for rank_record in self._prefill_records),
            ticket_timeout_s=30.0,
            settle_s=0.5,
        )

    def _decode_settings(self) -> DecodeSettings:
        return DecodeSettings(
            me=self.decode_peer,
            records=[self._decode_record],
            transfer_timeout_s=60.0,
            quarantine_limit=0.25,
            settle_s=0.5,
        )
