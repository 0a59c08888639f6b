"""Prompts for the recall model as token ids, and the answers that follow from its rule, in plain arithmetic."""

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise

from workers.models.recall import FIRST_BYTE_ID
from workers.models.recall_parts import BEGIN_ID, VOCAB_SIZE

LINK_LEN = 6
"""Tokens of one link in a chain. No page may be shorter."""
NUM_FILLERS = 16


def recall_oracle(prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """Return the next ``num_tokens`` tokens. Each one is the most frequent follower of the current token so far.

    For the model, the first token follows itself, as no token precedes it. Raises ValueError if the rule has no answer:
    the token has no follower, or two followers are equally frequent.
    """
    followers: defaultdict[int, Counter[int]] = defaultdict(Counter)
    if prompt_ids[0] != BEGIN_ID:
        followers[prompt_ids[0]][prompt_ids[0]] += 1
    for token_id, follower in pairwise(prompt_ids):
        followers[token_id][follower] += 1
    current, answer = prompt_ids[-1], []
    for _ in range(num_tokens):
        ranked = followers[current].most_common(2)
        if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
            raise ValueError(f"token {current} has no single most frequent follower; the followers are {ranked}")
        follower = ranked[0][0]
        followers[current][follower] += 1
        answer.append(follower)
        current = follower
    return answer


def chain_prompt(num_tokens: int, page_size: int, *, seed: int = 0) -> list[int]:
    """Return a prompt whose answer leads through every full page in order, with one token per full page.

    Page k says twice that x_{k+1} follows x_k. After each x_{k+1} it has a filler, and the two mentions of x_{k+2} in
    page k + 1 outvote both. The prompt ends with x_0, so token k of the answer is right only if page k was read. Full
    pages are the pages before the one with the last token.

    Raises ValueError when pages are shorter than LINK_LEN, when none is full, or when there are more than tokens.
    """
    num_pages = (num_tokens - 1) // page_size
    draw = random.Random(seed)
    fillers, others = _fillers_and_others(draw)
    if page_size < LINK_LEN or not 1 <= num_pages < len(others):
        raise ValueError(
            f"a chain needs pages of at least {LINK_LEN} tokens and 1 to {len(others) - 1} full pages, "
            f"but {num_tokens} tokens in pages of {page_size} make {num_pages}"
        )
    chain = others[: num_pages + 1]
    prompt: list[int] = []
    for first, second in pairwise(chain):
        one, other = draw.sample(fillers, 2)
        padding = draw.choices(fillers, k=page_size - LINK_LEN)
        prompt += [first, second, one, first, second, other, *padding]
    return [*prompt, *draw.choices(fillers, k=num_tokens - 1 - len(prompt)), chain[0]]


def needle_prompt(num_tokens: int, depth: float, *, needle_len: int = 11, seed: int = 0) -> list[int]:
    """Return a haystack with a marker and ``needle_len`` tokens after it, each once, and the marker again at the end.

    ``depth`` is the position of the needle from 0.0 (start) to 1.0 (end). The answer begins with the needle's tokens.
    Raises ValueError if it does not fit.
    """
    room = num_tokens - needle_len - 3
    draw = random.Random(seed)
    fillers, others = _fillers_and_others(draw)
    if room < 0 or not 0 <= depth <= 1 or not 1 <= needle_len < len(others):
        raise ValueError(
            f"a needle of {needle_len} tokens at depth {depth} does not fit into {num_tokens} tokens; it needs "
            f"{needle_len + 3} tokens, a depth of 0 to 1 and 1 to {len(others) - 1} tokens of its own"
        )
    needle = others[: needle_len + 1]
    # At the very start, the marker would also follow itself.
    before = 1 + int(depth * room)
    haystack = draw.choices(fillers, k=num_tokens - needle_len - 2)
    return [*haystack[:before], *needle, *haystack[before:], needle[0]]


def _fillers_and_others(draw: random.Random) -> tuple[list[int], list[int]]:
    """Return token ids for padding, and shuffled token ids that are distinguishable in any mixture.

    Any two codes are nearly orthogonal, but ids that are half the vocabulary apart have opposite codes, which would
    cancel out. Bytes and special tokens are excluded because they are not text by themselves.
    """
    token_ids = list(range(FIRST_BYTE_ID + 256, VOCAB_SIZE))
    draw.shuffle(token_ids)
    half = VOCAB_SIZE // 2
    fillers = [token_id for token_id in token_ids if token_id < half][:NUM_FILLERS]
    kept_out = {*fillers, *(token_id + half for token_id in fillers)}
    return fillers, [token_id for token_id in token_ids if token_id not in kept_out]
