"""Picks the replicas of requests: who has room, what policies are shown of them, and their own chance each time."""

import itertools
import random
from collections.abc import Iterable, Sequence

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Room
from cluster.spec.lifecycle import Role
from cluster.spec.peer import Peer
from router.breaker import Breakers
from router.directory import Directory
from router.flight import Ask, Pair
from router.load import LoadBook
from router.lower_tiers import Weights
from router.page_index import PageIndex
from router.policies.candidate import Bounds, Candidate, Chance
from router.policies.registry import find_policy

_PREFIX_AWARE = "prefix_aware"


class Picker:
    """The choices of one router."""

    def __init__(
        self,
        config: DeployConfig,
        directory: Directory,
        load: LoadBook,
        breakers: Breakers,
        chance: random.Random | None = None,
    ) -> None:
        """``chance`` is where random numbers come from."""
        names = {Role.PREFILL: config.router.prefill_policy, Role.DECODE: config.router.decode_policy}
        self._policies = {role: find_policy(name) for role, name in names.items()}
        self._turns = {role: itertools.count() for role in Role}
        self._random = chance or random.Random()
        self._bounds = Bounds(config.router.prefix_max_imbalance, config.router.prefix_max_ratio)
        self._page_size = config.kv.page_size
        self._weights = Weights(config.router.host_weight, config.router.storage_weight)
        self._max_queued_tokens = config.prefill.max_queued_tokens
        self._max_fill = config.decode.max_fill
        self._directory = directory
        self._load = load
        self._breakers = breakers
        self._skip_below_tokens = config.prefill.skip_below_tokens
        asks = {role: name == _PREFIX_AWARE for role, name in names.items()}
        asks[Role.DECODE] |= self._skip_below_tokens > 0
        # Without caches nobody need hash prompts, or tell what it has.
        self.prefix_roles = [role for role in names if asks[role] and config.kv.prefix_cache]
        """Those of which somebody asks what replicas have cached."""
        self.pages = PageIndex(config.router.max_known_pages)
        """What they have cached, as far as they were asked."""

    def why_full(self, asks: Sequence[Ask], now_s: float) -> str | None:
        """What must end before requests can be taken; None when there is room."""
        if not self._with_room(self._peers(Role.PREFILL, now_s)):
            limit = f"{self._max_queued_tokens} prompt tokens or more (prefill.max_queued_tokens)"
            return f"the queue is full: {limit} wait at every prefill replica; try again later"
        if not self._with_pages(self._peers(Role.DECODE, now_s), sum(_longest(ask) for ask in asks)):
            limit = f"{self._max_fill:g} times what it holds (decode.max_fill)"
            return f"the queue is full: every decode replica has tokens for {limit}; try again later"
        return None

    def pair(self, ask: Ask, room: Room, avoided: frozenset[Peer], now_s: float) -> Pair | None:
        """Where an attempt of a request is to run; see ``Pick``."""
        prefills = self._peers(Role.PREFILL, now_s, avoided)
        decodes = self._peers(Role.DECODE, now_s, avoided)
        if not prefills or not decodes:
            return None
        decode = self._pick(Role.DECODE, self._with_pages(decodes, _longest(ask)) or decodes, ask, room)
        skip_below = self._skip_below_tokens
        if skip_below and len(ask.prompt_ids) - self._cached_for_sure(decode.peer, ask) < skip_below:
            return Pair(prefill=None, decode=decode.peer)
        prefill = self._pick(Role.PREFILL, self._with_room(prefills) or prefills, ask, room)
        return Pair(prefill=prefill.peer, decode=decode.peer, cached_tokens=prefill.cached_tokens)

    def _pick(self, role: Role, peers: Sequence[Peer], ask: Ask, room: Room) -> Candidate:
        keys = ask.page_keys.known(self.pages.is_known) if ask.page_keys and role in self.prefix_roles else ()
        candidates = [
            Candidate(peer=peer, load=self._load.of(peer), cached_tokens=self._count_cached(peer, keys))
            for peer in peers
        ]
        chance = Chance(
            turn=next(self._turns[role]),
            unit=self._random.random(),
            room=room,
            session=ask.session,
            bounds=self._bounds,
        )
        return self._policies[role](candidates, chance)

    def _peers(self, role: Role, now_s: float, avoided: frozenset[Peer] = frozenset()) -> list[Peer]:
        """Those that are ready; none that is avoided or has an open breaker, as long as others are left."""
        peers = self._directory.ready(role)
        if avoided:
            peers = [peer for peer in peers if peer not in avoided] or peers
        return self._breakers.allowed(peers, now_s)

    def _with_room(self, peers: Iterable[Peer]) -> list[Peer]:
        """Those with fewer tokens before the next request, which may be of any length: it would never find more."""
        return [peer for peer in peers if self._load.of(peer).num_tokens < self._max_queued_tokens]

    def _with_pages(self, peers: Iterable[Peer], num_tokens: int) -> list[Peer]:
        """Those that are idle, or would not be filled beyond what they may."""

        def fits(peer: Peer) -> bool:
            load, pool_tokens = self._load.of(peer), self._directory.pool_tokens_of(peer)
            has_room = pool_tokens is None or load.num_tokens + num_tokens <= pool_tokens * self._max_fill
            return has_room or not load.num_requests

        return [peer for peer in peers if fits(peer)]

    def _cached_for_sure(self, decode: Peer, ask: Ask) -> int:
        """Tokens that decode would not have to compute; what is in storage may not come in time."""
        if Role.DECODE not in self.prefix_roles or not ask.page_keys:
            return 0
        keys = ask.page_keys.known(self.pages.is_known)
        return int(self.pages.worth(decode, keys, Weights(host=1.0)) * self._page_size)

    def _count_cached(self, peer: Peer, keys: Sequence[bytes]) -> int:
        return int(self.pages.worth(peer, keys, self._weights) * self._page_size) if keys else 0


def _longest(ask: Ask) -> int:
    """The most tokens that decode keeps for it alone."""
    return ask.stopping.max_tokens + (0 if ask.shares_prompt else len(ask.prompt_ids))
