"""The page keys of prompts, by which replicas tell what they have cached."""

import asyncio
from collections.abc import Callable, Sequence

from cluster.spec.page_key import extend_page_keys

_INLINE_TOKENS = 32_768
"""Of longer prompts all keys are made at once, beside the event loop."""
_FIRST_PAGES = 4


class PromptKeys:
    """The keys of the pages of one prompt that may come from a cache, made as far as anybody has them."""

    def __init__(self, prompt_ids: Sequence[int], page_size: int, salt: str) -> None:
        self._prompt_ids = prompt_ids
        self._page_size = page_size
        self._salt = salt
        # The last token is always computed.
        self._num_pages = (len(prompt_ids) - 1) // page_size
        self._keys: list[bytes] = []

    async def prepare(self) -> None:
        """Keep what would take long from the event loop."""
        if len(self._prompt_ids) > _INLINE_TOKENS:
            await asyncio.to_thread(self._extend, self._num_pages)

    def known(self, is_known: Callable[[bytes], bool]) -> Sequence[bytes]:
        """All keys before the first that nobody knows, and perhaps some more."""
        while len(self._keys) < self._num_pages and (not self._keys or is_known(self._keys[-1])):
            self._extend(max(2 * len(self._keys), _FIRST_PAGES))
        return self._keys

    def _extend(self, num_pages: int) -> None:
        end = min(num_pages, self._num_pages) * self._page_size
        extend_page_keys(self._keys, self._prompt_ids[:end], self._page_size, self._salt)
