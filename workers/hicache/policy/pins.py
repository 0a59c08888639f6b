"""Pinned prompts, whose pages stay in host memory. Keys only."""

from collections import Counter
from collections.abc import Sequence

from workers.cache.lifetimes import Lifetimes


class Pins:
    """Set of pinned prompts, each identified by the key of its last page.

    A page stays pinned while any pinned prompt contains it, even before the page is in host memory.
    """

    def __init__(self, pages_per_owner: int, num_owners: int, lifetimes: Lifetimes) -> None:
        self._lifetimes = lifetimes
        self._pages_per_owner = pages_per_owner
        self.limit = pages_per_owner // 2
        """Maximum number of pinned pages per owner. The other pages remain available to prompts that are not pinned."""
        self._prompts: set[bytes] = set()
        self._num_prompts: Counter[bytes] = Counter()
        """Number of pinned prompts per pinned page."""
        self._num_pages = [0] * num_owners

    def __contains__(self, key: bytes) -> bool:
        return key in self._num_prompts

    def __bool__(self) -> bool:
        return bool(self._prompts)

    def refusal(self, keys: Sequence[bytes]) -> str:
        """Return why a prompt cannot be pinned; empty if it can be pinned."""
        num_pages = self._num_pages.copy()
        for owner, key in self._owned(keys):
            num_pages[owner] += key not in self
        if max(num_pages) <= self.limit:
            return ""
        whose = " of one CP rank" if len(num_pages) > 1 else ""
        return (
            f"{max(num_pages)} of {self._pages_per_owner} host pages{whose} would be pinned, "
            f"up from {max(self._num_pages)}; allowed: at most {self.limit}"
        )

    def add(self, keys: Sequence[bytes]) -> list[bytes]:
        """Pin a prompt; return the newly pinned pages."""
        assert not self.refusal(keys), f"this prompt cannot be pinned: {self.refusal(keys)}"
        if not keys or keys[-1] in self._prompts:
            return []
        self._prompts.add(keys[-1])
        added = []
        for owner, key in self._owned(keys):
            if key not in self:
                added.append(key)
                self._num_pages[owner] += 1
            self._num_prompts[key] += 1
        return added

    def remove(self, keys: Sequence[bytes]) -> list[bytes]:
        """Unpin a prompt if it is pinned; return the pages that are no longer pinned."""
        if not keys or keys[-1] not in self._prompts:
            return []
        self._prompts.remove(keys[-1])
        removed = []
        for owner, key in self._owned(keys):
            self._num_prompts[key] -= 1
            if not self._num_prompts[key]:
                del self._num_prompts[key]
                removed.append(key)
                self._num_pages[owner] -= 1
        return removed

    def _owned(self, keys: Sequence[bytes]) -> list[tuple[int, bytes]]:
        return [(page.index % len(self._num_pages), page.key) for page in self._lifetimes.prefix_pages(keys)]
