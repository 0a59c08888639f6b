"""Defects that can be put into the real router, as those of the rest are in ``defects``."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from msgspec.structs import replace

from cluster.spec.config import RouterConfig
from cluster.spec.ids import Room
from cluster.spec.messages import PageNews, Submit
from cluster.spec.peer import Peer
from router.actions import Action
from router.attempts import Attempts
from router.breaker import Breakers
from router.dispatch import Dispatch
from router.flight import Attempt, Flight, Pair, Pick
from router.inquiries import Inquiries
from router.load import LoadBook
from router.page_index import PageIndex

Patch = pytest.MonkeyPatch


def reuse_a_room(patch: Patch) -> None:
    """The router numbers its open requests, and gives the numbers of those that have ended to others."""
    make = Dispatch.__init__

    def make_with_numbers(
        self: Dispatch, me: Peer, config: RouterConfig, load: LoadBook, breakers: Breakers, pick: Pick, _: object
    ) -> None:
        def draw() -> Room:
            return next(room for room in map(Room, count(1)) if not (self.is_open(room) or self.is_under_way(room)))

        make(self, me, config, load, breakers, pick, draw)

    patch.setattr(Dispatch, "__init__", make_with_numbers)


def miss_no_news(patch: Patch) -> None:
    """The router does not look at the numbers of what it is told of caches."""
    on_news = PageIndex.on_news

    def take(self: PageIndex, news: PageNews, now_s: float) -> bool:
        known = self._known.get((news.replica, news.incarnation))
        if known is not None and known.next_number is not None and news.number:
            known.next_number = news.number
        return on_news(self, news, now_s)

    patch.setattr(PageIndex, "on_news", take)


def continue_at_output_0(patch: Patch) -> None:
    """What the client has is sent as a longer prompt: output positions begin anew."""
    submit = Flight.submit

    def submit_as_prompt(self: Flight, attempt: Attempt, router: Peer) -> Submit:
        return replace(submit(self, attempt, router), num_given=0)

    patch.setattr(Flight, "submit", submit_as_prompt)


def begin_anew_behind_given_tokens(patch: Patch) -> None:
    """A request that goes on elsewhere is sent as it was at first."""
    submit = Flight.submit

    def submit_first_prompt(self: Flight, attempt: Attempt, router: Peer) -> Submit:
        return replace(submit(self, attempt, router), prompt_ids=self.ask.prompt_ids)

    patch.setattr(Flight, "submit", submit_first_prompt)


def retry_in_the_same_room(patch: Patch) -> None:
    """All attempts of a request meet in one room."""
    begin = Attempts.begin

    def begin_in_first_room(self: Attempts, flight: Flight, _room: Room, *others: Any) -> list[Action]:
        return begin(self, flight, flight.room, *others)

    patch.setattr(Attempts, "begin", begin_in_first_room)


def cancel_no_other_leg(patch: Patch) -> None:
    """When one leg fails, the other is left to find out by itself."""
    leave = Attempts.leave

    def leave_without_a_word(self: Attempts, flight: Flight, _cancelled: Sequence[Peer]) -> list[Action]:
        return leave(self, flight, [])

    patch.setattr(Attempts, "leave", leave_without_a_word)


def retry_where_it_failed(patch: Patch) -> None:
    """A request takes the pair that it had, whatever has become of it."""
    begin = Attempts.begin

    def begin_there(self: Attempts, flight: Flight, room: Room, now_s: float, *others: Any) -> list[Action]:
        pairs[flight.room] = pairs.get(flight.room) or self._pick(flight.ask, room, frozenset(), now_s)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self, "_pick", lambda *_: pairs[flight.room])
            return begin(self, flight, room, now_s, *others)

    pairs: dict[Room, Pair | None] = {}
    patch.setattr(Attempts, "begin", begin_there)


def never_inquire(patch: Patch) -> None:
    """The router waits for its deadline, whatever was lost."""
    patch.setattr(Inquiries, "ask", lambda _self, _now_s: [])


def answer_no_inquiry(patch: Patch) -> None:
    """Nobody tells a leader a second time what is over."""
    patch.setattr(Inquiries, "answer", lambda _self, _inquire: [])
