"""Which retracted sequences have their KV in host memory, and in which slots: ids only, no memory. Sans I/O.

Ranks copy as step plans tell them; a slot is as large as a page, and the same on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.spec.ids import Room
from cluster.spec.step_messages import HostCopy


@dataclass(frozen=True, slots=True)
class KeepCost:
    """What a rank measured before it took requests."""

    token_s: float
    """To compute one token again."""
    page_s: float
    """To copy one page."""

    def is_worth(self, num_tokens: int, num_pages: int) -> bool:
        """Whether it is cheaper to copy these pages there and back than to compute what is in them."""
        return 2 * num_pages * self.page_s < num_tokens * self.token_s


@dataclass(frozen=True, slots=True)
class _Kept:
    slots: list[int]
    num_tokens: int


class HostKeeper:
    """The slots of one replica, and the copies of the next step plan."""

    def __init__(self, num_slots: int = 0, cost: KeepCost | None = None) -> None:
        """Without slots nothing is kept; without a cost, everything for which there is a slot."""
        self._free = list(range(num_slots))
        self._num_slots = num_slots
        self._cost = cost
        self._kept: dict[Room, _Kept] = {}
        self._saves: list[HostCopy] = []
        self._loads: list[HostCopy] = []
        self.num_kept = 0
        """Sequences whose KV was kept, since the start."""

    def keep(self, room: Room, pages: Sequence[int], num_tokens: int) -> None:
        """A sequence gives back these pages, which hold the KV of its first tokens: keep it if that pays."""
        assert room not in self._kept, f"room {room} is kept already"
        is_worth = self._cost is None or self._cost.is_worth(num_tokens, len(pages))
        if not pages or not is_worth or len(pages) > len(self._free):
            return
        slots = [self._free.pop() for _ in pages]
        self._kept[room] = _Kept(slots, num_tokens)
        self._saves.append(HostCopy(room=room, pages=list(pages), slots=slots))
        self.num_kept += 1

    def kept_len(self, room: Room) -> int:
        """Tokens of a sequence whose KV is kept."""
        return self._kept[room].num_tokens if room in self._kept else 0

    def restore(self, room: Room, pages: Sequence[int], num_cached: int) -> int:
        """A sequence has pages again, the first of them cached: the tokens that have KV once the next step is over."""
        kept = self._kept.get(room)
        if kept is None:
            return 0
        self.forget(room)
        places = range(num_cached, len(kept.slots))
        if places:
            self._loads.append(
                HostCopy(
                    room=room, pages=[pages[place] for place in places], slots=[kept.slots[place] for place in places]
                )
            )
        return kept.num_tokens

    def forget(self, room: Room) -> None:
        """A sequence has ended, or needs what is kept no longer."""
        kept = self._kept.pop(room, None)
        if kept is not None:
            self._free += kept.slots

    def take_copies(self) -> tuple[list[HostCopy], list[HostCopy]]:
        """What ranks are to save and then to load with the next step."""
        saves, self._saves = self._saves, []
        loads, self._loads = self._loads, []
        return saves, loads

    def check_integrity(self, waiting: set[Room]) -> None:
        """Prove that every slot is free or kept for a sequence that waits."""
        assert self._kept.keys() <= waiting, f"kept for nobody: {self._kept.keys() - waiting}"
        slots = [slot for kept in self._kept.values() for slot in kept.slots]
        assert sorted(self._free + slots) == list(range(self._num_slots)), "host slots are lost, or in two hands"
