"""A prefill and a decode leader joined by a network that delays and interleaves, over ranks that compute by arithmetic.

A page's content is the list of tokens written to it; the next token is a function of all tokens so far, read back from
the pages. So a missing, stale or foreign page gives a wrong token.
"""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field

import msgspec

from cluster.spec.ids import ROUTER, Incarnation, Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import (
    Blame,
    Cancel,
    Failure,
    FollowPages,
    Inquire,
    Message,
    Output,
    PageNews,
    Submit,
    TableUpdate,
)
from cluster.spec.peer import Peer
from cluster.spec.registry import (
    KvOwnership,
    PageFilter,
    RankRow,
    ReplicaEntry,
    ReplicaLoad,
    TableSnapshot,
    TransferMode,
    Verify,
)
from cluster.spec.sampling import FinishReason, Sampling, Stopping, TokenLogprobs
from cluster.spec.step_messages import DropSend, SendReport, StepPlan
from cluster.spec.strategy import Strategy
from cluster.spec.token_ids import TokenIds
from cluster.spec.transfer_messages import CheckPages, PageDigests, PagesChecked, SendState
from tests.fakes.handoff_settings import decode_settings, prefill_settings
from tests.fakes.paged_ranks import PAGE_SIZE, Ranks, row
from transfer.plan import is_sender, owned_pages
from transfer.sender_session import SenderSession
from workers.cache.page_allocator import PageAllocator
from workers.cache.prefix_tree import PrefixTree
from workers.context_parallel.cost_model import fixed
from workers.scheduler.decode import DecodeLeader
from workers.scheduler.prefill import PrefillLeader
from workers.scheduler.steps import StepLimits, StepScheduler


def _allocator(of: RankRow, prefix_cache: bool) -> PageAllocator:
    tree = PrefixTree(of.num_owners) if prefix_cache else None
    return PageAllocator(of.layout.num_pages, tree, of.num_owners)


@dataclass
class Client:
    """What came back for one request."""

    prompt: list[int]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    failure: str | None = None
    blame: Blame | None = None
    cancelled: bool = False
    cached_tokens: int = 0
    num_given: int = 0
    """Of the prompt: output of an earlier attempt."""


class World:
    """One prefill replica of ``cp`` ranks, one decode replica, a router that only sends and collects."""

    def __init__(
        self,
        *,
        seed: int,
        cp: int,
        mode: TransferMode,
        page_filter: PageFilter,
        num_pages: int,
        chunk_tokens: int,
        prefix_cache: bool = True,
        ownership: KvOwnership = KvOwnership.REPLICATED,
        verify: Verify = Verify.COUNTS,
        flips: float = 0.0,
    ) -> None:
        """Everybody idle.

        Args:
            num_pages: of each replica; sharded prefill ranks divide them evenly, so cp must divide them.
            flips: share of the pages that change on their way.
        """
        self.verify, self.flips = verify, flips
        self.flipped: set[Room] = set()
        """Requests with such a page."""
        self.random = random.Random(seed)
        self.cp, self.page_filter, self.mode = cp, page_filter, mode
        self.now_s = 0.0
        self.clients: dict[Room, Client] = {}
        self.queues: dict[tuple[str, str], deque[Message]] = defaultdict(deque)
        self.sessions: dict[tuple[Room, int], SenderSession] = {}
        num_owners = ownership.num_owners(cp)
        assert num_pages % num_owners == 0, f"{num_pages} pages on {num_owners} ranks"
        self.prefill_rows = [
            row(Role.PREFILL, rank, cp, num_pages // num_owners, mode, page_filter, ownership) for rank in range(cp)
        ]
        self.decode_row = row(Role.DECODE, 0, 1, num_pages, mode, page_filter)
        rows = {Role.PREFILL: self.prefill_rows, Role.DECODE: [self.decode_row]}
        self.allocators = allocators = {role: _allocator(rows[role][0], prefix_cache) for role in Role}
        self.page_news: list[PageNews] = []
        """That the router was told."""
        self.ranks = {role: Ranks(rows[role], allocators[role]) for role in Role}
        self.num_pages_sent = 0
        self.num_computed = dict.fromkeys(Role, 0)
        """Tokens."""
        limits = StepLimits(PAGE_SIZE, chunk_tokens, 4)
        steps = {role: StepScheduler(allocators[role], limits, fixed(Strategy.NONE)) for role in Role}
        prefill, decode = prefill_settings(self.prefill_rows), decode_settings(self.decode_row, verify)
        self.prefill_peer, self.decode_peer = prefill.me, decode.me
        self.leaders: dict[str, PrefillLeader | DecodeLeader] = {
            "prefill/0": PrefillLeader(prefill, steps[Role.PREFILL], allocators[Role.PREFILL]),
            "decode/0": DecodeLeader(decode, steps[Role.DECODE], allocators[Role.DECODE]),
        }
        for address in self.leaders:
            self.queues["bootstrap", address].append(TableUpdate(snapshot=self.table()))

    def table(self) -> TableSnapshot:
        """Both replicas, ready."""
        entries = [
            ReplicaEntry(
                replica=rows[0].replica,
                role=rows[0].role,
                incarnation=Incarnation(1),
                ready=True,
                rows=tuple(rows),
                load=ReplicaLoad(),
            )
            for rows in (self.prefill_rows, [self.decode_row])
        ]
        return TableSnapshot(version=1, replicas=tuple(entries), reaped={})

    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        cache_salt: str = "",
        priority: int = 0,
        prompt_of: Room | None = None,
        on_decode: bool = False,
        num_given: int = 0,
    ) -> Room:
        """A new request, sent to both leaders; to decode alone where it shares a prompt, or is computed there."""
        room = Room(len(self.clients) + 1)
        self.clients[room] = Client(prompt, max_tokens, num_given=num_given)
        message = Submit(
            room=room,
            prompt_ids=TokenIds.of(prompt),
            sampling=Sampling(num_logprobs=1, frequency_penalty=1.0),
            stopping=Stopping(max_tokens=max_tokens),
            prefill=None if on_decode or prompt_of else self.prefill_peer,
            decode=self.decode_peer,
            router=Peer(replica=ROUTER, incarnation=Incarnation(1), address=ROUTER),
            prompt_of=prompt_of,
            cache_salt=cache_salt,
            priority=priority,
            num_given=num_given,
        )
        for peer in (message.prefill, message.decode):
            if peer is not None:
                # Choices may overtake each other.
                sender = f"choice {room}" if prompt_of else ROUTER
                self.queues[sender, peer.address].append(message)
        return room

    def follow_pages(self, peer: Peer) -> None:
        """The router asks a leader what it has cached."""
        router = Peer(replica=ROUTER, incarnation=Incarnation(1), address=ROUTER)
        self.queues[ROUTER, peer.address].append(FollowPages(router=router, incarnation=peer.incarnation))

    def cancel(self, room: Room) -> None:
        """The client leaves."""
        self.clients[room].cancelled = True
        for address in self.leaders:
            self.queues[ROUTER, address].append(Cancel(room=room, incarnation=Incarnation(1)))

    def inquire(self, *rooms: Room) -> None:
        """The router has heard nothing of these for a while."""
        router = Peer(replica=ROUTER, incarnation=Incarnation(1), address=ROUTER)
        message = Inquire(rooms=list(rooms), sender=router, incarnation=self.decode_peer.incarnation)
        self.queues[ROUTER, self.decode_peer.address].append(message)

    def lose_router(self) -> None:
        """The router is proven gone, and with it whoever waits for outputs."""
        for client in self.clients.values():
            client.cancelled = True
        gone = msgspec.structs.replace(self.table(), version=2, reaped={ROUTER: Incarnation(1)})
        for address in self.leaders:
            self.queues["bootstrap", address].append(TableUpdate(snapshot=gone))

    def act(self) -> bool:
        """One random thing that can happen now: a delivery or a step. False when nothing can."""
        choices = [("deliver", key) for key, queue in self.queues.items() if queue]
        choices += [("step", (address, "")) for address, leader in self.leaders.items() if leader.has_work()]
        if not choices:
            return False
        kind, key = self.random.choice(choices)
        if kind == "deliver":
            self.deliver(key[1], self.queues[key].popleft())
        else:
            self._step(key[0])
        for leader in self.leaders.values():
            leader.check_integrity()
        return True

    def run(self) -> None:
        """Act until nothing can happen, let time pass for deadlines, and act again."""
        for _ in range(10):
            while self.act():
                continue
            self.now_s += 1.0
            for address, leader in self.leaders.items():
                leader.tick(self.now_s)
                self._post(address)

    def deliver(self, address: str, message: Message) -> None:
        """Let a message arrive, and what it leads to leave."""
        if address == ROUTER:
            self._reply(message)
        elif isinstance(message, DropSend):
            self._drop(address, message)
        elif isinstance(message, CheckPages):
            self._check(address, message)
        else:
            self.leaders[address].on_message(message, self.now_s)
            self._post(address)

    def _reply(self, message: Message) -> None:
        if isinstance(message, PageNews):
            self.page_news.append(message)
            return
        if isinstance(message, Inquire):
            self._answer(message)
            return
        assert isinstance(message, Output | Failure)
        client = self.clients[message.room]
        if isinstance(message, Failure):
            client.failure, client.blame = message.reason, message.blame
        else:
            assert message.first_index == client.num_given + len(client.tokens)
            client.tokens += message.token_ids
            client.logprobs += message.logprobs
            client.cached_tokens += message.cached.total
            client.finish = message.finish

    def _answer(self, inquire: Inquire) -> None:
        for room in inquire.rooms:
            client = self.clients[room]
            if client.cancelled or client.finish or client.failure:
                cancel = Cancel(room=room, incarnation=inquire.sender.incarnation)
                self.queues[ROUTER, inquire.sender.address].append(cancel)

    def _step(self, address: str) -> None:
        leader = self.leaders[address]
        plan = leader.next_plan()
        if plan is None:
            return
        role = Role(address.partition("/")[0])
        if role is Role.PREFILL:
            for rank in range(self.cp):
                self._send_cached(rank, plan)
        sampled = self.ranks[role].execute(plan)
        self.num_computed[role] += sum(len(step_row.token_ids) for step_row in plan.scheduled)
        if role is Role.PREFILL:
            for rank in range(self.cp):
                self._send_finished(rank, plan)
        if plan.scheduled:
            leader.commit(plan, sampled, self.now_s)
        self._post(address)

    def _send_cached(self, rank: int, plan: StepPlan) -> None:
        for admit in plan.admits:
            assert admit.target is not None
            num_pages = -(-admit.target.num_tokens // PAGE_SIZE)
            owned = owned_pages(
                self.page_filter,
                self.mode,
                num_pages=num_pages,
                cp_rank=rank,
                cp_size=self.cp,
                base=admit.owner_base,
                first=admit.target.held_pages,
            )
            self.sessions[admit.room, rank] = SenderSession(
                room=admit.room,
                target=admit.target,
                prefill=self.prefill_peer,
                sender_rank=rank,
                page_size=PAGE_SIZE,
                owned=owned,
                sends=is_sender(self.mode, rank),
            )
        admitted = {admit.room for admit in plan.admits}
        for step_row in plan.scheduled:
            if step_row.room in admitted and step_row.first_position:
                self._send(rank, step_row.room, step_row.new_pages, step_row.first_position)

    def _send_finished(self, rank: int, plan: StepPlan) -> None:
        for step_row in plan.scheduled:
            pages = self.ranks[Role.PREFILL].pages[step_row.room]
            self._send(rank, step_row.room, pages, step_row.first_position + len(step_row.token_ids))

    def _send(self, rank: int, room: Room, pages: list[int], computed_len: int) -> None:
        session = self.sessions[room, rank]
        pairs = session.advance(pages, computed_len)
        sent = {target: list(self.ranks[Role.PREFILL].read_as(rank, source)) for source, target in pairs}
        for target, tokens in sent.items():
            if self.random.random() < self.flips:
                self.flipped.add(room)
                tokens = [tokens[0] ^ 1, *tokens[1:]]
            self.ranks[Role.DECODE].receive(target, tokens)
        if pairs:
            told = [self._told(sent)] if self.verify is Verify.DIGEST else []
            session.written(len(pairs), len(pairs) * self.decode_row.layout.page_bytes, told)
            self.num_pages_sent += len(pairs)
        if session.is_over:
            self._report(session, rank)

    def _told(self, sent: dict[int, list[int]]) -> PageDigests:
        digests = [str(tokens).encode() for tokens in sent.values()]
        return PageDigests(rank=0, spans=[(0, self.decode_row.layout.page_bytes)], pages=list(sent), digests=digests)

    def _check(self, address: str, message: CheckPages) -> None:
        holds = self.ranks[Role.DECODE].received.__getitem__
        pages = [pair for part in message.told for pair in zip(part.pages, part.digests, strict=True)]
        wrong = [page for page, digest in pages if str(holds(page)).encode() != digest]
        self.queues["checker", address].append(PagesChecked(room=message.room, rank=0, wrong=wrong))

    def _drop(self, address: str, message: DropSend) -> None:
        rank = int(address.partition("/")[2])
        session = self.sessions.get((message.room, rank))
        if session is None:
            report = SendReport(
                room=message.room, generation=message.generation, sender_rank=rank, state=SendState.DRAINED
            )
            self.queues[address, "prefill/0"].append(report)
            return
        session.drop()
        session.drained()
        self._report(session, rank)

    def _report(self, session: SenderSession, rank: int) -> None:
        done = session.done()
        if done is not None:
            self.queues[f"sender/{rank}", "decode/0"].append(done)
        self.queues[f"sender/{rank}", "prefill/0"].append(session.report())

    def _post(self, address: str) -> None:
        leader = self.leaders[address]
        outgoing, leader.outgoing = leader.outgoing, []
        for target, message in outgoing:
            self.queues[address, target].append(message)
