"""Ranks that compute by arithmetic, over a memory of pages that hold tokens instead of KV."""

from cluster.spec.ids import Incarnation, Room, replica_id
from cluster.spec.kv import KvGeometry, PoolLayout
from cluster.spec.lifecycle import Role
from cluster.spec.registry import (
    Endpoint,
    KvOwnership,
    PageFilter,
    RankCoords,
    RankRow,
    TransferMode,
)
from cluster.spec.sampling import Sampled, TokenLogprobs
from cluster.spec.step_messages import StepPlan
from transfer.plan import local_page
from workers.cache.page_allocator import PageAllocator

PAGE_SIZE = 4
GEOMETRY = KvGeometry(model="m", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", page_size=PAGE_SIZE)


def next_token(tokens: list[int]) -> int:
    """The fake model."""
    return (sum(tokens) * 31 + len(tokens)) % 1009


def sampled_of(token_id: int) -> Sampled:
    """A token with log-probabilities that name it."""
    return Sampled(token_id=token_id, logprobs=TokenLogprobs(logprob=-token_id, top_ids=[token_id], top_logprobs=[0]))


def row(
    role: Role,
    cp_rank: int,
    cp: int,
    num_pages: int,
    mode: TransferMode = TransferMode.ALL_RANKS,
    page_filter: PageFilter = PageFilter.MODULAR,
    ownership: KvOwnership = KvOwnership.REPLICATED,
) -> RankRow:
    """A rank's row; its address is readable. ``num_pages`` are those of the rank's own pool."""
    return RankRow(
        replica=replica_id(role, 0),
        role=role,
        incarnation=Incarnation(1),
        coords=RankCoords(dp=0, cp=cp_rank, tp=0, pp=0),
        sizes=RankCoords(dp=1, cp=cp, tp=1, pp=1),
        global_rank=cp_rank,
        address=f"{role}/{cp_rank}",
        endpoint=Endpoint(backend="fake", session="", base_address=0, num_bytes=0),
        geometry=GEOMETRY,
        layout=PoolLayout(
            num_pages=num_pages,
            first_head=0,
            num_heads=1,
            first_layer=0,
            num_layers=1,
            page_size=PAGE_SIZE,
            head_dim=1,
            itemsize=4,
        ),
        transfer_mode=mode,
        page_filter=page_filter,
        ownership=ownership,
        build="test",
    )


class Ranks:
    """The page tables of one replica's ranks, and a page memory for each owner; replicated ones are equal."""

    def __init__(self, rows: list[RankRow], allocator: PageAllocator) -> None:
        self.num_owners = rows[0].num_owners
        self.pages: dict[Room, list[int]] = {}
        self.histories: dict[Room, list[int]] = {}
        """Prompt and output as sampling sees them."""
        self.received: dict[int, list[int]] = {}
        """What peers have written; as on a GPU, it is in no page before a plan tells that it has arrived."""
        self._rows = rows
        self._memory: list[list[list[int]]] = [[[]] * rows[0].layout.num_pages for _ in range(self.num_owners)]
        self._allocator = allocator

    def write(self, page: int, tokens: list[int]) -> None:
        """Change a page; a cached one is only read."""
        assert not self._allocator.is_cached(page), f"page {page} is cached and written to"
        self._memory[page % self.num_owners][page // self.num_owners] = tokens

    def receive(self, page: int, tokens: list[int]) -> None:
        """A peer's write; nobody may hold the page yet."""
        assert not self._allocator.is_cached(page), f"page {page} is cached and written to"
        self.received[page] = tokens

    def read(self, page: int) -> list[int]:
        """The tokens in a page, whoever has it."""
        return self._memory[page % self.num_owners][page // self.num_owners]

    def read_as(self, cp_rank: int, page: int) -> list[int]:
        """The tokens in a page, by the memory of one rank that has it."""
        memory = self._memory[cp_rank if self.num_owners > 1 else 0]
        return memory[local_page(self._rows[cp_rank], page)]

    def execute(self, plan: StepPlan) -> dict[Room, Sampled]:
        """Write the step's tokens to pages; sample from what the pages hold."""
        for room in plan.releases:
            self.pages.pop(room, None)
            self.histories.pop(room, None)
        for admit in plan.admits:
            self.pages[admit.room] = []
            self.histories[admit.room] = list(admit.history)
        for page in plan.arrived:
            self._memory[page % self.num_owners][page // self.num_owners] = self.received[page]
        sampled = {}
        for step_row in plan.scheduled:
            pages = self.pages[step_row.room]
            pages += step_row.new_pages
            for place, token in enumerate(step_row.token_ids, start=step_row.first_position):
                page = pages[place // PAGE_SIZE]
                self.write(page, [*self.read(page)[: place % PAGE_SIZE], token])
            if step_row.samples:
                length = step_row.first_position + len(step_row.token_ids)
                tokens = [token for page in pages for token in self.read(page)][:length]
                assert len(tokens) == length, f"room {step_row.room}: KV is missing"
                assert self.histories[step_row.room] == tokens, f"room {step_row.room}: another history than KV"
                sampled[step_row.room] = sampled_of(next_token(tokens))
                self.histories[step_row.room].append(sampled[step_row.room].token_id)
        return sampled
