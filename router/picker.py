"""Picks the replicas of requests: who has room, what policies are shown of them, and their own chance each time."""

import itertools
import random
from collections.abc import Sequence

from cluster.spec.config import DeployConfig
from cluster.spec.ids import Room
from cluster.spec.lifecycle import Role
from cluster.spec.messages import Peer
from router.directory import Directory
from router.flight import Ask
from router.load import LoadBook, with_room
from router.page_index import PageIndex
from router.policies.candidate import Bounds, Candidate, Chance
from router.policies.registry import find_policy

_PREFIX_AWARE = "prefix_aware"


class Picker:
    """The choices of one router."""

    def __init__(self, config: DeployConfig, directory: Directory, load: LoadBook) -> None:
        names = {Role.PREFILL: config.router.prefill_policy, Role.DECODE: config.router.decode_policy}
        self._policies = {role: find_policy(name) for role, name in names.items()}
        self._turns = {role: itertools.count() for role in Role}
        self._random = random.Random()
        self._bounds = Bounds(config.router.prefix_max_imbalance, config.router.prefix_max_ratio)
        self._page_size = config.kv.page_size
        self._max_queued_tokens = config.prefill.max_queued_tokens
        self._max_fill = config.decode.max_fill
        self._directory = directory
        self._load = load
        asks = {role: name == _PREFIX_AWARE for role, name in names.items()}
        asks[Role.DECODE] |= config.prefill.skip_below_tokens > 0
        self.prefix_roles = [role for role in names if asks[role]]
        """Those of which somebody asks what replicas have cached."""
        self.pages = PageIndex(config.router.max_known_pages)
        """What they have cached, as far as they were asked."""

    def why_full(self, asks: Sequence[Ask]) -> str | None:
        """What must end before requests can be taken; None when there is room."""
        if not with_room(self._candidates(Role.PREFILL), self._max_queued_tokens):
            limit = f"{self._max_queued_tokens} prompt tokens or more (prefill.max_queued_tokens)"
            return f"the queue is full: {limit} wait at every prefill replica; try again later"
        if not self._decodes_for(sum(_longest(ask) for ask in asks)):
            limit = f"{self._max_fill:g} times what it holds (decode.max_fill)"
            return f"the queue is full: every decode replica has tokens for {limit}; try again later"
        return None

    def pick(self, role: Role, ask: Ask, room: Room) -> tuple[Peer, int]:
        """A replica, and how many tokens of the prompt it is known to have cached."""
        if role is Role.PREFILL:
            candidates = with_room(self._candidates(role, ask), self._max_queued_tokens)
        else:
            candidates = self._decodes_for(_longest(ask), ask)
        chance = Chance(
            turn=next(self._turns[role]),
            unit=self._random.random(),
            room=room,
            session=ask.session,
            bounds=self._bounds,
        )
        picked = self._policies[role](candidates or self._candidates(role, ask), chance)
        return picked.peer, picked.cached_tokens

    def _decodes_for(self, num_tokens: int, ask: Ask | None = None) -> list[Candidate]:
        """Those that are idle, or would not be filled beyond what they may."""

        def fits(candidate: Candidate) -> bool:
            pool_tokens = self._directory.pool_tokens_of(candidate.peer)
            has_room = pool_tokens is None or candidate.load.num_tokens + num_tokens <= pool_tokens * self._max_fill
            return has_room or not candidate.load.num_requests

        return [candidate for candidate in self._candidates(Role.DECODE, ask) if fits(candidate)]

    def _candidates(self, role: Role, ask: Ask | None = None) -> list[Candidate]:
        return [
            Candidate(peer=peer, load=self._load.of(peer), cached_tokens=self._count_cached(peer, ask))
            for peer in self._directory.ready(role)
        ]

    def _count_cached(self, peer: Peer, ask: Ask | None) -> int:
        if ask is None or not ask.page_keys:
            return 0
        return self.pages.count(peer, ask.page_keys) * self._page_size


def _longest(ask: Ask) -> int:
    """The most tokens that decode keeps for it alone."""
    return ask.stopping.max_tokens + (0 if ask.shares_prompt else len(ask.prompt_ids))
