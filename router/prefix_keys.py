"""The page keys of prompts, by which replicas tell what they have cached."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from cluster.spec.page_key import page_keys
from router.flight import Ask

_INLINE_TOKENS = 32_768
"""Prompts up to this length are hashed on the event loop, in a millisecond or two."""


async def with_page_keys(asks: Sequence[Ask], page_size: int) -> list[Ask]:
    """The same asks with the keys of the pages that may come from a cache; the last token is always computed."""
    made: list[Ask] = []
    for ask in asks:
        # The choices of one prompt stand together, and share one list.
        before = made[-1] if made else None
        if before is not None and before.prompt_ids is ask.prompt_ids and before.cache_salt == ask.cache_salt:
            keys = before.page_keys
        elif len(ask.prompt_ids) <= _INLINE_TOKENS:
            keys = _keys(ask, page_size)
        else:
            keys = await asyncio.to_thread(_keys, ask, page_size)
        made.append(replace(ask, page_keys=keys))
    return made


def _keys(ask: Ask, page_size: int) -> Sequence[bytes]:
    if ask.sampling.num_prompt_logprobs is not None:
        return ()
    return page_keys(ask.prompt_ids[:-1], page_size, ask.cache_salt)
